"""The meta.pkl of a nanoGPT data set: a vocabulary of characters, bytes or longer texts, or a tokenizer's name."""
import os
import re
import unicodedata

from sampling.checkpoints.pickles import MAX_PICKLE_BYTES, describe, read_pickle, unwrap
from sampling.checkpoints.untrusted_files import reject_damaged, require
from sampling.inputs.tokenizer import ADVICE, ENCODINGS, REPLACEMENT, Tokenizer, encode_utf8

# The fields in which prepare scripts name or extend a tokenizer, and names for what stoi and itos describe.
NAME_FIELDS = ("has_additional_tokens", "tiktoken_encoding", "tokenizer", "tokenizer_name", "tokenizer_type",
               "tokenizer_file", "tokenizer_path", "tokenizer_model", "sentencepiece_model")
MAX_TOKENS = 2**20 # of a vocabulary: a long text as itos takes many times its size in memory
MAX_SYMBOL = 1000 # characters of a token: each sampled one is a copy
CHAR_NAMES = re.compile(r"(char|byte)(s|acters?)?([-_ ]level)?")


class CharTokenizer(Tokenizer):
    """Looks up each character of a text in stoi, or each byte in UTF-8, and joins the texts of itos, as nanoGPT does.
    So texts of several characters, such as words, are never found in a prompt. meta: the content, if it was read.
    """
    def __init__(self, path: str | os.PathLike, meta: dict | None = None):
        self.source, meta = str(path), read_meta(path) if meta is None else meta
        self.stoi, self.itos = parse_vocabulary(meta, path)
        self.size = 1 + max([*self.stoi.values(), *self.itos])
        self.is_bytes = any(isinstance(symbol, int) for symbol in self.itos.values())

    def encode(self, text: str) -> list[int]:
        text = text if "\ufeff" in self.stoi or self.is_bytes else text.removeprefix("\ufeff") # a byte-order mark
        symbols = encode_utf8(text) if self.is_bytes else text
        if unknown := [symbol for symbol in dict.fromkeys(symbols) if symbol not in self.stoi]:
            listed = "; ".join(f"{symbol!r} at {symbols.index(symbol) + 1}" for symbol in unknown[:5])
            known = bytes(sorted(self.stoi)) if self.is_bytes else "".join(sorted(s for s in self.stoi if len(s) == 1))
            more = r"""; for a newline pass --start='"\n"'""" if "\\" in unknown else ""
            composed = unicodedata.normalize("NFC", text)
            if self.stoi.keys() >= set(composed):
                more += f"; it has them composed: save the prompt in Unicode's form NFC, here {composed!r:.60}"
            raise ValueError(f"the prompt has characters that {self.source} lacks: {listed}; it has {known!r:.200}"
                             f"{more}")
        return [self.stoi[symbol] for symbol in symbols]

    def missing_from(self, text: str) -> set | None:
        return None if self.is_bytes else {*text}.difference(*self.itos.values())

    def fingerprint(self) -> str:
        return repr(sorted(self.itos.items()))

    def token_bytes(self, token_id: int) -> bytes:
        symbol = self.itos.get(token_id, REPLACEMENT)
        return bytes([symbol]) if isinstance(symbol, int) else symbol.encode("utf-8", "replace")


def parse_vocabulary(meta: dict, source: object) -> tuple[dict, dict]:
    """stoi and itos, in which a byte is an int. Raises ValueError unless they map symbols to token ids, and back."""
    def byte_as_int(symbol):
        return symbol[0] if isinstance(symbol, bytes) and len(symbol) == 1 else symbol

    with reject_damaged(source):
        stoi, itos = unwrap(meta.get("stoi")), unwrap(meta.get("itos", {}))
        if isinstance(itos, list | tuple | str | bytes):
            require(len(itos) <= MAX_TOKENS, f"its itos has {len(itos)} tokens; at most {MAX_TOKENS} are allowed")
            itos = dict(enumerate(itos))
        for name, value in ("stoi", stoi), ("itos", itos):
            require(isinstance(value, dict), f"its {name} is not a dict, but {describe(value)}")
        stoi = {byte_as_int(symbol): i for symbol, i in stoi.items()}
        itos = {i: byte_as_int(symbol) for i, symbol in itos.items()}
        ids, symbols = [*stoi.values(), *itos], [*stoi, *itos.values()]
        are_bytes = all(type(symbol) is int and 0 <= symbol < 256 for symbol in symbols)
        are_ids = all(type(i) is int and 0 <= i < 2**63 for i in ids) # a hash, or a text, of a long number takes long
        are_texts = all(type(symbol) is str and len(symbol) <= MAX_SYMBOL for symbol in symbols)
        require(ids and are_ids and (are_bytes or are_texts), "it must map texts or bytes to token ids in stoi, and "
                f"token ids to them in itos; a text may have {MAX_SYMBOL} characters")
        return stoi, itos or {i: symbol for symbol, i in stoi.items()}


def named_encoding(meta: dict, source: object) -> str | None:
    """The encoding of tiktoken that a meta.pkl, or a checkpoint's settings, name; None if they name no tokenizer.
    Raises ValueError for any other tokenizer: its tokens must not be read as something else.
    """
    for field in NAME_FIELDS:
        value = meta.get(field)
        name = value.lower().replace("gpt-2", "gpt2") if isinstance(value, str) else None
        if name in ENCODINGS:
            return name
        if value and name != "tiktoken" and not CHAR_NAMES.fullmatch(name or ""):
            raise ValueError(f"{source} needs a tokenizer that cannot be read: {field} is {describe(value)}; {ADVICE}")
    return None


def read_meta(path: str | os.PathLike) -> dict:
    """The content of a meta.pkl. No code in it runs. Raises ValueError if it is not a dict of plain data."""
    with reject_damaged(path), open(path, "rb") as file:
        pickled = file.read(MAX_PICKLE_BYTES + 1)
        require(len(pickled) <= MAX_PICKLE_BYTES, f"it has more than {MAX_PICKLE_BYTES} bytes")
        meta = read_pickle(pickled)
        require(isinstance(meta, dict), f"it holds {describe(meta)}, not the stoi and itos of a vocabulary")
    is_named = meta.get("tokenizer") == "byte" # and then the file has an itos at most
    return {"stoi": {byte: byte for byte in range(256)}, **meta} if is_named else meta
