"""Runs that end early: printed and saved samples are complete, and the same command resumes the run."""
import array
import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import termios
import time

import psutil
import pytest

from models import CHARS, make_gpt, save_checkpoint, save_meta
from project import RULE, SCRIPT
from script_process import CLOSED, start_script
from terminal import Terminal

RUN = ("--start=LINES:prompts.txt", "--num_samples=50", "--max_new_tokens=30", "--stop=e", "--batch_size=8",
       "--device=cpu", "--out_file=a.jsonl", "--logprobs=5")
END = f"\n{RULE}\n".encode()


@pytest.fixture(scope="module")
def prepared(run_script, tmp_path_factory):
    """A folder with all files that a run needs, and the samples (as printed, and as saved) of a whole run."""
    folder = tmp_path_factory.mktemp("prepared")
    save_checkpoint(folder / "out", make_gpt())
    (folder / "prompts.txt").write_text("The \nO\nWhat is it?\nyes\nAnd so they went. \n")
    done = run_script(*RUN, cwd=folder)
    assert done.returncode == 0, done.stderr
    samples = [part + END for part in done.stdout.encode().split(END)[:-1]]
    saved = (folder / "a.jsonl").read_bytes()
    (folder / "a.jsonl").unlink()
    return folder, samples, saved


@pytest.fixture
def folder(prepared, tmp_path):
    return shutil.copytree(prepared[0], tmp_path / "run")


def saved_in(folder):
    path = folder / "a.jsonl"
    return path.read_bytes() if path.exists() else b""


@pytest.fixture
def finish(run_script, prepared, folder):
    """finish() runs the same command without an interruption."""
    def run():
        done = run_script(*RUN, cwd=folder)
        assert done.returncode == 0 and saved_in(folder) == prepared[2], done.stderr
    return run


@pytest.mark.parametrize("number, status, moments", [
    (signal.SIGKILL, -9, [0, 0.02]),
    (signal.SIGINT, 130, [0.02]),
    pytest.param(signal.SIGTERM, 143, [0, 0.05, 0.1, 0.2, 0.3], marks=pytest.mark.slow),
], ids=str)
def test_a_signal_leaves_complete_samples(prepared, folder, finish, number, status, moments):
    """moments: seconds after the first new sample. Each run resumes the previous one."""
    _, samples, saved = prepared
    for moment in moments:
        num_saved = saved_in(folder).count(b"\n")
        process = start_script(*RUN, "--html_file=a.html", cwd=folder)
        while process.poll() is None and saved_in(folder).count(b"\n") <= num_saved:
            time.sleep(0.005)
        time.sleep(moment)
        process.send_signal(number)
        time.sleep(0.005)
        process.send_signal(number) # a user may press Ctrl-C twice
        printed, messages = process.communicate()
        assert process.returncode in (status, 0) and b"Traceback" not in messages and b"rror" not in messages, messages
        found = saved_in(folder)
        assert saved.startswith(found) and b"".join(samples[num_saved:]).startswith(printed)
        # A sample is saved just before it is printed.
        assert found.count(b"\n") - num_saved - printed.count(END) in (0, 1)
        if number != signal.SIGKILL:
            assert found.endswith(b"\n") and (printed == b"" or printed.endswith(END))
            assert (folder / "a.html").read_bytes().count(b"</article>") == found.count(b"\n")
        if process.returncode == 130:
            expected = rb"\na.jsonl holds %d samples?: the same command .* goes on after them\n$" % found.count(b"\n")
            assert re.search(expected, messages), messages
        if process.returncode == 0:
            (folder / "a.jsonl").unlink()
    finish()


def test_stdout_may_be_closed_after_any_number_of_bytes(prepared, folder, finish):
    """head closes it like this."""
    _, samples, saved = prepared
    wanted, read = len(b"".join(samples)) // 10, b""
    process = start_script(*RUN, cwd=folder)
    while len(read) < wanted and (more := process.stdout.read(wanted - len(read))):
        read += more
    process.stdout.close()
    messages = process.stderr.read()
    assert process.wait() in (141, 0) and b"Traceback" not in messages and b"rror" not in messages, messages
    assert b"".join(samples).startswith(read)
    found = saved_in(folder)
    assert saved.startswith(found) and found.endswith(b"\n") and found.count(b"\n") >= read.count(END)
    process.stderr.close()
    finish()


