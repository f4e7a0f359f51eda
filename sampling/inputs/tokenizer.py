"""Tokenizer, the protocol of all tokenizers, and the choice of the tokenizer for a checkpoint."""
import codecs
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sampling.messages import Log

if TYPE_CHECKING: # it imports torch, which takes a second
    from sampling.checkpoints.checkpoint import Checkpoint

# The encodings of tiktoken, and how many tokens each has.
ENCODINGS = {"gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "cl100k_base": 100277, "o200k_base": 200019}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}" # the text of unknown ids, and of bytes that form no character


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

def load_tokenizer(checkpoint: "Checkpoint", log: Log, tokenizer: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model. Raises ValueError if none is surely the model's, or if it cannot be loaded.

    tokenizer: the setting, which names an encoding of tiktoken or a file. Without it, searches folders_of(checkpoint)
    for a meta.pkl, then for a Hugging Face tokenizer. If there is none, loads the encoding that the training's settings
    in the checkpoint name, or else GPT-2's if the vocabulary has its size.
    """
    from sampling.inputs.tiktoken_tokenizer import TiktokenTokenizer
    for name in candidates(checkpoint) if tokenizer is None else [resolve(tokenizer)]:
        if found := load_from(name, checkpoint, log):
            return found
    if tokenizer is not None:
        raise ValueError(f"{tokenizer} has no stoi, and names no tokenizer")
    searched = ", ".join(dict.fromkeys(os.path.join(os.path.abspath(folder), "") for folder in folders_of(checkpoint)))
    lacks = (f"{checkpoint.folder} has no tokenizer of its own" if checkpoint.is_huggingface else
             f"neither meta.pkl nor tokenizer.json is in {searched}")
    check_size(checkpoint, "GPT-2's encoding", ENCODINGS["gpt2"], is_guess=True, prefix=f"{lacks}; ")
    if checkpoint.is_huggingface:
        log(f"{checkpoint.path} has no tokenizer of its own: using GPT-2's encoding")
    return TiktokenTokenizer("gpt2", log)


def resolve(name: str) -> str | Path:
    """The encoding, or the file, that the setting names. Raises ValueError if there is none."""
    from sampling.inputs.hf_files import find_tokenizer
    if name in ENCODINGS:
        return name
    path = Path(name)
    if path.is_dir():
        path = find_tokenizer(path) or path / "meta.pkl"
    if not path.is_file():
        raise ValueError(f"tokenizer must be an encoding of tiktoken ({', '.join(ENCODINGS)}), a tokenizer.json or its "
                         f"folder, or a meta.pkl; got {name!r:.200}")
    return path


def candidates(checkpoint: "Checkpoint") -> Iterator[str | Path]:
    """Yield the files and encodings that may be the checkpoint's tokenizer, the likeliest first."""
    from sampling.inputs.char_tokenizer import named_encoding
    from sampling.inputs.hf_files import find_tokenizer
    folders, dataset = folders_of(checkpoint), str(checkpoint.raw_config.get("dataset"))
    is_outside = os.path.isabs(dataset) or ".." in dataset.replace("\\", "/").split("/")
    for find in [find_tokenizer] if checkpoint.is_huggingface else [find_meta, find_tokenizer]:
        for folder in folders:
            if path := find(folder):
                if is_outside and folder is not folders[0]: # a stranger's checkpoint could name any file
                    raise ValueError(f"the checkpoint names {path} as its vocabulary, but this file is outside of "
                                     "data/; if it is the right file, copy it to the folder of ckpt.pt")
                yield path
    if encoding := named_encoding(checkpoint.raw_config, checkpoint.path):
        yield encoding


def find_meta(folder: Path) -> Path | None:
    return folder / "meta.pkl" if os.path.isfile(folder / "meta.pkl") else None # Path.is_file fails for long names


def folders_of(checkpoint: "Checkpoint") -> list[Path]:
    """The folder of the checkpoint; of a ckpt.pt also data/<dataset>: in the working directory, and beside out_dir."""
    folder, dataset = Path(checkpoint.folder), checkpoint.raw_config.get("dataset") # any type: it may be a stranger's
    if checkpoint.is_huggingface or not isinstance(dataset, str) or len(dataset) >= 1000 or "\0" in dataset:
        return [folder]
    return [folder, Path("data", dataset), Path(os.path.abspath(folder)).parent / "data" / dataset]


def load_from(name: str | Path, checkpoint: "Checkpoint", log: Log) -> Tokenizer | None:
    """Load the encoding with this name, or the tokenizer in a file; None for a meta.pkl without a vocabulary."""
    from sampling.inputs.char_tokenizer import CharTokenizer, named_encoding, read_meta
    from sampling.inputs.hf_tokenizer import HFTokenizer
    from sampling.inputs.tiktoken_tokenizer import TiktokenTokenizer, encoding_label
    if isinstance(name, str):
        check_size(checkpoint, encoding_label(name), ENCODINGS[name]) # first, because loading may download files
        return TiktokenTokenizer(name, log)
    if name.suffix != ".pkl":
        found = HFTokenizer(name, checkpoint.config.vocab_size)
    else:
        meta = read_meta(name)
        if encoding := named_encoding(meta, name):
            return load_from(encoding, checkpoint, log)
        if "stoi" not in meta: # there may be only a vocab_size, for GPT-2's tokens
            return None
        found = CharTokenizer(name, meta)
    check_size(checkpoint, found.source, found.size)
    return found


def check_size(checkpoint: "Checkpoint", source: str, size: int, is_guess: bool = False, prefix: str = "") -> None:
    """Raise ValueError, whose message begins with the prefix, unless a tokenizer of this size fits the model.

    is_guess: nobody named this tokenizer, so only the sizes to which people pad GPT-2's vocabulary are sure.
    """
    vocab_size = checkpoint.config.vocab_size
    is_padded = vocab_size <= 2 * size # to a round size, but not to more than twice the tokenizer's
    if is_guess:
        is_padded = vocab_size <= -(-size // 128) * 128 or vocab_size == 51_200
    if not (size <= vocab_size and is_padded):
        raise ValueError(f"{prefix}{source} has {size} tokens, but the model has {vocab_size}, so it is not the "
                         "tokenizer of this model; pass --tokenizer=NAME|FILE, the tokenizer that it was trained "
                         "with: an encoding of tiktoken such as cl100k_base, a tokenizer.json, or a meta.pkl")
