"""Shows a run: prints its samples on standard output, as nanoGPT does, or a line for each text that
it scores, and its progress on standard error.
"""
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator

from sampling.inputs.tokenizer import Tokenizer
from sampling.outputs.console import (
    clear_bar,
    is_tty,
    name_write_errors,
    plural,
    sanitize,
    start_progress_bar,
)
from sampling.outputs.jsonl import round_sum
from sampling.params import Piece, Prompt, Sample, Score

logger = logging.getLogger(__name__)
RULE = "---------------" # nanoGPT prints it after every sample
LOG_INTERVAL = 30 # seconds between two lines of progress
BAR_INTERVAL = 0.1 # seconds between two changes of the bar

# The page's backgrounds in the terminal's 256 colours, for tokens below these probabilities.
TINTS = {0.01: 209, 0.02: 216, 0.05: 217, 0.1: 223, 0.2: 224, 0.5: 230}


class Printer:
    """Prints samples one after another.

    show_probs: the background of each piece shows its probability, if standard output has colours.
    streams: print each piece at once. Otherwise, print a sample whole when it is finished.
    """

    def __init__(self, tokenizer: Tokenizer, show_probs: bool = False, streams: bool = True):
        self.tokenizer = tokenizer
        self.streams = streams
        is_terminal = is_tty(sys.stdout)
        self.make_safe = sanitize if is_terminal else str
        # See https://no-color.org and https://force-color.org.
        has_colors = not os.environ.get("NO_COLOR") and (is_terminal or bool(os.environ.get("FORCE_COLOR")))
        self.show_probs = show_probs and has_colors
        if show_probs and not has_colors:
            logger.warning("show_probs has no effect: standard output is not a terminal, or NO_COLOR is set")
        self.sample: Sample | None = None # the latest one
        self.unprinted: list[str] = [] # parts of it
        self.reset_total()

    def update(self, sample: Sample, pieces: Iterable[Piece], shows_prompt: bool = True) -> None:
        """Print the new pieces of a sample, after its prompt (if shows_prompt), and the rule when
        it is finished. Of a text that is scored, print its pieces only with their probabilities,
        and then its score.
        """
        if sample is not self.sample:
            self.sample = sample
            prompt_ids = sample.prompt_ids if shows_prompt else []
            self.unprinted = [self.make_safe(self.tokenizer.decode(prompt_ids))]
        is_score = isinstance(sample, Score)
        for text, logprob in pieces if self.show_probs or not is_score else ():
            is_colored = self.show_probs and logprob is not None
            self.unprinted.append(colorize(self.make_safe(text), logprob) if is_colored else self.make_safe(text))
        if sample.finish_reason is not None:
            line = f"{self.make_safe(name_of(sample.prompt))}: {summary(sample)}" if is_score else RULE
            self.unprinted.append(f"{line}\n" if is_score and not self.show_probs else f"\n{line}\n")
            self.add_to_total(sample)
        if self.streams or sample.finish_reason is not None:
            self.write("".join(self.unprinted))
            self.unprinted = []

    def reset_total(self) -> None:
        self.total = Score(0, Prompt("all"), [])
        self.num_scores = 0

    def add_to_total(self, sample: Sample) -> None:
        if isinstance(sample, Score):
            self.num_scores += 1
            self.total.num_tokens += sample.num_tokens
            self.total.num_bytes += sample.num_bytes
            self.total.cumulative_logprob += round_sum(sample) # as in a resumed run

    def print_total(self) -> None:
        """Print the score of all texts together, if there were several."""
        if self.num_scores > 1 and self.total.num_tokens:
            self.write(f"all: {summary(self.total)}\n")

    def write(self, text: str) -> None:
        clear_bar()
        with name_write_errors("standard output"):
            print(text, end="", flush=True)


def summary(score: Score) -> str:
    """How many tokens of a text were scored, and how likely they are."""
    if not score.num_tokens:
        return "a single token, and no token comes before it"
    nats = 0.0 - round_sum(score) / score.num_tokens # as in out_file, and in the total
    bits = nats * score.num_tokens / math.log(2) / max(1, score.num_bytes)
    perplexity = math.exp(nats) if nats < 700 else math.inf # there is no larger float
    return (f"{score.num_tokens:,} token{'' if score.num_tokens == 1 else 's'}, {nats:.4f} nats a token, perplexity "
            f"{perplexity:.2f}, {bits:.2f} bits a byte")


