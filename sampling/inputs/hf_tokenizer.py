"""HFTokenizer: a tokenizer of Hugging Face's tokenizers library, from a tokenizer.json or from the older files.

The library trusts its files, which may be a stranger's. Padding to a multiple of 2**40 allocates terabytes; if thirty
replacements each double the text, encoding never ends; and some merges abort the process. So the library gets only a
vocabulary and steps that are known to be harmless.
"""
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sampling.checkpoints.checkpoint import first_sentence, named_errors, require
from sampling.inputs.hf_files import read_tokenizer, vocab_of
from sampling.inputs.tokenizer import REPLACEMENT, require_unicode

CONTEXT = 8 # the text of a token depends on at most this many tokens before it
MAX_HELD = 64 # how many tokens may wait for the end of a run of bytes, and then of a character
MAX_STEPS = 16 # normalizers; also pre-tokenizers, and decoders
MAX_GROWTH = 256 # how many times longer they may make a text
MAX_TEXT = 2**10 # characters of a token, or of a text in a step; real tokens have at most a few hundred
MAX_TREE_BYTES = 2**20 # of all added tokens, and Unigram's pieces: each byte may become a node of 330 bytes
# What the library gets: fields of models, without BPE's dropout, which makes encoding random; and types of steps.
MODEL_FIELDS = {"BPE": "vocab merges unk_token end_of_word_suffix fuse_unk byte_fallback ignore_merges",
                "WordPiece": "vocab unk_token continuing_subword_prefix max_input_chars_per_word",
                "WordLevel": "vocab unk_token", "Unigram": "vocab unk_id byte_fallback"}
STEPS = { # part of a tokenizer.json -> its field in a Sequence, the types that are known to be harmless
    "normalizer": ("normalizers", "NFC NFD NFKC NFKD Lowercase StripAccents Nmt ByteLevel BertNormalizer Strip Prepend "
                                  "Replace"),
    "pre_tokenizer": ("pretokenizers", "BertPreTokenizer Whitespace WhitespaceSplit UnicodeScripts ByteLevel Metaspace "
                                       "Punctuation Digits CharDelimiterSplit Split"),
    "decoder": ("decoders", "ByteLevel ByteFallback Fuse WordPiece Metaspace BPEDecoder Strip Replace")}
GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "BertNormalizer": 3, "Lowercase": 2, "ByteLevel": 2,
          "Metaspace": 3} # type -> how many bytes it can make of one
# Regular expressions of well-known models. Others could run forever, or abort the process.
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
KNOWN_EXPRESSIONS = " {2,}", GPT2, LLAMA3, LLAMA3.replace("{1,3}", "") # the last one is Qwen 2's


class HFTokenizer:
    """The tokenizer whose main file is at path: a tokenizer.json, vocab.json or vocab.txt.

    Ids and texts are the same as in transformers with add_special_tokens=False and clean_up_tokenization_spaces=False.
    An added token that a model of vocab_size tokens lacks is plain text. Raises ValueError if it cannot be read.
    """

    def __init__(self, path: Path, vocab_size: int):
        from tokenizers import Tokenizer
        self.source = str(path)
        with named_errors(path):
            content = safe_content(read_tokenizer(path))
            vocab = vocab_of(content["model"])
            max_id = max(vocab.values())
            # Many tokenizers have an added padding token that their model lacks.
            added = [token for token in content["added_tokens"] if token["id"] < max(vocab_size, max_id)]
            self.size = 1 + max([max_id, *(token["id"] for token in added)])
            self.tokenizer = call_library(lambda: Tokenizer.from_str(json.dumps({**content, "added_tokens": added})))
            for token in added:
                require(self.tokenizer.token_to_id(token["content"]) == token["id"],
                        f"the id {token['id']!s:.20} of its added token {token['content']!r:.60} is another token's, "
                        "or does not follow the ids of the vocabulary")
        self.joins_spaces = "'ByteLevel'" in str(content["pre_tokenizer"])
        # Where ByteFallback joins bytes, <0xE2> and the like are no text before their run ends.
        self.byte_ids = {i for token, i in vocab.items() if token.startswith("<0x") and len(token) == 6}

    def encode(self, text: str) -> list[int]:
        require_unicode(text)
        ids = call_library(lambda: self.tokenizer.encode(text, add_special_tokens=False).ids)
        if not ids:
            raise ValueError(f"the prompt {text!r:.60} has no tokens in {self.source}, but a sample needs at least "
                             "one; pass another --start")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        ids = [int(i) for i in ids]
        if all(map(self._is_known, ids)):
            return self._text(ids)
        decode = self.incremental_decoder()
        return "".join(decode(token_id, last=i == len(ids)) for i, token_id in enumerate(ids, 1))

    def incremental_decoder(self, prompt_ids: Sequence[int] = ()) -> Callable[[int, bool], str]:
        # Decodes the last few tokens with the new one, and returns what this adds. The library's DecodeStream does so
        # too, but raises an exception if bytes that form no character follow bytes that do.
        context, held = [i for i in prompt_ids[-CONTEXT:] if self._is_known(i)], []
        while context and self._is_open(context): # no token continues the last character of the prompt
            context.pop()

        def decode_next(token_id: int, last: bool = False) -> str:
            if is_known := self._is_known(token_id):
                held.append(token_id)
                if not last and self._is_open(context + held, len(held)):
                    return ""
            text = self._text(context + held)[len(self._text(context)):]
            context.extend(i for i in held if i not in self.byte_ids) # a new run of bytes is another one
            held.clear()
            del context[:-CONTEXT]
            return text if is_known else text + REPLACEMENT
        return decode_next

    def _is_open(self, ids: list[int], num_held: int = 0) -> bool:
        if num_held >= MAX_HELD + 4: # more bytes than a character has, so they form none
            return False
        return (ids[-1] in self.byte_ids and num_held < MAX_HELD) or self._text(ids).endswith(REPLACEMENT)

    def _is_known(self, token_id: int) -> bool:
        return token_id < self.size and self.tokenizer.id_to_token(token_id) is not None

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def call_library(function: Callable):
    """The result of a function that uses the library. Raises ValueError if it fails."""
    try:
        return function()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error: # a Rust panic is no Exception
        raise ValueError(first_sentence(error)) from None


