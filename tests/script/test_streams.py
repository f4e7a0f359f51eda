"""Ctrl-C, and standard streams that are closed, late, or cannot encode a character."""
import signal
import subprocess
import threading
import time

import pytest

from models import CHARS, make_gpt, save_checkpoint, save_meta
from project import RULE
from script_process import CLOSED, PIPE, start_script
from terminal import Terminal

FAST = "--num_samples=1", "--max_new_tokens=5"


@pytest.mark.parametrize("seconds", [pytest.param(0.1, marks=pytest.mark.slow), 0.3, 0.6])
def test_ctrl_c_while_torch_is_imported_ends_the_run_at_once(char_checkpoint, seconds):
    process = start_script(f"--out_dir={char_checkpoint}", "--num_samples=100000", "--batch_size=1", separate=True)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=20)
    if b"settings: " in messages:
        assert process.returncode == 130 and b"Traceback" not in messages, messages
    else: # Python was still starting, and exits in its own way
        assert process.returncode in (130, -2, 1)


@pytest.mark.parametrize("separate", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fork", "separate"])
def test_ctrl_c_ends_the_run_after_a_complete_sample(char_checkpoint, separate):
    process = start_script(f"--out_dir={char_checkpoint}", "--num_samples=100000", "--batch_size=1", separate=separate)
    printed = process.stdout.read(1) # the first sample is there
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    rest, messages = process.communicate(timeout=20)
    assert process.returncode == 130 and b"Traceback" not in messages and b"rror" not in messages
    assert (printed + rest).endswith(f"\n{RULE}\n".encode())


@pytest.mark.parametrize("streams", [{}, *(pytest.param(case, marks=pytest.mark.slow) for case in [{"stdout": False}, {"stderr": False}])], ids=str)
def test_ctrl_c_on_a_terminal_ends_the_line(char_checkpoint, tiktoken_cache, streams):
    pytest.importorskip("pty")
    screen = Terminal([f"--out_dir={char_checkpoint}", "--num_samples=1", "--max_new_tokens=1000000", "--context_shift", "--device=cpu"], tiktoken_cache, **streams)
    screen.read_some()
    time.sleep(0.5)
    screen.type("\x03")
    assert screen.read_to_end().endswith("\n")
    screen.close()
    assert screen.process.returncode == 130


def test_messages_do_not_go_to_stdout_if_stderr_is_closed(char_checkpoint):
    process = start_script(f"--out_dir={char_checkpoint}", "--num_samples=2", "--start=Hi", "--max_new_tokens=0", stderr=CLOSED)
    printed, _ = process.communicate()
    assert process.returncode == 0 and printed.decode() == f"Hi\n{RULE}\n" * 2


def test_a_closed_stdin_is_ignored(char_checkpoint):
    process = start_script(f"--out_dir={char_checkpoint}", "--num_samples=1", "--start=Hi", "--max_new_tokens=0", stdin=CLOSED)
    assert process.communicate()[0].decode() == f"Hi\n{RULE}\n"


def test_a_pipe_gets_utf8_where_its_encoding_lacks_a_character(run_script, tmp_path):
    save_checkpoint(tmp_path, make_gpt())
    save_meta(tmp_path / "meta.pkl", CHARS[:-1] + "é")
    run = (f"--out_dir={tmp_path}", *FAST, "--start=é")
    assert run_script(*run, PYTHONIOENCODING="ascii").stdout == run_script(*run).stdout != ""
    assert run_script(*run).stdout.startswith("é")


def test_a_closed_pipe_is_not_an_error(char_checkpoint):
    head = subprocess.Popen(["head", "-1"], stdin=PIPE, stdout=PIPE)
    process = start_script(f"--out_dir={char_checkpoint}", "--batch_size=1", "--max_new_tokens=5", "--num_samples=50", stdout=head.stdin)
    printed, _ = head.communicate()
    _, messages = process.communicate(timeout=20)
    assert printed.count(b"\n") == 1 and process.returncode == 141
    assert b"Traceback" not in messages and b"rror" not in messages


def test_a_pipe_gets_a_sample_while_others_of_its_batch_go_on(run_script, char_checkpoint):
    run = f"--out_dir={char_checkpoint}", "--start=The ", "--num_samples=2", "--batch_size=2", "--context_shift", "--device=cpu"
    first = run_script(*run, "--max_new_tokens=12").stdout.split(f"\n{RULE}\n")[0]
    process = start_script(*run, "--max_new_tokens=1000000", f"--stop={first[-8:]}") # the second sample does not have this text
    timer = threading.Timer(60, process.kill)
    timer.start()
    expected, printed = f"{first[:-8]}\n{RULE}\n".encode(), b""
    while len(printed) < len(expected) and (part := process.stdout.read(1000)):
        printed += part
    assert printed == expected and process.poll() is None
    process.kill()
    assert process.communicate(timeout=20)[0] == b""
    timer.cancel()


def test_input_from_a_pipe_may_come_late(char_checkpoint):
    process = start_script(f"--out_dir={char_checkpoint}", *FAST, "--start=FILE:-", stdin=PIPE)
    time.sleep(0.3)
    printed, _ = process.communicate(b"Hello")
    assert process.returncode == 0 and printed.startswith(b"Hello")
