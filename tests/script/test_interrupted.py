"""Runs that end early: their samples are complete, and the same command resumes the run."""
import array
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from resource import RLIMIT_AS, RLIMIT_FSIZE, prlimit

import psutil
import pytest

from models import CHARS, make_gpt, save_checkpoint, save_meta
from project import RULE, SCRIPT
from script_process import PIPE, run_in_shell, start_script
from terminal import Terminal

# Without stop texts: on a busy machine, rows that end early leave their batch earlier, and another
# batch rounds otherwise.
RUN = ("--start=LINES:prompts.txt", "--num_samples=6", "--max_new_tokens=25", "--batch_size=4",
       "--device=cpu", "--out_file=a.jsonl", "--logprobs=5")
END = f"\n{RULE}\n".encode()
slow = pytest.mark.slow


def texts_of(lines):
    """Index and text of each line: the last digits of log-probabilities may differ."""
    return re.findall(rb'"index": (\d+), .*?"text": (".*?"), "num_tokens"', lines)


@pytest.fixture(scope="module")
def prepared(run_script, tmp_path_factory):
    """A folder with all files of a run, and the samples of a whole run, printed and saved."""
    folder = tmp_path_factory.mktemp("prepared")
    save_checkpoint(folder / "out", make_gpt())
    (folder / "prompts.txt").write_text("The \nO\nWhat is it?\nyes\nAnd so they went. \n")
    done = run_script(*RUN, cwd=folder)
    saved = (folder / "a.jsonl").read_bytes()
    (folder / "a.jsonl").unlink()
    return folder, done.stdout.encode(), saved


@pytest.fixture
def folder(prepared, tmp_path):
    return shutil.copytree(prepared[0], tmp_path / "run")


@pytest.fixture
def start(folder):
    """start(*arguments) starts the run, with more arguments, in the folder."""
    return lambda *arguments, **streams: start_script(*RUN, *arguments, cwd=folder, **streams)


def saved_in(folder):
    return b"".join(path.read_bytes() for path in folder.glob("a.jsonl"))


def num_on_page(folder):
    return (folder / "a.html").read_bytes().count(b"</article>")


def wait_for_lines(process, folder, count):
    """Wait until a.jsonl has so many lines, or the process has ended."""
    while process.poll() is None and saved_in(folder).count(b"\n") < count:
        time.sleep(0.005)


def assert_no_error(messages):
    assert b"Traceback" not in messages, messages
    assert b"rror" not in messages, messages


@pytest.fixture
def finish(run_script, prepared, folder):
    """finish(printed) runs the same command again. So far, what was saved and printed is right."""
    def run(printed=b""):
        _, samples, saved = prepared
        assert samples.startswith(printed)
        found = texts_of(saved_in(folder))
        assert found == texts_of(saved)[:len(found)]
        done = run_script(*RUN, cwd=folder)
        assert texts_of(saved_in(folder)) == texts_of(saved), done.stderr
    return run


@pytest.mark.parametrize("number, status, moments", [
    (signal.SIGKILL, -9, [0, 0.02]),
    (signal.SIGINT, 130, [0.02]),
    (signal.SIGHUP, 129, [0.02]), # of a dropped connection
    pytest.param(signal.SIGTERM, 143, [0, 0.1, 0.3], marks=slow),
])
def test_a_signal_leaves_complete_samples(
        prepared, folder, start, finish, number, status, moments):
    """moments: seconds after the first new sample. Each run resumes the previous one."""
    _, samples, saved = prepared
    for moment in moments:
        num_before = saved_in(folder).count(b"\n")
        rest = END.join(samples.split(END)[num_before:])
        process = start("--html_file=a.html")
        wait_for_lines(process, folder, num_before + 1)
        time.sleep(moment)
        process.send_signal(number)
        time.sleep(0.005)
        process.send_signal(number) # a user may press Ctrl-C twice
        printed, messages = process.communicate()
        assert process.returncode in (status, 0), messages
        assert_no_error(messages)
        found = saved_in(folder)
        num_saved = found.count(b"\n")
        assert texts_of(found) == texts_of(saved)[:num_saved]
        assert rest.startswith(printed)
        # A sample is saved just before it is printed.
        assert num_saved - num_before - printed.count(END) in (0, 1)
        if number != signal.SIGKILL:
            assert found.endswith(b"\n")
            assert printed == b"" or printed.endswith(END)
            assert num_on_page(folder) == num_saved
        if process.returncode in (129, 130):
            line = rf"\na.jsonl holds {num_saved} line.* goes on after them\n$"
            assert re.search(line, messages.decode())
        if process.returncode == 0:
            (folder / "a.jsonl").unlink()
    finish()


