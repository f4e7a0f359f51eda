"""What becomes of the samples of a run: lines in out_file, a page that is made from them, and what
the user sees.
"""
import logging
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from sampling.inputs.prompts import parse_start
from sampling.outputs import html
from sampling.outputs.console import before_exit, is_tty, plural
from sampling.outputs.jsonl import PAGE, LinesFile, Run, open_output, run_settings
from sampling.outputs.printer import RULE, Printer, Progress
from sampling.params import (
    Piece,
    Sample,
    SamplingParams,
    ScoringParams,
    choose_seed,
    warn_about_stops,
)
from sampling.process import peak_memory

if TYPE_CHECKING: # the import would load torch
    from sampling.text_generator import TextGenerator

logger = logging.getLogger(__name__)
# The tokens that are saved or shown of a text: with their alternatives, ten megabytes or more.
MAX_SCORED_TOKENS = 100_000


class OutputFiles:
    """out_file and html_file of a run, which other models may follow with watch.

    The lines are in out_file, or on standard output. If there is only an html_file, they are in
    PAGE.jsonl until the run is over. Lines that the file already holds stay. With overwrite, the
    first write removes them: a run that fails earlier changes no file. Raises ValueError or
    OSError, which names the file, if one of them cannot be used.
    """

    def __init__(self, settings: Mapping[str, Any]):
        self.settings = {**settings, "logprobs": saved_logprobs(settings)}
        self.html_file = settings["html_file"]
        out_file = settings["out_file"]
        self.uses_stdout = out_file == "-" # then nothing else may be printed there
        self.keeps_lines = out_file is not None and not self.uses_stdout
        if sys.stdout is None and not (self.keeps_lines or self.html_file):
            raise ValueError("standard output is closed, so the samples would be lost: give out_file")
        path, (kind, prompts) = out_file if self.keeps_lines else None, parse_start(settings["start"])
        if path and kind != "TEXT" and os.path.exists(path) and os.path.realpath(path) == os.path.realpath(prompts):
            raise ValueError(f"{path} is the file of the prompts: give out_file another name")
        path = path or (self.html_file and f"{self.html_file}.jsonl")
        self.lines = LinesFile(path) if path else None
        self.page_end = 0 # how many bytes of the lines html_file shows
        if self.lines:
            before_exit.append(self.close)
        if self.html_file:
            is_new = not os.path.exists(self.html_file)
            with open_output(self.html_file) as page:
                page.seek(0)
                begin = page.read(200)
            if is_new: # it only shows that the page can be written
                os.unlink(os.path.realpath(self.html_file))
            if begin and not (settings["overwrite"] or (self.lines.size and PAGE.match(begin))):
                raise ValueError(f"{self.html_file} exists already, and nothing is overwritten: give html_file "
                                 "another name, or replace it with --overwrite")

    def write_page(self) -> None:
        """Make html_file from the saved lines, unless it shows them all."""
        if self.html_file and self.lines.is_ours and self.page_end < (end := self.lines.size):
            html.write_page(self.html_file, [self.lines.path])
            self.page_end = end

    def close(self, status: int) -> None:
        """Write the page of a run that ends early. After Ctrl-C or SIGTERM, say how the run goes
        on. Remove the lines that were only for the page of a run that is complete, and a file that
        this run has created and left empty.
        """
        self.write_page()
        lines = self.lines
        size = self.lines.size
        if status in (130, 143): # Ctrl-C, SIGTERM
            noun = "text" if self.settings["score"] else "sample"
            with open(lines.path, "rb") as file:
                count = sum(1 for _ in file) if lines.is_ours else 0
            without = " and without --overwrite" if self.settings["overwrite"] else ""
            logger.info(f"{lines.path} holds {plural(count, noun)}: the same command with the same seed{without} goes "
                        "on after them" if count else f"no {noun} was finished, so nothing new is saved")
        if (size == self.page_end and not (self.keeps_lines or status)) or (lines.is_new and size == 0):
            lines.remove() # while it is locked
        lines.file.close()


class Outputs:
    """Saves the samples of a model, and shows them. num_total: how many there will be; None if
    unknown.
    """

    def __init__(self, files: OutputFiles, gpt: "TextGenerator", num_total: int | None):
        settings = files.settings
        checkpoint = gpt.checkpoint
        checksum = zlib.crc32(gpt.tokenizer.fingerprint().encode("utf-8", "replace"), int(checkpoint.crc32, 16))
        checkpoint_id = {"path": checkpoint.path, "crc32": f"{checksum:08x}", "iter_num": checkpoint.iter_num,
                         "val_loss": checkpoint.val_loss and round(checkpoint.val_loss, 4) + 0.0}
        self.run = Run(checkpoint_id, run_settings(settings, gpt.backend.device.type, gpt.backend.dtype_name))
        self.files = files
        self.device = gpt.backend.device
        self.printer = Printer(gpt.tokenizer, settings["show_probs"], streams=is_tty(sys.stdout))
        # A file gets only samples.
        if settings["watch"] and self.printer.streams and not files.uses_stdout:
            # The samples of the next checkpoint follow.
            self.printer.write(f"{checkpoint.describe()}\n{RULE}\n")
        is_score = settings["score"]
        self.progress = Progress(num_total, None if is_score else settings["max_new_tokens"],
                                 shows_text=not is_score or settings["show_probs"])

    def resume(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Yield the samples for the model to generate. Those that the file already holds are marked
        as saved.
        """
        lines = self.files.lines
        settings = self.files.settings
        if lines and (lines.is_ours or not settings["overwrite"]):
            samples = lines.mark_saved(samples, self.run, settings["watch"])
        for sample in self.progress.follow(samples):
            if sample.already_saved:
                self.printer.add_to_total(sample)
            yield sample

    def update(self, sample: Sample, pieces: list[Piece]) -> None:
        """Show the new pieces of a sample. Save it first if it is finished: a resumed run does not
        show it again.
        """
        uses_stdout = self.files.uses_stdout
        lines = self.files.lines
        if sample.finish_reason is not None:
            line = self.run.line(sample) if lines or uses_stdout else b""
            if lines:
                lines.write(line)
            if uses_stdout:
                self.printer.write(self.printer.make_safe(line.decode()))
        self.progress.update(sample)
        if not uses_stdout:
            self.printer.update(sample, pieces)

    def finish(self) -> None:
        """Write the page, and say how many samples the model has generated, or what the sums of all
        scores are.
        """
        self.files.write_page()
        if not self.files.uses_stdout:
            self.printer.print_total()
        self.progress.close(peak_memory(self.device))


def saved_logprobs(settings: Mapping[str, Any]) -> int | None:
    """The setting logprobs, or what the page needs if that is more."""
    return max(html.NUM_ALTERNATIVES, settings["logprobs"] or 0) if settings["html_file"] else settings["logprobs"]


def choose_params(settings: Mapping[str, Any]) -> SamplingParams | ScoringParams:
    """What to do with the prompts, with the log-probabilities that out_file, the page or the
    terminal needs.
    """
    num_logprobs = saved_logprobs(settings)
    if settings["score"]:
        needs_tokens = num_logprobs is not None or settings["show_probs"]
        return ScoringParams(num_logprobs or 0, MAX_SCORED_TOKENS if needs_tokens else 0)
    if num_logprobs is None and (settings["out_file"] or settings["show_probs"]):
        num_logprobs = 0
    values = {field.name: settings[field.name] for field in fields(SamplingParams) if field.name in settings}
    params = SamplingParams(**values | {"seed": choose_seed(settings["seed"]), "num_logprobs": num_logprobs})
    warn_about_stops(params.stop_texts)
    return params
