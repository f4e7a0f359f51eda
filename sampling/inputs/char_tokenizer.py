"""The meta.pkl of a data set: a vocabulary of characters, bytes or texts, or a tokenizer's name."""
import logging
import os
import re
import unicodedata

from sampling.checkpoints.pickles import MAX_PICKLE_BYTES, describe, is_size, read_pickle, unwrap
from sampling.checkpoints.untrusted_files import reject_damaged, require
from sampling.inputs.tokenizer import ADVICE, ENCODINGS, Tokenizer, encode_utf8

logger = logging.getLogger(__name__)
# The fields in which prepare scripts name or extend a tokenizer.
NAME_FIELDS = (
    "has_additional_tokens", "tiktoken_encoding", "tokenizer", "tokenizer_name", "tokenizer_type",
    "tokenizer_file", "tokenizer_path", "tokenizer_model", "sentencepiece_model")
MAX_TOKENS = 2**20 # of a vocabulary: a long text as itos takes many times its size in memory
MAX_SYMBOL = 1000 # characters of a token: each sampled one is a copy
# Names of what stoi and itos, or another field, describe.
PLAIN_NAMES = re.compile(r"(char|byte)(s|acters?)?([-_ ]level)?|tiktoken")

ALONE = "but each character of a prompt is looked up alone, as in nanoGPT"


class CharTokenizer(Tokenizer):
    """Looks up each character of a text, or each byte in UTF-8, in stoi. Joins the texts of itos.

    This is nanoGPT's way. So texts of several characters, such as words, are never found in a
    prompt. meta: the content of the file.
    """
    def __init__(self, path: str | os.PathLike, meta: dict):
        self.source = str(path)
        self.stoi, self.itos = parse_vocabulary(meta, path)
        self.size = 1 + max([*self.stoi.values(), *self.itos])
        self.words = [text for text in self.stoi if isinstance(text, str) and len(text) > 1]
        self.is_bytes = any(isinstance(symbol, int) for symbol in self.itos.values())

    def encode(self, text: str) -> list[int]:
        if self.is_bytes:
            symbols = encode_utf8(text)
        elif "\ufeff" in self.stoi:
            symbols = text
        else: # leave out a byte-order mark
            symbols = text.removeprefix("\ufeff")
        unknown = [symbol for symbol in dict.fromkeys(symbols) if symbol not in self.stoi]
        if unknown:
            raise ValueError(self.describe_unknown(unknown, symbols))
        if any(word in text[:1000] for word in self.words):
            logger.warning(f"the prompt has tokens of several characters in {self.source}, {ALONE}")
            self.words = [] # once is enough
        return [self.stoi[symbol] for symbol in symbols]

    def describe_unknown(self, unknown: list, symbols: str | bytes) -> str:
        """What to say of the symbols that stoi lacks."""
        listed = "; ".join(f"{symbol!r} at {symbols.index(symbol) + 1}" for symbol in unknown[:5])
        advice = ""
        if self.is_bytes:
            known = bytes(sorted(self.stoi))
        else:
            known = "".join(sorted(symbol for symbol in self.stoi if len(symbol) == 1))
            if "\\" in unknown:
                advice = r"""; for a newline pass start='"\n"'"""
            composed = unicodedata.normalize("NFC", symbols)
            if self.stoi.keys() >= set(composed):
                advice += ("; it has them composed: save the prompt in Unicode's form NFC, "
                           f"here {composed!r:.60}")
            if len(self.words) > len(known):
                advice += f"; its tokens are words, {ALONE}: pass start={known[-1:]!r} or the like"
        return (f"the prompt has characters that {self.source} lacks: {listed}; "
                f"it has {known!r:.200}{advice}")

    def missing_from(self, text: str) -> set | None:
        if self.is_bytes: # which may form any character
            return None
        return set(text).difference(*self.itos.values())

    def fingerprint(self) -> str:
        return repr(sorted(self.itos.items()))

    def token_bytes(self, token_id: int) -> bytes:
        if token_id not in self.itos:
            return super().token_bytes(token_id)
        symbol = self.itos[token_id]
        return bytes([symbol]) if isinstance(symbol, int) else symbol.encode("utf-8", "replace")


def parse_vocabulary(meta: dict, source: object) -> tuple[dict, dict]:
    """stoi and itos, in which a byte is an int.

    Raises ValueError unless they map symbols to token ids, and token ids to symbols.
    """
    with reject_damaged(source):
        stoi = unwrap(meta.get("stoi"))
        itos = unwrap(meta.get("itos", {}))
        if isinstance(itos, list | tuple | str | bytes):
            require(len(itos) <= MAX_TOKENS,
                    f"its itos has {len(itos)} tokens; at most {MAX_TOKENS} are allowed")
            itos = dict(enumerate(itos))
        require(isinstance(stoi, dict), f"its stoi is not a dict, but {describe(stoi)}")
        require(isinstance(itos, dict), f"its itos is not a dict, but {describe(itos)}")
        stoi = {byte_as_int(symbol): i for symbol, i in stoi.items()}
        itos = {i: byte_as_int(symbol) for i, symbol in itos.items()}
        ids = [*stoi.values(), *itos]
        symbols = [*stoi, *itos.values()]
        # is_size has a limit: a hash, or a text, of a long number takes long.
        are_ids = all(map(is_size, ids))
        are_bytes = all(is_size(symbol) and symbol < 256 for symbol in symbols)
        are_texts = all(type(symbol) is str and len(symbol) <= MAX_SYMBOL for symbol in symbols)
        require(ids and are_ids and (are_bytes or are_texts),
                "it must map texts or bytes to token ids in stoi, and token ids to them in itos; "
                f"a text may have {MAX_SYMBOL} characters")
    return stoi, itos or {i: symbol for symbol, i in stoi.items()}


def byte_as_int(symbol: object) -> object:
    return symbol[0] if isinstance(symbol, bytes) and len(symbol) == 1 else symbol


def named_encoding(meta: dict, source: object) -> str | None:
    """The encoding of tiktoken that a meta.pkl, or a checkpoint's settings, name.

    None if they name no tokenizer. Raises ValueError for any other tokenizer: its tokens must not
    be read as something else.
    """
    for field in NAME_FIELDS:
        value = meta.get(field)
        name = value.lower().replace("gpt-2", "gpt2") if isinstance(value, str) else ""
        if name in ENCODINGS:
            return name
        if value and not PLAIN_NAMES.fullmatch(name):
            raise ValueError(f"{source} needs a tokenizer that cannot be read: "
                             f"{field} is {describe(value)}; {ADVICE}")
    return None


def read_meta(path: str | os.PathLike) -> dict:
    """The content of a meta.pkl. No code in it runs.

    Raises ValueError if it is not a dict of plain data.
    """
    with reject_damaged(path), open(path, "rb") as file:
        pickled = file.read(MAX_PICKLE_BYTES + 1)
        require(len(pickled) <= MAX_PICKLE_BYTES, f"it has more than {MAX_PICKLE_BYTES} bytes")
        meta = read_pickle(pickled)
        require(isinstance(meta, dict),
                f"it holds {describe(meta)}, not the stoi and itos of a vocabulary")
    if meta.get("tokenizer") == "byte": # such a file has an itos at most
        meta.setdefault("stoi", {byte: byte for byte in range(256)})
    return meta
