"""The files of samples: their lines of JSON, and how a later run may continue or replace them."""
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from sampling.inputs.prompts import MULTI_KINDS, RESULT_FIELDS, parse_start
from sampling.outputs.console import name_write_errors, plural
from sampling.params import SAMPLING_SETTINGS, Sample, Score, Token, as_list

logger = logging.getLogger(__name__)
VERSION = 5 # of the fields of a line
SAMPLE_FIELDS = "text", "num_tokens", "finish_reason", "cumulative_logprob"
# Not None, so that the lines of several runs are one table.
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SCORE_FIELDS = "num_tokens", "num_bytes", "cumulative_logprob"
# Some readers take them for the end of a line.
SEPARATORS = {0x85: r"\u0085", 0x2028: r"\u2028", 0x2029: r"\u2029"}

# How the files begin that sample.py writes.
LINE_START = b'{"version": %d, "index": ' % VERSION # a line of this version
LINE_START_OF_ANY_VERSION = re.compile(rb'\{"version": \d+, "index": ')
PAGE = re.compile(rb'<!DOCTYPE html>.*<meta name="generator" content="sample.py">', re.DOTALL)


@dataclass
class Run:
    """What decides the samples of a model. Turns them into lines, and recognises the lines of the
    same run.
    """
    checkpoint_id: dict[str, Any] # "path", "crc32", "iter_num" and "val_loss"
    # With logprobs, only if lines have them: then all lines of a file have the same fields.
    settings: dict[str, Any]

    def line(self, sample: Sample) -> bytes:
        fields = SCORE_FIELDS if isinstance(sample, Score) else SAMPLE_FIELDS
        results = {name: getattr(sample, name) for name in fields}
        results["cumulative_logprob"] = round_sum(sample)
        if (num_top := self.settings.get("logprobs")) is not None and sample.tokens:
            results["logprobs"] = {"content": [ # as in OpenAI's chat completions, with ids
                filled({**token_fields(token), "top_logprobs": list(map(token_fields, token.top_logprobs[:num_top]))})
                for token in sample.tokens]}
        if "seed" in self.settings: # not for scores
            results["seed"] = self.settings["seed"]
        text = json.dumps({**self.first_fields(sample), **results, "checkpoint": filled(self.checkpoint_id),
                           "settings": self.settings}, ensure_ascii=False)
        # A lone surrogate becomes an escape, because UTF-8 has none.
        return text.translate(SEPARATORS).encode("utf-8", errors="backslashreplace") + b"\n"

    def check(self, record: Mapping[str, Any], sample: Sample, where: str) -> None:
        """Raise ValueError, with where and the difference, unless this is the record of this sample
        of this run.
        """
        first = self.first_fields(sample)
        checksum = "the checkpoint's checksum"
        saved = {name: value for name, value in record.items() if name in first or name not in RESULT_FIELDS}
        check_equal({**record["settings"], checksum: record["checkpoint"].get("crc32"), **saved},
                    {**self.settings, checksum: self.checkpoint_id["crc32"], **first}, where)

    def first_fields(self, sample: Sample) -> dict[str, Any]:
        prompt = sample.prompt
        of_prompt = {}
        if not isinstance(sample, Score):
            of_prompt["prompt_index"], of_prompt["sample_index"] = divmod(
                # Of one prompt, there may be more later.
                sample.index, self.settings.get("num_samples", sys.maxsize))
        prompt_id = {} if prompt.id is None else {"id": prompt.id}
        return {"version": VERSION, "index": sample.index, **of_prompt, "prompt": prompt.text, **prompt_id,
                **prompt.other_fields}


