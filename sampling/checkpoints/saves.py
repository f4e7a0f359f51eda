"""Reads files whole that a training saves meanwhile, and waits for its next save."""
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from sampling.checkpoints.finding import checkpoint_path
from sampling.checkpoints.untrusted_files import RejectedFileError, reject_damaged, require
from sampling.process import is_out_of_memory

logger = logging.getLogger(__name__)
# Seconds to wait for a file that is being written; a slow disk may stop a writer for seconds.
MAX_WAIT = 10
# Seconds between two attempts: a quick writer leaves little time between two saves.
POLL = 0.01
WATCH_POLL = 0.5 # seconds between two looks at a file that a training will save
# The paths of files whose next save a run waits for, and has said so: the line comes once.
ANNOUNCED_WAITS: set[object] = set()


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


# ---- waiting for the next save

def load_saves(out_dir: str | Path, load: Callable[[], Any]) -> Iterator[Any]:
    """Wait for a checkpoint in out_dir, and yield what load returns for it; then again after each
    new save. If load rejects the file, wait for its next save: it may be whole then.
    """
    last = None
    while True:
        path = checkpoint_path(out_dir)
        state = file_state(path)
        if last or not state:
            if path not in ANNOUNCED_WAITS:
                logger.info(f"waiting for the {'next' if last else 'first'} save of {path}")
            state = wait_for_save(out_dir, last)
            path = checkpoint_path(out_dir)
        try:
            model = load()
        except (FileNotFoundError, RejectedFileError) as error:
            if path not in ANNOUNCED_WAITS:
                logger.warning(f"{error}; waiting for the next save of {path}")
                ANNOUNCED_WAITS.add(path)
            last = state
            continue
        ANNOUNCED_WAITS.discard(path)
        # A training may have saved a newer one between the wait and the load.
        last = model.checkpoint.file_state or state
        yield model
        model = None # the memory must be free before the next model is loaded


def wait_for_save(out_dir: str | Path, last: tuple | None) -> tuple:
    """The state of the next checkpoint, when its save is over: it stays the same for a while."""
    previous = None
    while True:
        state = file_state(checkpoint_path(out_dir))
        if state == previous and state not in (last, None):
            return state
        time.sleep(WATCH_POLL)
        previous = state
