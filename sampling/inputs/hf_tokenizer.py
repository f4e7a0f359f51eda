"""HFTokenizer: a tokenizer of the library tokenizers, from tokenizer.json or older files.

The library runs no code in the files. But a file may waste time or memory, or end the process:
SECURITY.md says so. Raises ValueError for a file that cannot be read, and for a text that cannot be
encoded.
"""
import json
import os
from collections.abc import Sequence
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

from sampling.checkpoints.untrusted_files import (
    MAX_TEXT_BYTES,
    read_json,
    read_text,
    reject_damaged,
    require,
)
from sampling.inputs.tokenizer import REPLACEMENT, Decoder, Tokenizer, call_library, encode_utf8

# The text of a token depends on so many tokens before it, unless the decoder sees the whole text.
CONTEXT = 8
MAX_HELD = 64 # how many tokens may wait for the end of a run of bytes, and then of a character
MAIN_FILES = "tokenizer.json", "vocab.json", "vocab.txt"
OTHER_FILES = "sentencepiece.bpe.model", "spiece.model", "tokenizer.model", "merges.txt"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                "mask_token")
FLAGS = {"single_word", "lstrip", "rstrip", "normalized", "special"} # of an added token
# The classes of transformers that read the older files as we do
CLASSES = {
    "vocab.json": ["", "GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer", "CodeGenTokenizer"],
    "vocab.txt": ["", "BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"],
}
BERT_TOKENS = { # unless the settings name others
    f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}


class HFTokenizer(Tokenizer):
    """The tokenizer whose main file is at path: a tokenizer.json, vocab.json or vocab.txt.

    Ids and texts are the same as in transformers with add_special_tokens=False and
    clean_up_tokenization_spaces=False. An added token that a model of vocab_size tokens lacks is
    plain text.
    """
    def __init__(self, path: Path, vocab_size: int):
        self.source = str(path)
        self.vocab_size = vocab_size
        self.tokenizer, content = load_library_tokenizer(path, vocab_size)
        vocab = self.tokenizer.get_vocab()
        self.size = 1 + max(vocab.values())
        # Where ByteFallback joins bytes, <0xE2> and the like are no text before their run ends.
        self.byte_ids = {
            i for token, i in vocab.items() if token.startswith("<0x") and len(token) == 6}
        self.decodes_whole = decodes_whole_text(content.get("decoder"))

    def encode(self, text: str) -> list[int]:
        encode_utf8(text) # which checks it
        ids = call_library(lambda: self.tokenizer.encode(text, add_special_tokens=False).ids)
        if not ids:
            raise ValueError(f"the prompt {text!r:.60} has no tokens in {self.source}: "
                             "give another prompt")
        if max(ids) >= self.vocab_size:
            raise ValueError(f"the prompt {text!r:.60} has a token of {self.source} that the model "
                             "lacks: give another prompt")
        return ids

    def num_bytes(self, ids: Sequence[int]) -> int:
        text = self.text_of(ids)
        if len(ids) > 1 or not text.endswith(REPLACEMENT):
            return len(text.encode())
        # It ends inside a character. A byte is a token there, or one sign of the token's name.
        return 1 if ids[0] in self.byte_ids else len(self.tokenizer.id_to_token(ids[0]))

    def fingerprint(self) -> str:
        return self.tokenizer.to_str()

    def decoder(self, prompt_ids: Sequence[int] = ()) -> Decoder:
        return HFDecoder(self, prompt_ids)

    def is_known(self, token_id: int) -> bool:
        return token_id < self.size and self.tokenizer.id_to_token(token_id) is not None

    def text_of(self, ids: list[int]) -> str:
        if not ids: # some decoders fail here
            return ""
        return call_library(lambda: self.tokenizer.decode(ids, skip_special_tokens=False))


