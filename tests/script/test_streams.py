"""The script's standard streams when something is wrong with them, and Ctrl-C."""
import shlex
import signal
import subprocess
import sys
import time

import pytest

from models import CHARS, make_gpt, save_checkpoint, save_meta
from project import RULE, SCRIPT
from script_process import CLOSED, PIPE, start_script

FAST = "--num_samples=1", "--max_new_tokens=5"


@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.6])
def test_ctrl_c_while_torch_is_imported_ends_the_run_at_once(letters, seconds):
    process = start_script(f"--out_dir={letters}", "--num_samples=100000", "--batch_size=1", separate=True)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=20)
    if b"settings: " in messages:
        assert process.returncode == 130 and b"Traceback" not in messages, messages
    else: # Python itself is still starting, and ends in its own way
        assert process.returncode in (130, -2, 1)


@pytest.mark.parametrize("separate", [False, True], ids=["fork", "separate"])
def test_ctrl_c_ends_the_run_between_two_samples(letters, separate):
    process = start_script(f"--out_dir={letters}", "--num_samples=100000", "--batch_size=1", separate=separate)
    printed = process.stdout.read(1) # the first sample is there
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    rest, messages = process.communicate(timeout=20)
    assert process.returncode == 130 and b"Traceback" not in messages and b"rror" not in messages
    assert (printed + rest).endswith(f"\n{RULE}\n".encode())


def test_a_closed_stderr_takes_nothing_to_stdout(letters):
    process = start_script(f"--out_dir={letters}", "--num_samples=2", "--start=Hi", "--max_new_tokens=0", stderr=CLOSED)
    printed, _ = process.communicate()
    assert process.returncode == 0 and printed.decode() == f"Hi\n{RULE}\n" * 2


def test_a_closed_stdin_is_not_missed(letters):
    process = start_script(f"--out_dir={letters}", "--num_samples=1", "--start=Hi", "--max_new_tokens=0", stdin=CLOSED)
    assert process.communicate()[0].decode() == f"Hi\n{RULE}\n"


def test_a_character_that_stdout_cannot_encode_is_replaced(sample, tmp_path):
    save_checkpoint(tmp_path, make_gpt())
    save_meta(tmp_path / "meta.pkl", CHARS[:-1] + "é")
    assert sample(f"--out_dir={tmp_path}", *FAST, "--start=é", PYTHONIOENCODING="ascii").stdout.startswith("?")


def test_a_reader_that_has_read_enough_is_not_an_error(letters):
    command = shlex.join([sys.executable, str(SCRIPT), f"--out_dir={letters}", "--batch_size=1", "--max_new_tokens=5", "--num_samples=50"])
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command} | head -1"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "rror" not in done.stderr and done.returncode == 141


def test_input_from_a_pipe_may_come_late(letters):
    process = start_script(f"--out_dir={letters}", *FAST, "--start=FILE:-", stdin=PIPE)
    time.sleep(0.3)
    printed, _ = process.communicate(b"Hello")
    assert process.returncode == 0 and printed.startswith(b"Hello")
