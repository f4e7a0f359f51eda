"""Finds the files of a tokenizer in a folder, and reads them as if they were one tokenizer.json."""
import os
from itertools import chain
from pathlib import Path

from sampling.checkpoints.errors import RejectedFileError, first_sentence, require
from sampling.checkpoints.hf_files import read_json
from sampling.inputs.tokenizer_json import FLAGS

MAX_VOCAB_BYTES = 2**24 # of a vocabulary file; a tokenizer.json of 250,000 tokens has 12 million
GPT2_CLASSES = {"", "GPT2Tokenizer"}
BYTE_LEVEL_CLASSES = GPT2_CLASSES | {"RobertaTokenizer", "BartTokenizer", "PreTrainedTokenizer", "TokenizersBackend"}
WORD_PIECE_CLASSES = {"", "BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "PreTrainedTokenizer",
                      "TokenizersBackend"}
NAMED_TOKENS = "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
TOKEN_LISTS = "extra_special_tokens", "additional_special_tokens"
# The special tokens of a class of transformers, for a folder that does not name its own.
GPT2_TOKENS = {"unk_token": "<|endoftext|>"}
BERT_TOKENS = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]",
               "mask_token": "[MASK]"}
SENTENCEPIECE = "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"


def find_tokenizer(folder: str | Path) -> Path | None:
    """The main file of the tokenizer in a folder: tokenizer.json, vocab.json or vocab.txt; None if there is none.

    Raises ValueError, which names the file, if the folder only has a tokenizer of a kind that is not supported.
    """
    folder = Path(folder)
    for name in "tokenizer.json", "vocab.json", "vocab.txt":
        if os.path.lexists(folder / name):
            return folder / name
    if os.path.lexists(folder / "merges.txt"):
        raise ValueError(f"{folder / 'merges.txt'} needs a vocab.json in the same folder")
    for name in SENTENCEPIECE:
        if os.path.lexists(folder / name):
            raise ValueError(f"{folder / name} is a SentencePiece model, which is not supported; convert it to a "
                             "tokenizer.json with transformers: "
                             "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)")
    settings = read_optional(folder / "tokenizer_config.json")
    if "auto_map" in settings or class_name(settings) not in GPT2_CLASSES:
        raise ValueError(f"{folder / 'tokenizer_config.json'} asks for "
                         f"{class_name(settings) or 'custom code'!r:.60}, but the folder has neither tokenizer.json, "
                         "nor vocab.json and merges.txt, nor vocab.txt")
    return None


def read_tokenizer(path: Path) -> dict:
    """The tokenizer with this main file, as the content of a tokenizer.json.

    Its added tokens include the special tokens that only the other files in the folder name. Raises ValueError if a
    file is damaged or of a kind that is not supported, OSError if it cannot be opened.
    """
    settings = read_settings(path.parent)
    if path.name == "tokenizer.json":
        content = read_large_json(path)
        if is_byte_level_bpe(content) and is_gpt2(path.parent, settings):
            settings = GPT2_TOKENS | settings
            content["pre_tokenizer"] |= gpt2_options(settings)
    elif path.name == "vocab.json":
        settings = GPT2_TOKENS | settings
        content = byte_level_bpe(path, settings)
    else:
        settings = BERT_TOKENS | settings
        content = word_piece(path, settings)
    return add_special_tokens(content, settings)


# ---- the kinds of tokenizers

def byte_level_bpe(path: Path, settings: dict) -> dict:
    """The tokenizer of a vocab.json and its merges.txt, such as GPT-2's."""
    require(class_name(settings) in BYTE_LEVEL_CLASSES, needs_json_message(path, settings))
    lines = read_lines(path.with_name("merges.txt"))
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True} | gpt2_options(settings)
    return {"pre_tokenizer": byte_level, "decoder": byte_level, "added_tokens": [], "model": {
        "type": "BPE", "vocab": read_large_json(path), "merges": [x for x in lines if not x.startswith("#version")]}}


