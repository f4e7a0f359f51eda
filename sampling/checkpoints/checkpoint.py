"""Checkpoint, and what all that reads files shares: errors, text and JSON, and files that a training overwrites."""
import difflib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sampling.messages import Log, is_out_of_memory

if TYPE_CHECKING: # it imports torch, which takes a second
    from model import GPTConfig

Convert = Callable[[Any], Any] # from a float32 tensor
MAX_WAIT = 10 # seconds to wait for a file that is being written; a slow disk may stop a writer for seconds
POLL = 0.01 # seconds between two attempts: a quick writer leaves little time between two saves
MAX_CONFIG_BYTES = 2**20 # of a config.json: parsing it takes many times its size in memory


@dataclass
class Checkpoint:
    """The content of a ckpt.pt, or of the files of a Hugging Face model. It is data only: nothing in a file was run.

    The tensors have nanoGPT's names and are float32, unless a convert function made something else of the weights.
    They fit config.
    """
    path: str # the file, or the folder or Hugging Face id as it was given; for messages and JSONL
    config: "GPTConfig"
    state_dict: dict
    folder: Path # of the file or the model; it may hold the tokenizer
    crc32: str | None = None # of all tensors in float32, 8 hexadecimal digits, if with_crc32 asked for it
    is_huggingface: bool = False # otherwise it is a ckpt.pt
    num_init_draws: int = 0 # how many 32-bit random numbers nanoGPT draws to initialise such a model
    iter_num: int | None = None # how many steps the model was trained
    val_loss: float | None = None
    raw_config: dict = field(default_factory=dict) # the settings of train.py, or config.json: plain data of any type

    def describe(self) -> str:
        """One line for the user: what was loaded."""
        iteration = "" if self.iter_num is None else f"iteration {self.iter_num}"
        loss = "" if self.val_loss is None else f"validation loss {self.val_loss:.4f}"
        return f"{self.path}: {', '.join(filter(None, [iteration, loss])) or 'loaded'}"


# ---- errors

class RejectedFileError(ValueError):
    """Why a file cannot be read, without its name, which named_errors adds. The file may be undamaged."""


class DamagedFileError(RejectedFileError):
    """The file is damaged or incomplete. If it was changed lately, it may still be written."""

    def __init__(self, reason: str):
        super().__init__(f"it is damaged or incomplete ({reason}); copy it again, or use another one")


class NamedFileError(ValueError):
    """Why a file cannot be read, with its name: named_errors leaves it as it is."""


def require(condition: object, reason: str) -> None:
    """Raises RejectedFileError with this reason unless the condition holds. For blocks inside named_errors."""
    if not condition:
        raise RejectedFileError(reason)


def reject_pointer(content: bytes | str) -> None:
    """Raises RejectedFileError if a file with this content, or start, is a pointer of Git LFS."""
    prefix = "version https://git-lfs"
    require(not content.startswith(prefix if isinstance(content, str) else prefix.encode()),
            "it is only a pointer of Git LFS to the file; get the file itself: run 'git lfs install' and then "
            "'git lfs pull' in its folder")


