"""The files of samples: their lines of JSON, and how a later run may continue or replace them."""
import functools
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from sampling.configurator import as_list
from sampling.inputs.prompts import MULTI_KINDS, parse_start
from sampling.outputs.console import name_write_errors, plural
from sampling.params import RESULT_FIELDS, SAMPLING_SETTINGS, Settings
from sampling.samples import Result, Sample, Score, Token

logger = logging.getLogger(__name__)
Record = dict[str, Any] # a line
VERSION = 5 # changes with the fields of a line
CHECKSUM = "the checkpoint's checksum"
# The fields that every line has, and those for what came of the prompt, with their types.
FIELD_TYPES = {"version": int, "index": int, "prompt": str, "settings": dict, "checkpoint": dict}
SCORE_FIELDS = {"num_tokens": int, "num_bytes": int, "cumulative_logprob": float}
SAMPLE_FIELDS = {"text": str, "num_tokens": int, "finish_reason": str, "cumulative_logprob": float}
SAMPLE_TYPES = FIELD_TYPES | SAMPLE_FIELDS
SCORE_TYPES = FIELD_TYPES | SCORE_FIELDS
# The values of settings that are None: a field has the same type in the lines of all runs.
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
# Some readers take these characters for the end of a line.
SEPARATORS = {0x85: r"\u0085", 0x2028: r"\u2028", 0x2029: r"\u2029"}
REMOVE = "remove it and all lines after it, and give the command that wrote them again"
LARGE = 2**24 # bytes of a file that takes half a second or more to read

# How the files begin that sample.py writes.
LINE_START = b'{"version": %d, "index": ' % VERSION # a line of this version
LINE_START_OF_ANY_VERSION = re.compile(rb'\{"version": \d+, "index": ')
PAGE = re.compile(rb'<!DOCTYPE html>.*<meta name="generator" content="sample.py">', re.DOTALL)


@dataclass
class Run:
    """What decides the samples of a model.

    Makes lines of them, and recognises the lines of the same run.
    """
    checkpoint_id: Record # "path", "crc32", "iter_num" and "val_loss"
    settings: Record # as run_settings returns them

    def line(self, sample: Result) -> bytes:
        record = self.first_fields(sample)
        if isinstance(sample, Score):
            names = SCORE_FIELDS
            logprob = round_score(sample.cumulative_logprob, sample.num_tokens)
        else:
            names = SAMPLE_FIELDS
            logprob = rounded(sample.cumulative_logprob)
        for name in names:
            record[name] = getattr(sample, name)
        record["cumulative_logprob"] = logprob
        num_top = self.settings.get("logprobs")
        if num_top is not None and sample.tokens: # in the form of OpenAI's chat completions
            content = [token_fields(token, num_top) for token in sample.tokens]
            record["logprobs"] = {"content": content}
        if "seed" in self.settings: # scores have none
            record["seed"] = self.settings["seed"]
        record["checkpoint"] = filled(self.checkpoint_id)
        record["settings"] = self.settings
        text = json.dumps(record, ensure_ascii=False).translate(SEPARATORS)
        # UTF-8 has no lone surrogates, so they become escapes.
        return text.encode("utf-8", errors="backslashreplace") + b"\n"

    def check(self, record: Record, sample: Result, where: str) -> None:
        """Raises ValueError, with the difference, unless this is the sample's own record."""
        check_equal(record["settings"], self.settings, where)
        saved = {CHECKSUM: record["checkpoint"].get("crc32")}
        check_equal(saved, {CHECKSUM: self.checkpoint_id["crc32"]}, where)
        check_index(record["index"], sample.index, where)
        wanted = self.first_fields(sample)
        saved = {name: value for name, value in record.items()
                 if name in wanted or name not in RESULT_FIELDS}
        check_equal(saved, wanted, where)

    def first_fields(self, sample: Result) -> Record:
        prompt = sample.prompt
        fields = {"version": VERSION, "index": sample.index}
        if isinstance(sample, Sample):
            # A single prompt may get more samples later.
            num_samples = self.settings.get("num_samples", sys.maxsize)
            fields["prompt_index"], fields["sample_index"] = divmod(sample.index, num_samples)
        fields["prompt"] = prompt.text
        if prompt.id is not None:
            fields["id"] = prompt.id
        return fields | prompt.other_fields


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
        if is_at(path, self.file) or not self.has_inode:
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
            if isinstance(sample, Score): # Printer.print_total needs the sums of all texts
                for name in SCORE_FIELDS:
                    setattr(sample, name, record[name])
            sample.already_saved = True
            num_saved += 1
            yield sample
        new = next(samples, None)
        if num_saved:
            saved = plural(num_saved, "text" if "score" in run.settings else "sample")
            if watch:
                saved += " of this checkpoint"
            if new:
                logger.info(f"{self.path} holds {saved} already: resuming after them")
            else:
                logger.info(f"{self.path} is complete, with {saved}: nothing to do")
        if new:
            yield new
        yield from samples

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


