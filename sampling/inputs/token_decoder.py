"""Turns the tokens of a tokenizer.json into text, one token at a time.

Each class here does what the decoder of its name does in the tokenizers library, which decodes whole sequences only.
feed takes the next tokens, and returns what is certain of their texts; last: the sequence ends here for now.
"""
import codecs
import re
from typing import Protocol

from sampling.checkpoints.errors import Refused, require

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x(\+[0-9a-fA-F]|[0-9a-fA-F]{2})>") # the library reads <0x+A> as a byte, too
# What cleanup of WordPiece replaces, in this order.
CLEANUP = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
           (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))


class Stage(Protocol):
    """One step from tokens to text."""

    def feed(self, tokens: list[str], last: bool) -> list[str]:
        """Take the next tokens, and return the finished ones."""


def byte_of_chars() -> dict[str, int]:
    """The characters that stand for bytes in byte-level tokens, as GPT-2's encoder.json has them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = byte_of_chars()


class ByteLevel:
    """Characters stand for bytes. A token with other characters, such as an added one, stands for itself."""

    def __init__(self):
        self.decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def feed(self, tokens, last):
        """See Stage.feed."""
        return [self.decode(b"".join(map(self._bytes, tokens)), last)]

    def _bytes(self, token: str) -> bytes:
        try:
            return bytes([BYTE_OF_CHAR[char] for char in token])
        except KeyError:
            return token.encode()


class ByteFallback:
    """<0xE2> stands for a byte. A run of such tokens is UTF-8, or every byte of it becomes U+FFFD."""

    def __init__(self):
        self.run = bytearray()

    def feed(self, tokens, last):
        """See Stage.feed."""
        finished = []
        for token in tokens:
            if byte := BYTE_TOKEN.fullmatch(token):
                self.run.append(int(byte[1], 16))
            else:
                finished += [*self._finish_run(), token]
        return finished + self._finish_run() if last else finished

    def _finish_run(self) -> list[str]:
        run, self.run = self.run, bytearray()
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return [REPLACEMENT] * len(run)


class WordPiece:
    """A token that begins with the prefix continues a word; a space precedes every other one."""

    def __init__(self, prefix: str = "##", cleanup: bool = True):
        self.prefix, self.cleanup, self.is_first = prefix, cleanup, True

    def feed(self, tokens, last):
        """See Stage.feed."""
        return [self._text(token) for token in tokens]

    def _text(self, token: str) -> str:
        if not self.is_first:
            token = token.removeprefix(self.prefix) if token.startswith(self.prefix) else f" {token}"
        self.is_first = False
        for found, replacement in CLEANUP if self.cleanup else ():
            token = token.replace(found, replacement)
        return token


class Metaspace:
    """A sign stands for a space; those of the first token are dropped, if the tokenizer adds one there."""

    def __init__(self, replacement: str = "▁", prepend_scheme: str = "always"):
        self.replacement, self.is_first, self.drops_first = replacement, True, prepend_scheme != "never"

    def feed(self, tokens, last):
        """See Stage.feed."""
        return [self._text(token) for token in tokens]

    def _text(self, token: str) -> str:
        space = "" if self.is_first and self.drops_first else " "
        self.is_first = False
        return token.replace(self.replacement, space)


class BPEDecoder:
    """A suffix ends a word. A space follows it, unless it ends the whole text."""

    def __init__(self, suffix: str = "</w>"):
        self.suffix, self.spaces = suffix, ""

    def feed(self, tokens, last):
        """See Stage.feed."""
        return [self._text(token) for token in tokens]

    def _text(self, token: str) -> str:
        text, spaces = token, self.spaces
        self.spaces = ""
        while text.endswith(self.suffix):
            text, self.spaces = text.removesuffix(self.suffix), self.spaces + " "
        return spaces + text.replace(self.suffix, " ")


class SpacesBetween:
    """What the library does without a decoder."""

    def __init__(self):
        self.is_first = True

    def feed(self, tokens, last):
        """See Stage.feed."""
        spaced = [token if self.is_first and i == 0 else f" {token}" for i, token in enumerate(tokens)]
        self.is_first = self.is_first and not tokens
        return spaced


class Replace:
    """Replaces a text in each token."""

    def __init__(self, pattern: str, content: str):
        self.pattern, self.content = pattern, content

    def feed(self, tokens, last):
        """See Stage.feed."""
        return [token.replace(self.pattern, self.content) for token in tokens]


class Strip:
    """Removes up to start of one character from the beginning of each token, and up to stop from its end."""

    def __init__(self, content: str, start: int, stop: int):
        self.content, self.start, self.stop = content, start, stop

    def feed(self, tokens, last):
        """See Stage.feed."""
        return [strip_end(strip_start(token, self.content, self.start), self.content, self.stop) for token in tokens]


class StripText:
    """Removes up to start of one character from the beginning of the whole text."""

    def __init__(self, content: str, start: int):
        self.content, self.left = content, start

    def feed(self, tokens, last):
        """See Stage.feed."""
        return [self._text(token) for token in tokens]

    def _text(self, text: str) -> str:
        stripped = strip_start(text, self.content, self.left)
        self.left = 0 if stripped else self.left - len(text)
        return stripped


def strip_start(text: str, char: str, count: int) -> str:
    """The text without up to count of a character at its beginning."""
    return text[min(count, len(text) - len(text.lstrip(char))):]


def strip_end(text: str, char: str, count: int) -> str:
    """The text without up to count of a character at its end."""
    return text[:len(text) - min(count, len(text) - len(text.rstrip(char)))]


def make_stages(steps: list[dict]) -> list[Stage]:
    """New stages for the decoders of a tokenizer.json. Raises Refused if they cannot work one token at a time."""
    stages, is_fused = [], False # fused: the decoders that follow see one long token
    for step in steps:
        kind, options = step["type"], {name: value for name, value in step.items() if name != "type"}
        if kind != "Fuse":
            stages.append(make_fused_stage(kind, options) if is_fused else make_stage(kind, options))
        is_fused = is_fused or kind in ("Fuse", "ByteLevel")
    return stages or [Replace("", "")] if steps else [SpacesBetween()]


def make_stage(kind: str, options: dict) -> Stage:
    """The stage of one decoder."""
    if kind == "ByteLevel":
        return ByteLevel()
    if kind == "Metaspace":
        older = "always" if options.get("add_prefix_space", True) else "never" # what older files say instead
        return Metaspace(options.get("replacement", "▁"), options.get("prepend_scheme", older))
    if kind == "Replace":
        return Replace(options["pattern"]["String"], options["content"])
    plain = {"ByteFallback": ByteFallback, "WordPiece": WordPiece, "BPEDecoder": BPEDecoder, "Strip": Strip}
    return plain[kind](**options)


def make_fused_stage(kind: str, options: dict) -> Stage:
    """The stage of a decoder after Fuse. What it does must not depend on where the pieces of the text end."""
    if kind == "Replace":
        require(len(options["pattern"]["String"]) == 1, "its decoder replaces more than a character after Fuse")
        return Replace(options["pattern"]["String"], options["content"])
    if kind == "Strip":
        require(options["stop"] == 0, "its decoder strips the end of the text after Fuse")
        return StripText(options["content"], options["start"])
    raise Refused(f"its decoder has {kind} after Fuse")
