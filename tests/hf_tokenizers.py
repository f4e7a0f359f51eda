"""Small tokenizers of every kind, trained on a few lines and saved by transformers, and random texts for them."""
import json
import random

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LINES = [
    "Hello world, I'm a language model. Don't they say that it's the end of the world? We've won!",
    "Die Größe der Straße überrascht; die Brücke über den Fluß ist schön.",
    "O coração não sabe o que é a solidão até que a manhã comece.",
    "Привет, мир! Как дела сегодня? Русский язык богат и красив.",
    "日本語の文章 and 🙂 in one line, def f(x):\n    return x + 1\n",
] * 3
SPECIAL = ["<|endoftext|>", "[UNK]", "[SEP]", "<unk>", "<s>", "</s>"]
SPACE = "▁"
KINDS = ["byte-level", "older-files", "wordpiece", "vocab-txt", "unigram", "unigram-bytes", "byte-fallback", "suffix", "words"]


def train(tokenizer, trainer):
    """The tokenizer, trained."""
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return train(tokenizer, trainers.BpeTrainer(vocab_size=500, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                                special_tokens=["<|endoftext|>"], show_progress=False))


def wordpiece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return train(tokenizer, trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False))


def unigram(byte_fallback=False):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    train(tokenizer, trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", special_tokens=["<unk>", "<s>", "</s>"],
                                             show_progress=False))
    if not byte_fallback:
        return tokenizer
    content = json.loads(tokenizer.to_str())
    model = content["model"]
    model["vocab"] = [piece for piece in model["vocab"] if piece[0].isascii() or SPACE in piece[0]]
    model["vocab"] += [[byte, -20.0] for byte in bytes_]
    model["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def byte_fallback():
    """As Llama's: it replaces spaces itself, and its decoder strips the first one."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    train(tokenizer, trainers.BpeTrainer(vocab_size=450, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False,
                                         limit_alphabet=40, max_token_length=12))
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    vocab |= {byte: len(vocab) + i for i, byte in enumerate(bytes_)}
    return Tokenizer.from_str(json.dumps(content))


def suffix():
    """As CLIP's: a suffix ends a word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder()
    return train(tokenizer, trainers.BpeTrainer(vocab_size=300, end_of_word_suffix="</w>", special_tokens=["<unk>", "</s>"], show_progress=False))


def words():
    """A token a word, and no decoder."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return train(tokenizer, trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"], show_progress=False))


MAKE = {"byte-level": byte_level, "older-files": byte_level, "wordpiece": wordpiece, "vocab-txt": wordpiece, "unigram": unigram,
        "unigram-bytes": lambda: unigram(True), "byte-fallback": byte_fallback, "suffix": suffix, "words": words}


def save_tokenizer(kind, folder):
    """Write the files of such a tokenizer to a folder. Returns its size."""
    from transformers import PreTrainedTokenizerFast
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = MAKE[kind]()
    if kind == "older-files":
        tokenizer.model.save(str(folder))
        (folder / "added_tokens.json").write_text("{}")
        (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>", "bos_token": {"content": "<|endoftext|>"}}')
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    elif kind == "vocab-txt":
        tokenizer.model.save(str(folder))
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    else:
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return tokenizer.get_vocab_size()


def random_texts(seed, count):
    """Random texts: words, special tokens, spaces of all kinds, control characters, any character."""
    rng = random.Random(seed)
    words = " ".join(LINES).split(" ")
    kinds = [lambda: rng.choice(words), lambda: rng.choice([" ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000"]),
             lambda: rng.choice(SPECIAL), lambda: chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xD800), rng.randrange(0x10000, 0x11000)])),
             lambda: " " + rng.choice(words), lambda: rng.choice(["'s", "n't", " '", ".", " do not", SPACE, "##", "<0x41>", "é", "e\u0301", "ﷺ"])]
    for _ in range(count):
        yield "".join(rng.choice(kinds)() for _ in range(rng.randrange(1, 12)))
