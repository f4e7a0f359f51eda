"""Prints samples on standard output, as nanoGPT does."""
import math
import sys

from sampling.inputs.tokenizer import Tokenizer
from sampling.outputs.console import is_tty, sanitize
from sampling.params import Sample, TextCursor

RULE = "---------------" # nanoGPT prints it after every sample

# Backgrounds, of the terminal's 256 colours, for tokens below these probabilities; more likely tokens have none.
BACKGROUNDS = (0.01, 203), (0.05, 216), (0.2, 223)


class Printer:
    """Prints samples one after another: whole, or in parts while they stream.

    show_probs: the background of each token shows its probability.
    """

    def __init__(self, tokenizer: Tokenizer, show_probs: bool = False):
        self.tokenizer, self.show_probs = tokenizer, show_probs
        self.is_terminal = is_tty(sys.stdout)
        self.cursor = None # how much of the current sample was printed; None: nothing, not even its prompt

    def update(self, sample: Sample) -> None:
        """Print the new text of a sample, and the rule when it is finished."""
        parts = []
        if self.cursor is None:
            self.cursor = TextCursor(sample)
            parts.append(self._safe(self.tokenizer.decode(sample.request.prompt_ids)))
        for text, token in self.cursor.read():
            parts.append(colorize(self._safe(text), token.logprob) if self.show_probs else self._safe(text))
        if sample.finish_reason is not None:
            parts.append(f"\n{RULE}\n")
            self.reset()
        if text := "".join(parts):
            print(text, end="", flush=True)

    def reset(self) -> None:
        """Forget the current sample. The next update begins another one."""
        self.cursor = None

    def _safe(self, text: str) -> str:
        return sanitize(text) if self.is_terminal else text


def colorize(text: str, logprob: float) -> str:
    """The text on a terminal background that shows how likely it was. Line ends have no background."""
    background = next((colour for limit, colour in BACKGROUNDS if math.exp(logprob) < limit), None)
    if background is None:
        return text
    begin, end = f"\x1b[38;5;16;48;5;{background}m", "\x1b[0m" # black text, whatever the terminal's own colour
    return "\n".join(line and begin + line + end for line in text.split("\n"))
