"""Shows a run: prints its samples on standard output, as nanoGPT does, or a line for each text that
it scores, and its progress on standard error.
"""
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sampling.inputs.tokenizer import Tokenizer
from sampling.outputs.console import CONTROL_PICTURES, clear_bar, is_tty, name_write_errors, plural
from sampling.outputs.jsonl import round_score
from sampling.samples import Piece, Prompt, Result, Score

logger = logging.getLogger(__name__)
RULE = "---------------" # nanoGPT prints it after every sample
LOG_INTERVAL = 30 # seconds between two lines of progress
BAR_INTERVAL = 0.1 # seconds between two changes of the bar

# The page's backgrounds in the terminal's 256 colours, for tokens below these probabilities.
TINTS = {0.01: 209, 0.02: 216, 0.05: 217, 0.1: 223, 0.2: 224, 0.5: 230}


class Printer:
    """Prints samples one after another, or the scores of texts.

    show_probs: the background of each piece shows its probability, if standard output has colours.
    streams_always: print each piece at once, even if standard output is no terminal. Otherwise, a
    file or a pipe gets each sample whole when it is finished.
    """

    def __init__(self, tokenizer: Tokenizer, show_probs: bool = False, streams_always: bool = True):
        self.tokenizer = tokenizer
        self.is_terminal = is_tty(sys.stdout)
        self.streams = self.is_terminal or streams_always
        # See https://no-color.org and https://force-color.org.
        forces_color = bool(os.environ.get("FORCE_COLOR"))
        has_colors = (self.is_terminal or forces_color) and not os.environ.get("NO_COLOR")
        self.show_probs = show_probs and has_colors
        if show_probs and not has_colors:
            logger.warning("show_probs has no effect: standard output is not a terminal, or "
                           "NO_COLOR is set")
        self.sample: Result | None = None # the latest one
        self.unprinted = "" # a part of its text
        self.sums: list[tuple] = [] # as summary takes them, of each text that is scored

    def update(self, sample: Result, pieces: Iterable[Piece], shows_prompt: bool = True) -> None:
        """Print the new pieces of a sample, after its prompt (if shows_prompt), and the rule when
        it is finished. Of a text that is scored, print the pieces only with their probabilities,
        and then its score.
        """
        if sample is not self.sample:
            self.sample = sample
            self.unprinted = ""
            if shows_prompt:
                self.unprinted = self.make_safe(self.tokenizer.decode(sample.prompt_ids))
        is_score = isinstance(sample, Score)
        shows_text = self.show_probs or not is_score
        if shows_text:
            self.unprinted += "".join(map(self.format, pieces))
        if sample.finish_reason:
            line = RULE
            if is_score:
                self.add_to_total(sample)
                line = f"{self.make_safe(name_of(sample.prompt))}: {summary(*self.sums[-1])}"
            if shows_text:
                self.unprinted += "\n"
            self.unprinted += f"{line}\n"
        if self.streams or sample.finish_reason:
            self.write(self.unprinted)
            self.unprinted = ""

    def make_safe(self, text: str) -> str:
        return text.translate(CONTROL_PICTURES) if self.is_terminal else text

    def format(self, piece: Piece) -> str:
        """The text of a piece. With show_probs, its background shows how likely it was; line ends
        have no background.
        """
        text = self.make_safe(piece.text)
        if self.show_probs and piece.logprob is not None:
            probability = math.exp(piece.logprob)
            for limit, tint in TINTS.items():
                if probability < limit:
                    # Black text, whatever the terminal's own colour.
                    return re.sub(".+", f"\x1b[38;5;16;48;5;{tint}m\\g<0>\x1b[0m", text)
        return text

    def add_to_total(self, score: Score) -> None:
        # A resumed run has the rounded numbers, too.
        logprob = round_score(score.cumulative_logprob, score.num_tokens)
        self.sums.append((score.num_tokens, score.num_bytes, logprob))

    def print_total(self) -> None:
        """Print the score of all texts together, if there were several."""
        total = [sum(column) for column in zip(*self.sums, strict=True)]
        if len(self.sums) > 1 and total[0]:
            self.write(f"all: {summary(*total)}\n")

    def write(self, text: str) -> None:
        clear_bar()
        with name_write_errors("standard output"):
            print(text, end="", flush=True)


class LinePrinter(Printer):
    """Prints a line of JSON for each finished sample or score, and nothing else. line: makes it."""

    def __init__(self, tokenizer: Tokenizer, line: Callable[[Result], bytes]):
        super().__init__(tokenizer)
        self.streams = False
        self.line = line

    def update(self, sample: Result, pieces: Iterable[Piece], shows_prompt: bool = True) -> None:
        if sample.finish_reason:
            self.write(self.make_safe(self.line(sample).decode()))

    def print_total(self) -> None:
        """A total would be no line of JSON."""


