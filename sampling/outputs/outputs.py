"""What becomes of the samples of a run: lines in out_file, a page that is made from them, and what the user sees."""
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sampling.outputs import html
from sampling.outputs.console import before_exit, is_tty, plural
from sampling.outputs.jsonl import PAGE, LineFormat, LinesFile, open_output, run_settings
from sampling.outputs.printer import Printer, Progress
from sampling.params import Piece, Sample, SamplingParams, ScoringParams
from sampling.process import peak_memory

if TYPE_CHECKING: # the import would load torch
    from sampling.text_generator import TextGenerator

logger = logging.getLogger(__name__)
MAX_SCORED_TOKENS = 100_000 # that are saved or shown of a text: with their alternatives, ten megabytes or more


class Outputs:
    """Saves the samples of a run, shows them, and makes html_file from the saved lines.

    The lines are in out_file, or on standard output. If there is only an html_file, they are in PAGE.jsonl until the
    page is written. Lines that the file already holds stay, and resume checks them. With overwrite, the first write
    removes them: a run that fails earlier changes no file.
    Raises ValueError or OSError, which names the file, if out_file or html_file cannot be used.
    """

    def __init__(self, settings: Mapping[str, Any]):
        self.settings = {**settings, "logprobs": saved_logprobs(settings)}
        self.html_file, out_file = settings["html_file"], settings["out_file"]
        self.uses_stdout = out_file == "-" # then nothing else may be printed there
        self.keeps_lines = out_file is not None and not self.uses_stdout
        if sys.stdout is None and not (self.keeps_lines or self.html_file):
            raise ValueError("standard output is closed, so the samples would be lost: give out_file")
        path = out_file if self.keeps_lines else self.html_file and f"{self.html_file}.jsonl"
        self.lines = LinesFile(path) if path else None
        self.page_end = 0 # how many bytes of the lines html_file shows
        if self.lines:
            before_exit.append(self.close)
        if self.html_file:
            with open_output(self.html_file) as page:
                page.seek(0)
                begin = page.read(200)
            if begin and not (settings["overwrite"] or (os.path.getsize(path) and PAGE.match(begin))):
                raise ValueError(f"{self.html_file} exists already, and nothing is overwritten: give html_file "
                                 "another name, or replace it with --overwrite")
            if not os.path.getsize(self.html_file): # open_output has created it
                os.unlink(os.path.realpath(self.html_file))

    def begin(self, gpt: "TextGenerator", num_total: int | None) -> None:
        """Prepare for the samples of a model; with watch, another model may follow. num_total: None if unknown."""
        settings, checkpoint = self.settings, gpt.checkpoint
        checkpoint_id = {name: getattr(checkpoint, name) for name in ("path", "crc32", "iter_num")}
        checkpoint_id["val_loss"] = checkpoint.val_loss and round(checkpoint.val_loss, 4)
        self.format = LineFormat(checkpoint_id, run_settings(settings, gpt.device.type, gpt.dtype_name))
        self.device = gpt.device
        self.printer = Printer(gpt.tokenizer, settings["show_probs"], streams=is_tty(sys.stdout))
        is_score = settings["score"]
        self.progress = Progress(num_total, None if is_score else settings["max_new_tokens"],
                                 shows_text=not is_score or settings["show_probs"])

    def resume(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Yield the samples for the model to generate. Those that the file already holds are marked as saved."""
        if self.lines and (self.lines.is_ours or not self.settings["overwrite"]):
            samples = self.lines.mark_saved(samples, self.format, self.settings["watch"])
        for sample in self.progress.follow(samples):
            if sample.already_saved:
                self.printer.add_to_total(sample)
            yield sample

    def update(self, sample: Sample, pieces: list[Piece]) -> None:
        """Show the new pieces of a sample. Save it first if it is finished: a resumed run does not show it again."""
        if sample.finish_reason is not None:
            line = self.format.line(sample) if self.lines or self.uses_stdout else b""
            if self.lines:
                self.lines.write(line)
            if self.uses_stdout:
                self.printer.write(self.printer.make_safe(line.decode()))
        self.progress.update(sample)
        if not self.uses_stdout:
            self.printer.update(sample, pieces)

    def finish(self) -> None:
        """Write the page, and say how many samples the model has generated, or what the sums of all scores are."""
        self.write_page()
        if not self.uses_stdout:
            self.printer.print_total()
        self.progress.close(peak_memory(self.device))

    def write_page(self) -> None:
        """Make html_file from the saved lines, unless it shows them all."""
        if self.html_file and self.lines.is_ours and self.page_end < (end := os.path.getsize(self.lines.path)):
            html.write_page(self.html_file, [self.lines.path])
            self.page_end = end

    def close(self, status: int) -> None:
        """Write the page of a run that ends early. Remove the lines that were only for the page, and an empty file.

        After Ctrl-C or SIGTERM, say how the run goes on.
        """
        self.write_page()
        self.lines.file.close()
        if os.path.getsize(self.lines.path) == (0 if self.keeps_lines else self.page_end):
            os.unlink(self.lines.path)
        elif status in (130, 143) and self.lines.is_ours: # Ctrl-C, SIGTERM
            with open(self.lines.path, "rb") as lines:
                saved = plural(sum(1 for _ in lines), "text" if self.settings["score"] else "sample")
            without = " and without --overwrite" if self.settings["overwrite"] else ""
            logger.info(f"{self.lines.path} holds {saved}: the same command with the same seed{without} goes on after "
                        "them")


def saved_logprobs(settings: Mapping[str, Any]) -> int | None:
    """The setting logprobs, or what the page needs if that is more."""
    return max(html.NUM_ALTERNATIVES, settings["logprobs"] or 0) if settings["html_file"] else settings["logprobs"]


def choose_params(settings: Mapping[str, Any]) -> SamplingParams | ScoringParams:
    """What to do with the prompts, with the log-probabilities that out_file, the page or the terminal needs."""
    num_logprobs = saved_logprobs(settings)
    if settings["score"]:
        needs_tokens = num_logprobs is not None or settings["show_probs"]
        return ScoringParams(num_logprobs or 0, MAX_SCORED_TOKENS if needs_tokens else 0)
    if num_logprobs is None and (settings["out_file"] or settings["show_probs"]):
        num_logprobs = 0
    return SamplingParams.from_settings(settings, num_logprobs)
