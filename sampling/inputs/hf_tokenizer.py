"""HFTokenizer: a tokenizer of Hugging Face's tokenizers library, from a tokenizer.json or from the older files.

The library runs no code in the files. But a file may waste time or memory, or end the process: see SECURITY.md.
Raises ValueError for a file that cannot be read, and for a text that cannot be encoded.
"""
import json
import os
from collections.abc import Sequence
from itertools import chain, dropwhile, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

from sampling.checkpoints.untrusted_files import read_json, read_text, reject_damaged, require
from sampling.inputs.tokenizer import REPLACEMENT, IncrementalDecoder, Tokenizer, call_library, encode_utf8

CONTEXT = 8 # the text of a token depends on at most this many tokens before it, unless the decoder sees the whole text
MAX_HELD = 64 # how many tokens may wait for the end of a run of bytes, and then of a character
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


class HFTokenizer(Tokenizer):
    """The tokenizer whose main file is at path: a tokenizer.json, vocab.json or vocab.txt.

    Ids and texts are the same as in transformers with add_special_tokens=False and clean_up_tokenization_spaces=False.
    An added token that a model of vocab_size tokens lacks is plain text.
    """
    def __init__(self, path: Path, vocab_size: int):
        self.source = str(path)
        self.tokenizer, content = load_library_tokenizer(path, vocab_size)
        vocab = self.tokenizer.get_vocab()
        self.size = 1 + max(vocab.values())
        # Where ByteFallback joins bytes, <0xE2> and the like are no text before their run ends.
        self.byte_ids = {i for token, i in vocab.items() if token.startswith("<0x") and len(token) == 6}
        self.decodes_whole = decodes_whole_text(content.get("decoder"))

    def encode(self, text: str) -> list[int]:
        encode_utf8(text) # which checks it
        ids = call_library(lambda: self.tokenizer.encode(text, add_special_tokens=False).ids)
        if not ids:
            raise ValueError(f"the prompt {text!r:.60} has no tokens in {self.source}, but a sample needs at least "
                             "one; pass another --start")
        return ids

    def incremental_decoder(self, prompt_ids: Sequence[int] = ()) -> IncrementalDecoder:
        return HFDecoder(self, prompt_ids)

    def is_known(self, token_id: int) -> bool:
        return token_id < self.size and self.tokenizer.id_to_token(token_id) is not None

    def text_of(self, ids: list[int]) -> str:
        decode = self.tokenizer.decode
        return call_library(lambda: decode(ids, skip_special_tokens=False)) if ids else "" # some decoders fail at []


class HFDecoder(IncrementalDecoder):
    """Decodes the last few tokens with the new ones, and returns what these add.

    The library's DecodeStream does so too, but fails if bytes that form no character follow bytes that do.
    """

    def __init__(self, tokenizer: HFTokenizer, prompt_ids: Sequence[int]):
        self.tokenizer, self.held = tokenizer, []
        known = [i for i in prompt_ids[-1000:] if tokenizer.is_known(i)]
        run = [*takewhile(tokenizer.byte_ids.__contains__, reversed(known))][::-1]
        if not tokenizer.text_of(run).endswith(REPLACEMENT): # its characters are complete: no token continues them
            run = []
        self.context = self.context_of(known) + run

    def __call__(self, token_id: int, last: bool = False) -> str:
        tokenizer, is_known = self.tokenizer, self.tokenizer.is_known(token_id)
        held, may_wait = [*self.held, token_id] if is_known else self.held, is_known and not last
        if may_wait and (tokenizer.decodes_whole or (token_id in tokenizer.byte_ids and len(held) < MAX_HELD)):
            self.held = held
            return ""
        before, after = tokenizer.text_of(self.context), tokenizer.text_of(self.context + held)
        if may_wait and after.endswith(REPLACEMENT) and len(held) < MAX_HELD + 4: # a character has at most 4 bytes
            self.held = held
            return ""
        while not after.startswith(before): # a character of the prompt was incomplete
            before = before[:-1]
        self.context, self.held = self.context_of(self.context + held), []
        return after[len(before):] + ("" if is_known else REPLACEMENT)

    def context_of(self, ids: list[int]) -> list[int]:
        """The tokens before the next one, without bytes, because a new run of bytes is another one."""
        return [i for i in ids if i not in self.tokenizer.byte_ids][-CONTEXT:]


def decodes_whole_text(decoder: dict | None) -> bool:
    """Whether a token may change the text of those before it. Fuse and ByteLevel join all tokens, so then a step must
    be known to act at one place only.
    """
    steps = decoder.get("decoders", [decoder]) if decoder else []
    joined = [*dropwhile(lambda step: step["type"] not in ("Fuse", "ByteLevel", "Sequence"), steps)]
    return not all(step["type"] in ("Fuse", "ByteLevel")
                   or (step["type"] == "Strip" and step["start"] <= CONTEXT and not step["stop"])
                   or (step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1) for step in joined)


# ---- files

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
    as one for padding, are plain text.
    """
    from tokenizers import AddedToken, Tokenizer
    with reject_damaged(path):
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
        unknown, = named_tokens({"unk_token": settings.get("unk_token", "[UNK]")})
        pieces = read_text(path).removesuffix("\n").split("\n")
        normalizer = {"type": "BertNormalizer", "clean_text": True, "strip_accents": settings.get("strip_accents"),
                      "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
                      "lowercase": settings.get("do_lower_case", True)}
        model = {"type": "WordPiece", "vocab": {piece.rstrip(): i for i, piece in enumerate(pieces)},
                 "unk_token": unknown["content"], "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
        return {"normalizer": normalizer, "pre_tokenizer": {"type": "BertPreTokenizer"}, "model": model,
                "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, BERT_TOKENS
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
