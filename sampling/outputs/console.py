"""Shows messages on standard error, and ends the script. Only samples go to standard output."""
import io
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO

from sampling import process
from sampling.process import is_out_of_memory
from sampling.torchrun import rank

# What is shown for each character that a terminal would obey: control characters, except tab and
# newline, and those that change the direction of text.
CONTROL_PICTURES = {i: chr(0x2400 + i) for i in range(32) if chr(i) not in "\t\n"}
CONTROL_PICTURES[0x7f] = "\u2421"
for invisible in range(0x80, 0xa0), range(0x202a, 0x202f), range(0x2066, 0x206a):
    CONTROL_PICTURES.update(dict.fromkeys(invisible, "\ufffd"))
SETTING_TO_PASS = re.compile("pass (?=[a-z_]+=)") # which is a flag on the command line


class ConsoleHandler(logging.Handler):
    """Shows the package's messages on the standard error of the moment, if there is one."""
    bar = None # the progress bar, a tqdm: messages are shown above it

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:
            with suppress(OSError, RuntimeError): # the latter if a signal came within a write
                clear_bar()
                prefix = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
                message = record.getMessage().translate(CONTROL_PICTURES)
                message = SETTING_TO_PASS.sub("pass --", message)
                print(prefix + message, file=sys.stderr, flush=True)


logger = logging.getLogger(__name__)
_console = ConsoleHandler() # the only one of this process
# Called with the exit status, also after an error or one of END_SIGNALS.
before_exit: list[Callable[[int], None]] = []


def setup_console(owns_process: bool = True) -> None:
    """Set up messages, which standard error then shows, END_SIGNALS, which then end the script at
    once, and standard output, which then never fails on characters: a terminal shows "?",
    files and pipes get UTF-8.

    Ranks other than 0 show only errors. owns_process: no other code runs in this process, so the
    end of the run may call os._exit. Otherwise, as in a notebook, Ctrl-C and exits raise
    exceptions.
    """
    package = logging.getLogger("sampling")
    package.addHandler(_console) # once, however often this is called
    package.setLevel(logging.ERROR if rank() else logging.INFO)
    package.propagate = False
    process.owns_process = owns_process
    _console.bar = None
    before_exit.clear() # a run that ended in an internal error may have left some
    for number in process.END_SIGNALS if owns_process else ():
        # A shell's background job ignores Ctrl-C. A KeyboardInterrupt would be swallowed by torch
        # while it is imported.
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, end_by_signal)
    # A notebook has another stream, which takes all characters.
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In UTF-8, only lone surrogates are replaced.
        encoding = None if is_tty(sys.stdout) else "utf-8"
        sys.stdout.reconfigure(encoding=encoding, errors="replace")
        # A parent may have made it non-blocking: then a full pipe loses text.
        with suppress(AttributeError, OSError):
            os.set_blocking(sys.stdout.fileno(), True)


def start_progress_bar() -> Any:
    """Return a tqdm of tokens, or None if standard error is no terminal."""
    if not is_tty(sys.stderr):
        return None
    from tqdm import tqdm
    _console.bar = tqdm(unit=" tokens", unit_scale=True, delay=1, mininterval=0, miniters=1,
                        leave=False)
    return _console.bar


def clear_bar() -> None:
    """Make room for a line: the bar comes again with its next update."""
    if _console.bar is not None:
        _console.bar.clear()


@contextmanager
def report_user_errors(status: int = 1) -> Iterator[None]:
    """End the script with one line, of limited length, for every error that a user can cause.

    status: the exit status for ValueError and OSError; other errors of the user give 1.
    """
    try:
        yield
        return end_run(0)
    except KeyboardInterrupt: # in a notebook or a session; otherwise Ctrl-C calls end_by_signal
        hard_exit(130)
    except BrokenPipeError: # the reader of the samples has ended, as in: python sample.py | head
        hard_exit(141)
    except (ValueError, OSError) as error:
        message = str(error)
    except (ImportError, MemoryError, RuntimeError) as error:
        status = 1
        if is_out_of_memory(error):
            message = ("out of memory: torch, the model, or a single sample does not fit "
                       f"({str(error) or 'no details available':.200}): use a smaller model, fewer "
                       "max_new_tokens, dtype=bfloat16 or, on a CPU, dtype=int8")
        elif isinstance(error, ImportError):
            message = (f"{error} in {sys.executable}: use a Python with the packages of "
                       "requirements.txt, such as .venv/bin/python")
        else:
            raise
    line = " ".join(message.split())
    if rank(): # rank 0 may have the same error: then it ends before this process shows it
        time.sleep(5)
        line = f"process {rank()}: {line}"
    logger.error(line if len(line) < 3000 else f"{line[:1500]} ... {line[-1500:]}")
    hard_exit(status)


def hard_exit(status: int = 0) -> NoReturn:
    """End the script at once: torch's own shutdown takes 0.3 s.

    Raises SystemExit if owns_process is False.
    """
    if status == 130 and not rank():
        end_line()
    try:
        end_run(status)
    except (OSError, ValueError) as error:
        logger.error(error)
    if not process.owns_process:
        # Closes the run's files: a notebook keeps its latest traceback.
        traceback.clear_frames(sys.exc_info()[2])
        sys.exit(status)
    os._exit(status)


def end_run(status: int) -> None:
    while before_exit:
        before_exit.pop()(status)


def end_by_signal(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN) # a second Ctrl-C would end before_exit
    hard_exit(128 + number)


@contextmanager
def name_write_errors(name: str | os.PathLike) -> Iterator[None]:
    """Turn an OSError inside the block into one that names the file. A broken pipe stays one."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or error
        if isinstance(error, FileNotFoundError):
            folder = os.path.dirname(os.path.realpath(name))
            reason = (f"the folder {folder} is missing, or takes no files; create it, or give "
                      "another path")
        raise OSError(f"cannot write {name!r:.200}: {reason}") from None


def end_line() -> None:
    """End the terminal's current line. A signal handler may call this."""
    if is_tty(sys.stdout) or is_tty(sys.stderr):
        with suppress(OSError):
            os.write(1 if is_tty(sys.stdout) else 2, b"\n")


def is_tty(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