class LinesFile:
    """A file of lines, locked for this run. Unless is_ours (they are known to be of this run), the
    first write replaces them.
    """

    def __init__(self, path: str):
        self.path = path
        self.is_ours = False
        self.is_new = not os.path.exists(path) # a link may lead nowhere
        self.file = open_output(path)
        self.end = 0 # how many bytes the file has, once is_ours

    @property
    def size(self) -> int:
        """In bytes. Raises ValueError if the file is not there any more."""
        self.require_place()
        return os.path.getsize(self.path)

    def require_place(self) -> None:
        """Raises ValueError if another program has moved, deleted or replaced the file. A copy of
        it is made first.
        """
        if is_at(self.path, self.file):
            return
        path = self.path
        self.path = f"{path}.{os.getpid()}"
        with name_write_errors(self.path):
            # This also works for a file without a name.
            shutil.copyfile(f"/proc/self/fd/{self.file.fileno()}", self.path)
            self.file = open(self.path, "ab") # noqa: SIM115, as in open_output
        raise ValueError(f"{path} was moved, deleted or replaced while this run wrote to it: its samples, if any, are "
                         f"in {self.path}; rename that to {path}, and the same command goes on after them")

    def remove(self) -> None:
        os.unlink(os.path.realpath(self.path)) # a link stays

    def mark_saved(self, samples: Iterator[Sample], run: Run, watch: bool) -> Iterator[Sample]:
        """Yield the samples. Those in the file are marked as already saved. watch: it may hold
        several models. Raises ValueError, without changing the file, if it is from another run.
        """
        num_saved = 0
        end = 0
        lacks_newline = False
        self.require_place()
        for where, start, line, record in read_records(self.path):
            end = start + len(line)
            lacks_newline = not line.endswith(b"\n")
            # The line is of another model.
            if watch and record["checkpoint"].get("crc32") != run.checkpoint_id["crc32"]:
                check_equal(record["settings"], run.settings, where)
            elif sample := next(samples, None):
                run.check(record, sample, where)
                num_saved += 1
                sample.already_saved = True
                if isinstance(sample, Score): # for the sums of all texts
                    sums = list(map(record.get, SCORE_FIELDS))
                    if [type(value) for value in sums] != [int, int, float]:
                        raise ValueError(f"{where}: its sums are not those that sample.py wrote")
                    sample.num_tokens, sample.num_bytes, sample.cumulative_logprob = sums
                yield sample
            else:
                raise ValueError(f"{where}, is one sample more than this run generates: give the file another name, or "
                                 "replace it with --overwrite")
        self.file.truncate(end)
        self.is_ours = True
        self.end = end
        if lacks_newline:
            self.write(b"\n")
        first_new = next(samples, None)
        if num_saved:
            saved = plural(num_saved, "text" if "score" in run.settings else "sample") + " of this checkpoint" * watch
            logger.info(f"{self.path} holds {saved} already: resuming after them" if first_new
                        else f"{self.path} is complete, with {saved}: nothing to do")
        if first_new:
            yield first_new
        yield from samples

    def write(self, line: bytes) -> None:
        """Raises ValueError if another program has changed the file."""
        if self.size != self.end and self.is_ours:
            self.is_ours = False # no page is made of what is left
            raise ValueError(f"another program changed {self.path} while this run wrote to it: see whether its lines "
                             "are whole; the same command goes on after them")
        with name_write_errors(self.path):
            if not self.is_ours:
                self.file.truncate(0)
                self.is_ours = True
            self.end += len(line)
            while line: # once, unless the disk is full: Ctrl-C never finds half a line
                line = line[os.write(self.file.fileno(), line):]


