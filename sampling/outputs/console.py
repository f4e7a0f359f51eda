"""Shows messages on standard error, and ends the script. Only samples go to standard output."""
import io
import os
import signal
import stat
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TextIO

from sampling.messages import is_out_of_memory

if TYPE_CHECKING:
    from tqdm import tqdm

# Unicode's symbols for control characters, except tab and newline. A terminal would interpret the characters.
CONTROL_PICTURES = {**{i: chr(0x2400 + i) for i in range(32) if chr(i) not in "\t\n"}, 0x7f: "\u2421",
                    **dict.fromkeys(range(0x80, 0xa0), "\ufffd")}


@dataclass
class Console:
    """The state that the functions below share."""
    is_main: bool = True
    owns_process: bool = True
    bar: "tqdm | None" = None # on standard error; log clears it before a message


_console = Console()


def setup_console(is_main: bool = True, owns_process: bool = True) -> None:
    """Set up Ctrl-C, which then ends the script at once, and standard output, which then never fails on characters.

    On a terminal, characters that its encoding lacks become "?". Files and pipes get UTF-8.

    is_main=False silences all messages: only rank 0 of a run shows them.
    owns_process: no other code runs in this process, so the end of the run may call os._exit. Otherwise, as in a
    notebook, Ctrl-C and exits raise exceptions.
    """
    _console.is_main, _console.owns_process, _console.bar = is_main, owns_process, None
    if owns_process and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Not a KeyboardInterrupt: it would show a traceback, and importing torch would swallow it.
        signal.signal(signal.SIGINT, lambda *_: hard_exit(130))
    if isinstance(sys.stdout, io.TextIOWrapper): # a notebook has another stream, which takes all characters
        if is_tty(sys.stdout):
            sys.stdout.reconfigure(errors="replace")
        else:
            sys.stdout.reconfigure(encoding="utf-8", errors="replace") # only lone surrogates are replaced


def log(text: str) -> None:
    """Print a message for the user on standard error, if the process has one."""
    if sys.stderr is not None and _console.is_main:
        with suppress(OSError):
            if _console.bar is not None:
                _console.bar.clear()
            print(sanitize(text), file=sys.stderr, flush=True)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shows_progress_bar() -> bool:
    """Whether to show a progress bar: standard error must go to a terminal, and the samples must not.

    The reader of a pipe may show the samples there, as in: python sample.py | tee samples.txt
    """
    return _console.is_main and is_tty(sys.stderr) and not (is_tty(sys.stdout) or is_pipe(sys.stdout))


def set_progress_bar(bar: "tqdm | None") -> None:
    """Register the bar on standard error, so that messages do not run into it."""
    _console.bar = bar


@contextmanager
def report_user_errors(status: int = 1) -> Iterator[None]:
    """End the script with one line for every error that a user can cause.

    status: the exit status for ValueError and OSError; other errors of the user give 1.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt: # with owns_process=False; otherwise Ctrl-C has called hard_exit
        traceback.clear_frames(interrupt.__traceback__)
        raise
    except BrokenPipeError: # the program that reads the samples has ended, as in: python sample.py | head
        hard_exit(141)
    except (ValueError, OSError) as error:
        report_and_exit(status, str(error))
    except ModuleNotFoundError as error:
        report_and_exit(1, f"{error} in {sys.executable}: use a Python with the packages of requirements.txt, "
                           "such as .venv/bin/python")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        report_and_exit(1, "out of memory: the model, or a single sample, does not fit "
                           f"({str(error) or 'no details available':.200}): use a smaller model, fewer max_new_tokens, "
                           "dtype=bfloat16 or, on a CPU, dtype=int8")


def report_and_exit(status: int, message: str) -> NoReturn:
    """Show an error as one line of limited length, and end the script."""
    line = " ".join(f"error: {message}".split())
    log(line if len(line) < 3000 else f"{line[:1500]} ... {line[-1500:]}")
    set_progress_bar(None) # log has cleared it
    if not _console.is_main: # torchrun ends all processes as soon as one has failed: rank 0 must show its error first
        time.sleep(10)
    hard_exit(status)


def hard_exit(status: int = 0) -> NoReturn:
    """End the script at once: torch's own shutdown takes 0.3 s. Raises SystemExit if owns_process is False."""
    if _console.bar is not None:
        log("") # so that the shell's prompt begins on a new line
    elif status == 130 and _console.is_main:
        end_line()
    if not _console.owns_process:
        traceback.clear_frames(sys.exc_info()[2]) # closes the run's files: a notebook keeps its latest traceback
        sys.exit(status)
    os._exit(status)


def end_line() -> None:
    """End the terminal's current line. A signal handler may call this."""
    for fd, stream in enumerate([sys.stdout, sys.stderr], 1):
        if is_tty(stream):
            with suppress(OSError):
                os.write(fd, b"\n")
            return


def sanitize(text: str) -> str:
    """Replace control characters by symbols, except tab and newline."""
    return text.translate(CONTROL_PICTURES)


def is_tty(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def is_pipe(stream: TextIO | None) -> bool:
    """Whether another program reads what is written to a stream."""
    with suppress(OSError): # some streams have no descriptor, as in a notebook
        return stream is not None and stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    return False


def has_colors(stream: TextIO | None) -> bool:
    """Whether colours may be written to a stream: see https://no-color.org and https://force-color.org."""
    return not os.environ.get("NO_COLOR") and (is_tty(stream) or bool(os.environ.get("FORCE_COLOR")))
