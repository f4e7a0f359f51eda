"""Small tokenizers of every kind, trained on a few lines, and random texts for them."""
import json
import random
from functools import partial

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from project import GPT2_FILES

LINES = [
    "Hello world, I'm a language model. Don't they say that it's the end of the world? We've won!",
    "Die Größe der Straße überrascht; die Brücke über den Fluß ist schön.",
    "O coração não sabe o que é a solidão até que a manhã comece.",
    "Привет, мир! Как дела сегодня? "
    "Русский язык богат и красив.",
    "日本語の文章 and 🙂 in one line, def f(x):\n    return x + 1\n",
] * 3
SPACE = "▁"
END = "<|endoftext|>"
PIECES = [
    END, "[UNK]", "[SEP]", "<unk>", "<s>", "</s>", " ", "  ", "\n", "\t", "\r\n",
    "\u00a0", "\u3000", "'s", "n't", " '", ".", " do not", SPACE, "##", "<0x41>", "é", "e\u0301",
    "ﷺ"]


def make(model, trainer, special, size=300, **parts):
    """A tokenizer with these parts, trained. special: its special tokens."""
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    special = special.split()
    settings = trainer(special_tokens=special, show_progress=False, vocab_size=size)
    tokenizer.train_from_iterator(LINES, settings)
    return tokenizer


def byte_level():
    """With padding, truncation and a post-processor.

    transformers leaves them out if no special tokens are wanted.
    """
    tokenizer = make(
        models.BPE(),
        partial(trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
        END, 500,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
        post_processor=processors.TemplateProcessing(f"{END} $A", None, [(END, 0)]))
    tokenizer.enable_padding(pad_to_multiple_of=64)
    tokenizer.enable_truncation(1)
    return tokenizer


def wordpiece():
    return make(
        models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer,
        "[PAD] [UNK] [CLS] [SEP] [MASK]",
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece())


def byte_fallback():
    """As Llama's: it replaces spaces itself, and its decoder strips the first one."""
    tokenizer = make(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        partial(trainers.BpeTrainer, limit_alphabet=40, max_token_length=12),
        "<unk> <s> </s>", 450,
        normalizer=normalizers.Sequence([
            normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]),
        decoder=decoders.Sequence([
            decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0)]))
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    return Tokenizer.from_str(json.dumps(content))


def words():
    """A token a word, and no decoder."""
    return make(
        models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer, "<unk> </s>",
        pre_tokenizer=pre_tokenizers.Whitespace())


def replace():
    """A token for each character of the lines, and a decoder that sees the whole text."""
    return make(
        models.WordLevel(unk_token="[UNK]"), trainers.WordLevelTrainer, "[UNK]",
        pre_tokenizer=pre_tokenizers.Split("", "isolated"),
        decoder=decoders.Sequence([decoders.Fuse(), decoders.Replace("th", "þ")]))


MAKE = {
    "replace": replace,
    "byte-level": byte_level,
    "older-files": byte_level,
    "wordpiece": wordpiece,
    "vocab-txt": wordpiece,
    "byte-fallback": byte_fallback,
    "words": words,
}
SETTINGS = { # beside vocab.json and vocab.txt
    "older-files": {
        "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"},
        "special_tokens_map": {"eos_token": END, "bos_token": {"content": END}},
    },
    "vocab-txt": {"tokenizer_config": {"tokenizer_class": "BertTokenizer"}},
}


def save_tokenizer(kind, folder):
    """Write the files of such a tokenizer to a folder. Returns its size."""
    from transformers import PreTrainedTokenizerFast
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = MAKE[kind]()
    if kind in SETTINGS:
        tokenizer.model.save(str(folder))
        write_json(folder, **SETTINGS[kind])
    else:
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return tokenizer.get_vocab_size()


def write_json(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def gpt2_tokenizer_json(folder):
    """GPT-2's tokenizer.json, from the files of its encoding in a folder of tiktoken's cache."""
    from tokenizers import ByteLevelBPETokenizer
    files = [str(folder / GPT2_FILES[name]) for name in ("encoder.json", "vocab.bpe")]
    tokenizer = ByteLevelBPETokenizer(*files)
    tokenizer.add_special_tokens([END])
    return tokenizer.to_str()


def random_texts(seed, count):
    """Random texts: words, special tokens, spaces of all kinds, control characters, any character.
    """
    rng = random.Random(seed)
    words = " ".join(LINES).split(" ")
    ranges = (32, 127), (0, 0xD800), (0x10000, 0x11000)
    for _ in range(count):
        text = ""
        for _ in range(rng.randrange(1, 12)):
            word = rng.choice(words)
            char = chr(rng.randrange(*rng.choice(ranges)))
            text += rng.choice([word, " " + word, rng.choice(PIECES), char])
        yield text