def first_sentence(error: BaseException) -> str:
    """The first sentence of an exception's message, or the name of the exception's type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0][:200]


@contextmanager
def named_errors(source: object) -> Iterator[None]:
    """Turn an exception inside the block into one that names the source. OSError and lack of memory pass."""
    try:
        yield
    except Exception as e: # a file that holds no model can make torch raise any exception
        if isinstance(e, OSError | NamedFileError) or is_out_of_memory(e):
            raise
        one_line = " ".join(str(e).splitlines()) # a name in a damaged file may have a newline
        raise NamedFileError(f"cannot read {source}: {one_line:.1000}") from None


@contextmanager
def damaged_if_fails() -> Iterator[None]:
    """Inside this block, any exception but lack of memory means a damaged file: raise DamagedFileError instead."""
    try:
        yield
    except Exception as e:
        if isinstance(e, RejectedFileError) or is_out_of_memory(e):
            raise
        raise DamagedFileError(first_sentence(e)) from None


# ---- files

def find_checkpoint(out_dir: str | Path) -> Path:
    """The path of ckpt.pt in out_dir, or out_dir if it is a file, or a .safetensors file in out_dir, for which
    read_nanogpt_file raises the advice. Raises FileNotFoundError, which names what is there, if there is none.
    """
    folder = Path(out_dir)
    path = folder / "ckpt.pt" if folder.is_dir() else folder
    if path.is_file():
        return path
    if is_huggingface_folder(folder):
        raise FileNotFoundError(f"{folder} holds a Hugging Face model, but no ckpt.pt; pass --init_from={folder}")
    if snapshots := newest_first(folder.glob("*.pt")): # ckpt-2000-1.2-1.4.pt, best_model.pt or 2000_ckpt.pt of forks
        names = first_names(snapshot.name for snapshot in snapshots)
        raise FileNotFoundError(f"{folder} holds {names}, but no ckpt.pt; pass --out_dir={snapshots[0]}")
    if weights := newest_first([*folder.glob("*.safetensors"), folder / "adapter_model.bin"]):
        return weights[0]
    found = [*folder.parent.glob("ckpt.pt"), *folder.parent.glob("*/ckpt.pt"), *folder.glob("*/ckpt.pt"),
             *Path().glob("*/ckpt.pt")]
    near = dict.fromkeys(path.parent for path in newest_first(found))
    similar = difflib.get_close_matches(folder.name, [place.name for place in near], n=1)
    guess = next((place for place in near if place.name in similar), None)
    advice = f"; did you mean --out_dir={guess}?" if guess else ""
    advice += f"; found ckpt.pt in {first_names(near)}" if near else ""
    raise FileNotFoundError(f"there is no checkpoint at {path}{advice}; pass --out_dir=FOLDER_OR_FILE, or "
                            "--init_from=gpt2 for GPT-2")


def first_names(names: Iterable[object]) -> str:
    """The first five of some names."""
    listed = [str(name) for name in names]
    return ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else "")


def newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(filter(Path.is_file, paths), key=lambda path: (path.stat().st_mtime, path.name), reverse=True)


def is_huggingface_folder(folder: Path) -> bool:
    """Whether a folder has the config.json of a Hugging Face model."""
    with suppress(OSError, ValueError):
        return is_huggingface_config(read_json(folder / "config.json", MAX_CONFIG_BYTES))
    return False


def is_huggingface_config(config: dict) -> bool:
    """Whether a config.json names an architecture, or has GPT-2's fields, as those of 2019 and of GPT2-Chinese."""
    return "model_type" in config or config.keys() >= {"n_embd", "n_head", "n_layer", "n_positions"}


def read_complete(source: object, paths: Sequence[Path], read: Callable[..., Any], log: Log) -> Any:
    """The result of read, which gets the open files at these paths. Raises ValueError, which names the source.

    While a training writes the files, they are read again, for up to MAX_WAIT seconds. They must never be mapped: a
    training may truncate them at any time, and a process that then touches a mapped page dies. They are open only
    here: Windows lets nobody write an open file.
    """
    end, is_waiting = time.monotonic() + MAX_WAIT, False
    while True:
        with named_errors(source), ExitStack() as stack:
            try:
                files = [stack.enter_context(open(path, "rb")) for path in paths]
                before = file_states(files)
                result = read(*files)
                if file_states(files) == before:
                    return result
            except OSError: # a writer may remove the file before it writes it again
                if not is_waiting:
                    raise
            except Exception as e:
                is_recent = any(abs(time.time() - changed) < MAX_WAIT for _, changed in before)
                if file_states(files) == before and not (is_recent and isinstance(e, DamagedFileError)):
                    raise
        result = None # its memory must be free before the next attempt
        if time.monotonic() > end:
            raise ValueError(f"{source} is being written, and was never complete for {MAX_WAIT} seconds: try again "
                             "between two saves, or copy the file when it is complete")
        if not is_waiting:
            log(f"{source} is being written: waiting")
        is_waiting = True
        time.sleep(POLL)


def file_states(files: Sequence[BinaryIO]) -> list[tuple[int, float]]:
    """The size and the time of the last change of each open file."""
    return [(status.st_size, status.st_mtime) for status in (os.fstat(file.fileno()) for file in files)]


def read_json(path: Path, max_bytes: float = math.inf) -> dict:
    """The object in a JSON file. Raises ValueError if the file holds anything else, or too much."""
    text = read_text(path, max_bytes)
    with named_errors(path), damaged_if_fails():
        content = json.loads(text)
        require(isinstance(content, dict), f"it must hold an object, got {type(content).__name__}")
    return content


def read_text(path: Path, max_bytes: float = math.inf) -> str:
    """The text of a file. Raises ValueError if it is not a regular file, too large, or not UTF-8."""
    if not path.is_file(): # a device or a pipe may never end
        raise NamedFileError(f"{path} is missing, or not a regular file")
    with named_errors(path):
        require(path.stat().st_size <= max_bytes, f"it has more than {max_bytes} bytes")
        text = path.read_text("utf-8")
        reject_pointer(text)
    return text
