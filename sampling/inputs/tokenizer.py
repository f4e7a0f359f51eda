"""Tokenizer, the protocol of all tokenizers, and the choice of the tokenizer for a checkpoint."""
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sampling.inputs.char_tokenizer import CharTokenizer, NoVocabularyError
from sampling.inputs.gpt2_tokenizer import GPT2Tokenizer
from sampling.inputs.token_ids import IdArray
from sampling.log import Log

if TYPE_CHECKING: # it imports torch, which takes a second
    from sampling.checkpoints.checkpoint import Checkpoint


class Tokenizer(Protocol):
    """Turns text into token ids and back. Unknown ids decode to U+FFFD: a model's vocabulary may be padded."""
    size: int # of the vocabulary
    source: str # where the vocabulary is from, for messages

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises ValueError if the text cannot be encoded."""

    def decode(self, ids: Sequence[int] | IdArray) -> str:
        """The text of token ids: of a list, or of a torch tensor or numpy array of one dimension."""

    def incremental_decoder(self, prompt_ids: Sequence[int] = ()) -> Callable[[int, bool], str]:
        """A function (id, last=False) -> text for one sequence, which continues prompt_ids.

        Without prompt_ids, the joined texts are what decode returns. With prompt_ids, they are what the tokens add to
        the text of the prompt. A character that spans several tokens comes with the last of them. last=True: no token
        follows, so an incomplete character becomes U+FFFD.
        """


def load_tokenizer(checkpoint: "Checkpoint", log: Log) -> Tokenizer:
    """Load the tokenizer of a model.

    For a ckpt.pt, searches its folder, data/<dataset>/ in the working directory, and data/<dataset>/ beside its folder:
    first for a meta.pkl with a vocabulary, then for a Hugging Face tokenizer. For a Hugging Face model, searches the
    folder of the model. If nothing is found, loads GPT-2's encoding; for a Hugging Face model, logs that. Raises
    ValueError if the tokenizer does not fit the model, or cannot be loaded.
    """
    tokenizer = load_char_tokenizer(checkpoint) or load_hf_tokenizer(checkpoint)
    if tokenizer:
        check_size(checkpoint, tokenizer.source, tokenizer.size)
        return tokenizer
    check_size(checkpoint, GPT2Tokenizer.source, GPT2Tokenizer.size, is_own=False)
    if checkpoint.is_huggingface:
        log(f"{checkpoint.path} has no tokenizer of its own: using GPT-2's encoding")
    return GPT2Tokenizer() # after all checks, because it may download files


def load_char_tokenizer(checkpoint: "Checkpoint") -> CharTokenizer | None:
    """The vocabulary of the first meta.pkl that has one. A meta.pkl may have none, for GPT-2's tokens."""
    if not checkpoint.is_huggingface:
        for path in find_in_folders(checkpoint, find_meta):
            with suppress(NoVocabularyError):
                return CharTokenizer(path)
    return None


def load_hf_tokenizer(checkpoint: "Checkpoint") -> Tokenizer | None:
    """The Hugging Face tokenizer of the first folder that has one; None if there is none."""
    from sampling.inputs.hf_tokenizer import HFTokenizer
    from sampling.inputs.tokenizer_files import find_tokenizer
    path = next(find_in_folders(checkpoint, find_tokenizer), None)
    return HFTokenizer(path, checkpoint.vocab_size) if path else None


def find_in_folders(checkpoint: "Checkpoint", find: Callable[[str], Path | None]) -> Iterator[Path]:
    """Yield the paths that find returns for the folders of this checkpoint: its own folder, then those of its data set.

    Raises ValueError if find returns a path in the folder of a data set that is outside of data/.
    """
    if path := find(str(checkpoint.folder)):
        yield path
    for folder in data_folders(checkpoint):
        if path := find(folder):
            if may_leave_folder(checkpoint.dataset):
                raise ValueError(f"the checkpoint names {path} as its vocabulary, but this file is outside of data/; "
                                 "if it is the right file, copy it to the folder of ckpt.pt")
            yield path


def find_meta(folder: str) -> Path | None:
    """The meta.pkl in a folder, if there is one."""
    path = os.path.join(folder, "meta.pkl")
    return Path(path) if os.path.isfile(path) else None


def data_folders(checkpoint: "Checkpoint") -> list[str]:
    """The folders that may hold the data set: in the working directory, and beside the folder of the checkpoint.

    Empty if dataset is not a name. A checkpoint from a stranger may hold any object.
    """
    dataset = checkpoint.dataset
    if not isinstance(dataset, str) or len(dataset) >= 1000 or "\0" in dataset:
        return []
    folders, project = [os.path.join("data", dataset)], os.path.dirname(os.path.abspath(checkpoint.folder))
    if not (os.path.isdir(project) and os.path.samefile(project, os.curdir)):
        folders.append(os.path.join(project, "data", dataset))
    return list(dict.fromkeys(folders)) # an absolute dataset gives the same one twice


def may_leave_folder(path: str) -> bool:
    """Whether a path may lead out of the folder that it is relative to."""
    return os.path.isabs(path) or ".." in path.replace("\\", "/").split("/")


def check_size(checkpoint: "Checkpoint", source: str, size: int, is_own: bool = True) -> None:
    """Raises ValueError unless a tokenizer of this size fits the model. is_own: it is from a folder of the model."""
    # The vocabulary of a model may be padded to a round size, but not to more than twice the size of the tokenizer.
    if not size <= checkpoint.vocab_size <= 2 * size:
        raise ValueError(f"{source} has {size} tokens, but the model has {checkpoint.vocab_size}, so it is not the "
                         f"tokenizer of this model{'' if is_own else missing_files(checkpoint)}; "
                         f"{tokenizer_advice(checkpoint)}")


def missing_files(checkpoint: "Checkpoint") -> str:
    """A note for the error: where load_tokenizer found no tokenizer."""
    if checkpoint.is_huggingface:
        return f" ({checkpoint.folder} has no tokenizer of its own)"
    folders = [os.path.join(folder, "") for folder in (checkpoint.folder, *data_folders(checkpoint))]
    return f" (neither meta.pkl nor tokenizer.json is in {', '.join(folders)})"


def tokenizer_advice(checkpoint: "Checkpoint") -> str:
    """What to do about a tokenizer that does not fit the model."""
    if checkpoint.is_huggingface:
        return ("copy the tokenizer.json that the model was trained with, or its vocab.json and merges.txt, to "
                f"{checkpoint.folder}")
    return "copy the meta.pkl or tokenizer.json of the training data to the folder of ckpt.pt"