def test_stdout_may_be_closed_after_any_number_of_bytes(prepared, folder, start, finish):
    """head closes it like this."""
    process = start()
    read = b"".join(process.stdout.read(1) for _ in range(len(prepared[1]) // 10))
    process.stdout.close()
    assert_no_error(process.stderr.read())
    process.stderr.close()
    assert process.wait() in (141, 0)
    found = saved_in(folder)
    assert found.endswith(b"\n")
    assert found.count(b"\n") >= read.count(END)
    finish(read)


def test_a_full_disk_is_one_error_line(folder, start, finish):
    """It is full after three kilobytes of out_file, and of the file that gets standard output."""
    with open(folder / "printed", "wb") as file:
        process = start(stdout=file)
        prlimit(process.pid, RLIMIT_FSIZE, (3 * 1024, -1)) # long before the process writes
        _, messages = process.communicate()
    assert process.returncode == 1
    *_, error = messages.splitlines()
    assert error.startswith(b"error: cannot write 'a.jsonl': File too large"), messages
    assert b"Traceback" not in messages
    finish((folder / "printed").read_bytes())


@pytest.mark.parametrize("start", ["FILE:/dev/zero", "LINES:/dev/zero", "JSONL:-"])
def test_a_prompt_that_never_ends_is_one_error_line(char_checkpoint, start):
    with open("/dev/zero", "rb") as zeros:
        process = start_script(f"--out_dir={char_checkpoint}", f"--start={start}", stdin=zeros)
    in_use = psutil.Process(process.pid).memory_info().vms # with CUDA, torch maps gigabytes
    prlimit(process.pid, RLIMIT_AS, (in_use + 2 * 2**30, -1))
    printed, messages = process.communicate(timeout=120)
    assert process.returncode == 1
    assert printed == b""
    error = rb"\nerror: .*: a prompt has at most 134,217,728 characters, and here are more\n$"
    assert re.search(error, messages)


MOVED = r"error: a\.jsonl was .* are in (a\.jsonl\.\d+); rename that to a\.jsonl, .*"
CHANGED = r"error: another program changed a\.jsonl while .* goes on after them"


@pytest.mark.parametrize("change, message", [
    ("rm a.jsonl", MOVED),
    ("sed -i s/x/y/ a.jsonl", MOVED),
    ("truncate -s 400 a.jsonl", CHANGED),
    ("printf '\n' >> a.jsonl", CHANGED),
])
def test_out_file_that_another_program_changes_ends_the_run_with_a_way_to_go_on(
        change, message, folder, start, finish):
    process = start("--html_file=a.html")
    wait_for_lines(process, folder, 2)
    process.send_signal(signal.SIGSTOP)
    subprocess.run(change, shell=True, cwd=folder, check=True)
    process.send_signal(signal.SIGCONT)
    messages = process.communicate()[1].decode()
    assert process.returncode == 1
    assert messages.count("rror") == 1, messages
    found = re.fullmatch(message, messages.splitlines()[-1])
    assert found, messages
    if message == MOVED:
        (folder / found[1]).rename(folder / "a.jsonl")
        assert num_on_page(folder) == saved_in(folder).count(b"\n") >= 2
    finish()


def test_stdout_may_be_full_or_closed_from_the_start():
    done = run_in_shell("> /dev/full", "--help", status=2)
    assert done.stderr == "error: cannot write 'standard output': No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, SCRIPT, "--help"], stdout=writer, stderr=PIPE)
    os.close(writer)
    assert_no_error(done.stderr)
    assert done.returncode == 141


def test_ctrl_c_while_torch_is_imported_ends_the_run_at_once(char_checkpoint):
    run = f"--out_dir={char_checkpoint}", "--num_samples=100000", "--batch_size=1"
    process = subprocess.Popen([sys.executable, SCRIPT, *run], stdout=PIPE, stderr=PIPE)
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and "libtorch" not in maps.read_text():
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    assert b"Traceback" not in messages


NEW_CONTAINER = "unshare", "--map-root-user", "--pid", "--fork", "--kill-child"
CAN_UNSHARE = shutil.which("unshare") and not subprocess.call(
    [*NEW_CONTAINER, "true"], stderr=subprocess.DEVNULL)
in_a_container = pytest.mark.skipif(not CAN_UNSHARE, reason="no user may make a container here")


def end_first_process(number, words, *arguments, **environment):
    """Run sample.py as process 1 of a container. Send it a signal when it has written these words.

    Returns its exit status and what it wrote to standard error afterwards.
    """
    command = *NEW_CONTAINER, sys.executable, SCRIPT, *arguments
    env = {**os.environ, **environment}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=env) as process:
        lines = [b""]
        while words not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], lines # it has ended
        script, = psutil.Process(process.pid).children()
        script.send_signal(number)
        # If it ignored the signal, it would end later, with another status.
        return process.wait(100), process.stderr.read()


