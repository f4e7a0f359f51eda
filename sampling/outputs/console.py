"""Shows messages on standard error, and ends the script. Only samples go to standard output."""
import io
import logging
import os
import signal
import stat
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn, TextIO

from sampling.messages import is_out_of_memory

if TYPE_CHECKING:
    from tqdm import tqdm

# Symbols for control characters, except tab and newline, and for characters that change the direction of text. A
# terminal would interpret the characters.
CONTROL_PICTURES = {**{i: chr(0x2400 + i) for i in range(32) if chr(i) not in "\t\n"}, 0x7f: "\u2421",
                    **dict.fromkeys([*range(0x80, 0xa0), *range(0x202a, 0x202f), *range(0x2066, 0x206a)], "\ufffd")}
LOGGERS = "sampling", "configurator"
PREFIXES = {logging.WARNING: "warning: ", logging.ERROR: "error: "}


class ConsoleHandler(logging.Handler):
    """Shows the messages of LOGGERS on the standard error of the moment, if the process has one.

    is_main: whether this is rank 0 of the run. Only rank 0 shows messages, but every rank shows errors.
    owns_process: whether the end of the run may call os._exit: see setup_console.
    bar: the progress bar on standard error, above which messages are shown.
    """
    is_main, owns_process = True, True
    bar: "tqdm | None" = None

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None and (self.is_main or record.levelno >= logging.ERROR):
            with suppress(OSError):
                if self.bar is not None:
                    self.bar.clear()
                text = PREFIXES.get(record.levelno, "") + record.getMessage()
                print(sanitize(text), file=sys.stderr, flush=True)


logger = logging.getLogger(__name__)
_console = ConsoleHandler() # the only one of this process


def setup_console(is_main: bool = True, owns_process: bool = True) -> None:
    """Set up messages, which standard error then shows, Ctrl-C, which then ends the script at once, and standard
    output, which then never fails on characters.

    On a terminal, characters that its encoding lacks become "?". Files and pipes get UTF-8.

    is_main=False silences all messages but errors: only rank 0 of a run shows them.
    owns_process: no other code runs in this process, so the end of the run may call os._exit. Otherwise, as in a
    notebook, Ctrl-C and exits raise exceptions.
    """
    for package in map(logging.getLogger, LOGGERS):
        package.addHandler(_console) # once, however often this is called
        package.setLevel(logging.INFO)
        package.propagate = False
    _console.is_main, _console.owns_process, _console.bar = is_main, owns_process, None
    if owns_process and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Not a KeyboardInterrupt: it would show a traceback, and importing torch would swallow it.
        signal.signal(signal.SIGINT, lambda *_: hard_exit(130))
    if isinstance(sys.stdout, io.TextIOWrapper): # a notebook has another stream, which takes all characters
        encoding = None if is_tty(sys.stdout) else "utf-8" # in which only lone surrogates are replaced
        sys.stdout.reconfigure(encoding=encoding, errors="replace")


def start_progress_bar(total: int | None) -> "tqdm | None":
    """Show a bar of total tokens, if standard error goes to a terminal and the samples do not; else return None."""
    if not _console.is_main or not is_tty(sys.stderr) or is_tty(sys.stdout):
        return None
    if sys.stdout is not None and stat.S_ISFIFO(os.fstat(1).st_mode): # tee, for example, shows them on the terminal
        return None
    from tqdm import tqdm
    _console.bar = tqdm(total=total, unit=" tokens", unit_scale=True, delay=1, postfix="0 samples", leave=False)
    return _console.bar


@contextmanager
def system_interrupts() -> Iterator[None]:
    """Give Ctrl-C the system's own action inside this block, which ends the process, if the script owns it.

    Python calls a handler only between two operations, and a stranger's file can ask for one that takes minutes.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_used = _console.owns_process and callable(handler) # otherwise it is ignored, or not Python's
    if is_used:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_used:
            signal.signal(signal.SIGINT, handler)


@contextmanager
def report_user_errors(status: int = 1) -> Iterator[None]:
    """End the script with one line, of limited length, for every error that a user can cause.

    status: the exit status for ValueError and OSError; other errors of the user give 1.
    """
    try:
        yield
        return
    except KeyboardInterrupt as interrupt: # with owns_process=False; otherwise Ctrl-C has called hard_exit
        traceback.clear_frames(interrupt.__traceback__)
        raise
    except BrokenPipeError: # the program that reads the samples has ended, as in: python sample.py | head
        hard_exit(141)
    except (ValueError, OSError) as error:
        message = str(error)
    except ModuleNotFoundError as error:
        status, message = 1, (f"{error} in {sys.executable}: use a Python with the packages of requirements.txt, such "
                              "as .venv/bin/python")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        status, message = 1, ("out of memory: the model, or a single sample, does not fit "
                              f"({str(error) or 'no details available':.200}): use a smaller model, fewer "
                              "max_new_tokens, dtype=bfloat16 or, on a CPU, dtype=int8")
    line = " ".join(message.split())
    if not _console.is_main: # torchrun ends all processes as soon as one has failed: rank 0 must show its error first
        time.sleep(10)
    logger.error(line if len(line) < 3000 else f"{line[:1500]} ... {line[-1500:]}")
    hard_exit(status)


@contextmanager
def name_write_errors(name: str | os.PathLike) -> Iterator[None]:
    """Turn an OSError inside the block into one that names the file. A broken pipe stays one."""
    try:
        yield
    except BrokenPipeError:
        raise
    except FileNotFoundError:
        folder = os.path.dirname(os.path.realpath(name))
        raise OSError(f"cannot write {name!r:.200}: there is no folder {folder}; create it, or give another "
                      "path") from None
    except OSError as error:
        raise OSError(f"cannot write {name!r:.200}: {error.strerror}") from None


def hard_exit(status: int = 0) -> NoReturn:
    """End the script at once: torch's own shutdown takes 0.3 s. Raises SystemExit if owns_process is False."""
    if status == 130 and _console.is_main:
        end_line()
    if not _console.owns_process:
        traceback.clear_frames(sys.exc_info()[2]) # closes the run's files: a notebook keeps its latest traceback
        sys.exit(status)
    os._exit(status)


def end_line() -> None:
    """End the terminal's current line. A signal handler may call this."""
    if is_tty(sys.stdout) or is_tty(sys.stderr):
        with suppress(OSError):
            os.write(1 if is_tty(sys.stdout) else 2, b"\n")


def sanitize(text: str) -> str:
    """Replace control characters by symbols, except tab and newline."""
    return text.translate(CONTROL_PICTURES)


def is_tty(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
