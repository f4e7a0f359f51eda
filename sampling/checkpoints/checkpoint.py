"""Checkpoint, and what everything that reads files shares: errors, JSON, and files that a training overwrites."""
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from sampling.messages import Log, is_out_of_memory

Convert = Callable[[Any], Any] # from a float32 tensor; this module must not import torch, which takes a second
MAX_WAIT = 10 # seconds to wait for a file that is being written; a slow disk may stop a writer for seconds
POLL = 0.01 # seconds between two attempts: a quick writer leaves little time between two saves
MAX_JSON_BYTES = 2**21 # a config.json has about 1,000 bytes, the index of a large model has 100,000


@dataclass
class Checkpoint:
    """The content of a ckpt.pt, or of the files of a Hugging Face model. It is data only: nothing in a file was run.

    The tensors have nanoGPT's names and are float32, unless a convert function made something else of the weights.
    They fit model_args.
    """
    path: str # the file, or the folder or Hugging Face id as it was given; for messages and JSONL
    model_args: dict # GPTConfig's fields
    state_dict: dict
    vocab_size: int # rows of the token embedding; 0 if it is no matrix
    folder: Path # of the file or the model; it may hold the tokenizer
    dataset: object = None # train.py's setting, of any type; data/<dataset> may hold the tokenizer
    crc32: str | None = None # of all tensors in float32, 8 hexadecimal digits, if with_crc32 asked for it
    is_huggingface: bool = False # otherwise it is a ckpt.pt
    num_init_draws: int = 0 # how many 32-bit random numbers nanoGPT draws to initialise such a model
    iter_num: int | None = None # how many steps the model was trained
    val_loss: float | None = None
    meta: dict = field(default_factory=dict) # the checkpoint's config, with the settings of the training: plain data

    def describe(self) -> str:
        """One line for the user: what was loaded."""
        iteration = "" if self.iter_num is None else f"iteration {self.iter_num}"
        loss = "" if self.val_loss is None else f"validation loss {self.val_loss:.4f}"
        return f"{self.path}: {', '.join(filter(None, [iteration, loss])) or 'loaded'}"


def snapshots_in(folder: str | Path) -> list[Path]:
    """The .pt files in a folder, the newest first: forks save ckpt-2000-1.2-1.4.pt, best_model.pt or 2000_ckpt.pt.

    Files of the same second, as in a copied folder, are in the order of the numbers in their names.
    """
    def age(path: Path) -> tuple:
        return int(path.stat().st_mtime), [int(digits) for digits in re.findall(r"\d{1,18}", path.name)], path.name
    return sorted(filter(Path.is_file, Path(folder).glob("*.pt")), key=age, reverse=True)


# ---- errors

class RejectedFileError(ValueError):
    """Why a file cannot be read, without its name, which open_unchanged adds. The file may be undamaged."""


class DamagedFileError(RejectedFileError):
    """The file is damaged. Only within a second of its last change, it may be one that changes now."""
    max_age = 1 # seconds


class IncompleteFileError(DamagedFileError):
    """The end of the file is missing. If it was changed lately, it may still be written."""
    max_age = MAX_WAIT


class BeingWrittenError(ValueError):
    """The file changes, or it is damaged and has just changed."""


def require(condition: bool, reason: str) -> None:
    """Raises RejectedFileError with this reason unless the condition holds."""
    if not condition:
        raise RejectedFileError(reason)


def first_sentence(error: BaseException) -> str:
    """The first sentence of an exception's message, or the name of the exception's type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0][:200]


@contextmanager
def named_errors(source: object) -> Iterator[None]:
    """Turn an exception inside the block into a ValueError that names the source. OSError and lack of memory pass."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as e:
        if is_out_of_memory(e):
            raise
        # A file that holds no model can make torch raise any exception.
        is_named = isinstance(e, ValueError) and str(source) in str(e)
        raise ValueError(f"{e!s:.2000}" if is_named else f"cannot load {source}: {e!s:.1000}") from None


# ---- files that a training overwrites

def read_complete(read: Callable[[], Any], log: Log) -> Any:
    """The result of read, which is called again while it raises BeingWrittenError, for up to MAX_WAIT seconds."""
    end, is_waiting = time.monotonic() + MAX_WAIT, False
    while True:
        try:
            return read()
        except BeingWrittenError as e:
            if time.monotonic() > end:
                raise ValueError(f"{e}, and was never complete for {MAX_WAIT} seconds: try again between two saves, or "
                                 "copy the file when it is complete") from None
            if not is_waiting:
                log(f"{e}: waiting")
            is_waiting = True
        time.sleep(POLL)


@contextmanager
def open_unchanged(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read it inside the block. It must never be mapped: a training may truncate it at any time, and a
    process that then touches a mapped page dies. It is open only here: Windows lets nobody write an open file.

    Raises BeingWrittenError if the file changed, or if the block raised DamagedFileError and the last change was less
    than its max_age ago; otherwise a ValueError that names the file, for a RejectedFileError of the block.
    """
    def state() -> tuple[int, int, int]:
        status = os.fstat(file.fileno())
        return status.st_size, status.st_mtime_ns, status.st_ino

    with open(path, "rb") as file:
        before = state()
        try:
            yield file
        except ValueError as e:
            is_damaged, age = isinstance(e, DamagedFileError), time.time() - os.fstat(file.fileno()).st_mtime
            if state() != before or (is_damaged and abs(age) < e.max_age):
                raise BeingWrittenError(f"{path} is being written") from None
            if isinstance(e, RejectedFileError):
                reason = f"it is damaged or incomplete ({e}); copy it again, or use another one" if is_damaged else (
                    f"{e}; only tensors, numbers and text are allowed")
                raise ValueError(f"cannot read {path}: {reason}") from None
            raise
        if state() != before:
            raise BeingWrittenError(f"{path} is being written")


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises ValueError if the file holds anything else, or more than MAX_JSON_BYTES."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise ValueError(f"cannot read {path}: it is damaged, or not JSON ({e}); copy it again") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"cannot read {path}: {first_sentence(e)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}")
    return content
