"""Reads lines from a user: with a prompt sign, line editing, and the history of earlier sessions."""
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sampling.outputs.console import is_tty


def is_tty_session() -> bool:
    """Whether a user types at a terminal and sees the samples there."""
    return is_tty(sys.stdin) and is_tty(sys.stdout)


def input_line() -> str:
    """Read a line. A user at a terminal sees "> " first, on standard error if standard output is not a terminal."""
    if is_tty(sys.stdin) and not is_tty(sys.stdout) and is_tty(sys.stderr):
        print("> ", end="", file=sys.stderr, flush=True)
    line = input("> " if is_tty_session() else "")
    line = line.removeprefix("\ufeff").removesuffix("\r") # a file may come from Windows
    if line.count("\n") == 1: # a single line, pasted with its newline
        line = line.removesuffix("\n")
    if "\n" in line: # the history file holds one entry per line
        replace_last_history_item(repr(line))
    return line


def replace_last_history_item(line: str) -> None:
    """Replace the last entry of the history, which the arrow keys recall."""
    import readline
    if length := readline.get_current_history_length():
        readline.replace_history_item(length - 1, line)


def keep_invalid_bytes() -> None:
    """Let input() turn bytes that are not UTF-8 into lone surrogates, so that only their line is an error."""
    if isinstance(sys.stdin, io.TextIOWrapper): # not in a notebook
        sys.stdin.reconfigure(errors="surrogateescape")


@contextmanager
def line_editing() -> Iterator[None]:
    """Give input() on a terminal line editing, the history of earlier sessions, and multi-line paste."""
    try:
        import readline
    except ImportError: # on Windows the console itself edits lines
        readline = None
    if readline is None or not is_tty_session():
        yield
        return
    if os.environ.get("TERM") != "dumb":
        readline.parse_and_bind("set enable-bracketed-paste on") # Python disables it
    path = history_path()
    with suppress(OSError): # there may be no history yet
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(1000)
        with suppress(OSError): # without a home folder, the history ends with the session
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)


def history_path() -> Path:
    """Where the history of sessions is saved: https://specifications.freedesktop.org/basedir-spec."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()) / "nanogpt-sample" / "history"
