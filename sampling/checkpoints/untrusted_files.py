"""Reads files that a stranger made, or that a training overwrites: one-line errors, text and JSON, and whole saves."""
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sampling.process import first_sentence, is_out_of_memory

logger = logging.getLogger(__name__)
MAX_WAIT = 10 # seconds to wait for a file that is being written; a slow disk may stop a writer for seconds
POLL = 0.01 # seconds between two attempts: a quick writer leaves little time between two saves
MAX_CONFIG_BYTES = 2**20 # of a config.json: parsing it takes many times its size in memory
MAX_TEXT_BYTES = 2**26 # of other files, such as a tokenizer.json

UNFINISHED: set[object] = set() # the paths of files whose next save a run waits for, and has said so

# ---- errors

class RejectedFileError(ValueError):
    """Says why a file, or a text, cannot be used: for good, so it is not read again. path: None if it names no file."""
    path: object = None


def require(condition: object, reason: str) -> None:
    """Raises RejectedFileError unless the condition holds. For blocks inside reject_damaged."""
    if not condition:
        raise RejectedFileError(reason)


def reject_lfs_pointer(start: bytes) -> None:
    require(not start.startswith(b"version https://git-lfs"),
            "it is only a pointer of Git LFS to the file; get the file itself: run 'git lfs install' and then "
            "'git lfs pull' in its folder")


@contextmanager
def reject_damaged(source: object) -> Iterator[None]:
    """Turn an exception inside the block into a RejectedFileError that names the source. An exception of another type
    means that the file is damaged. Lack of memory passes, and so does an error that names a file already.
    """
    try:
        yield
    except Exception as e: # for a damaged file, json, zipfile and torch may raise any exception
        if getattr(e, "path", None) or is_out_of_memory(e):
            raise
        kind = RejectedFileError
        if isinstance(e, RejectedFileError):
            reason = str(e)
        elif getattr(e, "filename", None): # such as a PermissionError
            kind = type(e)
            reason = f"{e.strerror}; give another path, or ask its owner for a copy"
        else:
            reason = f"it is damaged or incomplete ({first_sentence(e)}); copy it again, or use another one"
        one_line = " ".join(reason.splitlines()) # a name in a file may have a newline
        error = kind(f"cannot read {source}: {one_line:.1000}")
        error.path = source
        raise error from None


# ---- text and JSON

def read_json(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> dict:
    """The object in a JSON file. Raises ValueError if the file holds anything else, or too much."""
    text = read_text(path, max_bytes)
    with reject_damaged(path):
        content = json.loads(text)
        require(isinstance(content, dict), f"it must hold an object, got {type(content).__name__}")
    return content


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a file. Raises ValueError if it is not a regular file, too large, or not UTF-8."""
    with reject_damaged(path):
        require(path.is_file(), "it is missing, or not a regular file") # a device or a pipe may never end
        require(path.stat().st_size <= max_bytes, f"it has more than {max_bytes} bytes")
        text = path.read_text("utf-8")
        reject_lfs_pointer(text[:100].encode())
    return text


# ---- files that a training overwrites

def read_complete(paths: Sequence[Path], read: Callable[..., Any]) -> Any:
    """The result of read, which gets the open files at these paths. Raises ValueError, which names the file or folder.

    While a training writes the files, they are read again, for up to MAX_WAIT seconds.
    """
    source, end, is_waiting = paths[0] if len(paths) == 1 else paths[0].parent, time.monotonic() + MAX_WAIT, False
    while True:
        try:
            with reject_damaged(source):
                require(time.monotonic() <= end, f"it is being written, and was never complete for {MAX_WAIT} seconds; "
                        "try again between two saves, or copy the file when it is complete")
                if (result := read_unchanged(paths, read)) is not None:
                    return result
        except OSError: # a writer may remove the file before it writes it again
            if not is_waiting:
                raise
        if not (is_waiting or source in UNFINISHED):
            logger.info(f"{source} is being written: waiting")
        is_waiting = True
        time.sleep(POLL)


def read_unchanged(paths: Sequence[Path], read: Callable[..., Any]) -> Any | None:
    """The result of read for the open files at these paths; None if one of them changed meanwhile, or if one is damaged
    and was changed lately.

    Files must never be mapped: a training may truncate them at any time, and a process that then touches a mapped page
    dies. They are open only here: Windows lets nobody write an open file.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "rb")) for path in paths]
        before = file_states(files)
        try:
            result = read(*files)
        except Exception as e:
            is_damaged = not (isinstance(e, RejectedFileError) or is_out_of_memory(e))
            is_recent = any(abs(time.time() - changed) < MAX_WAIT for _, changed in before)
            if file_states(files) == before and not (is_damaged and is_recent):
                raise
            return None
        return result if file_states(files) == before else None


def file_states(files: Sequence[BinaryIO]) -> list[tuple[int, float]]:
    return [(status.st_size, status.st_mtime) for status in (os.fstat(file.fileno()) for file in files)]
