"""Decodes the tokens of a tokenizer.json to text, one token at a time.

Each class does what the decoder of the same name does in the tokenizers library, which can only decode whole sequences.
"""
import codecs
import re
from typing import Protocol

from sampling.checkpoints.errors import RejectedFileError, require

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x(\+[0-9a-fA-F]|[0-9a-fA-F]{2})>") # the library also reads <0x+A> as a byte
# What the cleanup of WordPiece replaces, in this order.
CLEANUP = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
           (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))


class DecoderStage(Protocol):
    """One stage of a tokenizer.json's decoder. Each takes what the stage before it returns."""

    def feed(self, tokens: list[str], last: bool) -> list[str]:
        """Take the next tokens, and return the text that later tokens cannot change, in pieces.

        last: no token of this text follows, so return all that is left.
        """


def byte_of_chars() -> dict[str, int]:
    """The byte that each character of a byte-level token represents, as in GPT-2's encoder.json."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = byte_of_chars()


class ByteLevel:
    """Each character of a token represents a byte. A token with other characters is plain text, as added tokens are."""

    def __init__(self):
        self.decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def feed(self, tokens, last):
        """See DecoderStage.feed."""
        return [self.decode(b"".join(map(self._bytes, tokens)), last)]

    def _bytes(self, token: str) -> bytes:
        try:
            return bytes([BYTE_OF_CHAR[char] for char in token])
        except KeyError:
            return token.encode()


class ByteFallback:
    """<0xE2> represents a byte. If a run of such tokens is not valid UTF-8, each of its bytes becomes U+FFFD."""

    def __init__(self):
        self.run = bytearray()

    def feed(self, tokens, last):
        """See DecoderStage.feed."""
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


class PerTokenDecoder:
    """A decoder that turns each token into one text."""

    def feed(self, tokens, last):
        """See DecoderStage.feed."""
        return [self._text(token) for token in tokens]

    def _text(self, token: str) -> str:
        raise NotImplementedError


class WordPiece(PerTokenDecoder):
    """A token with the prefix continues a word. Any other token starts a word, with a space before it."""

    def __init__(self, prefix: str = "##", cleanup: bool = True):
        self.prefix, self.cleanup, self.is_first = prefix, cleanup, True

    def _text(self, token: str) -> str:
        if not self.is_first:
            token = token.removeprefix(self.prefix) if token.startswith(self.prefix) else f" {token}"
        self.is_first = False
        for found, replacement in CLEANUP if self.cleanup else ():
            token = token.replace(found, replacement)
        return token


class Metaspace(PerTokenDecoder):
    """replacement, usually "▁", represents a space. The first token loses it if the tokenizer adds it there."""

    def __init__(self, replacement: str = "▁", prepend_scheme: str = "always"):
        self.replacement, self.is_first, self.drops_first = replacement, True, prepend_scheme != "never"

    def _text(self, token: str) -> str:
        space = "" if self.is_first and self.drops_first else " "
        self.is_first = False
        return token.replace(self.replacement, space)


class BPEDecoder(PerTokenDecoder):
    """The suffix marks the end of a word. It becomes a space, except at the end of the text."""

    def __init__(self, suffix: str = "</w>"):
        self.suffix, self.spaces = suffix, ""

    def _text(self, token: str) -> str:
        text, spaces = token, self.spaces
        self.spaces = ""
        while text.endswith(self.suffix):
            text, self.spaces = text.removesuffix(self.suffix), self.spaces + " "
        return spaces + text.replace(self.suffix, " ")


class SpaceJoin:
    """Puts a space between tokens, as the library does if there is no decoder."""

    def __init__(self):
        self.is_first = True

    def feed(self, tokens, last):
        """See DecoderStage.feed."""
        spaced = [token if self.is_first and i == 0 else f" {token}" for i, token in enumerate(tokens)]
        self.is_first = self.is_first and not tokens
        return spaced


class Replace(PerTokenDecoder):
    """Replaces pattern with content in each token."""

    def __init__(self, pattern: str, content: str):
        self.pattern, self.content = pattern, content

    def _text(self, token: str) -> str:
        return token.replace(self.pattern, self.content)


class Strip(PerTokenDecoder):
    """Removes a character from each token: up to start times at its beginning, and up to stop times at its end."""

    def __init__(self, content: str, start: int, stop: int):
        self.content, self.start, self.stop = content, start, stop

    def _text(self, token: str) -> str:
        return strip_end(strip_start(token, self.content, self.start), self.content, self.stop)


class StripText(PerTokenDecoder):
    """Removes a character up to start times from the beginning of the whole text."""

    def __init__(self, content: str, start: int):
        self.content, self.left = content, start

    def _text(self, text: str) -> str:
        stripped = strip_start(text, self.content, self.left)
        self.left = 0 if stripped else self.left - len(text)
        return stripped


def strip_start(text: str, char: str, count: int) -> str:
    """Remove a character up to count times from the beginning of a text."""
    return text[min(count, len(text) - len(text.lstrip(char))):]


def strip_end(text: str, char: str, count: int) -> str:
    """Remove a character up to count times from the end of a text."""
    return text[:len(text) - min(count, len(text) - len(text.rstrip(char)))]


def make_decoders(configs: list[dict]) -> list[DecoderStage]:
    """Make new decoders from the configurations in a tokenizer.json.

    Raises RejectedFileError if they cannot decode one token at a time.
    """
    if not configs:
        return [SpaceJoin()]
    decoders, is_fused = [], False # is_fused: the next decoders see the whole text as one token
    for config in configs:
        kind, options = config["type"], {name: value for name, value in config.items() if name != "type"}
        if kind != "Fuse":
            decoders.append(make_fused_decoder(kind, options) if is_fused else make_decoder(kind, options))
        is_fused = is_fused or kind in ("Fuse", "ByteLevel")
    return decoders


def make_decoder(kind: str, options: dict) -> DecoderStage:
    """Make a decoder that sees the tokens one by one."""
    if kind == "ByteLevel":
        return ByteLevel()
    if kind == "Metaspace":
        older = "always" if options.get("add_prefix_space", True) else "never" # the option of older files
        return Metaspace(options.get("replacement", "▁"), options.get("prepend_scheme", older))
    if kind == "Replace":
        return Replace(options["pattern"]["String"], options["content"])
    plain = {"ByteFallback": ByteFallback, "WordPiece": WordPiece, "BPEDecoder": BPEDecoder, "Strip": Strip}
    return plain[kind](**options)


def make_fused_decoder(kind: str, options: dict) -> DecoderStage:
    """Make a decoder after Fuse. Its result must not depend on how the text is split into pieces.

    Raises RejectedFileError if the result does.
    """
    if kind == "Replace":
        require(len(options["pattern"]["String"]) == 1,
                "its decoder replaces several characters after Fuse, which is not supported")
        return Replace(options["pattern"]["String"], options["content"])
    if kind == "Strip":
        require(options["stop"] == 0, "its decoder strips the end of the text after Fuse, which is not supported")
        return StripText(options["content"], options["start"])
    raise RejectedFileError(f"its decoder has {kind} after Fuse, which is not supported")
