"""Tokenizer, the protocol of all tokenizers, and the choice of the tokenizer for a checkpoint."""
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sampling.inputs.char_tokenizer import CharTokenizer
from sampling.inputs.gpt2_tokenizer import GPT2Tokenizer

if TYPE_CHECKING: # it imports torch, which takes a second
    from sampling.checkpoints.checkpoint import Checkpoint


class Tokenizer(Protocol):
    """Turns text into token ids and back. Unknown ids decode to U+FFFD: a model's vocabulary may be padded."""
    size: int # of the vocabulary
    source: str # where the vocabulary is from, for messages

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises ValueError if the text cannot be encoded."""

    def decode(self, ids: list[int]) -> str:
        """The text of token ids."""

    def incremental_decoder(self) -> Callable[[int, bool], str]:
        """Return a function (id, last=False) -> text, which decodes one sequence token by token, as decode does.

        If the bytes of a character are spread over several tokens, the last of these tokens has the character. last
        says that no token follows: an incomplete character then becomes U+FFFD.
        """


def load_tokenizer(checkpoint: "Checkpoint") -> Tokenizer:
    """Load the tokenizer of a model: meta.pkl in the checkpoint's folder or in data/<dataset>/, else GPT-2's.

    Raises ValueError if the tokenizer does not fit the model, or cannot be loaded.
    """
    paths = meta_paths(checkpoint.folder, checkpoint.dataset)
    found = next((path for path in paths if os.path.isfile(path)), None)
    if found is None:
        check_size(GPT2Tokenizer.source, GPT2Tokenizer.size, checkpoint.vocab_size, missing=paths)
        return GPT2Tokenizer() # only now: it may have to download its files
    if found != paths[0] and leaves_folder(checkpoint.dataset):
        raise ValueError(f"the checkpoint names {found} as its vocabulary, which is outside of data/: if that is "
                         "right, copy it to the folder of ckpt.pt")
    tokenizer = CharTokenizer(found)
    check_size(tokenizer.source, tokenizer.size, checkpoint.vocab_size)
    return tokenizer


def meta_paths(folder: Path | None, dataset: object) -> list[str]:
    """Where a meta.pkl may be, in order of preference. dataset comes from the checkpoint, and may be any object."""
    paths = [] if folder is None else [os.path.join(folder, "meta.pkl")]
    if isinstance(dataset, str) and len(dataset) < 1000:
        paths.append(os.path.join("data", dataset, "meta.pkl"))
    return paths


def leaves_folder(path: str) -> bool:
    """Whether a path may lead out of the folder that it is relative to."""
    return os.path.isabs(path) or ".." in path.replace("\\", "/").split("/")


def check_size(source: str, size: int, vocab_size: int, missing: list[str] | None = None) -> None:
    """Raise ValueError unless a tokenizer of this size fits the model. missing: paths without a meta.pkl."""
    # A vocabulary may be padded to a round size, but not to more than twice its own.
    if not size <= vocab_size <= 2 * size:
        looked = f" (there is no {' nor '.join(missing)})" if missing else ""
        raise ValueError(f"{source} has {size} tokens, but the model has {vocab_size}: they do not belong "
                         f"together{looked}; copy the meta.pkl of the training data to the folder of ckpt.pt")
