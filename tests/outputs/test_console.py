"""Messages on standard error, and exit statuses."""
import io
import os
import signal
import subprocess
import sys

import pytest

from project import SCRIPT
from sampling.outputs import console


@pytest.fixture
def read_stderr(monkeypatch, capsys):
    """A function that returns the text written to standard error. The console is restored after the test."""
    monkeypatch.setattr(console, "_console", console.Console())
    return lambda: capsys.readouterr().err


@pytest.fixture
def exit_statuses(monkeypatch):
    """A list that collects exit statuses. Exits raise SystemExit instead of ending the process."""
    statuses = []

    def exit(status):
        statuses.append(status)
        raise SystemExit(status)
    monkeypatch.setattr(console.os, "_exit", exit)
    return statuses


@pytest.mark.parametrize("error, status, message", [
    (ValueError("wrong"), 2, "error: wrong\n"),
    (FileNotFoundError(2, "No such file", "a.txt"), 2, "error: [Errno 2] No such file: 'a.txt'\n"),
    (ValueError("two\n  lines"), 2, "error: two lines\n"),
    (ValueError("a\x1b[2Jb\x9bc"), 2, "error: a\u241b[2Jb\ufffdc\n"),
    (BrokenPipeError(), 141, ""),
    (ModuleNotFoundError("No module named 'x'"), 1, f"error: No module named 'x' in {sys.executable}: use a Python with the packages of requirements.txt, such as .venv/bin/python\n"),
    (MemoryError(), 1, "error: out of memory: the model, or a single sample, does not fit (no details available): use a smaller model, fewer max_new_tokens, dtype=bfloat16 or, on a CPU, dtype=int8\n"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 1,
     "error: out of memory: the model, or a single sample, does not fit ([enforce fail] DefaultCPUAllocator: can't allocate memory): use a smaller model, fewer max_new_tokens, dtype=bfloat16 or, on a CPU, dtype=int8\n"),
], ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "")
def test_a_user_error_is_one_line(read_stderr, exit_statuses, error, status, message):
    with pytest.raises(SystemExit), console.report_user_errors(status=2):
        raise error
    assert exit_statuses == [status] and read_stderr() == message


def test_an_internal_error_keeps_its_traceback(read_stderr, exit_statuses):
    for error in RuntimeError("mat1 and mat2 shapes cannot be multiplied"), AssertionError(), KeyError("a"):
        with pytest.raises(type(error)), console.report_user_errors():
            raise error
    assert exit_statuses == [] and read_stderr() == ""


def test_a_message_clears_the_progress_bar_first(read_stderr, exit_statuses):
    class Bar:
        def clear(self):
            print("<cleared>", file=sys.stderr, end="")
    console.set_progress_bar(Bar())
    console.log("hello")
    with pytest.raises(SystemExit):
        console.hard_exit(3)
    assert read_stderr() == "<cleared>hello\n<cleared>\n"
    console.set_progress_bar(None)
    console.log("bye")
    assert read_stderr() == "bye\n"


def test_only_the_main_process_prints_messages(read_stderr, exit_statuses, monkeypatch):
    pauses = []
    monkeypatch.setattr(console.time, "sleep", pauses.append)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert console.shows_progress_bar()
    console.setup_console(is_main=False)
    console.log("hello")
    with pytest.raises(SystemExit), console.report_user_errors():
        raise ValueError("wrong")
    assert read_stderr() == "" and exit_statuses == [1]
    assert pauses == [10], "torchrun ends all processes as soon as one has failed: the main one must show its error first"
    assert not console.shows_progress_bar()


def test_a_progress_bar_is_shown_only_if_stderr_is_a_terminal_and_stdout_is_not(read_stderr, monkeypatch):
    for stdout_is_tty in False, True:
        for stderr_is_tty in False, True:
            monkeypatch.setattr(sys.stdout, "isatty", lambda tty=stdout_is_tty: tty, raising=False)
            monkeypatch.setattr(sys.stderr, "isatty", lambda tty=stderr_is_tty: tty, raising=False)
            assert console.shows_progress_bar() == (stderr_is_tty and not stdout_is_tty)


def test_there_is_no_bar_beside_a_pipe_whose_reader_may_show_the_samples(read_stderr, monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with open(reader), open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert not console.shows_progress_bar()
    with open(os.devnull, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert console.shows_progress_bar()


@pytest.mark.parametrize("environment, on_terminal, in_file", [({}, True, False), ({"NO_COLOR": "1"}, False, False), ({"NO_COLOR": ""}, True, False),
                                                               ({"FORCE_COLOR": "1"}, True, True), ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False)], ids=str)
def test_colours_are_for_terminals_and_can_be_switched_off(monkeypatch, environment, on_terminal, in_file):
    for name in "NO_COLOR", "FORCE_COLOR":
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file, terminal = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    assert (console.has_colors(terminal), console.has_colors(file)) == (on_terminal, in_file)


@pytest.mark.parametrize("is_terminal, written, times", [(True, b"a?b?\n", 1), (False, "aéb😀\n".encode(), 0)], ids=["terminal", "file"])
def test_characters_that_stdout_cannot_encode_are_logged_once(read_stderr, monkeypatch, is_terminal, written, times):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(console.signal, "signal", lambda *_: None)
    console.setup_console()
    console.log_replacements()
    print("aéb😀", flush=True)
    assert stream.buffer.getvalue() == written
    console.log_replacements()
    console.log_replacements()
    assert read_stderr().count("this terminal's encoding, ascii, lacks some characters: each shows as a question mark\n") == times


def test_a_closed_or_full_stderr_is_ignored(read_stderr, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")
    for stream in None, Full():
        monkeypatch.setattr(sys, "stderr", stream)
        console.log("hello")
        assert not console.is_tty(stream)


def test_ctrl_c_ends_the_script_at_once(read_stderr, exit_statuses):
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN) # as in a background job of a shell
        console.setup_console()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        console.setup_console()
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert exit_statuses == [130] and read_stderr() == ""


def test_error_messages_contain_no_control_characters(run_script):
    done = run_script("--out_dir=a\x1b[2Jb\x9bc\nd")
    assert done.returncode == 1 and done.stderr.count("\n") == 2 and not set("\x1b\x9b") & set(done.stderr)


def test_long_error_messages_are_shortened(run_script):
    done = run_script(f"--out_dir={'x' * 100_000}")
    assert done.returncode == 1 and len(done.stderr) < 4000 and "error: " in done.stderr and "xx ... xx" in done.stderr


def test_a_python_without_torch_gets_one_line():
    done = subprocess.run([sys.executable, "-S", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: No module named 'torch' in ") and done.stderr.count("\n") == 1
