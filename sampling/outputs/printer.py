"""Prints samples on standard output, as nanoGPT does."""
import math
import os
import sys
from collections.abc import Iterator

from sampling.inputs.tokenizer import Tokenizer
from sampling.outputs.console import has_colors, is_tty, log, sanitize
from sampling.params import Sample, Token

RULE = "---------------" # nanoGPT prints it after every sample

# The page's backgrounds, for tokens below these probabilities: in red, green and blue, and the nearest of 256 colours.
TINTS = ((0.01, (240, 160, 113), 209), (0.02, (244, 179, 141), 216), (0.05, (247, 195, 166), 217),
         (0.1, (250, 212, 190), 223), (0.2, (251, 227, 212), 224), (0.5, (252, 239, 231), 230))


class Printer:
    """Prints samples one after another: whole, or in parts while they stream.

    show_probs: the background of each token shows its probability, if standard output has colours.
    """

    def __init__(self, tokenizer: Tokenizer, show_probs: bool = False):
        self.tokenizer = tokenizer
        self.is_terminal, self.has_colors = is_tty(sys.stdout), has_colors(sys.stdout)
        self.set_show_probs(show_probs)
        self.reset()

    def reset(self) -> None:
        """Forget the current sample. The next update begins another one."""
        self.is_begun = False
        self.num_printed = 0 # characters, without the prompt
        self.token_index = self.offset = 0 # of the next character: its token, its position in the token's text

    def set_show_probs(self, show_probs: bool) -> None:
        self.show_probs = show_probs
        if show_probs and not self.has_colors:
            log("show_probs has no effect: standard output is not a terminal, or NO_COLOR is set")

    def update(self, sample: Sample, shows_prompt: bool = True) -> None:
        """Print the new text of a sample, after its prompt (if shows_prompt), and the rule when it is finished."""
        parts = []
        if shows_prompt and not self.is_begun:
            parts.append(self._safe(self.tokenizer.decode(sample.request.prompt_ids)))
        self.is_begun = True
        for text, i in self._new_text(sample):
            safe_text = self._safe(text)
            if self.show_probs and self.has_colors and sample.tokens[i].logprob is not None:
                safe_text = colorize(safe_text, char_logprob(sample.tokens, i))
            parts.append(safe_text)
        if sample.finish_reason is not None:
            parts.append(f"\n{RULE}\n")
            self.reset()
        if text := "".join(parts):
            print(text, end="", flush=True)

    def _new_text(self, sample: Sample) -> Iterator[tuple[str, int]]:
        """Yield the emittable text that was not printed before, in parts: (text, the index of its token)."""
        while self.num_printed < sample.num_emittable_chars:
            token_text = sample.tokens[self.token_index].text
            text = token_text[self.offset:self.offset + sample.num_emittable_chars - self.num_printed]
            yield text, self.token_index
            self.num_printed, self.offset = self.num_printed + len(text), self.offset + len(text)
            if self.offset == len(token_text):
                self.token_index, self.offset = self.token_index + 1, 0

    def _safe(self, text: str) -> str:
        return sanitize(text) if self.is_terminal else text


def char_logprob(tokens: list[Token], index: int) -> float:
    """The log-probability of the token at index, with those before it that have only the beginning of its character."""
    logprob = tokens[index].logprob
    while index and not tokens[index - 1].text:
        index -= 1
        logprob += tokens[index].logprob
    return logprob


def colorize(text: str, logprob: float) -> str:
    """The text on a background that shows how likely it was. Line ends have no background."""
    tint = next((tint for limit, *tint in TINTS if math.exp(logprob) < limit), None)
    if tint is None:
        return text
    (red, green, blue), color_256 = tint
    has_true_color = os.environ.get("COLORTERM") in ("truecolor", "24bit")
    background = f"2;{red};{green};{blue}" if has_true_color else f"5;{color_256}"
    begin, end = f"\x1b[38;5;16;48;{background}m", "\x1b[0m" # black text, whatever the terminal's own colour
    return "\n".join(line and begin + line + end for line in text.split("\n"))
