"""Where samples go: lines in out_file, a page that is made from them, and the user's screen."""
import logging
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from sampling.inputs.prompts import parse_start
from sampling.outputs.console import before_exit, plural, start_progress_bar
from sampling.outputs.html import write_page
from sampling.outputs.jsonl import Record, Run, rounded, run_settings
from sampling.outputs.lines_file import PAGE, LinesFile, open_output
from sampling.outputs.printer import RULE, LinePrinter, Printer, Progress
from sampling.process import END_SIGNALS
from sampling.samples import Piece, Prompt, Result, Score
from sampling.settings import Settings, is_same_file

if TYPE_CHECKING: # the import would load torch
    import torch

    from sampling.text_generator import TextGenerator

logger = logging.getLogger(__name__)


class OutputFiles:
    """The files that a run writes: out_file and html_file. With watch, several models share them.

    html_file is made from the lines in out_file. Without an out_file, they go to a file named as
    html_file, with .jsonl. If overwrite allows it, the first write removes the lines of another
    run: a run that fails earlier changes no file.
    Raises ValueError or OSError, which names the file, if one of them cannot be used.
    """

    def __init__(self, out_file: str | None, html_file: str | None, start: str, overwrite: bool):
        self.html_file = html_file
        self.overwrite = overwrite
        path = None if out_file == "-" else out_file
        if html_file and path is None:
            path = f"{html_file.removesuffix('.html')}.jsonl"
        if path is None and sys.stdout is None:
            raise ValueError("standard output is closed, so the samples would be lost: give "
                             "out_file")
        self.lines = None
        if path:
            kind, prompts = parse_start(start)
            if kind != "TEXT" and is_same_file(path, prompts):
                raise ValueError(f"{path} is the file of the prompts: give out_file another name")
            self.lines = LinesFile(path)
            before_exit.append(self.close)
        self.page_end = 0 # how many bytes of the lines html_file shows
        if html_file:
            self.check_page()

    def check_page(self) -> None:
        """Raises ValueError or OSError unless html_file can be written, and may be replaced."""
        self.is_new_page = not os.path.exists(self.html_file)
        with open_output(self.html_file) as page:
            page.seek(0)
            begin = page.read(200)
        if self.is_new_page: # open_output has created it, which shows that it can be written
            os.unlink(os.path.realpath(self.html_file))
        # A run that continues its lines makes their page again.
        may_replace = self.overwrite or (self.lines.checked_size() and PAGE.match(begin))
        if begin and not may_replace:
            raise ValueError(f"{self.html_file} exists already, and nothing is overwritten: give "
                             "html_file another name, or replace it with --overwrite")

    def write_page(self) -> None:
        """Make html_file from the saved lines, unless it shows them all.

        Raises ValueError if it was new, and another run has written it meanwhile.
        """
        lines = self.lines
        page = self.html_file
        if page and lines.is_ours and self.page_end < lines.checked_size():
            if self.is_new_page and not self.page_end and os.path.exists(page):
                self.html_file = None # it is not tried again
                raise ValueError(f"another run has written {page} since this one began, so it is "
                                 f"not replaced: {lines.path} has the samples; give html_file "
                                 f"another name, and {lines.same_command} makes their page")
            write_page(page, [lines.path])
            self.page_end = lines.checked_size()

    def close(self, status: int) -> None:
        """Write the page of a run that ends early.

        After a signal such as Ctrl-C, say how the run goes on. Remove a file that this run has
        created and left empty.
        """
        lines = self.lines
        with lines.file:
            self.write_page()
            size = lines.checked_size()
            if status - 128 in END_SIGNALS:
                self.log_resume()
            if lines.is_new and size == 0:
                # The file is still locked, so no other run uses it. A link to it stays.
                os.unlink(os.path.realpath(lines.path))

    def log_resume(self) -> None:
        """Say how many samples there are, and how the run goes on."""
        count = 0
        if self.lines.is_ours:
            with open(self.lines.path, "rb") as file:
                count = sum(1 for _ in file)
        if count == 0:
            logger.info("nothing was finished, so nothing new is saved")
            return
        without = " and without --overwrite" if self.overwrite else ""
        logger.info(f"{self.lines.path} holds {plural(count, 'line')}: {self.lines.same_command}"
                    f"{without} goes on after them")


