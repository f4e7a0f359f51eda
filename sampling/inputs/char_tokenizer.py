"""A tokenizer with one token per character. Its vocabulary is the meta.pkl of a nanoGPT data set."""
import io
import os
import pickle
from collections.abc import Callable, Sequence

from sampling.checkpoints.pickle_scanner import MAX_PICKLE_BYTES, check_pickle
from sampling.inputs.token_ids import IdArray, id_list

REPLACEMENT = "\N{REPLACEMENT CHARACTER}" # the text of ids that are not in the vocabulary
MAX_CHARS_PER_TOKEN = 2**8 # real vocabularies have one character per token


class NoVocabularyError(ValueError):
    """A meta.pkl is fine, but has no stoi."""


class CharTokenizer:
    """One token per character.

    Raises ValueError if the file at path is not a vocabulary, OSError if it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike):
        self.source = str(path)
        self.stoi, self.itos = read_meta(path)
        check_vocabulary(self.source, self.stoi, self.itos)
        self.size = 1 + max([*self.stoi.values(), *self.itos])

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises ValueError if it has characters that are not in the vocabulary."""
        if not set(text) <= self.stoi.keys():
            raise ValueError(self._describe_unknown(text))
        return [self.stoi[char] for char in text]

    def decode(self, ids: Sequence[int] | IdArray) -> str:
        """The text of token ids."""
        return "".join(self.itos.get(i, REPLACEMENT) for i in id_list(ids))

    def incremental_decoder(self, prompt_ids: Sequence[int] = ()) -> Callable[[int, bool], str]:
        """A function (id, last=False) -> text for one sequence."""
        return lambda token_id, last=False: self.itos.get(token_id, REPLACEMENT)

    def _describe_unknown(self, text: str) -> str:
        positions = {} # of each unknown character: the first three, and a fourth if there are more
        for i, char in enumerate(text, 1):
            if char not in self.stoi and len(positions.setdefault(char, [])) < 4:
                positions[char].append(str(i))
        unknown = [f"{char!r} at {', '.join(at[:3])}{' ...' if len(at) > 3 else ''}" for char, at in positions.items()]
        more = f"; {len(unknown) - 5} more" if len(unknown) > 5 else ""
        return (f"the prompt has characters that {self.source} lacks: {'; '.join(unknown[:5])}{more} (counted from 1)"
                + self._suggest(text, positions))

    def _suggest(self, text: str, unknown: dict) -> str:
        if "\\" in unknown and "\\n" in text and "\n" in self.stoi:
            return r"""; for a newline pass --start='"\n"', or --start=$'\n' in bash"""
        if "\r" in unknown and "\n" in self.stoi:
            return "; save the prompt with plain newlines"
        if swapped := [char.swapcase() for char in unknown if char.swapcase() in self.stoi]:
            return f"; it has {', '.join(map(repr, swapped[:5]))}"
        return f"; it has {''.join(sorted(map(str, self.stoi)))!r:.120}"


def read_meta(path: str | os.PathLike) -> tuple[dict, dict]:
    """Read stoi and itos from a meta.pkl without running code.

    Raises NoVocabularyError if it holds other data, ValueError if the dicts are damaged, OSError if the file cannot be
    opened.
    """
    try:
        with open(path, "rb") as file:
            pickled = file.read(MAX_PICKLE_BYTES + 1)
        check_pickle(pickled)
        meta = DataOnlyUnpickler(io.BytesIO(pickled)).load()
        if isinstance(meta, dict) and "stoi" not in meta:
            raise NoVocabularyError(f"{path} has no stoi")
        stoi, itos = meta["stoi"], meta["itos"]
        itos = dict(enumerate(itos)) if isinstance(itos, list) else itos
        if not (isinstance(stoi, dict) and isinstance(itos, dict)):
            raise ValueError("stoi or itos is not a dict")
        return stoi, itos
    except (OSError, NoVocabularyError):
        raise
    except Exception as error: # a damaged pickle can raise anything
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot read {path}: {why:.200}; it must hold the dicts stoi and itos of a vocabulary of "
                         "characters, and nothing but data") from None


def check_vocabulary(source: str, stoi: dict, itos: dict) -> None:
    """Raise ValueError unless the dicts map characters to token ids, and back to the same characters."""
    ids, chars = [*stoi.values(), *itos], [*stoi, *itos.values()]
    if not (ids and all(type(i) is int and i >= 0 for i in ids)
            and all(isinstance(char, str) and len(char) <= MAX_CHARS_PER_TOKEN for char in chars)):
        raise ValueError(f"{source} must map characters to token ids in stoi, and token ids to characters in itos")
    # Several characters may share an id, and several ids may share a character. But the two dicts must not conflict.
    pairs, reverse = set(stoi.items()), {(char, i) for i, char in itos.items()}
    known_chars, known_ids = set(itos.values()), set(stoi.values())
    conflicts = [char for char, _ in pairs - reverse if char in known_chars]
    conflicts += [char for char, i in reverse - pairs if i in known_ids]
    if conflicts:
        raise ValueError(f"{source} is damaged: stoi and itos disagree about {conflicts[0]!r:.40}")


class DataOnlyUnpickler(pickle.Unpickler):
    """Reads pickles of plain data. A pickle runs code by naming classes and functions: this class refuses all names."""

    def find_class(self, module, name):
        """Raise UnpicklingError for every name."""
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")
