"""What the user sees: samples on standard output, all else on standard error, and how the script ends."""
import math
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress

RULE = "---------------" # nanoGPT's, after every sample

# Backgrounds of the terminal's 256 colours for tokens below these probabilities; likelier ones have none.
TINTS = (0.01, 203), (0.05, 216), (0.2, 223)


def rank_and_size():
    """Which process of the run this is, and how many there are, as torchrun says; process 0 speaks for all."""
    return (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if "TORCHELASTIC_RUN_ID" in os.environ else (0, 1)


def say(text):
    """Tell the user what is no sample, where there is somebody to tell."""
    if sys.stderr is not None and rank_and_size()[0] == 0:
        with suppress(OSError):
            if Progress.bar is not None:
                Progress.bar.clear()
            print(visible(text), file=sys.stderr, flush=True)


def fail(status, error):
    """End with one line that says why, whatever the error's text holds."""
    line = " ".join(f"error: {error}".split())
    say(line if len(line) < 3000 else f"{line[:1500]} ... {line[-1500:]}")
    leave(status)


def prepare_console():
    """Before anything else: Ctrl-C ends the script at once, and no character that a terminal lacks does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Without a traceback; importing torch would swallow a KeyboardInterrupt.
        signal.signal(signal.SIGINT, lambda *_: leave(130))
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def mistakes_told(status=1):
    """End the script with one line, and this status, for every mistake that a user can make."""
    try:
        yield
    except BrokenPipeError: # the reader has had enough, as in: python sample.py | head
        leave(141)
    except (ValueError, OSError) as error:
        fail(status, error)
    except ModuleNotFoundError as error:
        fail(1, f"{error} in {sys.executable}: use a Python that has what requirements.txt lists, as .venv/bin/python")
    except (MemoryError, RuntimeError) as error:
        from devices import out_of_memory
        if not out_of_memory(error):
            raise
        fail(1, f"out of memory: the network, or one sample of it, is too large ({str(error) or 'no more known':.200})")


def leave(status=0):
    """End the script at once: torch's own end takes 0.3 s."""
    if Progress.bar is not None:
        say("") # for what comes next on the terminal
    os._exit(status)


# Control characters, but for tab and newline, as Unicode's pictures of them: a terminal obeys those of a file too.
PICTURES = {**{i: chr(0x2400 + i) for i in range(32) if chr(i) not in "\t\n"}, 0x7f: "\u2421",
            **dict.fromkeys(range(0x80, 0xa0), "\ufffd")}


def visible(text):
    """The text with nothing in it that a terminal would take for a command."""
    return text.translate(PICTURES)


def on_terminal(stream):
    """Whether somebody reads this stream while it is written."""
    return stream is not None and stream.isatty()


class Printer:
    """Prints samples as nanoGPT does: whole, or, where it is shown them while they grow, as far as they are known.

    tinted: whether a token's background tells how likely it was.
    """

    def __init__(self, tokenizer, tinted=False):
        self.tokenizer, self.tinted = tokenizer, tinted
        self.safe = visible if on_terminal(sys.stdout) else lambda text: text
        self.begin()

    def begin(self):
        """Turn to the next sample."""
        self.shown = None # how many of its characters are; None: not even the prompt
        self.piece = self.offset = 0 # where the next are

    def show(self, sample):
        """Print what is new of a sample, and the rule once it has ended."""
        parts = []
        if self.shown is None:
            parts.append(self.safe(self.tokenizer.decode(sample.ids)))
            self.shown = 0
        parts += self.fresh(sample)
        if sample.ended:
            parts.append(f"\n{RULE}\n")
            self.begin()
        if text := "".join(parts):
            print(text, end="", flush=True)

    def fresh(self, sample):
        """Yield what is certain of the text and not printed yet."""
        while self.shown < sample.ready:
            piece = sample.pieces[self.piece]
            text = piece[self.offset:self.offset + sample.ready - self.shown]
            yield tint(self.safe(text), sample.looks[self.piece][0]) if self.tinted else self.safe(text)
            self.shown, self.offset = self.shown + len(text), self.offset + len(text)
            if self.offset == len(piece):
                self.piece, self.offset = self.piece + 1, 0


def tint(text, logprob):
    """The text on a background that tells how likely it was."""
    colour = next((colour for limit, colour in TINTS if math.exp(logprob) < limit), None)
    if colour is None:
        return text
    begin, end = f"\x1b[38;5;16;48;5;{colour}m", "\x1b[0m" # black on it, whatever the terminal's own
    return "\n".join(line and begin + line + end for line in text.split("\n"))


class Progress:
    """Counts samples and tokens, with a bar on standard error where somebody looks on and no samples are shown there.

    samples: how many there will be; None: nobody knows.
    """
    bar = None # there is one standard error

    def __init__(self, samples, max_new_tokens):
        self.began, self.samples, self.tokens, self.max_new_tokens = time.perf_counter(), 0, 0, max_new_tokens
        if on_terminal(sys.stderr) and not on_terminal(sys.stdout) and rank_and_size()[0] == 0:
            from tqdm import tqdm
            total = samples and samples * max_new_tokens
            Progress.bar = tqdm(total=total, unit=" tokens", unit_scale=True, delay=1, postfix="0 samples", leave=False)

    def tick(self, tokens):
        """So many tokens more."""
        if self.bar is not None:
            self.bar.update(tokens)

    def count(self, sample):
        """A sample more."""
        self.samples, self.tokens = self.samples + 1, self.tokens + len(sample.new)
        if self.bar is not None:
            if self.bar.total:
                self.bar.total -= self.max_new_tokens - len(sample.new)
            self.bar.set_postfix_str(f"{self.samples} samples", refresh=False)

    def close(self, peak_memory):
        """Say how it went; peak_memory in bytes, or None."""
        if self.bar is not None:
            self.bar.close()
            Progress.bar = None
        took = time.perf_counter() - self.began
        peak = f", peak memory {peak_memory / 2**20:.0f} MB" if peak_memory else ""
        samples = "1 sample" if self.samples == 1 else f"{self.samples} samples"
        say(f"{samples}, {self.tokens} tokens in {took:.1f} s: {self.tokens / took:.0f} tokens/s{peak}")
