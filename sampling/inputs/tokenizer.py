"""Tokenizer and Decoder, the base classes of all tokenizers, and what the tokenizers share."""
import codecs
import logging
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from operator import index
from typing import Any

from sampling.checkpoints.untrusted_files import RejectedFileError
from sampling.values import first_sentence

logger = logging.getLogger(__name__)
# The encodings of tiktoken, and how many tokens each has.
ENCODINGS = {
    "gpt2": 50257,
    "r50k_base": 50257,
    "p50k_base": 50281,
    "cl100k_base": 100277,
    "o200k_base": 200019,
}
# The text of unknown ids, and of bytes that form no character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
ADVICE = (f"pass tokenizer=NAME|FILE: an encoding of tiktoken ({', '.join(ENCODINGS)}), "
          "a tokenizer.json or its folder, or a meta.pkl")


class Tokenizer:
    """Turns text into token ids and back. Unknown ids decode to U+FFFD.

    A subclass has token_bytes, or a decoder and num_bytes of its own.
    """
    size: int # of the vocabulary
    source: str # where the vocabulary is from, for messages
    knows_all = True # of the ids so far

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises ValueError if the text cannot be encoded."""

    def token_bytes(self, token_id: int) -> bytes:
        """The text of a token in UTF-8: perhaps a part of a character.

        Here, of an unknown id. The first one gets a warning.
        """
        if self.knows_all:
            self.knows_all = False
            logger.warning(f"{self.source} has no text for token {token_id}: such tokens become "
                           "U+FFFD; if it is not the model's own, pass another tokenizer")
        return REPLACEMENT.encode()

    def missing_from(self, text: str) -> set | None:
        """The characters of a text that surely no token has, if there are any."""

    def num_bytes(self, ids: Sequence[int]) -> int:
        """How many bytes these tokens have in UTF-8, also where they are a part of a character."""
        return sum(map(len, map(self.token_bytes, ids)))

    def fingerprint(self) -> str:
        """What another vocabulary would change."""
        return self.source

    def decoder(self, prompt_ids: Sequence[int] = ()) -> "Decoder":
        """A decoder for the tokens after prompt_ids."""
        return Decoder(self, prompt_ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids: a list, or a torch tensor or numpy array of one dimension."""
        ids = list(map(index, ids)) # raises TypeError for what is no whole number
        decoder = self.decoder()
        return "".join(decoder(token_id, last=i == len(ids)) for i, token_id in enumerate(ids, 1))


class Decoder:
    """Decodes one sequence, token by token. This one joins the bytes of tokens.

    It holds the bytes of an incomplete character. The character comes whole with the last of its
    tokens, also if its first token is in the prompt.

    Without a prompt, the joined texts are what Tokenizer.decode returns. With a prompt, they are
    what the tokens add to its text. The attributes are replaced, never changed.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self.held = b""
        self.shown = ""
        for token_id in prompt_ids[-4:]: # a character has at most four bytes
            self(token_id)
        if self.held:
            self.shown = REPLACEMENT # the text of the prompt has it for the incomplete character

    def __call__(self, token_id: int, last: bool = False) -> str:
        """The text that the next token adds.

        last: no token follows, so an incomplete character becomes U+FFFD.
        """
        data = self.held + self.tokenizer.token_bytes(token_id)
        text, num_read = codecs.utf_8_decode(data, "replace", last)
        self.held = data[num_read:]
        if text:
            text = text.removeprefix(self.shown)
            self.shown = ""
        return text

    def peek(self, token_id: int, last: bool = False) -> str:
        """What a call would return for this token. It is not added to the sequence."""
        return copy(self)(token_id, last)


def encode_utf8(text: str) -> bytes:
    """The text in UTF-8. Raises ValueError if it has lone surrogates, which UTF-8 lacks."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid UTF-8 at character {error.start + 1}") from None


def call_library(function: Callable[[], Any], advice: str = "") -> Any:
    """The result of a function that uses a tokenizer's library. Raises ValueError if it fails."""
    try:
        return function()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error: # a Rust panic is no Exception
        raise RejectedFileError("the tokenizer's library failed: "
                                f"{first_sentence(error)}{advice}") from None