def word_piece(path: Path, settings: dict) -> dict:
    """The tokenizer of a vocab.txt, such as BERT's."""
    require(class_name(settings) in WORD_PIECE_CLASSES, needs_json_message(path, settings))
    vocab = {token.rstrip(): i for i, token in enumerate(read_lines(path))}
    return {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "strip_accents": settings.get("strip_accents"),
                       "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
                       "lowercase": settings.get("do_lower_case", True)},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "added_tokens": [],
        "model": {"type": "WordPiece", "vocab": vocab, "unk_token": token_text(settings["unk_token"]),
                  "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    }


def is_gpt2(folder: Path, settings: dict) -> bool:
    """Whether transformers loads this tokenizer as GPT2Tokenizer. tokenizer_config.json decides, else config.json."""
    if class_name(settings):
        return class_name(settings) == "GPT2Tokenizer"
    return read_optional(folder / "config.json").get("model_type") == "gpt2"


def is_byte_level_bpe(content: dict) -> bool:
    """Whether the content of a tokenizer.json is a tokenizer like GPT-2's."""
    model, pre_tokenizer = content.get("model"), content.get("pre_tokenizer")
    if not (isinstance(model, dict) and isinstance(pre_tokenizer, dict)):
        return False
    return model.get("type") == "BPE" and pre_tokenizer.get("type") == "ByteLevel"


def gpt2_options(settings: dict) -> dict:
    """The options of a pre-tokenizer that transformers' GPT2Tokenizer takes from its settings."""
    return {"add_prefix_space": settings.get("add_prefix_space") or False}


def needs_json_message(path: Path, settings: dict) -> str:
    """The error for a tokenizer class that is only supported with a tokenizer.json."""
    return f"a tokenizer of the class {class_name(settings)!r:.60} needs a tokenizer.json, not {path.name}"


# ---- the settings in the other files

def read_settings(folder: Path) -> dict:
    """The settings in tokenizer_config.json.

    If it lists no added tokens, they come from the older special_tokens_map.json and added_tokens.json.
    """
    settings = read_optional(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= read_optional(folder / "special_tokens_map.json")
        named = {token_text(token) for token in named_tokens(settings)}
        settings["added_tokens_decoder"] = {
            token_id: {"content": content, "special": content in named, "normalized": content not in named}
            for content, token_id in read_added_tokens(folder / "added_tokens.json").items()}
    listed = settings["added_tokens_decoder"]
    require(isinstance(listed, dict) and all(isinstance(token, dict) for token in listed.values()),
            f"added_tokens_decoder in {folder / 'tokenizer_config.json'} must hold objects")
    return settings


def read_added_tokens(path: Path) -> dict[str, int]:
    """The tokens in an added_tokens.json, with their ids. Raises RejectedFileError if two tokens have the same id."""
    added = read_optional(path)
    ids = [token_id for token_id in added.values() if type(token_id) is int]
    require(len(set(ids)) == len(added), f"{path} must give each token a different id")
    return added


def add_special_tokens(content: dict, settings: dict) -> dict:
    """The content of tokenizer.json, with the tokens in the settings as added tokens.

    As in transformers: a token in added_tokens_decoder has the flags that are given there. A new token that the
    settings only name, such as eos_token, gets the next free id.
    """
    tokens, vocab = content.get("added_tokens") or [], unchecked_vocab(content.get("model"))
    require(isinstance(tokens, list) and all(isinstance(token, dict) for token in tokens),
            "its added_tokens must be a list of objects")
    tokens, positions = list(tokens), {token_text(token): i for i, token in enumerate(tokens)}
    for token_id, token in settings["added_tokens_decoder"].items():
        position = positions.setdefault(token_text(token), len(tokens))
        known_id = tokens[position].get("id") if position < len(tokens) else parse_id(token_id)
        tokens[position:position + 1] = [added_token(token, known_id)]
    ids = [i for i in chain(vocab.values(), (token.get("id") for token in tokens)) if type(i) is int]
    next_id = max(ids, default=-1) + 1
    for token in named_tokens(settings):
        token = token if isinstance(token, dict) else {"content": token}
        if positions.setdefault(token_text(token), len(tokens)) == len(tokens):
            tokens.append(added_token(token | {"special": True}, vocab.get(token_text(token), next_id)))
            next_id += tokens[-1]["id"] == next_id
    return {**content, "added_tokens": tokens}


def added_token(token: dict, token_id: object) -> dict:
    """An entry of added_tokens."""
    return {"id": token_id, "content": token.get("content")} | {name: token.get(name, False) for name in FLAGS}


def unchecked_vocab(model: object) -> dict:
    """The id of each token of a model that is not checked yet. Empty if there is no vocabulary."""
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list): # Unigram has a list of [piece, score]
        return {piece[0]: i for i, piece in enumerate(vocab) if isinstance(piece, list) and piece
                and isinstance(piece[0], str)}
    return vocab if isinstance(vocab, dict) else {}


def named_tokens(settings: dict) -> list:
    """The special tokens that the settings name. Each is a text or an object."""
    lists = [settings[name] for name in TOKEN_LISTS if isinstance(settings.get(name), list)]
    return [token for token in chain(map(settings.get, NAMED_TOKENS), *lists) if token_text(token)]


def token_text(token: object) -> str | None:
    """The text of a token, which is a text or an object; None for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def parse_id(token_id: object) -> object:
    """The number in the text of an id: JSON keys are always texts."""
    is_number = isinstance(token_id, str) and token_id.isascii() and token_id.isdigit() and len(token_id) <= 10
    return int(token_id) if is_number else token_id


def class_name(settings: dict) -> str:
    """The tokenizer class that the settings name, without "Fast"; empty if they name none."""
    name = settings.get("tokenizer_class")
    return name.removesuffix("Fast") if isinstance(name, str) else ""


# ---- reading

def read_optional(path: Path) -> dict:
    """The object in a JSON file; empty if there is no such file."""
    if not os.path.lexists(path):
        return {}
    require_file(path)
    return read_json(path)


def read_large_json(path: Path) -> dict:
    """The object in a JSON file that holds a vocabulary."""
    require_file(path)
    return read_json(path, MAX_VOCAB_BYTES)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file. Raises RejectedFileError if it is too long or not UTF-8."""
    require_file(path)
    require(path.stat().st_size <= MAX_VOCAB_BYTES, f"{path} has more than {MAX_VOCAB_BYTES} bytes")
    try:
        text = path.read_bytes().decode("utf-8")
    except ValueError as error:
        raise RejectedFileError(f"{path} is not UTF-8: {first_sentence(error)}") from None
    require(text.count("\n") <= MAX_VOCAB_BYTES // 16, f"{path} has more than {MAX_VOCAB_BYTES // 16} lines")
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def require_file(path: Path) -> None:
    """Raises RejectedFileError unless path is a regular file."""
    require(path.is_file(), f"{path} is missing, or not a regular file")
