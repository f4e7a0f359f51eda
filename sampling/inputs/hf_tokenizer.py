"""HFTokenizer: a tokenizer of Hugging Face's tokenizers library, from a tokenizer.json or from the older files.

The library runs no code in the files. But a file may waste time or memory, or end the process: see SECURITY.md.
Raises ValueError for a file that cannot be read, and for a text that cannot be encoded.
"""
import json
import os
from collections.abc import Sequence
from itertools import dropwhile, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

from sampling.checkpoints.untrusted_files import read_json, read_text, reject_damaged, require
from sampling.inputs.tokenizer import REPLACEMENT, Decoder, Tokenizer, call_library, encode_utf8

CONTEXT = 8 # the text of a token depends on at most this many tokens before it, unless the decoder sees the whole text
MAX_HELD = 64 # how many tokens may wait for the end of a run of bytes, and then of a character
OTHER_FILES = "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"
NAMED_TOKENS = "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
SETTINGS_FILES = "config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FLAGS = {"single_word", "lstrip", "rstrip", "normalized", "special"} # of an added token
# The classes of transformers that read the older files as we do
CLASSES = {"vocab.json": ["", "GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer", "CodeGenTokenizer"],
           "vocab.txt": ["", "BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"]}
BERT_TOKENS = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")} # unless named


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
        if ids := call_library(lambda: self.tokenizer.encode(text, add_special_tokens=False).ids):
            return ids
        raise ValueError(f"the prompt {text!r:.60} has no tokens in {self.source}: pass another --start")

    def num_bytes(self, ids: Sequence[int]) -> int:
        text = self.text_of(ids)
        if len(ids) == 1 and text.endswith(REPLACEMENT):
            # It ends inside a character. A byte is a token of its own there, or one sign of the token's name.
            return 1 if ids[0] in self.byte_ids else len(self.tokenizer.id_to_token(ids[0]))
        return len(text.encode())

    def fingerprint(self) -> str:
        return self.tokenizer.to_str()

    def decoder(self, prompt_ids: Sequence[int] = ()) -> Decoder:
        return HFDecoder(self, prompt_ids)

    def is_known(self, token_id: int) -> bool:
        return token_id < self.size and self.tokenizer.id_to_token(token_id) is not None

    def text_of(self, ids: list[int]) -> str: # some decoders fail at []
        return call_library(lambda: self.tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


class HFDecoder(Decoder):
    """Decodes the last few tokens with the new ones, and returns what these add. The library's DecodeStream does so
    too, but fails if bytes that form no character follow bytes that do.
    """
    def __init__(self, tokenizer: HFTokenizer, prompt_ids: Sequence[int]):
        self.tokenizer, self.held = tokenizer, []
        known = [i for i in prompt_ids[-1000:] if tokenizer.is_known(i)]
        run = [*takewhile(tokenizer.byte_ids.__contains__, reversed(known))][::-1]
        is_open = tokenizer.text_of(run).endswith(REPLACEMENT) # otherwise no token continues its last character
        self.context = self.context_of(known) + run * is_open

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
    joined = [*dropwhile(lambda step: step.get("type") not in ("Fuse", "ByteLevel", "Sequence", None), steps)]
    return not all(step.get("type") in ("Fuse", "ByteLevel")
                   or (step.get("type") == "Strip" and step["start"] <= CONTEXT and not step["stop"])
                   or (step.get("type") == "Replace" and len(step["pattern"].get("String", "")) == 1)
                   for step in joined)


# ---- files

def find_tokenizer(folder: Path) -> Path | None:
    """The main file of the tokenizer in a folder: tokenizer.json, vocab.json or vocab.txt; None if there is none."""
    for name in "tokenizer.json", "vocab.json", "vocab.txt":
        if os.path.lexists(folder / name):
            return folder / name
    fields, _ = read_settings(folder)
    name = "custom code" if "auto_map" in fields else fields["tokenizer_class"]
    other = next((file for file in OTHER_FILES if os.path.lexists(folder / file)), name)
    if other in ("", "GPT2Tokenizer"):
        return None
    raise ValueError(f"{folder} has {other:.60}, but no tokenizer.json; transformers may make one: "
                     "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)")


def load_library_tokenizer(path: Path, vocab_size: int) -> tuple[Any, dict]:
    """The library's tokenizer with this main file, and its content as that of a tokenizer.json.

    Tokens that only the other files add or name are added as in transformers: with their flags, and the next free id,
    whatever id they have there. Those for which a model of vocab_size tokens has no room are plain text.
    """
    from tokenizers import AddedToken, Tokenizer
    content, fields, added = read_content(path)
    with reject_damaged(path):
        vocab, listed = content["model"]["vocab"], content.get("added_tokens") or []
        # Padding, truncation and the post-processor would change a prompt, and dropout makes encoding random.
        content |= {"padding": None, "truncation": None, "post_processor": None,
                    "added_tokens": [token for token in listed if token["id"] < vocab_size]}
        content["model"].pop("dropout", None)
        texts = {i: text for text, i in vocab.items()} if isinstance(vocab, dict) else {
            i: entry[0] for i, entry in enumerate(vocab)}
        require(texts and len(texts) == len(vocab), "its vocabulary is empty, or gives two tokens the same id")
        # The library checks this too, but prints many lines where it fails.
        prefix = content["model"].get("continuing_subword_prefix") or ""
        for merge in content["model"].get("merges") or []:
            first, second = merge.split(" ") if isinstance(merge, str) else merge
            tokens = {first, second, first + second.removeprefix(prefix)}
            require(second.startswith(prefix) and tokens <= vocab.keys(),
                    f"its merge {first!r:.40} + {second!r:.40} does not fit its vocabulary; take both of one model")
        known = {token["content"]: token["id"] for token in [*listed, *added]}
        for text, token_id in known.items():
            is_free = texts.get(token_id, text) == text
            require(is_free, f"the id {token_id!s:.20} of its added token {text!r:.60} is another token's")
        named = [token | {"special": True} for token in named_tokens(fields) if token["content"] not in known]
        tokenizer = call_library(lambda: Tokenizer.from_str(json.dumps(content)))
        for token in sorted(added, key=itemgetter("id")) + named:
            text = token["content"]
            if tokenizer.token_to_id(text) is not None or tokenizer.get_vocab_size() < vocab_size:
                tokenizer.add_tokens([AddedToken(text, **{flag: token[flag] for flag in FLAGS & token.keys()})])
    return tokenizer, content


def read_content(path: Path) -> tuple[dict, dict, list[dict]]:
    """The content of a tokenizer.json for this main file, and read_settings' result with the tokens of the class."""
    fields, added = read_settings(path.parent)
    name = fields["tokenizer_class"]
    with reject_damaged(path):
        require(path.name not in CLASSES or name in CLASSES[path.name],
                f"a tokenizer of the class {name!r:.60} needs a tokenizer.json, not {path.name}")
        if path.name == "vocab.txt":
            unknown, pieces = fields.get("unk_token") or "[UNK]", read_text(path).removesuffix("\n").split("\n")
            normalizer = {"type": "BertNormalizer", "clean_text": True, "strip_accents": fields.get("strip_accents"),
                          "handle_chinese_chars": fields.get("tokenize_chinese_chars", True),
                          "lowercase": fields.get("do_lower_case", True)}
            model = {"type": "WordPiece", "vocab": {piece.rstrip(): i for i, piece in enumerate(pieces)},
                     "unk_token": unknown["content"] if isinstance(unknown, dict) else unknown,
                     "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
            return {"normalizer": normalizer, "pre_tokenizer": {"type": "BertPreTokenizer"}, "model": model,
                    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, BERT_TOKENS | fields, added
        content = read_json(path)
        if path.name == "vocab.json": # BPE.read_file skips ids that are no numbers, and truncates large ones
            merges = read_text(path.with_name("merges.txt")).removesuffix("\n").split("\n")
            content = {"model": {"vocab": content, "merges": [m for m in merges if not m.startswith("#version")]}}
        else:
            require(isinstance(content.get("model"), dict), "it has no model, so it is not a tokenizer.json")
            is_bpe = content["model"].get("type") == "BPE" and "ByteLevel" in json.dumps(content.get("pre_tokenizer"))
            if not (is_bpe and (name in CLASSES["vocab.json"] if name else fields["is_gpt2"])):
                return content, fields, added
        # These classes take the vocabulary and the merges alone.
        step = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True,
                "add_prefix_space": fields.get("add_prefix_space") or False}
        model = {"type": "BPE", "vocab": content["model"]["vocab"], "merges": content["model"]["merges"]}
        content |= {"normalizer": None, "pre_tokenizer": step, "decoder": step, "model": model}
        return content, {"unk_token": "<|endoftext|>"} | fields, added


def read_settings(folder: Path) -> tuple[dict, list[dict]]:
    """What the JSON files of a folder say, merged as transformers does: the settings, and the added tokens with ids."""
    with reject_damaged(folder):
        config, fields, older, ids = (read_json(path) if os.path.lexists(path) else {}
                                      for path in map(folder.joinpath, SETTINGS_FILES))
        added = [token | {"id": int(token_id)} for token_id, token in fields.get("added_tokens_decoder", {}).items()]
        if "added_tokens_decoder" not in fields: # then older files have them
            fields = fields | older
            special = {token["content"] for token in named_tokens(fields)}
            added = [{"content": text, "id": i, "special": text in special} for text, i in ids.items()]
        name = str(fields.get("tokenizer_class") or config.get("tokenizer_class") or "").removesuffix("Fast")
    return fields | {"tokenizer_class": name, "is_gpt2": config.get("model_type") == "gpt2"}, added


def named_tokens(fields: dict) -> list[dict]:
    """The special tokens in transformers' order, as objects. In the files, each is a text or an object."""
    names = dict.fromkeys([*NAMED_TOKENS, *(name for name in fields if name.endswith("_token"))])
    extra, older = (fields.get(f"{name}_special_tokens") or [] for name in ("extra", "additional"))
    listed = [*extra.values(), *older] if isinstance(extra, dict) else extra or older
    tokens = [token if isinstance(token, dict) else {"content": token} for token in [*map(fields.get, names), *listed]]
    return [token for token in tokens if isinstance(token.get("content"), str) and token["content"]]
