"""The files of a Hugging Face tokenizer: which a folder has, and their content as that of one tokenizer.json."""
import os
from itertools import chain
from pathlib import Path

from sampling.checkpoints.untrusted_files import read_json, read_text, require

NAMED_TOKENS = "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
TOKEN_LISTS = "extra_special_tokens", "additional_special_tokens"
FLAGS = "single_word", "lstrip", "rstrip", "normalized", "special" # of an added token
# The classes of transformers that read these files as we do, and their special tokens where a folder names none.
GENERAL_CLASSES = {"", "PreTrainedTokenizer", "TokenizersBackend"}
CLASSES = {"vocab.json": {"GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer"} | GENERAL_CLASSES,
           "vocab.txt": {"BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"} | GENERAL_CLASSES}
GPT2_TOKENS = {"unk_token": "<|endoftext|>"}
BERT_TOKENS = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]",
               "mask_token": "[MASK]"}


def find_tokenizer(folder: Path) -> Path | None:
    """The main file of the tokenizer in a folder: tokenizer.json, vocab.json or vocab.txt; None if there is none."""
    for name in "tokenizer.json", "vocab.json", "vocab.txt":
        if os.path.lexists(folder / name):
            return folder / name
    for name in "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model":
        if os.path.lexists(folder / name):
            raise ValueError(f"{folder} has {name}, but no tokenizer.json; transformers may make one: "
                             "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)")
    settings = read_optional(folder / "tokenizer_config.json")
    if "auto_map" in settings or class_name(settings) not in ("", "GPT2Tokenizer"):
        raise ValueError(f"{folder / 'tokenizer_config.json'} asks for {class_name(settings) or 'custom code'!r:.60}, "
                         "but the folder has neither tokenizer.json, nor vocab.json and merges.txt, nor vocab.txt")
    return None


def read_tokenizer(path: Path) -> dict:
    """The tokenizer with this main file, as the content of a tokenizer.json.

    Its added tokens include those that only the other files in the folder name.
    """
    settings = read_optional(path.with_name("tokenizer_config.json"))
    name, options = class_name(settings), {"add_prefix_space": settings.get("add_prefix_space") or False}
    added = [token | {"id": int(token_id)} for token_id, token in settings.get("added_tokens_decoder", {}).items()]
    if "added_tokens_decoder" not in settings: # then older files have them
        settings |= read_optional(path.with_name("special_tokens_map.json"))
        named = {token["content"] for token in named_tokens(settings)}
        added = [{"id": token_id, "content": content, "special": content in named, "normalized": content not in named}
                 for content, token_id in read_optional(path.with_name("added_tokens.json")).items()]
    require(path.name not in CLASSES or name in CLASSES[path.name],
            f"a tokenizer of the class {name!r:.60} needs a tokenizer.json, not {path.name}")
    if path.name == "vocab.txt":
        settings = BERT_TOKENS | settings
        content = wordpiece(path, settings)
    elif path.name == "vocab.json":
        settings = GPT2_TOKENS | settings
        content = byte_level(path, options)
    else:
        content, config = read_json(path), {} if name else read_optional(path.with_name("config.json"))
        require(isinstance(content.get("model"), dict), "it has no model, so it is not a tokenizer.json")
        step = content.get("pre_tokenizer") or {}
        is_bpe = (content["model"].get("type"), step.get("type")) == ("BPE", "ByteLevel")
        if is_bpe and (name == "GPT2Tokenizer" or config.get("model_type") == "gpt2"): # what transformers makes of it
            settings, content["pre_tokenizer"] = GPT2_TOKENS | settings, step | options
    return content | {"added_tokens": added_tokens(content, added, named_tokens(settings))}


def wordpiece(path: Path, settings: dict) -> dict:
    """A tokenizer.json for the vocab.txt of a BERT, with these settings."""
    pieces, unknown = read_text(path).removesuffix("\n").split("\n"), settings["unk_token"]
    return {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "strip_accents": settings.get("strip_accents"),
                       "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
                       "lowercase": settings.get("do_lower_case", True)},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "vocab": {piece.rstrip(): i for i, piece in enumerate(pieces)},
                  "unk_token": unknown["content"] if isinstance(unknown, dict) else unknown,
                  "max_input_chars_per_word": 100, "continuing_subword_prefix": "##"}}


def byte_level(path: Path, options: dict) -> dict:
    """A tokenizer.json for the vocab.json of a GPT-2, and the merges.txt beside it.

    The library's BPE.read_file is not used: it skips ids that are no numbers, and takes large ones modulo 2**32.
    """
    merges = read_text(path.with_name("merges.txt")).removesuffix("\n").split("\n")
    step = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True} | options
    model = {"type": "BPE", "vocab": read_json(path), "merges": [m for m in merges if not m.startswith("#version")]}
    return {"pre_tokenizer": step, "decoder": step, "model": model}


def added_tokens(content: dict, added: list[dict], named: list[dict]) -> list[dict]:
    """The added tokens of a tokenizer.json with this content, of which the settings add and name some more.

    As in transformers: a token that is added has the flags that are given there. A new token that the settings only
    name, such as eos_token, gets the next free id.
    """
    listed, vocab = content.get("added_tokens") or [], vocab_of(content["model"])
    tokens = {token["content"]: token for token in listed}
    require(len(tokens) == len(listed), "two of its added tokens have the same content")
    for token in added:
        text = token["content"]
        tokens[text] = token | {"id": tokens.get(text, token)["id"]}
    next_id = 1 + max(chain(vocab.values(), (token["id"] for token in tokens.values())), default=-1)
    for token in named:
        text = token["content"]
        if text not in tokens:
            tokens[text] = token | {"special": True, "id": vocab.get(text, next_id)}
            next_id = max(next_id, tokens[text]["id"] + 1)
    return [{"id": token["id"], "content": text} | {flag: token.get(flag, False) for flag in FLAGS}
            for text, token in tokens.items()]


def vocab_of(model: dict) -> dict:
    """The id of each token of a model."""
    vocab = model["vocab"]
    return {piece: i for i, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else vocab # Unigram has scores


def named_tokens(settings: dict) -> list[dict]:
    """The special tokens that the settings name, as objects. In the files, each is a text or an object."""
    lists = [settings[name] for name in TOKEN_LISTS if isinstance(settings.get(name), list)]
    tokens = [token if isinstance(token, dict) else {"content": token}
              for token in chain(map(settings.get, NAMED_TOKENS), *lists)]
    return [token for token in tokens if isinstance(token.get("content"), str) and token["content"]]


def class_name(settings: dict) -> str:
    """The tokenizer class that the settings name, without "Fast"; empty if they name none."""
    return str(settings.get("tokenizer_class") or "").removesuffix("Fast")


def read_optional(path: Path) -> dict:
    """The object in a JSON file; empty if there is no such file."""
    return read_json(path) if os.path.lexists(path) else {}