def test_a_full_disk_is_one_error_line(prepared, folder, finish):
    """The disk is full after three kilobytes of out_file, and of the file that receives standard output."""
    _, samples, saved = prepared
    with open(folder / "printed", "wb") as file:
        process = start_script(*RUN, cwd=folder, stdout=file)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (3 * 1024, -1)) # long before the process writes
        _, messages = process.communicate()
    error = messages.splitlines()[-1]
    assert process.returncode == 1 and error.startswith(b"error: cannot write 'a.jsonl': File too large"), messages
    assert b"Traceback" not in messages and b"Exception ignored" not in messages
    assert b"".join(samples).startswith((folder / "printed").read_bytes()) and saved.startswith(saved_in(folder))
    finish()


@pytest.mark.parametrize("start", ["FILE:/dev/zero", "LINES:/dev/zero", "JSONL:-"])
def test_a_prompt_that_never_ends_is_one_error_line(char_checkpoint, start):
    with open("/dev/zero", "rb") as zeros:
        process = start_script(f"--out_dir={char_checkpoint}", f"--start={start}", stdin=zeros)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (2 * 2**30, -1))
    printed, messages = process.communicate(timeout=120)
    error = messages.decode().splitlines()[-1]
    assert (process.returncode, printed) == (1, b"") and error.startswith("error: "), messages
    assert error.endswith(": a prompt has at most 134,217,728 characters, and here are more")


@pytest.mark.parametrize("change", ["rm a.jsonl", "sed -i s/x/y/ a.jsonl", "mv a.jsonl b.jsonl"])
def test_out_file_that_is_deleted_or_replaced_ends_the_run_and_the_line_says_where_the_samples_are(
        change, prepared, folder, finish):
    done, messages = change_out_file(folder, change)
    found = re.search(r"\nerror: a\.jsonl was .* are in (a\.jsonl\.\d+); rename that to a\.jsonl, .*\n$", messages)
    assert done.returncode == 1 and found and messages.count("rror") == 1, messages
    saved = (folder / found[1]).read_bytes()
    assert saved.count(b"\n") >= 2 and prepared[2].startswith(saved)
    assert (folder / "a.html").read_bytes().count(b"</article>") == saved.count(b"\n")
    (folder / found[1]).rename(folder / "a.jsonl")
    finish()


@pytest.mark.parametrize("change", ["truncate -s 0 a.jsonl", "truncate -s 400 a.jsonl", "printf '\n' >> a.jsonl"])
def test_out_file_that_is_cut_or_grows_ends_the_run_and_the_same_command_goes_on(change, folder, finish):
    done, messages = change_out_file(folder, change)
    assert done.returncode == 1 and messages.count("rror") == 1, messages
    assert re.search(r"\nerror: another program changed a\.jsonl while .* goes on after them\n$", messages)
    finish()


def change_out_file(folder, command):
    """Run a command when two samples are saved. Returns the process, when it has ended, and its messages."""
    process = start_script(*RUN, "--html_file=a.html", cwd=folder)
    while process.poll() is None and saved_in(folder).count(b"\n") < 2:
        time.sleep(0.005)
    process.send_signal(signal.SIGSTOP)
    subprocess.run(command, shell=True, cwd=folder, check=True)
    process.send_signal(signal.SIGCONT)
    return process, process.communicate()[1].decode()


def test_stdout_may_be_full_or_closed_from_the_start():
    with open("/dev/full", "wb") as full:
        process = start_script("--help", stdout=full)
        _, messages = process.communicate()
    assert process.returncode in (1, 2)
    assert messages == b"error: cannot write 'standard output': No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    process = start_script("--help", stdout=writer)
    os.close(writer)
    _, messages = process.communicate()
    assert process.returncode == 141 and b"rror" not in messages, messages


@pytest.mark.parametrize("seconds", [0.3, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.1, 0.6, 0.9))])
def test_ctrl_c_while_torch_is_imported_ends_the_run_at_once(char_checkpoint, seconds):
    process = start_script(f"--out_dir={char_checkpoint}", "--num_samples=100000", "--batch_size=1")
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=20)
    assert process.returncode in (130, -signal.SIGINT, 1) # the second while a file is read: the system ends the process
    if b"settings: " in messages: # before it, Python was still starting, and exits in its own way
        assert process.returncode != 1 and b"Traceback" not in messages, messages


