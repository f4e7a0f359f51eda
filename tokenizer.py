"""Text <-> token ids: a character table from a meta.pkl, or GPT-2's encoding.

A tokenizer has encode(text) -> list of ids, decode(ids) -> text, decoder() -> a function that decodes token by
token, size (how many tokens it knows) and source (where it came from, for messages). Ids it does not know
decode to the replacement character: vocabularies are padded.
"""
import codecs
import io
import os
import pickle

from guard import MOST_BYTES, check_pickle

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST = 2**8 # no table has a longer text for a token


class CharTokenizer:
    """One token a character, from the table that a nanoGPT data set's prepare.py wrote.

    ValueError where the file holds anything but that table; OSError where it cannot be opened.
    """

    def __init__(self, path):
        self.source = str(path)
        try:
            with open(path, "rb") as f:
                pickled = f.read(MOST_BYTES + 1)
            check_pickle(pickled)
            meta = DataOnly(io.BytesIO(pickled)).load()
            self.stoi, itos = meta["stoi"], meta["itos"]
            self.itos = dict(enumerate(itos)) if isinstance(itos, list) else itos
            if not (isinstance(self.stoi, dict) and isinstance(self.itos, dict)):
                raise ValueError("stoi or itos is no table")
        except OSError:
            raise
        except Exception as e: # a damaged pickle can raise anything
            why = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
            raise ValueError(f"cannot read {path}: {why:.200}; it must hold the dicts stoi and itos of a character "
                             "table, and nothing but data") from None
        ids, chars = [*self.stoi.values(), *self.itos], [*self.stoi, *self.itos.values()]
        if not (ids and all(type(i) is int and i >= 0 for i in ids)
                and all(isinstance(char, str) and len(char) <= LONGEST for char in chars)):
            raise ValueError(f"{path} must map characters to token ids in stoi and back in itos")
        pairs, back = set(self.stoi.items()), {(char, i) for i, char in self.itos.items()}
        known, taken = set(self.itos.values()), set(self.stoi.values())
        odd = [char for char, _ in pairs - back if char in known] + [char for char, i in back - pairs if i in taken]
        if odd: # several characters of one id, or ids of one, are fine
            raise ValueError(f"{path} is damaged: stoi and itos disagree about {odd[0]!r:.40}")
        self.size = 1 + max(ids)

    def encode(self, text):
        """Token ids of text; ValueError where it has characters outside the table."""
        if not set(text) <= self.stoi.keys():
            raise ValueError(self._explain(text))
        return [self.stoi[char] for char in text]

    def decode(self, ids):
        """The text of token ids."""
        return "".join(self.itos.get(i, REPLACEMENT) for i in ids)

    def decoder(self):
        """A function (id, last=False) -> text, which piece by piece gives what decode would in one."""
        return lambda i, last=False: self.itos.get(i, REPLACEMENT)

    def _explain(self, text):
        places = {} # the first three, and whether there are more
        for i, char in enumerate(text, 1):
            if char not in self.stoi and len(places.setdefault(char, [])) < 4:
                places[char].append(str(i))
        said = [f"{char!r} at {', '.join(at[:3])}{' ...' if len(at) > 3 else ''}" for char, at in places.items()]
        message = (f"the prompt has characters that {self.source} lacks: {'; '.join(said[:5])}"
                   f"{f'; {len(said) - 5} more' if len(said) > 5 else ''} (counted from 1)")
        if "\\" in places and "\\n" in text and "\n" in self.stoi:
            return message + r"""; for a newline pass --start='"\n"', or --start=$'\n' in bash"""
        if "\r" in places and "\n" in self.stoi:
            return message + "; save the prompt with plain newlines"
        swapped = [char.swapcase() for char in places if char.swapcase() in self.stoi]
        if swapped:
            return message + f"; it has {', '.join(map(repr, swapped[:5]))}"
        return message + f"; it has {''.join(sorted(map(str, self.stoi)))!r:.120}"


class DataOnly(pickle.Unpickler):
    """Reads pickles of plain data, and refuses every class and function: those are how a pickle runs code."""

    def find_class(self, module, name):
        """Raise UnpicklingError, whatever is named."""
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding, by tiktoken; <|endoftext|> in a text is the token of that name."""

    source, size = "GPT-2's encoding", 50257

    def __init__(self):
        import tiktoken
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except Exception as e:
            why = f"{type(e).__name__} {getattr(e, 'strerror', None) or ''}".strip()
            # tiktoken names a cached file by the SHA-1 of its address.
            raise ValueError(
                f"GPT-2's encoding is not on this machine and could not be downloaded and kept ({why}): where "
                "there is a network, get vocab.bpe and encoder.json from "
                "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/, save them as "
                "6d1cbeee0f20b3d9449abfede4726ed8212e3aee and 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6 in a folder "
                "here, and set TIKTOKEN_CACHE_DIR to that folder") from None

    def encode(self, text):
        """Token ids of text; ValueError where it is not valid Unicode."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise ValueError(f"the prompt is not valid UTF-8 at character {e.start + 1}") from None
        return self.encoding.encode(text, allowed_special={"<|endoftext|>"})

    def decode(self, ids):
        """The text of token ids; bytes that form no character become the replacement character."""
        if max(ids, default=0) < self.size: # at once, or a prompt of megabytes takes seconds
            return self.encoding.decode(ids, errors="replace")
        return b"".join(map(self._bytes, ids)).decode("utf-8", errors="replace")

    def decoder(self):
        """As CharTokenizer's; a character whose bytes come in several tokens is whole with its last, or at the end."""
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        return lambda i, last=False: decode(self._bytes(i), last)

    def _bytes(self, i):
        return self.encoding.decode_single_token_bytes(i) if i < self.size else REPLACEMENT.encode()


def load_tokenizer(folder, dataset, vocab_size):
    """The tokenizer of a network of vocab_size tokens: folder/meta.pkl, else data/<dataset>/meta.pkl, else GPT-2's.

    folder and dataset may be None. ValueError where it does not fit the network, or cannot be had.
    """
    places = [os.path.join(folder, "meta.pkl")] if folder is not None else []
    if isinstance(dataset, str) and len(dataset) < 1000:
        places.append(os.path.join("data", dataset, "meta.pkl"))
    found = next((path for path in places if os.path.isfile(path)), None)
    if found and found != places[0] and (os.path.isabs(dataset) or ".." in dataset.replace("\\", "/").split("/")):
        raise ValueError(f"the checkpoint names {found}, which is outside of data/, as its table of characters: where "
                         "that is right, put it beside ckpt.pt")
    tokenizer = CharTokenizer(found) if found else GPT2Tokenizer
    # A vocabulary may be padded to a round size; to more than twice its own it is another one.
    if not tokenizer.size <= vocab_size <= 2 * tokenizer.size:
        looked = "" if found or not places else f" (there is no {' nor '.join(places)})"
        raise ValueError(f"{tokenizer.source} has {tokenizer.size} tokens and the network {vocab_size}: they do not "
                         f"belong together{looked}; put the meta.pkl of its training data beside ckpt.pt")
    return tokenizer if found else GPT2Tokenizer() # whose files are only wanted if it fits