@in_a_container
@pytest.mark.parametrize("number, status", [
    (signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=slow)])
def test_the_first_process_of_a_container_ends_while_it_reads_a_model(number, status, tmp_path):
    # The file is new and incomplete: the process reads it again, here for a long time.
    os.truncate(save_checkpoint(tmp_path, make_gpt()), 10_000)
    patient = tmp_path / "patient.py"
    patient.write_text("from sampling.checkpoints import saves\n"
                       "saves.MAX_WAIT = 1000\n")
    run = patient, f"--out_dir={tmp_path}", "--device=cpu"
    assert end_first_process(number, b"is being written: waiting", *run) == (status, b"")


@in_a_container
def test_ctrl_c_ends_the_first_process_of_a_container_while_modules_are_imported(tmp_path):
    code = "import os, time; os.write(2, b'importing\\n'); time.sleep(60)"
    (tmp_path / "ctypes.py").write_text(code)
    status, _ = end_first_process(signal.SIGINT, b"importing", PYTHONPATH=str(tmp_path))
    assert status == 130


@pytest.mark.parametrize("streams", [
    {}, pytest.param({"stdout": False}, marks=slow), pytest.param({"stderr": False}, marks=slow)])
def test_ctrl_c_on_a_terminal_ends_the_line(char_checkpoint, tiktoken_cache, streams):
    run = (f"--out_dir={char_checkpoint}", "--num_samples=1", "--max_new_tokens=1000000",
           "--context_shift", "--device=cpu")
    screen = Terminal(run, tiktoken_cache, **streams)
    if streams.get("stderr", True):
        screen.wait_for("parameters on cpu")
    screen.read_some()
    screen.type("\x03")
    assert screen.read_to_end().endswith("\n")
    screen.close()
    assert screen.process.returncode == 130


def test_closed_streams_are_ignored(char_checkpoint):
    """Messages do not go to standard output instead."""
    run = f"--out_dir={char_checkpoint}", "--num_samples=2", "--start=Hi", "--max_new_tokens=0"
    assert run_in_shell("<&- 2>&-", *run).stdout == 2 * f"Hi\n{RULE}\n"


def test_a_standard_output_that_does_not_block_gets_all_samples(prepared, start):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    process = start(stdout=writer)
    os.close(writer)
    size = array.array("i", [0])
    while size[0] < 4000 and process.poll() is None: # the pipe is not full
        fcntl.ioctl(reader, termios.FIONREAD, size)
        time.sleep(0.1)
    with open(reader, "rb") as pipe:
        assert pipe.read() == prepared[1]
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_another_vocabulary_with_the_same_weights_is_no_resumed_run(run_script, folder):
    run_script(*RUN, cwd=folder)
    save_meta(folder / "out" / "meta.pkl", CHARS[::-1])
    assert "the checkpoint's checksum is" in run_script(*RUN, cwd=folder).stderr