NEW_CONTAINER = "unshare", "--map-root-user", "--pid", "--fork", "--kill-child" # the program is its process 1
CAN_UNSHARE = shutil.which("unshare") and subprocess.run([*NEW_CONTAINER, "true"], capture_output=True).returncode == 0


IN_A_CONTAINER = pytest.mark.skipif(not CAN_UNSHARE, reason="this machine lets no user make a container")


def end_first_process(number, words, *arguments, **environment):
    """Run sample.py as the first process of a container. Send it a signal when it has written the words to standard
    error. Returns its exit status and what it wrote afterwards.
    """
    with subprocess.Popen([*NEW_CONTAINER, sys.executable, SCRIPT, *arguments], stderr=subprocess.PIPE,
                          env={**os.environ, **environment}) as process:
        while words not in (line := process.stderr.readline()):
            assert line, "it has ended"
        script, = psutil.Process(process.pid).children()
        script.send_signal(number)
        return process.wait(timeout=5), process.stderr.read()


@IN_A_CONTAINER
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str)
def test_the_first_process_of_a_container_ends_while_it_reads_a_model(number, status, tmp_path):
    os.truncate(save_checkpoint(tmp_path, make_gpt()), 10_000) # new and incomplete: it is read again for ten seconds
    end = end_first_process(number, b"is being written: waiting", f"--out_dir={tmp_path}", "--device=cpu")
    assert end == (status, b"")


@IN_A_CONTAINER
def test_ctrl_c_ends_the_first_process_of_a_container_while_modules_are_imported(tmp_path):
    (tmp_path / "ctypes.py").write_text("import os, time; os.write(2, b'importing\\n'); time.sleep(60)")
    status, _ = end_first_process(signal.SIGINT, b"importing", PYTHONPATH=str(tmp_path))
    assert status == 130


@pytest.mark.parametrize("streams", [{}, pytest.param({"stdout": False}, marks=pytest.mark.slow),
                                     pytest.param({"stderr": False}, marks=pytest.mark.slow)], ids=str)
def test_ctrl_c_on_a_terminal_ends_the_line(char_checkpoint, tiktoken_cache, streams):
    screen = Terminal([f"--out_dir={char_checkpoint}", "--num_samples=1", "--max_new_tokens=1000000", "--context_shift",
                       "--device=cpu"], tiktoken_cache, **streams)
    screen.read_some()
    time.sleep(2 if streams else 0.5)
    screen.type("\x03")
    assert screen.read_to_end().endswith("\n")
    screen.close()
    assert screen.process.returncode == 130


def test_closed_streams_are_ignored(char_checkpoint):
    """Messages do not go to standard output instead."""
    process = start_script(f"--out_dir={char_checkpoint}", "--num_samples=2", "--start=Hi", "--max_new_tokens=0",
                           stdin=CLOSED, stderr=CLOSED)
    printed, _ = process.communicate()
    assert process.returncode == 0 and printed.decode() == f"Hi\n{RULE}\n" * 2


def test_a_standard_output_that_does_not_block_gets_all_samples(prepared, folder):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    process = start_script(*RUN, cwd=folder, stdout=writer)
    os.close(writer)
    size = array.array("i", [0])
    while size[0] < 4000 and process.poll() is None: # the pipe is not full
        fcntl.ioctl(reader, termios.FIONREAD, size)
        time.sleep(0.1)
    with open(reader, "rb") as pipe:
        assert pipe.read() == b"".join(prepared[1]) and process.wait(timeout=60) == 0, process.stderr.read()
    process.communicate()


@pytest.mark.parametrize("change", [
    lambda out: save_meta(out / "meta.pkl", CHARS[::-1]), lambda out: save_checkpoint(out, make_gpt(n_head=1))],
    ids=["vocabulary", "n_head"])
def test_another_model_with_the_same_weights_is_no_resumed_run(run_script, folder, change):
    assert run_script(*RUN, cwd=folder).returncode == 0
    change(folder / "out")
    assert "the checkpoint's checksum is" in run_script(*RUN, cwd=folder).stderr
