"""Files that a run appends its samples to, and that a later run can go on with."""
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO


def open_output(path: str | os.PathLike) -> BinaryIO:
    """Open a file to read and to append to, for this run alone; what it holds stays.

    Raises OSError or ValueError that names the file if that is not possible.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is not a regular file, so no samples can be added to it")
    with named_errors(path):
        file = open(path, "a+b") # noqa: SIM115, it stays open as long as the run
    try:
        lock(file)
        if is_stdout(file):
            raise ValueError(f"standard output goes to {path}: give the file another name")
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return file


def lock(file: BinaryIO) -> None:
    """Lock a file against other runs, if the system can. Raises ValueError if another run has locked it."""
    with suppress(ImportError): # Windows
        import fcntl
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run writes to {file.name}: give the file another name") from None
        except OSError: # a file system without locks
            pass


def is_stdout(file: BinaryIO) -> bool:
    """Whether standard output goes to the same file."""
    with suppress(OSError): # it may be closed
        return os.path.samestat(os.fstat(file.fileno()), os.fstat(1))
    return False


def append(file: BinaryIO, data: bytes) -> None:
    """Write to the end of the file at once. Raises OSError that names the file."""
    with named_errors(file.name):
        file.write(data)
        file.flush()


def check_not_removed(file: BinaryIO) -> None:
    """Raise OSError if the file was removed: all that is written to it would be lost. A renamed file is fine."""
    with named_errors(file.name):
        if not os.fstat(file.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it was removed during the run")


@contextmanager
def named_errors(path: str | os.PathLike) -> Iterator[None]:
    """Name the file in an OSError."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path!r:.200}: {error.strerror}") from None
