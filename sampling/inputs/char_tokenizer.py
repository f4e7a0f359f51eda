"""The meta.pkl of a nanoGPT data set: a vocabulary of characters or of bytes, or the name of a tokenizer."""
import codecs
import io
import os
import pickle
import pickletools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sampling.checkpoints.checkpoint import require
from sampling.inputs.gpt2_tokenizer import SIZES
from sampling.inputs.tokenizer import REPLACEMENT, id_list, require_unicode

MAX_PICKLE_BYTES, MAX_OPCODES = 2**23, 2**20 # a vocabulary of all characters takes 800,000 opcodes
CODE = {"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"} # opcodes that name a class or a function
HASHABLE = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET"}
# The fields in which prepare scripts name a tokenizer, and names for what stoi and itos describe.
NAME_FIELDS = ("tiktoken_encoding", "tokenizer", "tokenizer_name", "tokenizer_type", "tokenizer_file", "tokenizer_path",
               "tokenizer_model", "sentencepiece_model")
CHAR_NAMES = re.compile(r"(char|byte)(s|acters?)?([-_ ]level)?")
SPECIAL_TOKEN = re.compile(r"[<\[{|].{1,250}[>\]}|]", re.DOTALL) # a token of several characters that no text means
ADVICE = ("pass --tokenizer=NAME|FILE, an encoding of tiktoken or a tokenizer.json (transformers converts a "
          "SentencePiece model to one)")


class CharTokenizer:
    """One token for each character, or for each byte of the text in UTF-8.

    meta: the content of the meta.pkl at path, if it was read already. Raises ValueError if it is no vocabulary, OSError
    if it cannot be opened.
    """
    joins_spaces = False

    def __init__(self, path: str | os.PathLike, meta: dict | None = None):
        self.source = str(path)
        self.stoi, self.itos = vocabulary(self.source, read_meta(path) if meta is None else meta)
        self.size = 1 + max([*self.stoi.values(), *self.itos])
        self.is_bytes = any(isinstance(symbol, int) for symbol in self.stoi)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises ValueError if it has characters that are not in the vocabulary."""
        if self.is_bytes:
            require_unicode(text)
        symbols = text.encode("utf-8") if self.is_bytes else text
        if not set(symbols) <= self.stoi.keys():
            raise ValueError(self._describe_unknown(symbols))
        return [self.stoi[symbol] for symbol in symbols]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. Unknown ids, and bytes that form no character, become U+FFFD."""
        if not self.is_bytes:
            return "".join(self.itos.get(i, REPLACEMENT) for i in id_list(ids))
        return b"".join(map(self._bytes, id_list(ids))).decode("utf-8", errors="replace")

    def incremental_decoder(self, prompt_ids: Sequence[int] = ()) -> Callable[[int, bool], str]:
        """A function (id, last=False) -> text for one sequence. A character comes with the last of its bytes."""
        if not self.is_bytes:
            return lambda token_id, last=False: self.itos.get(token_id, REPLACEMENT)
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        return lambda token_id, last=False: decode(self._bytes(token_id), last)

    def _bytes(self, token_id: int) -> bytes:
        return bytes([self.itos[token_id]]) if token_id in self.itos else REPLACEMENT.encode()

    def _describe_unknown(self, symbols: str | bytes) -> str:
        positions = {} # of each unknown character: the first three, and a fourth if there are more
        for i, symbol in enumerate(symbols, 1):
            if symbol not in self.stoi and len(positions.setdefault(symbol, [])) < 4:
                positions[symbol].append(str(i))
        unknown = [f"{bytes([symbol]) if self.is_bytes else symbol!r} at {', '.join(at[:3])}"
                   f"{' ...' if len(at) > 3 else ''}" for symbol, at in positions.items()]
        swapped = [] if self.is_bytes else [char.swapcase() for char in positions if char.swapcase() in self.stoi]
        characters = "" if self.is_bytes else "".join(sorted(self.stoi))
        advice = f"; it has {', '.join(map(repr, swapped[:5])) or repr(characters)[:200]}" if characters else ""
        if "\\" in positions and "\n" in self.stoi:
            advice = r"""; for a newline pass --start='"\n"', or --start=$'\n' in bash"""
        elif "\r" in positions and "\n" in self.stoi:
            advice = "; save the prompt with plain newlines"
        more = f"; {len(unknown) - 5} more" if len(unknown) > 5 else ""
        return (f"the prompt has {'bytes' if self.is_bytes else 'characters'} that {self.source} lacks: "
                f"{'; '.join(unknown[:5])}{more} (counted from 1){advice}")


