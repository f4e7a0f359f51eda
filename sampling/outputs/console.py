"""Messages on standard error, and how the script ends. Standard output is for the samples alone."""
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn, Protocol, TextIO

from sampling.errors import is_out_of_memory

# Unicode's pictures of control characters, except tab and newline: a terminal obeys the characters themselves.
CONTROL_PICTURES = {**{i: chr(0x2400 + i) for i in range(32) if chr(i) not in "\t\n"}, 0x7f: "\u2421",
                    **dict.fromkeys(range(0x80, 0xa0), "\ufffd")}


class ProgressBar(Protocol):
    """A bar on standard error that can make room for a message."""

    def clear(self) -> object:
        """Clear its line. The bar's next update shows it again."""


@dataclass
class Console:
    """What the functions below share: a process has one standard error."""
    is_main: bool = True
    bar: ProgressBar | None = None


_console = Console()


def setup_console(is_main: bool = True) -> None:
    """Call this first: Ctrl-C then ends the script at once, and no character that a terminal lacks does.

    is_main=False silences the console: one process of a run speaks for all.
    """
    _console.is_main = is_main
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Not a KeyboardInterrupt: it would show a traceback, and importing torch would swallow it.
        signal.signal(signal.SIGINT, lambda *_: hard_exit(130))
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="replace")


def log(text: str) -> None:
    """Print a message for the user on standard error, if there is one."""
    if sys.stderr is not None and _console.is_main:
        with suppress(OSError):
            if _console.bar is not None:
                _console.bar.clear()
            print(sanitize(text), file=sys.stderr, flush=True)


def shows_progress_bar() -> bool:
    """Whether the user would see a bar on standard error, and not between samples on the same terminal."""
    return _console.is_main and is_tty(sys.stderr) and not is_tty(sys.stdout)


def set_progress_bar(bar: ProgressBar | None) -> None:
    """Say which bar is on standard error, so that messages do not run into it; None: no longer one."""
    _console.bar = bar


@contextmanager
def report_user_errors(status: int = 1) -> Iterator[None]:
    """End the script with one line, and this exit status, for every error that a user can cause."""
    try:
        yield
    except BrokenPipeError: # the reader has seen enough, as in: python sample.py | head
        hard_exit(141)
    except (ValueError, OSError) as error:
        report_and_exit(status, str(error))
    except ModuleNotFoundError as error:
        report_and_exit(1, f"{error} in {sys.executable}: use a Python with the packages of requirements.txt, "
                           "such as .venv/bin/python")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        report_and_exit(1, "out of memory: the model, or one sample of it, is too large "
                           f"({str(error) or 'nothing more is known':.200})")


def report_and_exit(status: int, message: str) -> NoReturn:
    """End the script with one line of a readable length, whatever the message holds."""
    line = " ".join(f"error: {message}".split())
    log(line if len(line) < 3000 else f"{line[:1500]} ... {line[-1500:]}")
    hard_exit(status)


def hard_exit(status: int = 0) -> NoReturn:
    """End the script at once: torch's own shutdown takes 0.3 s."""
    if _console.bar is not None:
        log("") # the shell's prompt then begins on a line of its own
    os._exit(status)


def sanitize(text: str) -> str:
    """The text without anything that a terminal would take for a command."""
    return text.translate(CONTROL_PICTURES)


def is_tty(stream: TextIO | None) -> bool:
    """Whether a stream goes to a terminal, where a user reads it as it is written."""
    return stream is not None and stream.isatty()
