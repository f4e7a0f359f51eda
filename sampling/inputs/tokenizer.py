"""Tokenizer, the protocol of all tokenizers, and the choice of the tokenizer for a checkpoint."""
import codecs
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

from sampling.checkpoints.checkpoint import Checkpoint
from sampling.inputs.hf_files import find_tokenizer
from sampling.messages import Log

# The encodings of tiktoken, and how many tokens each has.
ENCODINGS = {"gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "cl100k_base": 100277, "o200k_base": 200019}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}" # the text of unknown ids, and of bytes that form no character
ADVICE = (f"pass --tokenizer=NAME|FILE: an encoding of tiktoken ({', '.join(ENCODINGS)}), a tokenizer.json or its "
          "folder, or a meta.pkl")


class Tokenizer(Protocol):
    """Turns text into token ids and back. Unknown ids decode to U+FFFD: a model's vocabulary may be padded."""
    size: int # of the vocabulary
    source: str # where the vocabulary is from, for messages
    joins_spaces: bool # whether a space belongs to the token of the word after it, as in GPT-2's encoding

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises ValueError if the text cannot be encoded."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids: of a list, or of a torch tensor or numpy array of one dimension."""

    def incremental_decoder(self, prompt_ids: Sequence[int] = ()) -> Callable[[int, bool], str]:
        """A function (id, last=False) -> text for one sequence, which continues prompt_ids.

        Without prompt_ids, the joined texts are what decode returns. With prompt_ids, they are what the tokens add to
        the text of the prompt. A character that spans several tokens comes with the last of them. last=True: no token
        follows, so an incomplete character becomes U+FFFD.
        """


class ByteDecodingTokenizer:
    """Decodes tokens that are bytes of a text in UTF-8. A subclass has token_bytes(token_id)."""

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, map(int, ids))).decode(errors="replace")

    def incremental_decoder(self, prompt_ids: Sequence[int] = ()) -> Callable[[int, bool], str]:
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        return lambda token_id, last=False: decode(self.token_bytes(token_id), last)


def require_unicode(text: str) -> None:
    """Raise ValueError if the text has lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid UTF-8 at character {error.start + 1}") from None


# The modules of the tokenizers import what is above, so the functions below import them.

def load_tokenizer(checkpoint: Checkpoint, log: Log, tokenizer: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model. Raises ValueError if none is surely the model's, or if it cannot be loaded.

    tokenizer: the setting, which names an encoding of tiktoken or a file. Without it, searches the folder of the
    checkpoint, and for a ckpt.pt also data/<dataset> in the working directory and beside out_dir, for a meta.pkl, then
    for a Hugging Face tokenizer. If there is none, loads the encoding that the training's settings in the checkpoint
    name, or else GPT-2's if the vocabulary has its size.
    """
    for name in candidates(checkpoint, log) if tokenizer is None else [resolve(tokenizer)]:
        if found := load_from(name, checkpoint, log):
            return found
    raise ValueError(f"{tokenizer} has no stoi, and names no tokenizer")


def resolve(name: str) -> str | Path:
    """The encoding, or the file, that the setting names. Raises ValueError if there is none."""
    if name in ENCODINGS:
        return name
    given = Path(name)
    path = find_tokenizer(given) or given / "meta.pkl" if given.is_dir() else given
    if path.is_file() and (path.suffix in (".json", ".pkl") or path.name == "vocab.txt"):
        return path
    raise ValueError(f"there is no tokenizer {name!r:.200}; {ADVICE}")


def candidates(checkpoint: Checkpoint, log: Log) -> Iterator[str | Path]:
    """Yield the files and encodings that may be the checkpoint's tokenizer, the likeliest first.

    Raises ValueError where the next one would be a guess.
    """
    from sampling.inputs.char_tokenizer import named_encoding
    own, dataset = Path(checkpoint.folder), checkpoint.raw_config.get("dataset") # a stranger's, and of any type
    folders = [own]
    if not checkpoint.is_huggingface and isinstance(dataset, str) and len(dataset) < 1000 and "\0" not in dataset:
        folders += [Path("data", dataset), Path(os.path.abspath(own)).parent / "data" / dataset]
    metas = [] if checkpoint.is_huggingface else [folder / "meta.pkl" for folder in folders]
    for path in chain(filter(os.path.isfile, metas), filter(None, map(find_tokenizer, folders))):
        if path.parent != own and (Path(dataset).anchor or ".." in Path(dataset).parts): # the file could be any
            raise ValueError(f"the checkpoint names {path} as its vocabulary, but this file is outside of data/; if it "
                             "is the right file, copy it to the folder of ckpt.pt")
        yield path
    if encoding := named_encoding(checkpoint.raw_config, checkpoint.path):
        yield encoding
    # Nobody names GPT-2's encoding, so only the sizes to which people pad its vocabulary are sure.
    if not (50257 <= checkpoint.config.vocab_size <= 50304 or checkpoint.config.vocab_size == 51200):
        searched = ", ".join(dict.fromkeys(map(os.path.abspath, folders)))
        raise ValueError(f"no tokenizer is in {searched}, and GPT-2's encoding has 50257 tokens, but the model has "
                         f"{checkpoint.config.vocab_size}; {ADVICE}")
    if checkpoint.is_huggingface:
        log(f"{checkpoint.path} has no tokenizer of its own: using GPT-2's encoding")
    yield "gpt2"


def load_from(name: str | Path, checkpoint: Checkpoint, log: Log) -> Tokenizer | None:
    """Load the encoding with this name, or the tokenizer in a file; None for a meta.pkl without a vocabulary."""
    from sampling.inputs.char_tokenizer import CharTokenizer, named_encoding, read_meta
    from sampling.inputs.hf_tokenizer import HFTokenizer
    from sampling.inputs.tiktoken_tokenizer import encoding_label, load_encoding
    if isinstance(name, str):
        check_size(checkpoint, encoding_label(name), ENCODINGS[name]) # first, because loading may download files
        return load_encoding(name, log)
    if name.suffix != ".pkl":
        found = HFTokenizer(name, checkpoint.config.vocab_size)
    else:
        meta = read_meta(name)
        if encoding := named_encoding(meta, name):
            return load_from(encoding, checkpoint, log)
        if "vocab_size" in meta and not {"stoi", "itos"} & meta.keys(): # for GPT-2's tokens
            return None
        found = CharTokenizer(name, meta)
    check_size(checkpoint, found.source, found.size)
    return found


def check_size(checkpoint: Checkpoint, source: str, size: int) -> None:
    """Raise ValueError unless the model has as many tokens as its tokenizer, or at most twice as many, padded."""
    if not size <= checkpoint.config.vocab_size <= 2 * size:
        raise ValueError(f"{source} has {size} tokens, but the model has {checkpoint.config.vocab_size}, so it is not "
                         f"the tokenizer of this model; {ADVICE}")
