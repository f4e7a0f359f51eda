"""Saves the samples of a run: lines in out_file, which a later run resumes, and the page that is made from them."""
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO

from sampling.outputs.console import is_tty, log, log_replacements, plural, sanitize
from sampling.outputs.html import NUM_ALTERNATIVES, write_page
from sampling.outputs.jsonl import LineFormat, is_beginning, is_json, parse_record, reproducibility_settings
from sampling.outputs.output_file import PAGE, append, check_not_removed, check_replaceable, open_output
from sampling.params import Sample, SampleRequest

if TYPE_CHECKING: # the import would load torch
    from sampling.generation.assembly import LoadedModel

PAGE_INTERVAL = 2 # seconds between two pages, and at least 20 times as long as writing one takes


class Outputs:
    """Where a run saves its samples: out_file or standard output, html_file, several or none of them.

    Lines that out_file already holds stay, and resume checks them. With overwrite, the first write removes them: a run
    that fails earlier changes no file. The page is made from the lines of out_file. If these lack the log-probabilities
    that it shows, the lines of another file have them: html_file.jsonl, which a later run needs, or a temporary file.
    """

    def __init__(self, settings: Mapping[str, Any]):
        self.settings, self.overwrite = settings, settings["overwrite"]
        self.out_file, self.html_file = settings["out_file"], settings["html_file"]
        self.uses_stdout = self.out_file == "-" # then nothing else may be printed there
        self.lines: BinaryIO | None = None # out_file
        self.page_lines: BinaryIO | None = None # the other file
        self.format: LineFormat | None = None # None: the files are not open yet
        self.is_resumed = self.has_written = False
        # Of the samples that the current model is to generate: where their lines begin in out_file, how many lines are
        # before them, and how many of them were saved already. Only with watch, out_file has lines of earlier models.
        self.start = self.num_before = self.num_saved = 0
        self.page_time = 0.0 # when to write the page again

    def open(self, model: "LoadedModel") -> None:
        """Open the files for the samples of a model. With watch, another model may follow.

        Raises OSError or ValueError if one of the files cannot be used.
        """
        if self.format is None:
            self.open_files()
        checkpoint = model.checkpoint
        checkpoint_id = {"path": checkpoint.path, "crc32": checkpoint.crc32, "iter_num": checkpoint.iter_num}
        run = reproducibility_settings(self.settings, model.backend.device.type, model.dtype_name)
        self.format = LineFormat(checkpoint_id, run, self.settings["logprobs"])
        self.page_format = LineFormat(checkpoint_id, run, NUM_ALTERNATIVES)
        if self.lines is not None and not self.overwrite:
            self.find_start()

    def open_files(self) -> None:
        """Open out_file and the files of the page. Raises ValueError if there is a page of another run."""
        start, page = self.settings["start"], self.html_file
        for path in (self.out_file, page) if self.overwrite else ():
            if path not in (None, "-"):
                check_replaceable(path, start)
        if self.out_file and not self.uses_stdout:
            self.lines = open_output(self.out_file)
            self.is_resumed = not self.overwrite and self.lines.seek(0, os.SEEK_END) > 0
        if page is None:
            return
        with open_output(page) as file:
            begin = file.read(200)
        if begin and not self.overwrite and not (self.is_resumed and PAGE.match(begin)):
            raise ValueError(f"{page} exists already, and nothing is overwritten: give html_file another name, or "
                             "replace it with --overwrite")
        if self.lines is None:
            from tempfile import TemporaryFile
            self.page_lines = TemporaryFile(dir=os.path.dirname(os.path.realpath(page))) # noqa: SIM115
        elif (self.settings["logprobs"] or 0) < NUM_ALTERNATIVES:
            check_replaceable(f"{page}.jsonl", start)
            self.page_lines = open_output(f"{page}.jsonl")

    def find_start(self) -> None:
        """Find the lines of this model in out_file. Raises ValueError if, with watch, they are from another run."""
        self.start = self.num_before = end = number = 0
        record = last = None
        self.lines.seek(0)
        for line in self.lines:
            if not (line.endswith(b"\n") or is_json(line)): # half a line
                break
            number += 1
            if self.settings["watch"]:
                record, last = parse_record(line, f"{self.out_file}, line {number}"), line
                if record.get("index") == 0:
                    self.start, self.num_before = end, number - 1
            end += len(line)
        if record and record["checkpoint"].get("crc32") != self.format.checkpoint_id["crc32"]:
            self.format.check_settings(record, f"{self.out_file}, line {number}")
            self.lines.truncate(end)
            if not last.endswith(b"\n"):
                end += self.lines.write(b"\n")
            self.start, self.num_before = end, number
        self.num_saved = number - self.num_before

    def resume(self, requests: Iterator[SampleRequest]) -> Iterator[SampleRequest]:
        """Yield all requests. Those with samples in out_file are marked as already saved.

        Removes a truncated last line, and continues after the line before it. Raises ValueError, without changing the
        file, if out_file is from another run.
        """
        requests = iter(requests)
        if self.lines is None or self.overwrite:
            yield from requests
            return
        end, num_saved = self.start, 0
        self.lines.seek(end)
        while line := self.lines.readline():
            request = next(requests, None)
            if request is None:
                raise ValueError(f"{self.out_file} holds {self.num_saved} samples, more than this run generates: give "
                                 "out_file another name, or replace it with --overwrite")
            if not line.endswith(b"\n") and is_beginning(line, request):
                self.lines.truncate(end)
                requests = chain([request], requests)
                break
            self.format.check(line, request, f"{self.out_file}, line {self.num_before + request.index + 1}")
            if not line.endswith(b"\n"):
                self.lines.write(b"\n")
            end, num_saved = end + len(line), num_saved + 1
            yield replace(request, already_saved=True)
        request = next(requests, None)
        if request is None:
            log(f"{self.out_file} is complete, with {plural(num_saved, 'sample')}: nothing to sample")
            return
        if num_saved:
            log(f"{self.out_file} holds {plural(num_saved, 'sample')} already: resuming after them")
        yield from chain([request], requests)

    def write(self, sample: Sample) -> None:
        """Save a finished sample. Raises OSError if it cannot be written."""
        if not self.has_written:
            self.remove_old_lines()
        if self.page_lines is not None: # first, so that it never lacks a sample of out_file
            append(self.page_lines, self.page_format.line(sample))
        if self.uses_stdout:
            line = self.format.line(sample).decode()
            print(sanitize(line) if is_tty(sys.stdout) else line, end="", flush=True)
            log_replacements()
        elif self.lines is not None:
            check_not_removed(self.lines)
            append(self.lines, self.format.line(sample))
        if self.html_file and time.monotonic() >= self.page_time:
            self.finish()

    def remove_old_lines(self) -> None:
        """Before the first sample: remove the lines that it replaces, and half a line of a run that was killed."""
        if self.overwrite and self.lines is not None:
            self.lines.truncate(0)
        if self.page_lines is not None:
            self.page_lines.seek(0)
            end = sum(len(line) for line in self.page_lines if line.endswith(b"\n"))
            self.page_lines.truncate(end if self.is_resumed else 0)
        self.has_written, self.overwrite = True, False

    def finish(self) -> None:
        """Make the page of all samples so far."""
        if self.html_file and self.format is not None:
            begin = time.monotonic()
            write_page(self.html_file, {"": [file for file in (self.lines, self.page_lines) if file is not None]})
            end = time.monotonic()
            self.page_time = end + max(PAGE_INTERVAL, 20 * (end - begin))

    def close(self) -> None:
        """Close the files."""
        for file in self.lines, self.page_lines:
            if file is not None:
                file.close()


def num_logprobs(settings: Mapping[str, Any]) -> int | None:
    """How many top log-probabilities the outputs need: out_file, the page or the terminal. None if none needs any."""
    in_file = settings["logprobs"] or 0
    if settings["html_file"]:
        return max(NUM_ALTERNATIVES, in_file)
    return in_file if settings["out_file"] or settings["show_probs"] else None