class HFDecoder(Decoder):
    """Decodes the last few tokens with the new ones, and returns what these add.

    The library's DecodeStream does so too, but fails if bytes that form no character follow bytes
    that do.
    """
    def __init__(self, tokenizer: HFTokenizer, prompt_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self.held = []
        known = [i for i in prompt_ids[-1000:] if tokenizer.is_known(i)]
        self.context = self.context_of(known)
        run = list(takewhile(tokenizer.byte_ids.__contains__, reversed(known)))[::-1]
        if tokenizer.text_of(run).endswith(REPLACEMENT): # the next token may continue a character
            self.context += run

    def __call__(self, token_id: int, last: bool = False) -> str:
        tokenizer = self.tokenizer
        is_known = tokenizer.is_known(token_id)
        if is_known:
            self.held = [*self.held, token_id]
        may_wait = is_known and not last
        is_in_run = token_id in tokenizer.byte_ids and len(self.held) < MAX_HELD
        if may_wait and (tokenizer.decodes_whole or is_in_run):
            return ""
        ids = self.context + self.held
        before = tokenizer.text_of(self.context)
        after = tokenizer.text_of(ids)
        is_incomplete = after.endswith(REPLACEMENT)
        if may_wait and is_incomplete and len(self.held) < MAX_HELD + 4: # bytes of a character
            return ""
        while not after.startswith(before): # a character of the prompt was incomplete
            before = before[:-1]
        text = after[len(before):]
        self.context = self.context_of(ids)
        self.held = []
        return text if is_known else text + tokenizer.token_bytes(token_id).decode()

    def context_of(self, ids: list[int]) -> list[int]:
        """The tokens before the next one, without bytes: a new run of bytes is another one."""
        return [i for i in ids if i not in self.tokenizer.byte_ids][-CONTEXT:]


def decodes_whole_text(decoder: dict | None) -> bool:
    """Whether a token may change the text of those before it.

    Fuse and ByteLevel join all tokens, so a step after them must be known to act at one place only.
    """
    if not decoder:
        return False
    is_joined = False
    for step in decoder.get("decoders", [decoder]):
        kind = step.get("type")
        if kind in ("Fuse", "ByteLevel"):
            is_joined = True
            continue
        is_local = kind == "Strip" and step["start"] <= CONTEXT and not step["stop"]
        if kind in ("Sequence", None) or (is_joined and not is_local):
            return True
    return False


# ---- files

def find_tokenizer(folder: Path) -> Path | None:
    """The main file of the tokenizer in a folder; None if the folder has none."""
    for name in MAIN_FILES:
        if os.path.lexists(folder / name):
            return folder / name
    fields = read_settings(folder)
    found = fields["tokenizer_class"]
    if "auto_map" in fields:
        found = "custom code"
    for name in OTHER_FILES:
        if os.path.lexists(folder / name):
            found = name
    if found in ("", "GPT2Tokenizer"):
        return None
    raise ValueError(f"{folder} has {found:.60}, but no tokenizer.json; transformers may make one: "
                     "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)")


def load_library_tokenizer(path: Path, vocab_size: int) -> tuple[Any, dict]:
    """The library's tokenizer with this main file, and its content as that of a tokenizer.json.

    Tokens that only the other files add or name are added as in transformers: with their flags, and
    the next free id, whatever id they have there. A token is plain text if a model of vocab_size
    tokens has no room for it.
    """
    from tokenizers import AddedToken, Tokenizer
    content, fields = read_content(path)
    added = fields["added_tokens"]
    with reject_damaged(path):
        listed = content.get("added_tokens") or []
        known = {token["content"]: token["id"] for token in [*listed, *added]}
        check_vocabulary(content["model"], known)
        # Padding, truncation and the post-processor would change a prompt. Dropout is random.
        content |= dict.fromkeys(["padding", "truncation", "post_processor"])
        content["model"].pop("dropout", None)
        content["added_tokens"] = [token for token in listed if token["id"] < vocab_size]
        tokenizer = call_library(lambda: Tokenizer.from_str(json.dumps(content)))
        new = sorted(added, key=itemgetter("id"))
        for token in named_tokens(fields):
            if token["content"] not in known:
                new.append(token | {"special": True})
        for token in new:
            text = token["content"]
            if tokenizer.token_to_id(text) is not None or tokenizer.get_vocab_size() < vocab_size:
                flags = {flag: token[flag] for flag in FLAGS & token.keys()}
                tokenizer.add_tokens([AddedToken(text, **flags)])
    return tokenizer, content


def check_vocabulary(model: dict, added_ids: dict[str, int]) -> None:
    """Raises RejectedFileError if the vocabulary, the merges and the added tokens do not fit."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        texts = {i: text for text, i in vocab.items()}
    else:
        texts = {i: entry[0] for i, entry in enumerate(vocab)}
    require(texts and len(texts) == len(vocab),
            "its vocabulary is empty, or gives two tokens the same id")
    # The library checks this too, but prints many lines where it fails.
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in model.get("merges") or []:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        tokens = {first, second, first + second.removeprefix(prefix)}
        require(second.startswith(prefix) and tokens <= vocab.keys(),
                f"its merge {first!r:.40} + {second!r:.40} does not fit its vocabulary; "
                "take both of one model")
    for text, token_id in added_ids.items():
        require(texts.get(token_id, text) == text,
                f"the id {token_id!s:.20} of its added token {text!r:.60} is another token's")


def read_content(path: Path) -> tuple[dict, dict]:
    """The content of a tokenizer.json for this main file, and the settings.

    The settings name the special tokens of the tokenizer's class, too.
    """
    fields = read_settings(path.parent)
    name = fields["tokenizer_class"]
    with reject_damaged(path):
        require(path.name not in CLASSES or name in CLASSES[path.name],
                f"a tokenizer of the class {name!r:.60} needs a tokenizer.json, not {path.name}")
        if path.name == "vocab.txt":
            return wordpiece_content(path, fields), BERT_TOKENS | fields
        content = read_json(path, MAX_TEXT_BYTES)
        if path.name == "vocab.json":
            # BPE.read_file would skip ids that are no numbers, and truncate large ones.
            lines = read_lines(path.with_name("merges.txt"))
            merges = [line for line in lines if not line.startswith("#version")]
            model = {"vocab": content, "merges": merges}
            content = {}
        else:
            model = content.get("model")
            require(isinstance(model, dict), "it has no model, so it is not a tokenizer.json")
            has_class = name in CLASSES["vocab.json"] if name else fields["is_gpt2"]
            is_byte_level = "ByteLevel" in json.dumps(content.get("pre_tokenizer"))
            if not (has_class and is_byte_level and model.get("type") == "BPE"):
                return content, fields
        # These classes take the vocabulary and the merges alone.
        step = {
            "type": "ByteLevel",
            "trim_offsets": True,
            "add_prefix_space": fields.get("add_prefix_space") or False,
        }
        content |= {
            "normalizer": None,
            "pre_tokenizer": step,
            "decoder": step,
            "model": {"type": "BPE", "vocab": model["vocab"], "merges": model["merges"]},
        }
        return content, {"unk_token": "<|endoftext|>"} | fields


def wordpiece_content(path: Path, fields: dict) -> dict:
    """The content of a tokenizer.json for BERT's vocab.txt."""
    from tokenizers import BertWordPieceTokenizer
    unknown = fields.get("unk_token") or "[UNK]"
    if isinstance(unknown, dict):
        unknown = unknown["content"]
    tokenizer = BertWordPieceTokenizer(
        unk_token=unknown,
        handle_chinese_chars=fields.get("tokenize_chinese_chars", True),
        strip_accents=fields.get("strip_accents"),
        lowercase=fields.get("do_lower_case", True))
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] = {piece.rstrip(): i for i, piece in enumerate(read_lines(path))}
    return content


