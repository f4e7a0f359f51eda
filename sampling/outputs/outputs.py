"""Saves the samples of a run: lines in out_file, which a later run resumes, and the page that is made from them."""
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO

from sampling.outputs import html
from sampling.outputs.console import is_tty, log, plural, sanitize
from sampling.outputs.jsonl import LineFormat, is_complete, is_truncated_line_of, parse_record, reproducibility_settings
from sampling.outputs.output_file import PAGE, append, check_replaceable, open_output
from sampling.params import Sample, SampleRequest

if TYPE_CHECKING: # the import would load torch
    from sampling.generation.engine import LoadedModel

PAGE_INTERVAL = 2 # seconds between two pages, and at least 20 times as long as writing one takes


class Outputs:
    """Saves samples in out_file or on standard output, and makes html_file from the saved lines.

    Lines that out_file already holds stay, and resume checks them. With overwrite, the first write removes them: a run
    that fails earlier changes no file.
    """

    def __init__(self, settings: Mapping[str, Any]):
        self.settings, self.overwrite = settings, settings["overwrite"]
        self.out_file, self.html_file = settings["out_file"], settings["html_file"]
        self.uses_stdout = self.out_file == "-" # then nothing else may be printed there
        self.can_resume = bool(self.out_file) and not self.uses_stdout
        self.jsonl: BinaryIO | None = None # out_file; if it is no file, a temporary file with the lines of the page
        self.format: LineFormat | None = None # None: the files are not open yet
        # The lines of the current model in out_file: where they begin, how many lines are before them, and how many of
        # them there are. Only with watch, there are lines of earlier models.
        self.start_offset = self.num_earlier_lines = self.num_saved = 0
        self.next_page_time = 0.0

    def open(self, model: "LoadedModel", requests: Iterable[SampleRequest]) -> Iterator[SampleRequest]:
        """Open the files for the samples of a model. Returns the requests, marked as resume describes.

        With watch, another model may follow.
        """
        if self.format is None:
            self.open_files()
        checkpoint = model.checkpoint
        checkpoint_id = {"path": checkpoint.path, "crc32": checkpoint.crc32, "iter_num": checkpoint.iter_num}
        run = reproducibility_settings(self.settings, model.backend.device.type, model.dtype_name)
        self.format = LineFormat(checkpoint_id, run, saved_logprobs(self.settings))
        if self.can_resume and not self.overwrite:
            if self.settings["watch"]:
                self.start_offset, self.num_earlier_lines = self.find_start_of_model()
            self.jsonl.seek(self.start_offset)
            self.num_saved = sum(is_complete(line) for line in self.jsonl)
        return self.resume(iter(requests))

    def open_files(self) -> None:
        """Open out_file, or a temporary file. Raises ValueError if there is a page of another run."""
        is_resumed = False
        if self.can_resume:
            if self.overwrite:
                check_replaceable(self.out_file, self.settings["start"])
            self.jsonl = open_output(self.out_file)
            is_resumed = not self.overwrite and self.jsonl.seek(0, os.SEEK_END) > 0
        if self.html_file is None:
            return
        if self.overwrite:
            check_replaceable(self.html_file, self.settings["start"])
        with open_output(self.html_file) as file:
            begin = file.read(200)
        if begin and not self.overwrite and not (is_resumed and PAGE.match(begin)):
            raise ValueError(f"{self.html_file} exists already, and nothing is overwritten: give html_file another "
                             "name, or replace it with --overwrite")
        if self.jsonl is None:
            from tempfile import TemporaryFile
            self.jsonl = TemporaryFile(dir=os.path.dirname(os.path.realpath(self.html_file))) # noqa: SIM115

    def find_start_of_model(self) -> tuple[int, int]:
        """With watch: where in out_file the lines of this model begin, and how many lines are before them.

        If the last lines are of another model, these follow them. Raises ValueError if they are from another run.
        """
        start = num_before = end = number = 0
        record = last = None
        self.jsonl.seek(0)
        for line in filter(is_complete, self.jsonl):
            number, last = number + 1, line
            record = parse_record(line, f"{self.out_file}, line {number}")
            if record["index"] == 0:
                start, num_before = end, number - 1
            end += len(line)
        if record is None or record["checkpoint"].get("crc32") == self.format.checkpoint_id["crc32"]:
            return start, num_before
        self.format.check_settings(record, f"{self.out_file}, line {number}")
        self.jsonl.truncate(end)
        if not last.endswith(b"\n"):
            end += self.jsonl.write(b"\n")
        return end, number

    def resume(self, requests: Iterator[SampleRequest]) -> Iterator[SampleRequest]:
        """Yield all requests. Those with samples in out_file are marked as already saved.

        Removes a truncated last line, and continues after the line before it. Raises ValueError, without changing the
        file, if out_file is from another run.
        """
        if not self.can_resume or self.overwrite:
            yield from requests
            return
        end, num_saved = self.start_offset, 0
        self.jsonl.seek(end)
        while line := self.jsonl.readline():
            request = next(requests, None)
            if request is None:
                raise ValueError(f"{self.out_file} holds {self.num_saved} samples, more than this run generates: give "
                                 "out_file another name, or replace it with --overwrite")
            if is_truncated_line_of(request, line):
                self.jsonl.truncate(end)
                requests = chain([request], requests)
                break
            self.format.check(line, request, f"{self.out_file}, line {self.num_earlier_lines + request.index + 1}")
            if not line.endswith(b"\n"):
                self.jsonl.write(b"\n")
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
        """Save a finished sample, and make the page anew if it is time."""
        if not (self.out_file or self.html_file):
            return
        line = self.format.line(sample)
        if self.uses_stdout:
            text = line.decode()
            print(sanitize(text) if is_tty(sys.stdout) else text, end="", flush=True)
        if self.jsonl is not None:
            if self.overwrite:
                self.jsonl.truncate(0)
                self.overwrite = False
            append(self.jsonl, line)
        if self.html_file and time.monotonic() >= self.next_page_time:
            self.write_page()

    def write_page(self) -> None:
        """Make html_file, if there is one, of all samples so far."""
        if self.html_file and self.jsonl is not None:
            begin = time.monotonic()
            html.write_page(self.html_file, {str(self.out_file): self.jsonl})
            end = time.monotonic()
            self.next_page_time = end + max(PAGE_INTERVAL, 20 * (end - begin))


def saved_logprobs(settings: Mapping[str, Any]) -> int | None:
    """The setting logprobs, or what the page needs if that is more."""
    return max(html.NUM_ALTERNATIVES, settings["logprobs"] or 0) if settings["html_file"] else settings["logprobs"]


def num_logprobs(settings: Mapping[str, Any]) -> int | None:
    """How many top log-probabilities the outputs need: out_file, the page or the terminal. None if none needs any."""
    num_saved = saved_logprobs(settings)
    return 0 if num_saved is None and (settings["out_file"] or settings["show_probs"]) else num_saved