class Outputs:
    """Saves the samples of a model, or the scores, and shows them.

    prompts: theirs; an iterator if their number is unknown.
    """
    error: ValueError | None = None # see resume

    def __init__(self, settings: Settings, files: OutputFiles, gpt: "TextGenerator",
                 prompts: list[Prompt] | Iterator[Prompt]):
        self.watch = settings["watch"]
        self.files = files
        self.device = gpt.backend.device
        kept = run_settings(settings, self.device.type, gpt.backend.dtype_name)
        self.run = Run(checkpoint_id(gpt), kept)
        if files.lines and "seed" in kept: # which may have been drawn at random
            files.lines.same_command = f"the same command with --seed={kept['seed']}"
        if settings["out_file"] == "-": # instead of the samples
            self.printer = LinePrinter(gpt.tokenizer, self.run.line)
        else:
            self.printer = Printer(gpt.tokenizer, settings["show_probs"], streams_always=False)
        self.streams = self.printer.streams
        if self.watch: # standard output gets only samples
            logger.info(RULE)
        bar = None # it would disturb the parts of a line that a terminal shows
        if not self.streams or (settings["score"] and not settings["show_probs"]):
            bar = start_progress_bar()
        max_new_tokens = None if settings["score"] else settings["max_new_tokens"]
        num_total = None
        if isinstance(prompts, list):
            num_total = len(prompts) * settings["num_samples"]
        self.progress = Progress(num_total, max_new_tokens, bar)

    def resume(self, samples: Iterator[Result]) -> Iterator[Result]:
        """Yield the samples for the model to generate.

        Those that the file already holds are marked as saved. An error of the samples, such as a
        bad line of a pipe, is raised by finish, when those before it are done.
        """
        lines = self.files.lines
        # With overwrite, the first model replaces the lines. With watch, later ones continue them.
        if lines and (lines.is_ours or not self.files.overwrite):
            samples = lines.mark_saved(samples, self.run, self.watch)
        try:
            for sample in samples:
                self.progress.add(sample)
                if sample.already_saved and isinstance(sample, Score):
                    self.printer.add_to_total(sample)
                yield sample
        except ValueError as error:
            self.error = error

    def update(self, sample: Result, pieces: list[Piece]) -> None:
        """Show the new pieces of a sample.

        Save it first if it is finished: a resumed run does not show it again.
        """
        if sample.finish_reason and self.files.lines:
            self.files.lines.write(self.run.line(sample))
        self.progress.update(sample)
        self.printer.update(sample, pieces)

    def finish(self) -> None:
        """Write the page, and print the number of samples, or the sums of all scores.

        Raises the error of the samples, if there was one.
        """
        if self.error:
            raise self.error
        self.files.write_page()
        self.printer.print_total()
        self.progress.close(peak_memory(self.device))


def checkpoint_id(gpt: "TextGenerator") -> Record:
    """What a line says about the checkpoint. crc32: that of the checkpoint and the vocabulary."""
    checkpoint = gpt.checkpoint
    vocabulary = gpt.tokenizer.fingerprint().encode("utf-8", "replace")
    checksum = zlib.crc32(vocabulary, int(checkpoint.crc32, 16))
    return {"path": checkpoint.path, "crc32": f"{checksum:08x}", "iter_num": checkpoint.iter_num,
            "val_loss": rounded(checkpoint.val_loss, 4)}


def peak_memory(device: "torch.device") -> int | None:
    """The peak memory of this process in bytes: of the GPU if device is one, otherwise RAM.

    None if unknown.
    """
    if device.type == "cuda":
        import torch  # not above: it takes a second
        return torch.cuda.max_memory_allocated(device)
    with suppress(ImportError): # Windows
        import resource
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None
