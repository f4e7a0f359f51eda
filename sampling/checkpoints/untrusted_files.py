"""Reads files that a stranger made: one-line errors, text, JSON and Python's source."""
import ast
import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sampling.process import is_out_of_memory
from sampling.values import first_sentence

logger = logging.getLogger(__name__)
MAX_CONFIG_BYTES = 2**20 # a config.json: parsing it takes many times its size in memory
MAX_TEXT_BYTES = 2**26 # another file, such as a tokenizer.json
# nanoGPT's model.py has 17 KB, and those of its forks up to 60. A large one would take long to
# parse.
MAX_SOURCE_BYTES = 2**17
# Python joins the parts of an imported name at each dot: 40,000 of them would take a gigabyte.
LONG_NAME = re.compile(rb"(\.[\s\\]*\w+[\s\\]*){50}")
UNREADABLE = OSError, ValueError, SyntaxError, MemoryError, RecursionError # of parse_python


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
