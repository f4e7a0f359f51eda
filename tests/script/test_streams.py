"""Ctrl-C, and standard streams that are closed or cannot encode a character."""
import signal
import threading
import time

import pytest

from project import RULE
from script_process import CLOSED, start_script
from terminal import Terminal

FAST = "--num_samples=1", "--max_new_tokens=5"


@pytest.mark.parametrize("seconds", [0.3, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.1, 0.6, 0.9))])
def test_ctrl_c_while_torch_is_imported_ends_the_run_at_once(char_checkpoint, seconds):
    process = start_script(f"--out_dir={char_checkpoint}", "--num_samples=100000", "--batch_size=1")
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=20)
    assert process.returncode in (130, -signal.SIGINT, 1) # the second while a file is read: the system ends the process
    if b"settings: " in messages: # before it, Python was still starting, and exits in its own way
        assert process.returncode != 1 and b"Traceback" not in messages, messages


@pytest.mark.parametrize("streams", [{}, pytest.param({"stdout": False}, marks=pytest.mark.slow),
                                     pytest.param({"stderr": False}, marks=pytest.mark.slow)], ids=str)
def test_ctrl_c_on_a_terminal_ends_the_line(char_checkpoint, tiktoken_cache, streams):
    pytest.importorskip("pty")
    screen = Terminal([f"--out_dir={char_checkpoint}", "--num_samples=1", "--max_new_tokens=1000000", "--context_shift",
                       "--device=cpu"], tiktoken_cache, **streams)
    screen.read_some()
    time.sleep(2 if streams else 0.5)
    screen.type("\x03")
    assert screen.read_to_end().endswith("\n")
    screen.close()
    assert screen.process.returncode == 130


@pytest.mark.parametrize("stream", ["stdin", "stderr"])
def test_a_closed_stream_is_ignored(char_checkpoint, stream):
    """Messages do not go to standard output instead."""
    process = start_script(f"--out_dir={char_checkpoint}", "--num_samples=2", "--start=Hi", "--max_new_tokens=0",
                           **{stream: CLOSED})
    printed, _ = process.communicate()
    assert process.returncode == 0 and printed.decode() == f"Hi\n{RULE}\n" * 2


def test_a_pipe_gets_a_sample_while_others_of_its_batch_go_on(run_script, char_checkpoint):
    run = (f"--out_dir={char_checkpoint}", "--start=The ", "--num_samples=2", "--batch_size=2", "--context_shift",
           "--device=cpu")
    first = run_script(*run, "--max_new_tokens=12").stdout.split(f"\n{RULE}\n")[0]
    # The second sample does not have this text.
    process = start_script(*run, "--max_new_tokens=1000000", f"--stop={first[-8:]}")
    timer = threading.Timer(60, process.kill)
    timer.start()
    expected, printed = f"{first[:-8]}\n{RULE}\n".encode(), b""
    while len(printed) < len(expected) and (part := process.stdout.read(1000)):
        printed += part
    assert printed == expected and process.poll() is None
    process.kill()
    assert process.communicate(timeout=20)[0] == b""
    timer.cancel()
