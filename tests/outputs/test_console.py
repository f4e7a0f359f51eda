"""Messages on standard error, and exit statuses."""
import io
import logging
import sys
from types import SimpleNamespace

import pytest

from project import SCRIPT
from sampling.outputs import console
from script_process import run_python

LOGGER = logging.getLogger("sampling.test")
OUT_OF_MEMORY = ("error: out of memory: torch, the model, or a single sample does not fit ({}): "
                 "use a smaller model, fewer max_new_tokens, dtype=bfloat16 or, on a CPU, "
                 "dtype=int8\n")


@pytest.fixture
def read_stderr(capsys):
    """read_stderr() returns what was printed. An exit raises SystemExit, as in a notebook."""
    console.setup_console(owns_process=False)
    return lambda: capsys.readouterr().err


def exit_status(error, **options):
    """The status with which a run ends when this error is raised."""
    with pytest.raises(SystemExit) as end, console.report_user_errors(**options):
        raise error
    return end.value.code


@pytest.mark.parametrize("error, status, message", [
    (FileNotFoundError("two\n  lines"), 2, "error: two lines\n"),
    (ValueError("a\x1b[2Jb\x80\x9fc\u202a\u202ed\u2066\u2069"), 2,
     "error: a\u241b[2Jb\ufffd\ufffdc\ufffd\ufffdd\ufffd\ufffd\n"),
    (ValueError("x" * 9999), 2, f"error: {'x' * 1500} ... {'x' * 1500}\n"),
    (KeyboardInterrupt(), 130, ""), # in a notebook
    (MemoryError(), 1, OUT_OF_MEMORY.format("no details available")),
    (ImportError("x.so: failed to map segment"), 1,
     OUT_OF_MEMORY.format("x.so: failed to map segment")),
])
def test_a_user_error_is_one_line(read_stderr, error, status, message):
    assert exit_status(error, status=2) == status
    assert read_stderr() == message


def test_an_internal_error_keeps_its_traceback(read_stderr):
    shapes = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    for error in shapes, AssertionError(), KeyError("a"):
        with pytest.raises(type(error)), console.report_user_errors():
            raise error
    assert read_stderr() == ""


def test_other_processes_show_only_errors_with_their_number(read_stderr, monkeypatch):
    pauses = []
    monkeypatch.setattr(console.time, "sleep", pauses.append)
    for name in "RANK", "TORCHELASTIC_RUN_ID":
        monkeypatch.setenv(name, "3")
    console.setup_console(owns_process=False)
    LOGGER.warning("hello")
    assert exit_status(ValueError("wrong")) == 1
    assert read_stderr() == "error: process 3: wrong\n"
    # torchrun ends all processes when one has failed: rank 0 must show a common error first.
    assert pauses == [5]


def test_messages_are_shown_once_above_the_progress_bar(read_stderr, monkeypatch):
    console.setup_console(owns_process=False) # the second run of this process
    bar = SimpleNamespace(clear=lambda: sys.stderr.write("<cleared>"))
    monkeypatch.setattr(console._console, "bar", bar)
    LOGGER.info("hello")
    LOGGER.warning("hello")
    LOGGER.debug("hello")
    assert read_stderr() == "<cleared>hello\n<cleared>warning: hello\n"


LOGGING_PROGRAM = """
import logging
from sampling.outputs.console import setup_console
{}
logger = logging.getLogger('sampling.a')
logger.info('loaded')
logger.warning('hello')
"""


@pytest.mark.parametrize("setup, shown", [
    ("logging.basicConfig(level=logging.INFO)",
     "INFO:sampling.a:loaded\nWARNING:sampling.a:hello\n"),
    ("logging.basicConfig(); setup_console()", "loaded\nwarning: hello\n"), # as sample.py does
])
def test_a_program_configures_which_messages_reach_stderr(setup, shown):
    done = run_python("-c", LOGGING_PROGRAM.format(setup))
    assert done.stdout == ""
    assert done.stderr == shown


@pytest.mark.parametrize("is_terminal, written", [
    (True, b"a?b?\n"), (False, "aéb😀\n".encode())])
@pytest.mark.usefixtures("read_stderr")
def test_characters_that_a_terminal_lacks_are_question_marks(monkeypatch, is_terminal, written):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", stream)
    console.setup_console(owns_process=False)
    print("aéb😀", flush=True)
    assert stream.buffer.getvalue() == written


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [None, FullDisk()])
@pytest.mark.usefixtures("read_stderr")
def test_a_closed_or_full_stderr_is_ignored(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    LOGGER.info("hello")
    assert not console.is_tty(stream)


BACKGROUND_JOB = """
import signal, sampling.outputs.console
signal.signal(signal.SIGINT, signal.SIG_IGN)
sampling.outputs.console.setup_console()
signal.raise_signal(signal.SIGINT)
signal.raise_signal(signal.SIGTERM)
"""


def test_a_background_job_of_a_shell_still_ignores_ctrl_c():
    run_python("-c", BACKGROUND_JOB, status=143)


def test_a_python_without_torch_gets_one_line():
    assert run_python("-S", SCRIPT, status=1).stderr == (
        f"error: No module named 'torch' in {sys.executable}: use a Python with the packages of "
        "requirements.txt, such as .venv/bin/python\n")