def read_lines(path: Path) -> list[str]:
    return read_text(path).removesuffix("\n").split("\n")


def read_settings(folder: Path) -> dict:
    """The settings in the files of a folder, merged as transformers does.

    Its added_tokens are objects, as in a tokenizer.json.
    """
    def read(name: str) -> dict:
        path = folder / name
        return read_json(path, MAX_TEXT_BYTES) if os.path.lexists(path) else {}

    with reject_damaged(folder):
        config = read("config.json")
        fields = read("tokenizer_config.json")
        if "added_tokens_decoder" in fields:
            decoder = fields["added_tokens_decoder"]
            added = [token | {"id": int(token_id)} for token_id, token in decoder.items()]
        else:
            fields |= read("special_tokens_map.json")
            special = {token["content"] for token in named_tokens(fields)}
            ids = read("added_tokens.json")
            added = [
                {"content": text, "id": i, "special": text in special} for text, i in ids.items()]
        name = fields.get("tokenizer_class") or config.get("tokenizer_class") or ""
        fields["tokenizer_class"] = str(name).removesuffix("Fast")
        fields["is_gpt2"] = config.get("model_type") == "gpt2"
        fields["added_tokens"] = added
    return fields


def named_tokens(fields: dict) -> list[dict]:
    """The special tokens, in transformers' order. In the files, each is a text or an object."""
    ordered = dict.fromkeys(NAMED_TOKENS) | fields
    values = [value for name, value in ordered.items() if name.endswith("_token")]
    extra = fields.get("extra_special_tokens") or []
    if isinstance(extra, dict):
        values += extra.values()
        extra = []
    values += extra or fields.get("additional_special_tokens") or []
    tokens = []
    for value in values:
        token = value if isinstance(value, dict) else {"content": value}
        text = token.get("content")
        if isinstance(text, str) and text:
            tokens.append(token)
    return tokens
