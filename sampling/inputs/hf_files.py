"""The files of a Hugging Face tokenizer: which a folder has, and the library's tokenizer that they describe.

The library runs no code in the files. But a file may waste time or memory, or end the process: see SECURITY.md.
"""
import json
import os
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from sampling.checkpoints.untrusted_files import named_errors, read_json, read_text, require
from sampling.inputs.tokenizer import call_library

OTHER_FILES = "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"
NAMED_TOKENS = "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
TOKEN_LISTS = "extra_special_tokens", "additional_special_tokens"
FLAGS = {"single_word", "lstrip", "rstrip", "normalized", "special"} # of an added token
# The classes of transformers that read the older files as we do, and their special tokens where a folder names none.
CLASSES = {"vocab.json": ["", "GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer"],
           "vocab.txt": ["", "BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"]}
GPT2_TOKENS = {"unk_token": "<|endoftext|>"}
BERT_TOKENS = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]",
               "mask_token": "[MASK]"}


def find_tokenizer(folder: Path) -> Path | None:
    """The main file of the tokenizer in a folder: tokenizer.json, vocab.json or vocab.txt; None if there is none."""
    for name in "tokenizer.json", "vocab.json", "vocab.txt":
        if os.path.lexists(folder / name):
            return folder / name
    settings = read_optional(folder / "tokenizer_config.json")
    name = "custom code" if "auto_map" in settings else class_name(settings)
    other = next((file for file in OTHER_FILES if os.path.lexists(folder / file)), name)
    if other not in ("", "GPT2Tokenizer"):
        raise ValueError(f"{folder} has {other:.60}, but no tokenizer.json; transformers may make one: "
                         "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)")
    return None


def load_library_tokenizer(path: Path, vocab_size: int) -> tuple[Any, dict]:
    """The library's tokenizer with this main file, and its content as that of a tokenizer.json.

    Tokens that only the other files in the folder add or name are added as in transformers: with the flags that the
    files give, and with the next free id if they give none. Added tokens that a model of vocab_size tokens lacks, such
    as one for padding, are plain text. Raises ValueError if a file is damaged.
    """
    from tokenizers import AddedToken, Tokenizer
    with named_errors(path):
        settings = read_optional(path.with_name("tokenizer_config.json"))
        added = [token | {"id": int(token_id)} for token_id, token in settings.get("added_tokens_decoder", {}).items()]
        if "added_tokens_decoder" not in settings: # then older files have them
            settings |= read_optional(path.with_name("special_tokens_map.json"))
            special = {token["content"] for token in named_tokens(settings)}
            added = [{"content": text, "id": token_id, "special": text in special}
                     for text, token_id in read_optional(path.with_name("added_tokens.json")).items()]
        content, class_tokens = read_content(path, settings)
        listed = content.get("added_tokens") or []
        ids = {token["content"]: token["id"] for token in [*added, *listed]}
        # Padding, truncation and the post-processor would change a prompt, and dropout makes encoding random.
        content |= {"padding": None, "truncation": None, "post_processor": None,
                    "added_tokens": [token for token in listed if token["id"] < vocab_size]}
        content["model"].pop("dropout", None)
        tokenizer = call_library(lambda: Tokenizer.from_str(json.dumps(content)))
        vocab_ids = tokenizer.get_vocab(with_added_tokens=False).values()
        require(vocab_ids and len({*vocab_ids}) == len(vocab_ids),
                "its vocabulary is empty, or gives two tokens the same id")
        named = [token for token in named_tokens(class_tokens | settings) if token["content"] not in ids]
        for token in sorted(added, key=itemgetter("id")) + [token | {"special": True} for token in named]:
            text = token["content"]
            if tokenizer.token_to_id(text) is not None or tokenizer.get_vocab_size() < vocab_size:
                tokenizer.add_tokens([AddedToken(text, **{flag: token[flag] for flag in FLAGS & token.keys()})])
        for text, token_id in ids.items():
            require(token_id >= vocab_size or tokenizer.token_to_id(text) == token_id,
                    f"the id {token_id!s:.20} of its added token {text!r:.60} is another token's, or does not follow "
                    "the ids of the vocabulary")
    return tokenizer, content


def read_content(path: Path, settings: dict) -> tuple[dict, dict]:
    """The content of a tokenizer.json for this main file, and the special tokens of its class."""
    name, options = class_name(settings), {"add_prefix_space": settings.get("add_prefix_space") or False}
    require(path.name not in CLASSES or name in CLASSES[path.name],
            f"a tokenizer of the class {name!r:.60} needs a tokenizer.json, not {path.name}")
    if path.name == "vocab.txt":
        return read_wordpiece(path, settings), BERT_TOKENS
    if path.name == "vocab.json": # the library's BPE.read_file skips ids that are no numbers, and truncates large ones
        merges = read_text(path.with_name("merges.txt")).removesuffix("\n").split("\n")
        step = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True} | options
        model = {"type": "BPE", "vocab": read_json(path), "merges": [m for m in merges if not m.startswith("#version")]}
        return {"pre_tokenizer": step, "decoder": step, "model": model}, GPT2_TOKENS
    content, config = read_json(path), {} if name else read_optional(path.with_name("config.json"))
    require(isinstance(content.get("model"), dict), "it has no model, so it is not a tokenizer.json")
    step = content.get("pre_tokenizer") or {}
    is_bpe = (content["model"].get("type"), step.get("type")) == ("BPE", "ByteLevel")
    if is_bpe and (name == "GPT2Tokenizer" or config.get("model_type") == "gpt2"): # what transformers makes of it
        return content | {"pre_tokenizer": step | options}, GPT2_TOKENS
    return content, {}


def read_wordpiece(path: Path, settings: dict) -> dict:
    """The content of a tokenizer.json for the vocab.txt of a BERT, with these settings."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    vocab = {piece.rstrip(): i for i, piece in enumerate(read_text(path).removesuffix("\n").split("\n"))}
    unknown = settings.get("unk_token", "[UNK]")
    unknown = unknown["content"] if isinstance(unknown, dict) else unknown
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"), lowercase=settings.get("do_lower_case", True))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return json.loads(tokenizer.to_str())


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