def name_of(prompt: Prompt) -> str:
    """What names a text: its id, its place in a file, or its first characters."""
    if prompt.id is None:
        return prompt.location or repr(prompt.text[:40])
    name = prompt.id if isinstance(prompt.id, str) else json.dumps(prompt.id)
    return name if name and name.isprintable() else repr(name)


def colorize(text: str, logprob: float) -> str:
    """The text on a background that shows how likely it was. Line ends have no background."""
    tint = next((tint for limit, tint in TINTS.items() if math.exp(logprob) < limit), None)
    if tint is None:
        return text
    # Black text, whatever the terminal's own colour.
    begin = f"\x1b[38;5;16;48;5;{tint}m"
    end = "\x1b[0m"
    return "\n".join(line and begin + line + end for line in text.split("\n"))


class Progress:
    """Counts samples and tokens. Shows a bar, or if standard error is no terminal, as with nohup, a
    line now and then.

    total_samples: how many samples the run has; None if unknown. Those that are already saved do
    not count. max_new_tokens: of each sample; None if texts are scored. shows_text: whether text is
    printed as it comes.
    """

    def __init__(self, total_samples: int | None, max_new_tokens: int | None,
                 shows_text: bool = True):
        self.total_samples = total_samples
        self.max_new_tokens = max_new_tokens
        self.noun = "sample" if max_new_tokens is not None else "text"
        self.unfinished: set[Sample] = set() # the engine may append tokens to them
        self.num_samples = self.num_tokens = 0 # of finished samples
        self.bar = start_progress_bar(shows_text) # a tqdm, or None
        self.start = time.perf_counter() # the model is loaded
        self.interval = LOG_INTERVAL if self.bar is None else BAR_INTERVAL
        self.next_time = self.start + self.interval

    def follow(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield the samples to the engine, which fills them."""
        for sample in samples:
            if not sample.already_saved:
                self.unfinished.add(sample)
            elif self.total_samples is not None:
                self.total_samples -= 1
            yield sample

    def update(self, sample: Sample) -> None:
        """Note whether this sample is finished, and show how far all are, now and then."""
        if sample.finish_reason is not None:
            self.unfinished.discard(sample)
            self.num_samples += 1
            self.num_tokens += sample.num_tokens
        now = time.perf_counter()
        is_due = now >= self.next_time
        if is_due or (self.bar is not None and sample.finish_reason):
            # A finished sample is printed now. In a pipe to tee, it may take a moment to appear: no
            # bar until then.
            self.next_time = now + self.interval
        if not is_due:
            return
        num_tokens = self.num_tokens + sum(sample.num_tokens for sample in self.unfinished)
        if self.bar is not None:
            self.bar.total = self.expect_tokens()
            self.bar.set_postfix_str(plural(self.num_samples, self.noun), refresh=False)
            # Less than 0 after a batch that ran out of memory.
            self.bar.update(num_tokens - self.bar.n)
        elif not is_tty(sys.stderr):
            self.log_speed(f"{plural(self.num_samples, self.noun)} so far" if self.total_samples is None
                           else f"{self.num_samples} of {plural(self.total_samples, self.noun)}", num_tokens)

    def expect_tokens(self) -> int | None:
        """How many tokens the run will have at its end; None if unknown. Samples may stop early."""
        if self.total_samples is None:
            return None
        num_left = self.total_samples - self.num_samples
        if self.max_new_tokens is not None:
            return self.num_tokens + num_left * self.max_new_tokens
        is_known = num_left == len(self.unfinished) # the engine takes texts when it needs them
        return self.num_tokens + sum(len(score.ids) - 1 for score in self.unfinished) if is_known else None

    def close(self, peak_memory: int | None) -> None:
        """Remove the bar, and log a summary of the run if it generated samples. peak_memory is in
        bytes.
        """
        if self.bar is not None:
            self.bar.close()
        if self.num_samples: # otherwise, out_file was already complete
            peak = f", peak memory {peak_memory / 2**20:.0f} MB" if peak_memory else ""
            self.log_speed(plural(self.num_samples, self.noun), self.num_tokens, peak)

    def log_speed(self, samples: str, num_tokens: int, more: str = "") -> None:
        seconds = time.perf_counter() - self.start
        logger.info(f"{samples}, {plural(num_tokens, 'token')} in {seconds:.1f} s: {num_tokens / seconds:.1f} tokens/s"
                    f"{more}")
