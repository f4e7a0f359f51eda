"""Reads files that a stranger made, or that a training overwrites: one-line errors, text and JSON,
Python's source, and whole saves.
"""
import ast
import json
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from sampling.process import first_sentence, is_out_of_memory

logger = logging.getLogger(__name__)
# Seconds to wait for a file that is being written; a slow disk may stop a writer for seconds.
MAX_WAIT = 10
# Seconds between two attempts: a quick writer leaves little time between two saves.
POLL = 0.01
MAX_CONFIG_BYTES = 2**20 # a config.json: parsing it takes many times its size in memory
MAX_TEXT_BYTES = 2**26 # another file, such as a tokenizer.json
# nanoGPT's model.py has 17 KB, and those of its forks up to 60. A large one would take long to
# parse.
MAX_SOURCE_BYTES = 2**17
# Python joins the parts of an imported name at each dot: 40,000 of them would take a gigabyte.
LONG_NAME = re.compile(rb"(\.[\s\\]*\w+[\s\\]*){50}")
UNREADABLE = OSError, ValueError, SyntaxError, MemoryError, RecursionError # of parse_python
# The paths of files whose next save a run waits for, and has said so: the line comes once.
ANNOUNCED_WAITS: set[object] = set()


# ---- errors

class RejectedFileError(ValueError):
    """Says why a file, or a text, cannot be used: for good, so it is not read again."""
    path: object = None # None if the message names no file


def require(condition: object, reason: str) -> None:
    """Raises RejectedFileError unless the condition holds. For blocks inside reject_damaged."""
    if not condition:
        raise RejectedFileError(reason)


def reject_lfs_pointer(start: bytes) -> None:
    require(not start.startswith(b"version https://git-lfs"),
            "it is only a pointer of Git LFS to the file; get the file itself: run 'git lfs "
            "install' and then 'git lfs pull' in its folder")


@contextmanager
def reject_damaged(source: object) -> Iterator[None]:
    """Turn an exception inside the block into a RejectedFileError that names the source.

    An exception of another type means that the file is damaged. Lack of memory passes, and so does
    an error that names a file already.
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
            reason = (f"it is damaged or incomplete ({first_sentence(e)}); copy it again, or use "
                      "another one")
        one_line = " ".join(reason.splitlines()) # a name in a file may have a newline
        error = kind(f"cannot read {source}: {one_line:.1000}")
        error.path = source
        raise error from None


def is_inside(name: object) -> bool:
    """Whether what a file names is a relative path that does not leave its folder."""
    return isinstance(name, str) and not Path(name).anchor and ".." not in Path(name).parts


# ---- text and JSON

def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict:
    """The object in a JSON file. Raises ValueError if the file holds anything else, or too much."""
    with reject_damaged(path):
        content = json.loads(read_text(path, max_bytes))
        require(isinstance(content, dict), f"it must hold an object, got {type(content).__name__}")
    return content


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a file. Raises ValueError if it is not a regular file, too large, or not UTF-8.
    """
    with reject_damaged(path):
        # A device or a pipe may never end.
        require(path.is_file(), "it is missing, a link to what is missing, or no regular file")
        require(path.stat().st_size <= max_bytes, f"it has more than {max_bytes} bytes")
        text = path.read_text("utf-8")
        reject_lfs_pointer(text[:100].encode())
    return text


def parse_python(path: Path) -> ast.Module:
    """The syntax tree of a file, which is not run. Raises one of UNREADABLE."""
    source = read_text(path, MAX_SOURCE_BYTES).encode()
    if LONG_NAME.search(source):
        raise ValueError("it has a name with more than 50 dots")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore") # about unknown escapes
        return ast.parse(source)


# ---- files that a training overwrites

def read_complete(paths: Sequence[Path], read: Callable[..., Any]) -> Any:
    """The result of read, which gets the open files at these paths.

    While a training writes the files, they are read again, for up to MAX_WAIT seconds. Raises
    ValueError, which names the file or the folder.
    """
    source = paths[0] if len(paths) == 1 else paths[0].parent
    end = time.monotonic() + MAX_WAIT
    is_waiting = False
    while True:
        try:
            with reject_damaged(source):
                require(time.monotonic() <= end,
                        f"it is being written, and was never complete for {MAX_WAIT} seconds; try "
                        "again between two saves, or copy the file when it is complete")
                result = read_unchanged(paths, read)
                if result is not None:
                    return result
        except OSError: # a writer may remove the file before it writes it again
            if not is_waiting:
                raise
        if not (is_waiting or source in ANNOUNCED_WAITS):
            logger.info(f"{source} is being written: waiting")
        is_waiting = True
        time.sleep(POLL)


def read_unchanged(paths: Sequence[Path], read: Callable[..., Any]) -> Any | None:
    """The result of read for the open files at these paths; None if one of them changed meanwhile,
    or if one is damaged and was changed lately.

    Files must never be mapped: a training may truncate them at any time, and a process that then
    touches a mapped page dies. They are open only here: Windows lets nobody write an open file.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "rb")) for path in paths]

        def states() -> list[tuple]:
            return [file_state(file.fileno()) for file in files]

        before = states()
        try:
            result = read(*files)
        except Exception as e:
            open(os.devnull).close() # if no more files can be open, this error says so
            is_final = isinstance(e, RejectedFileError) or is_out_of_memory(e)
            is_recent = any(abs(time.time() - changed) < MAX_WAIT for _, changed, _ in before)
            if states() == before and (is_final or not is_recent):
                raise
            return None
        return result if states() == before else None


def file_state(file: Path | int) -> tuple | None:
    """What changes when the file at this path, or with this descriptor, is written: its size, time
    and inode. None if there is none now.
    """
    with suppress(OSError):
        status = os.stat(file)
        return status.st_size, status.st_mtime, status.st_ino
    return None
