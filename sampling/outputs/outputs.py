"""Saves the samples of a run: lines in out_file, which a later run resumes, and the page that is made from them."""
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from sampling.outputs import html
from sampling.outputs.console import is_tty, name_write_errors, sanitize
from sampling.outputs.jsonl import PAGE, LineFormat, check_replaceable, is_complete, open_output, run_settings
from sampling.params import Sample

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
        self.can_resume = self.out_file not in (None, "-")
        self.jsonl: BinaryIO | None = None # out_file; if it is no file, a temporary file with the lines of the page
        self.format: LineFormat | None = None # None: the files are not open yet
        self.num_saved = 0 # samples of the current model that out_file held before
        self.next_page_time = 0.0

    def open(self, model: "LoadedModel", samples: Iterator[Sample]) -> Iterator[Sample]:
        """Open the files for the samples of a model. Returns the samples, marked as LineFormat.resume says.

        With watch, another model may follow.
        """
        if self.format is None:
            self.open_files()
        checkpoint_id = {name: getattr(model.checkpoint, name) for name in ("path", "crc32", "iter_num")}
        run = run_settings(self.settings, model.backend.device.type, model.dtype_name)
        self.format = LineFormat(checkpoint_id, run, saved_logprobs(self.settings))
        if not self.can_resume or self.overwrite:
            return samples
        num_earlier = self.format.count_earlier_lines(self.jsonl) if self.settings["watch"] else 0
        self.jsonl.seek(0)
        self.num_saved = sum(map(is_complete, self.jsonl)) - num_earlier
        return self.format.resume(self.jsonl, samples, num_earlier, self.num_saved)

    def open_files(self) -> None:
        """Open out_file, or a temporary file. Raises ValueError if there is a page of another run."""
        is_resumed = False
        if self.can_resume:
            self.jsonl = open_output(self.out_file)
            if self.overwrite:
                check_replaceable(self.jsonl, self.settings["start"])
            else:
                is_resumed = self.jsonl.read(1) != b""
        if self.html_file is None:
            return
        with open_output(self.html_file) as page:
            if self.overwrite:
                check_replaceable(page, self.settings["start"])
            elif (begin := page.read(200)) and not (is_resumed and PAGE.match(begin)):
                raise ValueError(f"{self.html_file} exists already, and nothing is overwritten: give html_file another "
                                 "name, or replace it with --overwrite")
        if self.jsonl is None:
            from tempfile import TemporaryFile
            self.jsonl = TemporaryFile(dir=os.path.dirname(os.path.realpath(self.html_file))) # noqa: SIM115

    def write(self, sample: Sample) -> None:
        """Save a finished sample, and make the page anew if it is time."""
        if not (self.out_file or self.html_file):
            return
        line = self.format.line(sample)
        if self.uses_stdout:
            text = line.decode()
            with name_write_errors("standard output"):
                print(sanitize(text) if is_tty(sys.stdout) else text, end="", flush=True)
        if self.jsonl is not None:
            if self.overwrite:
                self.jsonl.truncate(0)
                self.overwrite = False
            with name_write_errors(self.out_file if self.can_resume else self.html_file):
                self.jsonl.seek(0, os.SEEK_END) # the page is read from the same file
                self.jsonl.write(line)
                self.jsonl.flush()
        if self.html_file and time.monotonic() >= self.next_page_time:
            self.write_page()

    def write_page(self) -> None:
        """Make html_file, if there is one, of all samples so far."""
        if self.html_file and self.jsonl is not None:
            begin = time.monotonic()
            html.write_page(self.html_file, [self.jsonl])
            end = time.monotonic()
            self.next_page_time = end + max(PAGE_INTERVAL, 20 * (end - begin))


def saved_logprobs(settings: Mapping[str, Any]) -> int | None:
    """The setting logprobs, or what the page needs if that is more."""
    return max(html.NUM_ALTERNATIVES, settings["logprobs"] or 0) if settings["html_file"] else settings["logprobs"]


def num_logprobs(settings: Mapping[str, Any]) -> int | None:
    """How many top log-probabilities the outputs need: out_file, the page or the terminal. None if none needs any."""
    num_saved = saved_logprobs(settings)
    return 0 if num_saved is None and (settings["out_file"] or settings["show_probs"]) else num_saved
