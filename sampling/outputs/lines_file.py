"""The file of a run's samples: its lock, and how a later run continues or replaces its lines."""
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import BinaryIO

from sampling.outputs.console import name_write_errors, plural
from sampling.outputs.jsonl import (
    LINE_START,
    LINE_START_OF_ANY_VERSION,
    SCORE_FIELDS,
    Record,
    Run,
    check_equal,
    check_index,
    read_records,
)
from sampling.samples import Result, Score

logger = logging.getLogger(__name__)
LARGE = 2**24 # bytes of a file that takes half a second or more to read
# How the pages begin that sample.py writes.
PAGE = re.compile(rb'<!DOCTYPE html>.*<meta name="generator" content="sample.py">', re.DOTALL)


class LinesFile:
    """A file of lines, locked for this run.

    While it is not known that they are of this run (is_ours), the first write replaces them.
    """
    same_command = "the same command" # that resumes the run; later with the run's seed

    def __init__(self, path: str):
        self.path = path
        self.is_new = not os.path.exists(path) # a link may lead nowhere
        self.file = open_output(path)
        # Some network drives and FUSE give a file another inode number at each look.
        self.has_inode = is_at(path, self.file)
        self.is_ours = False
        self.end = 0 # how many bytes the file has, if is_ours

    def checked_size(self) -> int:
        """The size in bytes. If another program has moved, deleted or replaced the file, save a
        copy of it beside its place and raise ValueError.
        """
        path = self.path
        if is_at(path, self.file):
            return os.fstat(self.file.fileno()).st_size # the path may go meanwhile
        if not self.has_inode:
            return os.path.getsize(path)
        self.path = f"{path}.{os.getpid()}"
        with name_write_errors(self.path):
            # This finds a file without a name, too.
            shutil.copyfile(f"/proc/self/fd/{self.file.fileno()}", self.path)
            self.file = open(self.path, "ab") # noqa: SIM115, as in open_output
        raise ValueError(f"{path} was moved, deleted or replaced while this run wrote to it: its "
                         f"samples, if any, are in {self.path}; rename that to {path}, and "
                         f"{self.same_command} goes on after them")

    def mark_saved(self, samples: Iterator[Result], run: Run, watch: bool) -> Iterator[Result]:
        """Yield the samples. Those in the file are marked as saved.

        watch: the file may also have samples of other models. Raises ValueError, without changing
        the file, if it is from another run.
        """
        num_bytes = self.checked_size() # the file must be in its place
        if num_bytes > LARGE:
            logger.info(f"{self.path}: reading the {num_bytes / 2**20:.0f} MB that are saved")
        num_saved = 0
        for where, record in self.continue_lines(run, watch):
            sample = next(samples, None)
            if sample is None:
                check_index(record["index"], num_saved, where)
                raise ValueError(f"{where}, is one sample more than this run generates: give the "
                                 "file another name, or replace it with --overwrite")
            run.check(record, sample, where)
            mark(sample, record)
            num_saved += 1
            yield sample
        new = list(islice(samples, 1))
        if num_saved:
            saved = plural(num_saved, "text" if "score" in run.settings else "sample")
            if watch:
                saved += " of this checkpoint"
            self.announce_saved(saved, is_complete=not new)
        yield from chain(new, samples)

    def announce_saved(self, saved: str, is_complete: bool) -> None:
        if is_complete:
            logger.info(f"{self.path} is complete, with {saved}: nothing to do")
        else:
            logger.info(f"{self.path} holds {saved} already: resuming after them")

    def continue_lines(self, run: Run, watch: bool) -> Iterator[tuple[str, Record]]:
        """Yield the records in the file, with their places. Then the file is ours: the next write
        continues its lines.

        watch: leave out those of other models.
        """
        num_logprobs = run.settings.get("logprobs")
        has_other_logprobs = False
        end = 0
        line = b"\n"
        for where, start, line, record in read_records(self.path):
            end = start + len(line)
            has_other_logprobs |= record["settings"].get("logprobs") != num_logprobs
            if watch and record["checkpoint"].get("crc32") != run.checkpoint_id["crc32"]:
                check_equal(record["settings"], run.settings, where)
            else:
                yield where, record
        self.file.truncate(end)
        self.end = end
        self.is_ours = True
        if not line.endswith(b"\n"):
            self.write(b"\n")
        if has_other_logprobs:
            logger.warning(f"{self.path} has lines that were not saved with logprobs={num_logprobs}"
                           ": they stay as they are, also on a page; --overwrite generates all "
                           "samples again")

    def write(self, line: bytes) -> None:
        """Raises ValueError if another program has changed the file."""
        if self.checked_size() != self.end and self.is_ours:
            self.is_ours = False # no page is made of what is left
            raise ValueError(f"another program changed {self.path} while this run wrote to it: see "
                             f"whether its lines are whole; {self.same_command} goes on after them")
        with name_write_errors(self.path):
            if not self.is_ours:
                self.file.truncate(0)
                self.is_ours = True
            try:
                num_written = 0
                # One call, unless the disk is full: Ctrl-C never leaves half a line.
                while num_written < len(line):
                    num_written += os.write(self.file.fileno(), line[num_written:])
            except OSError:
                self.file.truncate(self.end) # only whole lines stay
                raise
            self.end += len(line)


def mark(sample: Result, record: Record) -> None:
    """Mark a sample, or a score, as saved. Printer.print_total needs the sums of all scores."""
    sample.already_saved = True
    if isinstance(sample, Score):
        for name in SCORE_FIELDS:
            setattr(sample, name, record[name])


# ---- opening

def open_output(path: str, is_second: bool = False) -> BinaryIO:
    """Open a file for reading and appending, and lock it for this run.

    Its content stays. is_second: once was not enough.
    Raises ValueError or OSError, which names the file, if it cannot be used, if another run has
    locked it, or if sample.py has not written it.
    """
    with suppress(OSError): # there is no such file, or standard output is closed
        if os.path.samefile(path, 1):
            raise ValueError(f"{path} is where standard output goes: give another path; out_file=- "
                             "prints the lines instead of the samples")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is a folder, a device or a pipe, and not a file: give another "
                         "path")
    with name_write_errors(path):
        file = open(path, "a+b") # noqa: SIM115, it stays open until the run ends
    with suppress(ImportError, OSError): # Windows, and file systems without locks
        import fcntl
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(f"another run writes to {path}: give the file another name") from None
    if not (is_second or is_at(path, file)): # another run, which has ended, removed it meanwhile
        file.close()
        return open_output(path, is_second=True)
    file.seek(0)
    begin = file.read(200) # a new file has nothing, that of a killed run perhaps half a line
    is_line = LINE_START_OF_ANY_VERSION.match(begin) or LINE_START.startswith(begin)
    if not (is_line or PAGE.match(begin)):
        file.close()
        raise ValueError(f"{path} was not written by sample.py, or its beginning was edited, so it "
                         "is neither continued nor replaced: move it, or give another path")
    return file


def is_at(path: str, file: BinaryIO) -> bool:
    """Whether an open file is the one at this path."""
    try:
        return os.path.samefile(path, file.fileno())
    except (FileNotFoundError, NotADirectoryError):
        return False