def check_equal(saved: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Raise ValueError, with where and the first difference, unless the saved values are the wanted
    ones.
    """
    for name in dict.fromkeys([*wanted, *saved]):
        if saved.get(name) != wanted.get(name):
            raise ValueError(f"{where}, is from another run: {name} is {saved.get(name)!r:.100} there, and "
                             f"{wanted.get(name)!r:.100} here; give the file another name, run with its "
                             "settings, or replace it with --overwrite")


def run_settings(settings: Mapping[str, Any], device_type: str, dtype_name: str) -> dict[str, Any]:
    """The settings that decide the text of a sample, and what is saved. Values with the same
    meaning become equal.
    """
    names = [] if settings["score"] else [name for name in SAMPLING_SETTINGS if name != "draft"]
    if names and parse_start(settings["start"])[0] not in MULTI_KINDS:
        names.remove("num_samples") # a longer run of one prompt may continue the file
    kept = {name: OFF.get(name) if settings[name] is None else settings[name] for name in [*names, "compile"]}
    kept |= {name: settings[name] for name in ("tokenizer", "score") if settings[name]}
    if names:
        # Not a list, which would have no type if it is empty.
        kept["stop"] = json.dumps(as_list(kept["stop"]))
    return filled({**kept, "device": device_type, "dtype": dtype_name, "logprobs": settings["logprobs"]})


def filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have a value: None and an empty list are of another type than the field in
    other lines.
    """
    return {name: value for name, value in fields.items() if value not in (None, [])}


def token_fields(token: Token) -> dict[str, Any]:
    return {"id": token.id, "token": token.text, "logprob": round_logprob(token.logprob)}


def round_logprob(logprob: float | None) -> float | None:
    """Round to three decimals, because further ones depend on which samples shared a batch."""
    return None if logprob is None else round(logprob, 3) + 0.0 # never -0.0


def round_sum(sample: Sample) -> float | None:
    """The sum of the log-probabilities: of a short text with more decimals, as the mean is printed
    with four.
    """
    if isinstance(sample, Score):
        return round(sample.cumulative_logprob, max(3, 6 - len(str(sample.num_tokens)))) + 0.0
    return round_logprob(sample.cumulative_logprob)


def read_records(path: str) -> Iterator[tuple[str, int, bytes, dict[str, Any]]]:
    """Yield the place of each line for messages, its position, the line and its record, but no
    truncated last line. Raises ValueError if sample.py did not write a line, or if another version
    did.
    """
    types = {"version": int, "index": int, "prompt": str, "settings": dict, "checkpoint": dict}
    start = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip(): # an editor may add a blank line
                start += len(line)
                continue
            record = None
            where = f"{path}, line {number}"
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
            # Or zeros, after a crash.
            is_cut = LINE_START.startswith(line[:len(LINE_START)]) or not line.strip(b"\0")
            if record is None and not line.endswith(b"\n") and is_cut:
                logger.info(f"{where} is truncated, so it is left out")
                return
            if not (isinstance(record, dict) and all(type(record.get(name)) is kind for name, kind in types.items())
                    and record["version"] == VERSION):
                is_known = LINE_START_OF_ANY_VERSION.match(line)
                who = "another version of sample.py" if is_known else "another program, or an editor,"
                raise ValueError(f"{where}: {who} wrote it, so the file is neither used nor changed: remove the line, "
                                 "give another file, or replace the whole file with --overwrite")
            yield where, start, line, record
            start += len(line)


# ---- files

def open_output(path: str | os.PathLike) -> BinaryIO:
    """Open a file for reading and appending, and lock it for this run. Its content stays. Raises
    ValueError or OSError, which names it, if it cannot be used, if another run has locked it, or if
    sample.py has not written it.
    """
    with suppress(OSError): # there is no such file, or standard output is closed
        if os.path.samestat(os.stat(path), os.fstat(1)):
            raise ValueError(f"{path} is where standard output goes: give another path; out_file=- prints the lines "
                             "instead of the samples")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is a folder, a device or a pipe, and not a file: give another path")
    with name_write_errors(path):
        file = open(path, "a+b") # noqa: SIM115, it stays open until the run ends
    with suppress(ImportError, OSError): # Windows, and file systems without locks
        import fcntl
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(f"another run writes to {path}: give the file another name") from None
    if not is_at(path, file): # another run, which has ended, removed it meanwhile
        file.close()
        return open_output(path)
    file.seek(0)
    begin = file.read(200) # of a new file nothing, and of a killed run perhaps a part of a line
    if not (LINE_START_OF_ANY_VERSION.match(begin) or LINE_START.startswith(begin) or PAGE.match(begin)):
        file.close()
        raise ValueError(f"{path} was not written by sample.py, or its beginning was edited, so it is neither "
                         "continued nor replaced: move it, or give another path")
    return file


def is_at(path: str | os.PathLike, file: BinaryIO) -> bool:
    """Whether an open file is the one at this path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return False
