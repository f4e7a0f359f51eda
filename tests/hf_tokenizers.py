"""Small tokenizers of every kind, trained on a few lines and saved by transformers, and random texts for them."""
import json
import random
from functools import partial

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from project import GPT2_FILES

LINES = [
    "Hello world, I'm a language model. Don't they say that it's the end of the world? We've won!",
    "Die Größe der Straße überrascht; die Brücke über den Fluß ist schön.",
    "O coração não sabe o que é a solidão até que a manhã comece.",
    "Привет, мир! Как дела сегодня? Русский язык богат и красив.",
    "日本語の文章 and 🙂 in one line, def f(x):\n    return x + 1\n",
] * 3
SPECIAL, SPACE = ["<|endoftext|>", "[UNK]", "[SEP]", "<unk>", "<s>", "</s>"], "▁"


def make(model, trainer, special, size=300, **parts):
    """A tokenizer with these parts, trained. special: its special tokens."""
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(LINES, trainer(special_tokens=special.split(), show_progress=False, vocab_size=size))
    return tokenizer


def byte_level():
    """With padding, truncation and a post-processor, which transformers leaves out if no special tokens are wanted."""
    trainer = partial(trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    ends = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    tokenizer = make(models.BPE(), trainer, "<|endoftext|>", 500, decoder=decoders.ByteLevel(), post_processor=ends,
                     pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.enable_padding(pad_to_multiple_of=64)
    tokenizer.enable_truncation(1)
    return tokenizer


def wordpiece():
    return make(models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer, "[PAD] [UNK] [CLS] [SEP] [MASK]",
                normalizer=normalizers.BertNormalizer(), pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
                decoder=decoders.WordPiece())


def byte_fallback():
    """As Llama's: it replaces spaces itself, and its decoder strips the first one."""
    tokenizer = make(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        partial(trainers.BpeTrainer, limit_alphabet=40, max_token_length=12), "<unk> <s> </s>", 450,
        normalizer=normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]),
        decoder=decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)]))
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    return Tokenizer.from_str(json.dumps(content))


def words():
    """A token a word, and no decoder."""
    return make(models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer, "<unk> </s>",
                pre_tokenizer=pre_tokenizers.Whitespace())


def replace():
    """A token for each character of the lines, [UNK] for others, and a decoder that sees the whole text."""
    vocab = {char: i for i, char in enumerate(sorted({*"".join(LINES)}))}
    tokenizer = Tokenizer(models.WordLevel(vocab | {"[UNK]": len(vocab)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("th", "þ")])
    return tokenizer


MAKE = {
    "replace": replace, "byte-level": byte_level, "older-files": byte_level,
    "wordpiece": wordpiece, "vocab-txt": wordpiece, "byte-fallback": byte_fallback, "words": words}


def save_tokenizer(kind, folder):
    """Write the files of such a tokenizer to a folder. Returns its size."""
    from transformers import PreTrainedTokenizerFast
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = MAKE[kind]()
    if kind in ("older-files", "vocab-txt"):
        tokenizer.model.save(str(folder))
        name = "GPT2Tokenizer" if kind == "older-files" else "BertTokenizer"
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        named = {"eos_token": "<|endoftext|>", "bos_token": {"content": "<|endoftext|>"}}
        (folder / "special_tokens_map.json").write_text(json.dumps(named if kind == "older-files" else {}))
    else:
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return tokenizer.get_vocab_size()


def gpt2_tokenizer_json(folder):
    """GPT-2's tokenizer.json, from the files of its encoding in a folder of tiktoken's cache."""
    from tokenizers import ByteLevelBPETokenizer
    tokenizer = ByteLevelBPETokenizer(*(str(folder / GPT2_FILES[name]) for name in ("encoder.json", "vocab.bpe")))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer.to_str()


def random_texts(seed, count):
    """Random texts: words, special tokens, spaces of all kinds, control characters, any character."""
    rng, words = random.Random(seed), " ".join(LINES).split(" ")
    pieces = [*SPECIAL, " ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "'s", "n't", " '", ".", " do not", SPACE,
              "##", "<0x41>", "é", "e\u0301", "ﷺ"]
    kinds = [lambda: rng.choice(words), lambda: rng.choice(pieces), lambda: " " + rng.choice(words),
             lambda: chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xD800), rng.randrange(0x10000, 0x11000)]))]
    for _ in range(count):
        yield "".join(rng.choice(kinds)() for _ in range(rng.randrange(1, 12)))