def vocabulary(source: str, meta: dict) -> tuple[dict, dict]:
    """stoi and itos, in which a byte is an int. Raises ValueError unless they map symbols to token ids, and back."""
    stoi, itos = meta.get("stoi"), meta.get("itos", {})
    itos = dict(enumerate(itos)) if isinstance(itos, list) else itos
    require(isinstance(stoi, dict) and isinstance(itos, dict), f"cannot read {source}: stoi or itos is not a dict")
    stoi, itos = {plain(symbol): i for symbol, i in stoi.items()}, {i: plain(symbol) for i, symbol in itos.items()}
    ids, symbols = [*stoi.values(), *itos], [*stoi, *itos.values()]
    are_bytes = all(type(symbol) is int and 0 <= symbol < 256 for symbol in symbols)
    require(ids and all(type(i) is int and i >= 0 for i in ids) and (are_bytes or {*map(type, symbols)} == {str}),
            f"{source} must map characters or bytes to token ids in stoi, and token ids to them in itos")
    for symbol in () if are_bytes else symbols:
        require(len(symbol) <= 1 or SPECIAL_TOKEN.fullmatch(symbol),
                f"{source} has the token {symbol!r:.40} of several characters, so it is no vocabulary of characters; "
                f"{ADVICE}")
    # Several characters may share an id, and several ids may share a character. But the two dicts must not conflict.
    pairs, reverse = set(stoi.items()), {(symbol, i) for i, symbol in itos.items()}
    known_symbols, known_ids = set(itos.values()), set(stoi.values())
    conflicts = [symbol for symbol, _ in pairs - reverse if symbol in known_symbols]
    conflicts += [symbol for symbol, i in reverse - pairs if i in known_ids]
    require(not conflicts, f"{source} is damaged: stoi and itos disagree about {str(conflicts[:1])[1:-1]:.40}")
    return stoi, itos or {i: symbol for symbol, i in stoi.items()}


def plain(symbol: object) -> object:
    """A byte as an int; anything else unchanged."""
    return symbol[0] if isinstance(symbol, bytes) and len(symbol) == 1 else symbol


def find_meta(folder: str | os.PathLike) -> Path | None:
    """The meta.pkl in a folder, if there is one."""
    path = os.path.join(folder, "meta.pkl")
    return Path(path) if os.path.isfile(path) else None


def named_encoding(meta: dict, source: object) -> str | None:
    """The encoding of tiktoken that a meta.pkl, or a checkpoint's settings, name; None if they name no tokenizer.

    Raises ValueError, which names the field, for any other tokenizer: its tokens must not be read as something else.
    """
    for field in NAME_FIELDS:
        value = meta.get(field)
        name = value.lower().replace("gpt-2", "gpt2") if isinstance(value, str) else f"a {type(value).__name__}"
        if name in SIZES and not meta.get("has_additional_tokens"):
            return name
        if value and name != "tiktoken" and not CHAR_NAMES.fullmatch(name):
            field = f"{field}, with has_additional_tokens" if name in SIZES else field
            raise ValueError(f"{source} names a tokenizer that cannot be read, {name!r:.60} in {field}; {ADVICE}")
    return None


def read_meta(path: str | os.PathLike) -> dict:
    """The content of a meta.pkl. No code in it runs. Raises ValueError if it is not a dict of plain data."""
    try:
        with open(path, "rb") as file:
            pickled = file.read(MAX_PICKLE_BYTES)
        check_pickle(pickled)
        meta = DataOnlyUnpickler(io.BytesIO(pickled)).load()
        require(isinstance(meta, dict), f"it holds a {type(meta).__name__}")
    except OSError:
        raise
    except Exception as error: # a damaged pickle can raise anything
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot read {path}: {why:.200}; it must hold the dicts stoi and itos of a vocabulary of "
                         "characters, and nothing but data") from None
    is_named = meta.get("tokenizer") == "byte" # and then the file has an itos at most
    return {"stoi": {byte: byte for byte in range(256)}, **meta} if is_named else meta


def check_pickle(pickled: bytes) -> None:
    """Raise ValueError if loading this pickle could run code, or take far more time or memory than a vocabulary."""
    texts = ["", ""] # the last two, which are what a STACK_GLOBAL names
    for number, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
        texts = [texts[1], argument] if isinstance(argument, str) else texts
        if opcode.name in CODE: # an EXT would not ask the unpickler
            name = ".".join(texts) if opcode.name == "STACK_GLOBAL" else str(argument).replace(" ", ".")
            raise ValueError(f"it names {name:.80}, which could run code")
        is_far = "PUT" in opcode.name and argument > number # the reader makes a memo as long as its last index
        require(number < MAX_OPCODES and not is_far, "it would take far more memory than a vocabulary")
        # Hashing a tuple that holds another one twice, and so on, never ends.
        require(opcode.name not in HASHABLE, "it has a tuple or a frozenset, which a vocabulary does not need")


class DataOnlyUnpickler(pickle.Unpickler):
    """Reads pickles of plain data. A pickle runs code by naming classes and functions: this class refuses all names."""

    def find_class(self, module, name):
        """Raise UnpicklingError for every name."""
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")
