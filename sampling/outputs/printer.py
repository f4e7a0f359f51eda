"""Prints samples on standard output, as nanoGPT does."""
import math
import os
import sys

from sampling.inputs.tokenizer import Tokenizer
from sampling.outputs.console import has_colors, is_tty, log, log_replacements, sanitize
from sampling.params import Sample, TextCursor, Token

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
        self.cursor = None # how much of the current sample was printed; None: nothing, not even its prompt
        self.set_show_probs(show_probs)

    def set_show_probs(self, show_probs: bool) -> None:
        """Switch the backgrounds on or off."""
        self.show_probs = show_probs
        if show_probs and not self.has_colors:
            log("show_probs has no effect: standard output is not a terminal, or NO_COLOR is set")

    def update(self, sample: Sample, shows_prompt: bool = True) -> None:
        """Print the new text of a sample, after its prompt (if shows_prompt), and the rule when it is finished."""
        parts = []
        if self.cursor is None:
            self.cursor = TextCursor(sample)
            parts += [self._safe(self.tokenizer.decode(sample.request.prompt_ids))] if shows_prompt else []
        for text, i in self.cursor.read():
            safe_text = self._safe(text)
            if self.show_probs and self.has_colors and sample.tokens[i].logprob is not None:
                safe_text = colorize(safe_text, char_logprob(sample.tokens, i))
            parts.append(safe_text)
        if sample.finish_reason is not None:
            parts.append(f"\n{RULE}\n")
            self.reset()
        if text := "".join(parts):
            print(text, end="", flush=True)
        if self.cursor is None:
            log_replacements()

    def reset(self) -> None:
        """Forget the current sample. The next update begins another one."""
        self.cursor = None

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
    """The text on a terminal background that shows how likely it was. Line ends have no background."""
    tint = next((tint for limit, *tint in TINTS if math.exp(logprob) < limit), None)
    if tint is None:
        return text
    (red, green, blue), of_256 = tint
    background = f"2;{red};{green};{blue}" if os.environ.get("COLORTERM") in ("truecolor", "24bit") else f"5;{of_256}"
    begin, end = f"\x1b[38;5;16;48;{background}m", "\x1b[0m" # black text, whatever the terminal's own colour
    return "\n".join(line and begin + line + end for line in text.split("\n"))
