"""Shows a run: prints its samples on standard output, as nanoGPT does, and its progress on standard error."""
import logging
import math
import os
import sys
import time

from sampling.inputs.tokenizer import Tokenizer
from sampling.outputs.console import is_tty, name_write_errors, plural, sanitize, start_progress_bar
from sampling.params import Sample, Token

logger = logging.getLogger(__name__)
RULE = "---------------" # nanoGPT prints it after every sample
LOG_INTERVAL = 30 # seconds between two lines of progress

# The page's backgrounds in the terminal's 256 colours, for tokens below these probabilities.
TINTS = {0.01: 209, 0.02: 216, 0.05: 217, 0.1: 223, 0.2: 224, 0.5: 230}


class Printer:
    """Prints samples one after another: whole, or in parts while they stream.

    show_probs: the background of each token shows its probability, if standard output has colours.
    """

    def __init__(self, tokenizer: Tokenizer, show_probs: bool = False):
        self.tokenizer = tokenizer
        is_terminal = is_tty(sys.stdout)
        self.make_safe = sanitize if is_terminal else str
        # See https://no-color.org and https://force-color.org.
        has_colors = not os.environ.get("NO_COLOR") and (is_terminal or bool(os.environ.get("FORCE_COLOR")))
        self.show_probs = show_probs and has_colors
        if show_probs and not has_colors:
            logger.warning("show_probs has no effect: standard output is not a terminal, or NO_COLOR is set")
        self.sample: Sample | None = None # the latest one
        self.num_printed = 0 # its characters, without the prompt
        self.token_index = self.offset = 0 # of its next character: its token, its position in the token's text

    def update(self, sample: Sample, shows_prompt: bool = True) -> None:
        """Print the new text of a sample, after its prompt (if shows_prompt), and the rule when it is finished."""
        parts = []
        if sample is not self.sample:
            self.sample, self.num_printed, self.token_index, self.offset = sample, 0, 0, 0
            if shows_prompt:
                parts.append(self.make_safe(self.tokenizer.decode(sample.prompt_ids)))
        while self.num_printed < sample.num_emittable_chars:
            token = sample.tokens[self.token_index]
            text = token.text[self.offset:self.offset + sample.num_emittable_chars - self.num_printed]
            safe_text = self.make_safe(text)
            if self.show_probs and token.logprob is not None:
                safe_text = colorize(safe_text, char_logprob(sample.tokens, self.token_index))
            parts.append(safe_text)
            self.num_printed, self.offset = self.num_printed + len(text), self.offset + len(text)
            if self.offset == len(token.text):
                self.token_index, self.offset = self.token_index + 1, 0
        if sample.finish_reason is not None:
            parts.append(f"\n{RULE}\n")
        if text := "".join(parts):
            with name_write_errors("standard output"):
                print(text, end="", flush=True)


def char_logprob(tokens: list[Token], index: int) -> float:
    """The log-probability of the token at index, with those before it that have only the beginning of its character."""
    logprob = tokens[index].logprob
    while index and not tokens[index - 1].text:
        index -= 1
        logprob += tokens[index].logprob
    return logprob


def colorize(text: str, logprob: float) -> str:
    """The text on a background that shows how likely it was. Line ends have no background."""
    tint = next((tint for limit, tint in TINTS.items() if math.exp(logprob) < limit), None)
    if tint is None:
        return text
    begin, end = f"\x1b[38;5;16;48;5;{tint}m", "\x1b[0m" # black text, whatever the terminal's own colour
    return "\n".join(line and begin + line + end for line in text.split("\n"))


class Progress:
    """Counts samples and tokens. Shows a bar, or if standard error is no terminal, as with nohup, a line now and then.

    total_samples: how many samples the run will generate; None if unknown.
    """

    def __init__(self, total_samples: int | None, max_new_tokens: int):
        self.total_samples, self.max_new_tokens = total_samples, max_new_tokens
        self.start_time = self.last_line_time = time.perf_counter()
        self.num_samples = 0 # finished ones
        self.num_tokens = 0 # of all samples
        self.bar = start_progress_bar(total_samples and total_samples * max_new_tokens)

    def add_tokens(self, num_tokens: int) -> None:
        """Advance the bar by num_tokens. A negative number takes back the tokens of a batch that ran out of memory."""
        self.num_tokens += num_tokens
        now = time.perf_counter()
        if self.bar is not None:
            self.bar.update(num_tokens)
        elif now - self.last_line_time >= LOG_INTERVAL and not is_tty(sys.stderr):
            self.last_line_time = now
            samples = (f"{self.num_samples} of {plural(self.total_samples, 'sample')}" if self.total_samples
                       else plural(self.num_samples, "sample"))
            logger.info(f"{samples}, {plural(self.num_tokens, 'token')} so far: "
                        f"{self.num_tokens / (now - self.start_time):.1f} tokens/s")

    def add_sample(self, sample: Sample) -> None:
        self.num_samples += 1
        if self.bar is not None:
            if self.bar.total:
                self.bar.total -= self.max_new_tokens - sample.num_tokens # it stopped early
            self.bar.set_postfix_str(plural(self.num_samples, "sample"), refresh=False)

    def close(self, peak_memory: int | None) -> None:
        """Remove the bar, and log a summary of the run if it generated samples. peak_memory is in bytes."""
        if self.bar is not None:
            self.bar.close()
        if not self.num_samples: # out_file was already complete
            return
        seconds = time.perf_counter() - self.start_time
        peak = f", peak memory {peak_memory / 2**20:.0f} MB" if peak_memory else ""
        logger.info(f"{plural(self.num_samples, 'sample')}, {plural(self.num_tokens, 'token')} in {seconds:.1f} s: "
                    f"{self.num_tokens / seconds:.1f} tokens/s{peak}")
