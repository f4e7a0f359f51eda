"""HFTokenizer: a tokenizer of Hugging Face's tokenizers library, from a tokenizer.json or from the older files.

The library reads the file and runs no code in it. But a file may waste time or memory, or end the process: SECURITY.md.
"""
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from sampling.checkpoints.untrusted_files import first_sentence, named_errors, require
from sampling.inputs.hf_files import read_tokenizer, vocab_of
from sampling.inputs.tokenizer import REPLACEMENT, IncrementalDecoder, encode_utf8

CONTEXT = 8 # the text of a token depends on at most this many tokens before it, unless the decoder sees the whole text
MAX_HELD = 64 # how many tokens may wait for the end of a run of bytes, and then of a character


class HFTokenizer:
    """The tokenizer whose main file is at path: a tokenizer.json, vocab.json or vocab.txt.

    Ids and texts are the same as in transformers with add_special_tokens=False and clean_up_tokenization_spaces=False.
    An added token that a model of vocab_size tokens lacks is plain text. Raises ValueError if it cannot be read.
    """
    unit = "tokens"

    def __init__(self, path: Path, vocab_size: int):
        from tokenizers import Tokenizer
        self.source = str(path)
        with named_errors(path):
            content = read_tokenizer(path)
            vocab = vocab_of(content["model"])
            require(vocab and len({*vocab.values()}) == len(vocab),
                    "its vocabulary is empty, or gives two tokens the same id")
            max_id = max(vocab.values())
            # Many tokenizers have an added padding token that their model lacks.
            added = sorted((token for token in content["added_tokens"] if token["id"] < max(vocab_size, max_id)),
                           key=lambda token: token["id"])
            self.size = 1 + max([max_id, *(token["id"] for token in added)])
            # Padding, truncation and the post-processor would change a prompt, and dropout makes encoding random.
            content |= {"added_tokens": added, "padding": None, "truncation": None, "post_processor": None}
            content["model"].pop("dropout", None)
            self.tokenizer = call_library(lambda: Tokenizer.from_str(json.dumps(content)))
            for token in added:
                require(self.tokenizer.token_to_id(token["content"]) == token["id"],
                        f"the id {token['id']!s:.20} of its added token {token['content']!r:.60} is another token's, "
                        "or does not follow the ids of the vocabulary")
        self.joins_spaces = "'ByteLevel'" in str(content.get("pre_tokenizer"))
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

    def decode(self, ids: Iterable[int]) -> str:
        ids = [int(i) for i in ids]
        if all(map(self.is_known, ids)):
            return self.text_of(ids)
        decoder = self.incremental_decoder()
        return "".join(decoder(token_id, last=i == len(ids)) for i, token_id in enumerate(ids, 1))

    def incremental_decoder(self, prompt_ids: Sequence[int] = ()) -> IncrementalDecoder:
        return HFDecoder(self, prompt_ids)

    def is_known(self, token_id: int) -> bool:
        return token_id < self.size and self.tokenizer.id_to_token(token_id) is not None

    def text_of(self, ids: list[int]) -> str:
        return call_library(lambda: self.tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


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
        held, may_wait = self.held + [token_id] * is_known, is_known and not last
        if may_wait and (tokenizer.decodes_whole or (token_id in tokenizer.byte_ids and len(held) < MAX_HELD)):
            self.held = held
            return ""
        before, after = tokenizer.text_of(self.context), tokenizer.text_of(self.context + held)
        if may_wait and after.endswith(REPLACEMENT) and len(held) < MAX_HELD + 4: # more bytes than a character has
            self.held = held
            return ""
        while not after.startswith(before): # a character of the prompt was incomplete
            before = before[:-1]
        self.context, self.held = self.context_of(self.context + held), []
        return after[len(before):] + ("" if is_known else REPLACEMENT)

    def context_of(self, ids: list[int]) -> list[int]:
        """The tokens before the next one, without bytes, because a new run of bytes is another one."""
        return [i for i in ids if i not in self.tokenizer.byte_ids][-CONTEXT:]


def call_library(function: Callable[[], Any], advice: str = "") -> Any:
    """The result of a function that uses a library for tokenizers. Raises ValueError if it fails."""
    try:
        return function()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error: # a Rust panic is no Exception
        raise ValueError(f"the tokenizer's library failed: {first_sentence(error)}{advice}") from None


def decodes_whole_text(decoder: dict | None) -> bool:
    """Whether a token may change the text of those before it. Fuse and ByteLevel join all tokens, so then a step must
    be known to act at one place only.
    """
    steps = decoder.get("decoders", [decoder]) if decoder else []
    joined = [*dropwhile(lambda step: step["type"] not in ("Fuse", "ByteLevel", "Sequence"), steps)]
    return not all(step["type"] in ("Fuse", "ByteLevel")
                   or (step["type"] == "Strip" and step["start"] <= CONTEXT and not step["stop"])
                   or (step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1) for step in joined)
