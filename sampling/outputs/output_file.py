"""Opens, locks and appends to the files of samples, which a later run can continue."""
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from sampling.inputs.prompts import FILE_KINDS, parse_start

# How the files of samples begin.
LINES = re.compile(rb'\{"version": \d+, "index": ')
PAGE = re.compile(rb'<!DOCTYPE html>.*<meta name="generator" content="sample.py">', re.DOTALL)


def open_output(path: str | os.PathLike) -> BinaryIO:
    """Open a file for reading and appending, and lock it for this run. Its content stays."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is not a regular file, so no samples can be added to it: give another path")
    with name_write_errors(path):
        file = open(path, "a+b") # noqa: SIM115, it stays open until the run ends
    try:
        lock(file)
        if is_same_file(file, 1):
            raise ValueError(f"standard output goes to {path}: give the file another name")
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return file


def check_replaceable(path: str | os.PathLike, start: str) -> None:
    """Raise ValueError if overwrite may not replace this file: it holds the prompts, or sample.py did not write it."""
    kind, prompt_path = parse_start(start)
    with open_output(path) as file:
        if kind in FILE_KINDS and is_same_file(file, 0 if prompt_path == "-" else prompt_path):
            raise ValueError(f"{path} is also the file of prompts: give the file of samples another name")
        begin = file.read(200)
    if begin and not (LINES.match(begin) or PAGE.match(begin)):
        raise ValueError(f"{path} was not written by sample.py, so --overwrite does not replace it: move it, or give "
                         "the file another name")


def lock(file: BinaryIO) -> None:
    """Lock a file, if the system supports it. Raises ValueError if another run has locked the file."""
    with suppress(ImportError): # Windows
        import fcntl
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run writes to {file.name}: give the file another name") from None
        except OSError: # a file system without locks
            pass


def is_same_file(file: BinaryIO, other: str | int) -> bool: # other: a path or a file descriptor
    with suppress(OSError): # there may be no such file, and the descriptor may be closed
        return os.path.samestat(os.fstat(file.fileno()), os.stat(other))
    return False


def append(file: BinaryIO, data: bytes) -> None:
    with name_write_errors(file.name):
        file.seek(0, os.SEEK_END) # the page reads the lines of the same file
        file.write(data)
        file.flush()


@contextmanager
def name_write_errors(path: str | os.PathLike) -> Iterator[None]:
    """Turn an OSError inside the block into one that names the file."""
    try:
        yield
    except FileNotFoundError:
        folder = os.path.dirname(os.path.realpath(path))
        raise OSError(f"cannot write {path!r:.200}: there is no folder {folder}; create it, or give another "
                      "path") from None
    except OSError as error:
        raise OSError(f"cannot write {path!r:.200}: {error.strerror}") from None
