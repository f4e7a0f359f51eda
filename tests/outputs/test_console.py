"""Messages on standard error, and exit statuses."""
import io
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from project import PROJECT, SCRIPT
from sampling.outputs import console

LOGGER = logging.getLogger("sampling.test")
OUT_OF_MEMORY = ("error: out of memory: the model, or a single sample, does not fit ({}): use a smaller model, fewer "
                 "max_new_tokens, dtype=bfloat16 or, on a CPU, dtype=int8\n")


@pytest.fixture
def read_stderr(monkeypatch, capsys):
    """A function that returns the text written to standard error. Exits raise SystemExit, as in a notebook."""
    console.setup_console(owns_process=False)
    return lambda: capsys.readouterr().err


@pytest.mark.parametrize("error, status, message", [
    (ValueError("wrong"), 2, "error: wrong\n"),
    (FileNotFoundError("two\n  lines"), 2, "error: two lines\n"),
    (ValueError("a\x1b[2Jb\x9bc\u202ad\u2069"), 2, "error: a\u241b[2Jb\ufffdc\ufffdd\ufffd\n"),
    (ValueError("x" * 9999), 2, f"error: {'x' * 1500} ... {'x' * 1500}\n"),
    (BrokenPipeError(), 141, ""),
    (KeyboardInterrupt(), 130, ""), # in a notebook
    (MemoryError(), 1, OUT_OF_MEMORY.format("no details available")),
    (RuntimeError("can't allocate memory"), 1, OUT_OF_MEMORY.format("can't allocate memory")),
], ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "")
def test_a_user_error_is_one_line(read_stderr, error, status, message):
    with pytest.raises(SystemExit) as end, console.report_user_errors(status=2):
        raise error
    assert end.value.code == status and read_stderr() == message


def test_an_internal_error_keeps_its_traceback(read_stderr):
    for error in RuntimeError("mat1 and mat2 shapes cannot be multiplied"), AssertionError(), KeyError("a"):
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
    with pytest.raises(SystemExit) as end, console.report_user_errors():
        raise ValueError("wrong")
    assert read_stderr() == "error: process 3: wrong\n" and end.value.code == 1
    assert pauses == [5] # torchrun ends all processes when one has failed: rank 0 must show a common error first


def test_info_and_warnings_are_shown_once_above_the_progress_bar(read_stderr, monkeypatch):
    console.setup_console(owns_process=False) # the second run of this process
    bar = SimpleNamespace(clear=lambda: print("<cleared>", file=sys.stderr, end=""))
    monkeypatch.setattr(console._console, "bar", bar)
    LOGGER.info("hello")
    LOGGER.warning("hello")
    LOGGER.debug("hello")
    assert read_stderr() == "<cleared>hello\n<cleared>warning: hello\n"


@pytest.mark.parametrize("program, shown", [
    ("logging.basicConfig(level=logging.INFO)", "INFO:sampling.a:loaded\nWARNING:sampling.a:hello\n"),
    ("logging.basicConfig(); sampling.outputs.console.setup_console()", "loaded\nwarning: hello\n"), # as sample.py does
], ids=["basicConfig", "console"])
def test_in_a_program_warnings_reach_stderr_and_the_rest_is_as_it_configures(program, shown):
    lines = ["import logging, sampling, sampling.outputs.console", program, "logger = logging.getLogger('sampling.a')",
             "logger.info('loaded')", "logger.warning('hello')"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=PROJECT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", shown)


@pytest.mark.parametrize("is_terminal, beside_text, is_shown", [
    (True, True, False), (True, False, True), (False, False, False)])
def test_a_progress_bar_does_not_disturb_text(read_stderr, monkeypatch, is_terminal, beside_text, is_shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    bar = console.start_progress_bar(beside_text)
    assert (bar is not None) == is_shown
    if is_shown:
        bar.close()


@pytest.mark.parametrize("is_terminal, written", [(True, b"a?b?\n"), (False, "aéb😀\n".encode())])
def test_characters_that_a_terminal_lacks_are_question_marks(read_stderr, monkeypatch, is_terminal, written):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", stream)
    console.setup_console(owns_process=False)
    print("aéb😀", flush=True)
    assert stream.buffer.getvalue() == written


def test_a_closed_or_full_stderr_is_ignored(read_stderr, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")
    for stream in None, Full():
        monkeypatch.setattr(sys, "stderr", stream)
        LOGGER.info("hello")
        assert not console.is_tty(stream)


def test_a_background_job_of_a_shell_still_ignores_ctrl_c():
    program = ("import signal, sampling.outputs.console as c; signal.signal(signal.SIGINT, signal.SIG_IGN); "
               "c.setup_console(); signal.raise_signal(signal.SIGINT); signal.raise_signal(signal.SIGTERM)")
    assert subprocess.run([sys.executable, "-c", program], cwd=PROJECT).returncode == 143


def test_a_python_without_torch_gets_one_line():
    done = subprocess.run([sys.executable, "-S", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: No module named 'torch' in ")
    assert done.stderr.count("\n") == 1
