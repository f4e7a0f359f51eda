"""Runs that end early, at random moments: printed and saved samples are complete, and the same command resumes the run."""
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import NamedTuple

import pytest

from models import make_gpt, save_checkpoint
from project import SCRIPT
from script_process import start_script

pytestmark = pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs Linux")
RUN = ("--start=LINES:prompts.txt", "--num_samples=50", "--max_new_tokens=30", "--stop=e", "--batch_size=8", "--device=cpu")
RESUMABLE = (*RUN, "--out_file=a.jsonl")
RULE = b"\n---------------\n"
ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} # the tests start two runs at a time
# Output is buffered, as it is for users. With PYTHONUNBUFFERED, Python would have nothing left to write at exit.
SEPARATE_ENV = ENV | {"PYTHONUNBUFFERED": ""}
# Quick: a few forks of the fork server. Slow: also separate processes, which may end at any moment after their start.
QUICK_AND_SLOW = pytest.mark.parametrize("separate", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forks", "separate"])


class Uninterrupted(NamedTuple):
    """What a run prints and saves if nothing interrupts it."""
    samples: list[bytes] # as printed, each with its rule
    saved: bytes


def start(folder, *arguments, separate=False, **streams):
    """Start a run in a new session."""
    return start_script(*arguments, cwd=folder, env=SEPARATE_ENV if separate else ENV, new_session=True, separate=separate, **streams)


def start_command(folder, command):
    """Start another program in a new session."""
    return subprocess.Popen(command, cwd=folder, env=os.environ | SEPARATE_ENV, start_new_session=True, stdin=DEVNULL,
                            stdout=PIPE, stderr=PIPE)


def in_pairs(one, cases):
    """Call one(case) for all cases, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, cases))


def saved_in(folder):
    path = folder / "a.jsonl"
    return path.read_bytes() if path.exists() else b""


def num_saved_in(folder):
    return saved_in(folder).count(b"\n")


def processes_in(folder):
    """The running processes whose working directory is this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError): # it has just exited, or belongs to another user
            found += [process] if os.readlink(process / "cwd") == str(folder) else []
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with all files that a run needs."""
    folder = tmp_path_factory.mktemp("prepared")
    save_checkpoint(folder / "out", make_gpt())
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in ("The ", "O", "What is it?", "yes", "And so they went. ")))
    return folder


@pytest.fixture
def new_folder(prepared, tmp_path):
    """new_folder(name) makes a copy of that folder."""
    return lambda name: shutil.copytree(prepared, tmp_path / str(name)).resolve()


@pytest.fixture(scope="module")
def uninterrupted(prepared, tmp_path_factory):
    folder = shutil.copytree(prepared, tmp_path_factory.mktemp("uninterrupted") / "run")
    process = start(folder, *RESUMABLE)
    printed, messages = process.communicate()
    assert process.returncode == 0, messages
    return Uninterrupted([part + RULE for part in printed.split(RULE)[:-1]], (folder / "a.jsonl").read_bytes())


@cache
def seconds_of_a_separate_process(prepared):
    """How long a run takes that nothing interrupts."""
    began = time.monotonic()
    process = start(prepared, *RUN, separate=True)
    _, messages = process.communicate()
    assert process.returncode == 0, messages
    return time.monotonic() - began


def check(folder, uninterrupted, num_saved, printed, torn=False):
    """Assert that the output of a run that resumed after num_saved samples is complete; torn: except its last line."""
    saved = saved_in(folder)
    assert uninterrupted.saved.startswith(saved) and b"".join(uninterrupted.samples[num_saved:]).startswith(printed)
    if not torn:
        assert saved[-1:] in (b"", b"\n") and printed.endswith((b"", RULE)[bool(printed)])
    # A sample is saved just before it is printed.
    assert saved.count(b"\n") - num_saved - printed.count(RULE) in (0, 1)


def finish(folder, uninterrupted):
    """Run the same command without an interruption."""
    process = start(folder, *RESUMABLE)
    _, messages = process.communicate()
    assert process.returncode == 0 and saved_in(folder) == uninterrupted.saved, messages


def wait(process, folder, num_saved, moment):
    """Wait for moment seconds. If moment is negative, wait for the first new sample and then for -moment seconds."""
    while moment < 0 and process.poll() is None and num_saved_in(folder) <= num_saved:
        time.sleep(0.005)
    time.sleep(abs(moment))


@QUICK_AND_SLOW
@pytest.mark.parametrize("number, status", [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), pytest.param(signal.SIGTERM, -15, marks=pytest.mark.slow), (signal.SIGKILL, -9)], ids=["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_leaves_complete_samples_and_the_run_can_be_resumed(prepared, new_folder, uninterrupted, separate, number, status):
    """Each run resumes the previous one. The slow case has twelve moments: six after the start of a separate process, six while a fork samples."""
    rng, interrupted = random.Random(int(number)), []
    moments = [-0.2 * rng.random() for _ in range(6 if separate else 4)]
    if separate:
        moments += [seconds_of_a_separate_process(prepared) * (i + rng.random()) / 6 for i in range(6)]
        rng.shuffle(moments)

    def interrupt(half):
        folder = new_folder(str(half))
        for moment in moments[half::2]:
            num_saved = num_saved_in(folder)
            process = start(folder, *RESUMABLE, separate=moment >= 0)
            wait(process, folder, num_saved, moment)
            process.send_signal(number)
            printed, messages = process.communicate()
            if number == signal.SIGINT and b"settings: " not in messages: # Python was still starting, and prints its own message
                assert process.returncode in (130, -2, 1) and printed == b""
            else:
                assert process.returncode in (status, 0) and b"Traceback" not in messages and b"rror" not in messages, messages
            check(folder, uninterrupted, num_saved, printed, torn=number == signal.SIGKILL)
            assert not processes_in(folder)
            if process.returncode == 0:
                assert saved_in(folder) == uninterrupted.saved
                (folder / "a.jsonl").unlink()
            elif printed:
                interrupted.append(moment)
        finish(folder, uninterrupted)
    in_pairs(interrupt, range(2))
    assert len(interrupted) >= (3 if separate else 1)


@pytest.mark.slow
@QUICK_AND_SLOW
def test_stdout_may_be_closed_after_any_number_of_bytes(new_folder, uninterrupted, separate):
    """head closes it like this."""
    def read_some(half):
        folder, rng, num_early = new_folder(str(half)), random.Random(half), 0
        separate_half = separate and half == 0 # the other half are forks
        for share in [0, *(rng.random() for _ in range(6 if separate else 1))]:
            num_saved = num_saved_in(folder)
            rest = b"".join(uninterrupted.samples[num_saved:])
            process = start(folder, *RESUMABLE, separate=separate_half)
            wanted, read = int(share * len(rest) / 3), b""
            while len(read) < wanted and (more := process.stdout.read(wanted - len(read))):
                read += more
            process.stdout.close()
            messages = process.stderr.read()
            process.wait()
            process.stderr.close()
            assert rest[:wanted] == read
            # The pipe's buffer may already contain the rest.
            assert process.returncode == 141 or (process.returncode == 0 and num_saved + 100 > len(uninterrupted.samples))
            assert b"Traceback" not in messages and b"rror" not in messages, messages
            saved = saved_in(folder)
            assert uninterrupted.saved.startswith(saved) and saved[-1:] == b"\n" and saved.count(b"\n") - num_saved >= read.count(RULE)
            assert not processes_in(folder)
            num_early += process.returncode == 141
            if process.returncode == 0:
                (folder / "a.jsonl").unlink()
        finish(folder, uninterrupted)
        assert num_early >= (3 if separate else 1)
    in_pairs(read_some, range(2 if separate else 1))


@QUICK_AND_SLOW
def test_a_full_disk_is_one_error_line(new_folder, uninterrupted, separate):
    """The disk is full after any number of kilobytes of out_file, or of the file that receives standard output."""
    def fill(out_file):
        rng, folder = random.Random(2), new_folder(str(out_file))
        size = len(uninterrupted.saved if out_file else b"".join(uninterrupted.samples)) // 1024
        for blocks in sorted(rng.sample(range(size), 6 if separate else 1)): # each run has more space and resumes the previous one
            num_saved = num_saved_in(folder)
            with open(folder / "printed", "wb") as file:
                process = start(folder, *(RESUMABLE if out_file else RUN), separate=separate, stdout=file)
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (blocks * 1024, -1)) # long before the process writes
                _, messages = process.communicate()
            assert process.returncode == 1 and b"Traceback" not in messages and b"Exception ignored" not in messages, messages
            assert messages.splitlines()[-1].startswith(b"error: ") and b"File too large" in messages.splitlines()[-1]
            printed = (folder / "printed").read_bytes()
            assert len(saved_in(folder) if out_file else printed) == blocks * 1024
            if out_file:
                check(folder, uninterrupted, num_saved, printed, torn=True)
            else:
                assert b"".join(uninterrupted.samples).startswith(printed)
        if out_file:
            finish(folder, uninterrupted)
    in_pairs(fill, [True, False])


@pytest.mark.parametrize("arguments, statuses", [(["--help"], (1, 2)), (RUN, (1,))], ids=["help", "samples"])
def test_stdout_may_be_full_or_closed_from_the_start(new_folder, arguments, statuses):
    folder = new_folder("run")
    with open("/dev/full", "wb") as full:
        process = start(folder, *arguments, stdout=full)
        _, messages = process.communicate()
    assert process.returncode in statuses and messages.splitlines()[-1].startswith(b"error: "), messages
    assert b"No space left" in messages.splitlines()[-1]
    reader, writer = os.pipe()
    os.close(reader)
    process = start(folder, *arguments, stdout=writer)
    os.close(writer)
    _, messages = process.communicate()
    assert process.returncode == 141 and b"rror" not in messages, messages


@pytest.mark.slow
@QUICK_AND_SLOW
def test_files_may_be_renamed_during_a_run(prepared, new_folder, uninterrupted, separate):
    """The run continues with what it has already read, or ends with one error line before its first sample."""
    def rename_file(case):
        number, name = case
        folder, rng = new_folder(str(number)), random.Random(number)
        for moment in ([seconds_of_a_separate_process(prepared) * rng.random()] if separate else []) + [-0.2 * rng.random()]:
            process = start(folder, *RESUMABLE, separate=moment >= 0)
            wait(process, folder, 0, moment)
            with suppress(FileNotFoundError):
                (folder / name).rename(folder / "gone")
            printed, messages = process.communicate()
            assert b"Traceback" not in messages and not processes_in(folder)
            if process.returncode == 0:
                assert printed == b"".join(uninterrupted.samples)
            else:
                assert process.returncode == 1 and printed == b"" and messages.splitlines()[-1].startswith(b"error: ") and moment > 0
            with suppress(FileNotFoundError):
                (folder / "gone").rename(folder / name)
            (folder / "a.jsonl").unlink(missing_ok=True)
    in_pairs(rename_file, enumerate(["a.jsonl", "prompts.txt", "out/ckpt.pt"]))


@pytest.mark.slow
def test_a_signal_to_torchrun_ends_all_its_processes(new_folder, uninterrupted):
    """A single process can resume the run."""
    def interrupt(number):
        rng, folder = random.Random(3), new_folder(number.name)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--", str(SCRIPT), *RESUMABLE]
        for moment in 3 * rng.random(), -0.3 * rng.random():
            num_saved = num_saved_in(folder)
            process = start_command(folder, torchrun)
            wait(process, folder, num_saved, moment)
            process.send_signal(number)
            printed, messages = process.communicate()
            # torchrun may miss the signal while it imports torch. Then this run or the previous one is complete.
            assert process.returncode != 0 or printed.endswith(uninterrupted.samples[-1]) or num_saved == uninterrupted.saved.count(b"\n"), messages
            check(folder, uninterrupted, num_saved, printed)
            assert not processes_in(folder)
        finish(folder, uninterrupted)
    in_pairs(interrupt, [signal.SIGINT, signal.SIGTERM])