def check_equal(saved: Record, wanted: Record, where: str) -> None:
    """Raises ValueError, with where and the first difference, unless the values are equal.

    logprobs changes no text, so saved lines may have other ones.
    """
    if saved == wanted:
        return
    for name in wanted | saved:
        found = saved.get(name)
        if found != wanted.get(name) and name != "logprobs":
            settings = f"--seed={found}" if name == "seed" else "its settings"
            raise ValueError(f"{where}, is from another run: {name} is {found!r:.100} there, and "
                             f"{wanted.get(name)!r:.100} here; give the file another name, run "
                             f"with {settings}, or replace it with --overwrite")


def check_index(found: int, wanted: int, where: str) -> None:
    """Raises ValueError unless the line at this place has the next sample."""
    if found > wanted:
        raise ValueError(f"{where}: the line of sample {wanted} is missing before it: put that "
                         f"back, or {REMOVE}")
    if found < wanted:
        raise ValueError(f"{where}: it is doubled, or moved: sample {found} comes before sample "
                         f"{wanted}, which should be here; remove the line that is doubled")


def run_settings(settings: Settings, device_type: str, dtype_name: str) -> Record:
    """The settings that decide the text of a sample, and what is saved of it.

    Values with the same meaning become equal.
    """
    kept = {}
    if not settings["score"]:
        for name in SAMPLING_SETTINGS:
            kept[name] = OFF.get(name) if settings[name] is None else settings[name]
        del kept["draft"] # it changes no text
        if parse_start(settings["start"])[0] not in MULTI_KINDS:
            del kept["num_samples"] # a longer run of one prompt may continue the file
        # The JSON is a text: an empty list would be of another type than a list of texts.
        kept["stop"] = json.dumps(as_list(kept["stop"]))
    for name in "compile", "tokenizer", "logprobs":
        kept[name] = settings[name]
    kept["score"] = settings["score"] or None
    kept["device"] = device_type
    kept["dtype"] = dtype_name
    return filled(kept)


def filled(fields: Record) -> Record:
    """The fields that have a value.

    None and an empty list are left out: their types are others than those of the fields in other
    lines.
    """
    return {name: value for name, value in fields.items() if value not in (None, [])}


def token_fields(token: Token, num_top: int = 0) -> Record:
    return filled({"id": token.id, "token": token.text, "logprob": rounded(token.logprob),
                   "top_logprobs": list(map(token_fields, token.top_logprobs[:num_top]))})


def rounded(value: float | None, num_digits: int = 3) -> float | None:
    """A log-probability has three decimals: further ones depend on which samples shared a batch."""
    return None if value is None else round(value, num_digits) + 0.0 # never -0.0


def round_score(logprob: float, num_tokens: int) -> float:
    """The sum over a short text keeps more decimals, because the mean is printed with four."""
    return rounded(logprob, max(3, 6 - len(str(num_tokens))))


def read_records(path: str) -> Iterator[tuple[str, int, bytes, Record]]:
    """For each line, yield its place for messages, its position, the line and its record.

    A truncated last line is left out.
    Raises ValueError if sample.py did not write a line, or if another version did.
    """
    start = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip(): # an editor may add a blank line
                where = f"{path}, line {number}"
                record = parse_line(line)
                if record is None and is_truncated(line):
                    logger.info(f"{where} is truncated, so it is left out")
                    return
                if not is_record(record):
                    reason = "another program, or an editor, wrote it: remove it"
                    if line.startswith(LINE_START):
                        reason = f"it is damaged, or was edited: {REMOVE}"
                    elif LINE_START_OF_ANY_VERSION.match(line):
                        reason = "another version of sample.py wrote it: run that version"
                    raise ValueError(f"{where}: {reason}, or give another file; this one is "
                                     "neither used nor changed")
                yield where, start, line, record
            start += len(line)


def parse_line(line: bytes) -> Record | None:
    """The record in a line; None if the line is damaged.

    Most lines have the same end, which is parsed once: these records share its dicts.
    """
    start, _, end = line.rpartition(b', "checkpoint": ')
    try:
        return json.loads(start.decode() + "}") | parse_end(end)
    except (ValueError, TypeError, RecursionError):
        return None


@functools.lru_cache(100)
def parse_end(end: bytes) -> Record:
    return json.loads(b'{"checkpoint": ' + end)


def is_truncated(line: bytes) -> bool:
    if line.endswith(b"\n"):
        return False
    is_start = LINE_START.startswith(line[:len(LINE_START)])
    return is_start or not line.strip(b"\0") # a crash may leave zeros


def is_record(value: Any) -> bool:
    """Whether a value has the fields of a line of this version."""
    if not isinstance(value, dict) or value.get("version") != VERSION:
        return False
    types = SCORE_TYPES if "num_bytes" in value else SAMPLE_TYPES
    return [type(value.get(name)) for name in types] == [*types.values()]


# ---- files

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