def safe_content(content: dict) -> dict:
    """The harmless part of a tokenizer.json. Raises ValueError if it needs more.

    Padding, truncation and the post-processor, which would add tokens to a prompt or remove some, are left out.
    """
    parts = {part: safe_steps(content.get(part), part) for part in STEPS}
    total_growth = math.prod(growth(step) for steps in parts.values() for step in steps)
    require(total_growth <= MAX_GROWTH, f"its steps could make a text more than {MAX_GROWTH} times longer")
    is_fused = False # the next decoders see the whole text as one token: later text must not change what they did
    for step in parts["decoder"]:
        is_local = step["type"] in ("Strip", "Fuse") or len(step.get("pattern", {}).get("String", "")) == 1
        require(is_local or not is_fused, f"its decoder has {step['type']} after Fuse, which is not supported")
        require(not step.get("stop"), "its decoder strips the end of a text, which is not supported")
        is_fused = is_fused or step["type"] in ("Fuse", "ByteLevel")
    model, added = safe_model(content["model"]), sorted(content["added_tokens"], key=lambda token: token["id"])
    pieces, texts = vocab_of(model), [token["content"] for token in added]
    require(all(len(text) <= MAX_TEXT for text in [*pieces, *texts]),
            f"it has a token of more than {MAX_TEXT} characters")
    in_trees = [*pieces, *texts] if model["type"] == "Unigram" else texts
    require(sum(len(text.encode()) for text in in_trees) <= MAX_TREE_BYTES, "its tokens would take too much memory")
    sequences = {part: {"type": "Sequence", STEPS[part][0]: steps} if steps else None for part, steps in parts.items()}
    return {"model": model, "added_tokens": added, **sequences}


def safe_steps(content: dict | None, part: str) -> list[dict]:
    sequence, allowed = STEPS[part]
    steps = flatten(content, sequence)
    require(len(steps) <= MAX_STEPS, f"its {part} has more than {MAX_STEPS} steps")
    for step in steps:
        kind = step.get("type")
        require(kind in allowed.split(), f"its {part} has the type {kind!r:.60}; supported types: {allowed}")
        for name, value in step.items():
            require(is_harmless(value) or (name == "content" and value == ""),
                    f"{kind} in its {part} has {name!r:.60} {value!r:.100}, which is not supported")
    return steps


def flatten(step: dict | None, sequence: str) -> list[dict]:
    """The steps of a part, which may be nested in Sequences."""
    if step is None:
        return []
    return [each for inner in step[sequence] for each in flatten(inner, sequence)] if sequence in step else [step]


def growth(step: dict) -> float:
    """How many times more bytes a step can make of a text."""
    if step["type"] == "Replace":
        return max(1, len(step["content"].encode()) / len(step["pattern"].get("String", " ")))
    return GROWTH.get(step["type"], 1)


def is_harmless(value: object) -> bool:
    """Whether a step may have this value: a flag, a small number, a text, or a pattern that is text or well known."""
    if isinstance(value, dict):
        is_known = value in [{"Regex": expression} for expression in KNOWN_EXPRESSIONS]
        return is_known or (list(value) == ["String"] and is_text(value["String"]))
    return value is None or value in range(CONTEXT + 1) or is_text(value) # a larger number would need more context


def is_text(value: object) -> bool:
    """Whether value is a text of allowed length, and not empty."""
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT


def safe_model(model: dict) -> dict:
    kind = model.get("type") or ("BPE" if "merges" in model else "Unigram" if isinstance(model.get("vocab"), list) else
                                 "WordPiece" if "max_input_chars_per_word" in model else "WordLevel") # older files
    require(kind in MODEL_FIELDS, f"its model has the type {kind!r:.60}; supported types: {', '.join(MODEL_FIELDS)}")
    vocab = vocab_of(model)
    require(vocab and len({*vocab.values()}) == len(vocab), "its vocabulary is empty, or gives two tokens the same id")
    # WordPiece takes time in proportion to the square of a word's length.
    require(model.get("max_input_chars_per_word", 100) in range(1, MAX_TEXT), "its words may be too long")
    require(kind != "BPE" or not model.get("continuing_subword_prefix"),
            "its continuing_subword_prefix is not supported") # with some merges, the library aborts the process
    for merge in model.get("merges") or (): # the library raises an error for other bad merges, but panics for these
        require("".join(merge.split(" ") if isinstance(merge, str) else merge) in vocab,
                f"its merge {merge!r:.60} makes a token that its vocabulary lacks")
    return {"type": kind} | {name: model[name] for name in MODEL_FIELDS[kind].split() if name in model}