def summary(num_tokens: int, num_bytes: int, logprob: float) -> str:
    """How many tokens were scored, and how likely they are."""
    if not num_tokens:
        return "a single token, and no token comes before it"
    nats = 0.0 - round_score(logprob, num_tokens) / num_tokens # as in out_file
    bits = nats * num_tokens / math.log(2) / max(1, num_bytes)
    perplexity = math.exp(nats) if nats < 700 else math.inf # there is no larger float
    noun = "token" if num_tokens == 1 else "tokens"
    return (f"{num_tokens:,} {noun}, {nats:.4f} nats a token, perplexity {perplexity:.2f}, "
            f"{bits:.2f} bits a byte")


def name_of(prompt: Prompt) -> str:
    """What names a text: its id, its place in a file, or its first characters."""
    if prompt.id is None:
        return prompt.location or repr(prompt.text[:40])
    name = prompt.id if isinstance(prompt.id, str) else json.dumps(prompt.id)
    return name if name and name.isprintable() else repr(name)


@dataclass
class Progress:
    """Counts samples and tokens.

    Shows a bar, or if standard error is no terminal, as with nohup, a line now and then.
    """
    total_samples: int | None # how many the run has; None if unknown. Saved ones do not count
    max_new_tokens: int | None # that of each sample; None if texts are scored
    bar: Any # a tqdm, or None
    num_samples: int = 0 # how many are finished
    num_tokens: int = 0 # how many tokens these have

    def __post_init__(self):
        self.noun = "text" if self.max_new_tokens is None else "sample"
        self.unfinished: set[Result] = set() # the engine may append tokens to them
        self.interval = LOG_INTERVAL if self.bar is None else BAR_INTERVAL
        self.start: float | None = None # when the first sample was begun

    def add(self, sample: Result) -> None:
        """Note a sample that the engine will fill, unless it is saved already."""
        if not sample.already_saved:
            self.unfinished.add(sample)
        elif self.total_samples is not None:
            self.total_samples -= 1

    def update(self, sample: Result) -> None:
        """Note whether this sample is finished, and show how far all are, now and then."""
        if sample.finish_reason:
            self.unfinished.discard(sample)
            self.num_samples += 1
            self.num_tokens += sample.num_tokens
        now = time.perf_counter()
        if self.start is None:
            self.start = now
            self.next_time = now + self.interval
        is_due = now >= self.next_time
        # A pipe to tee may take a moment to show a finished sample: no bar comes until then.
        if is_due or (sample.finish_reason and self.bar is not None):
            self.next_time = now + self.interval
        if not is_due:
            return
        num_tokens = self.num_tokens + sum(sample.num_tokens for sample in self.unfinished)
        samples = plural(self.num_samples, self.noun)
        if self.bar is not None:
            self.bar.total = self.expect_tokens()
            self.bar.set_postfix_str(samples, refresh=False)
            # This is below 0 after a batch that ran out of memory.
            self.bar.update(num_tokens - self.bar.n)
        elif not is_tty(sys.stderr):
            if self.total_samples is None:
                done = f"{samples} so far"
            else:
                done = f"{self.num_samples} of {plural(self.total_samples, self.noun)}"
            self.log_speed(done, num_tokens)

    def expect_tokens(self) -> int | None:
        """How many tokens the run will have at its end; None if unknown. Samples may stop early."""
        if self.total_samples is None:
            return None
        num_left = self.total_samples - self.num_samples
        if self.max_new_tokens is not None:
            return self.num_tokens + num_left * self.max_new_tokens
        if num_left != len(self.unfinished): # the engine takes texts when it needs them
            return None
        return self.num_tokens + sum(len(score.ids) - 1 for score in self.unfinished)

    def close(self, peak_memory: int | None) -> None:
        """Remove the bar, and log a summary of the run if it generated samples.

        peak_memory is in bytes.
        """
        if self.bar is not None:
            self.bar.close()
        if self.num_samples: # otherwise, out_file was already complete
            peak = f", peak memory {peak_memory / 2**20:.0f} MB" if peak_memory else ""
            self.log_speed(plural(self.num_samples, self.noun), self.num_tokens, peak)

    def log_speed(self, samples: str, num_tokens: int, more: str = "") -> None:
        seconds = time.perf_counter() - self.start
        logger.info(f"{samples}, {plural(num_tokens, 'token')} in {seconds:.1f} s: "
                    f"{num_tokens / seconds:.1f} tokens/s{more}")
