"""Runs that end early, at a hundred random moments: what is printed and saved is whole, and the same command goes on from it."""
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from conftest import PROJECT, make_gpt, save_checkpoint

pytestmark = pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs Linux")
RUN = ("--start=LINES:prompts.txt", "--num_samples=50", "--max_new_tokens=30", "--stop=e", "--batch_size=8", "--device=cpu")
SAMPLE = [sys.executable, str(PROJECT / "sample.py"), *RUN]
# Buffered, as users have it: with PYTHONUNBUFFERED nothing is left to be written at the end.
ENV = {**{name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
RULE = b"\n---------------\n"


def start(folder, command=SAMPLE, **more):
    """A run, in a process group of its own."""
    return subprocess.Popen(command, cwd=folder, env=ENV, start_new_session=True,
                            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more})


def in_pairs(one, cases):
    """Call one(case) for all cases, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, cases))


def saved_in(folder):
    path = folder / "a.jsonl"
    return path.read_bytes() if path.exists() else b""


def left(folder):
    """The processes that still run in this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError): # it has just ended, or is another user's
            found += [process] if os.readlink(process / "cwd") == str(folder) else []
    return found


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with all that a run needs."""
    folder = tmp_path_factory.mktemp("begun")
    save_checkpoint(folder / "out", make_gpt())
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in ("The ", "O", "What is it?", "yes", "And so they went. ")))
    return folder


@pytest.fixture
def new_folder(begun, tmp_path):
    """Makes another one of that name."""
    return lambda name: shutil.copytree(begun, tmp_path / str(name)).resolve()


@pytest.fixture(scope="module")
def whole(begun, tmp_path_factory):
    """What an unbroken run prints, sample by sample, its file, and how long it takes."""
    folder, began = shutil.copytree(begun, tmp_path_factory.mktemp("whole") / "of it"), time.monotonic()
    process = start(folder, [*SAMPLE, "--out_file=a.jsonl"])
    printed, said = process.communicate()
    assert process.returncode == 0, said
    return [part + RULE for part in printed.split(RULE)[:-1]], (folder / "a.jsonl").read_bytes(), time.monotonic() - began


def check(folder, whole, kept, printed, torn=False):
    """Assert that the file and what was printed, of a run that began after kept samples, are whole; torn: but for the end."""
    parts, lines, _ = whole
    saved = saved_in(folder)
    assert lines.startswith(saved) and b"".join(parts[kept:]).startswith(printed)
    if not torn:
        assert saved[-1:] in (b"", b"\n") and printed.endswith((b"", RULE)[bool(printed)])
    # All but the latest sample are in both.
    assert saved.count(b"\n") - kept - printed.count(RULE) in (0, 1)


def finish(folder, whole):
    """The same command, uninterrupted."""
    process = start(folder, [*SAMPLE, "--out_file=a.jsonl"])
    _, said = process.communicate()
    assert process.returncode == 0 and saved_in(folder) == whole[1], said


def wait(process, folder, kept, moment):
    """So long; or, where that is negative, for the first sample of this run and then so long."""
    while moment < 0 and process.poll() is None and saved_in(folder).count(b"\n") <= kept:
        time.sleep(0.005)
    time.sleep(abs(moment))


@pytest.mark.parametrize("deadly, status", [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)], ids=["SIGINT", "SIGTERM", "SIGKILL"])
def test_signals(new_folder, whole, deadly, status):
    """Twenty moments each, from a process's start to its end, and half of them while it draws; each run goes on where the last one ended."""
    rng, met = random.Random(int(deadly)), []
    moments = [whole[2] * (i + rng.random()) / 10 for i in range(10)] + [-0.3 * rng.random() for _ in range(10)]
    rng.shuffle(moments)

    def interrupt(half):
        folder = new_folder(str(half))
        for moment in moments[half::2]:
            kept = saved_in(folder).count(b"\n")
            process = start(folder, [*SAMPLE, "--out_file=a.jsonl"])
            wait(process, folder, kept, moment)
            process.send_signal(deadly)
            printed, said = process.communicate()
            if deadly == signal.SIGINT and b"settings: " not in said: # Python itself is still starting: what it says is its own
                assert process.returncode in (130, -2, 1) and printed == b""
            else:
                assert process.returncode in (status, 0) and b"Traceback" not in said and b"rror" not in said, said
            check(folder, whole, kept, printed, torn=deadly == signal.SIGKILL)
            assert not left(folder)
            if process.returncode == 0:
                assert saved_in(folder) == whole[1]
                (folder / "a.jsonl").unlink()
            elif printed:
                met.append(moment)
        finish(folder, whole)
    in_pairs(interrupt, range(2))
    assert len(met) >= 5


def test_a_reader_that_has_had_enough(new_folder, whole):
    """As | head: after any number of bytes."""
    parts, lines, _ = whole

    def read_some(half):
        folder, rng, tries = new_folder(str(half)), random.Random(half), 0
        for share in [0, *(rng.random() for _ in range(6))]:
            kept = saved_in(folder).count(b"\n")
            rest = b"".join(parts[kept:])
            process = start(folder, [*SAMPLE, "--out_file=a.jsonl"], bufsize=0)
            wanted, read = int(share * len(rest) / 3), b""
            while len(read) < wanted and (more := process.stdout.read(wanted - len(read))):
                read += more
            process.stdout.close()
            said = process.stderr.read()
            process.wait()
            process.stderr.close()
            assert rest[:wanted] == read
            # What is left may have been in the pipe already.
            assert process.returncode == 141 or (process.returncode == 0 and kept + 100 > len(parts))
            assert b"Traceback" not in said and b"rror" not in said, said
            saved = saved_in(folder)
            assert lines.startswith(saved) and saved[-1:] == b"\n" and saved.count(b"\n") - kept >= read.count(RULE)
            assert not left(folder)
            tries += process.returncode == 141
            if process.returncode == 0:
                (folder / "a.jsonl").unlink()
        finish(folder, whole)
        assert tries >= 3
    in_pairs(read_some, range(2))


def test_a_full_disk(new_folder, whole):
    """Full after any number of kilobytes: of the file of samples, or of the file that standard output goes to."""
    parts, lines, _ = whole

    def fill(out_file):
        rng, folder = random.Random(2), new_folder(str(out_file))
        command = [*SAMPLE, "--out_file=a.jsonl"] if out_file else SAMPLE
        size = len(lines if out_file else b"".join(parts)) // 1024
        for blocks in sorted(rng.sample(range(size), 6)): # the disk grows, and the run goes on
            kept = saved_in(folder).count(b"\n")
            with open(folder / "printed", "wb") as printed:
                process = start(folder, ["bash", "-c", f"ulimit -f {blocks}; exec {shlex.join(command)}"], stdout=printed)
                _, said = process.communicate()
            assert process.returncode == 1 and b"Traceback" not in said and b"Exception ignored" not in said, said
            assert said.splitlines()[-1].startswith(b"error: ") and b"File too large" in said.splitlines()[-1]
            printed = (folder / "printed").read_bytes()
            assert len(saved_in(folder) if out_file else printed) == blocks * 1024
            if out_file:
                check(folder, whole, kept, printed, torn=True)
            else:
                assert b"".join(parts).startswith(printed)
        if out_file:
            finish(folder, whole)
    in_pairs(fill, [True, False])


@pytest.mark.parametrize("command, statuses", [([*SAMPLE[:2], "--help"], (1, 2)), (SAMPLE, (1,))], ids=["help", "samples"])
def test_no_room_at_all_and_no_reader(new_folder, command, statuses):
    folder = new_folder("a")
    with open("/dev/full", "wb") as full:
        process = start(folder, command, stdout=full)
        _, said = process.communicate()
    assert process.returncode in statuses and said.splitlines()[-1].startswith(b"error: ") and b"No space left" in said.splitlines()[-1], said
    reader, writer = os.pipe()
    os.close(reader)
    process = start(folder, command, stdout=writer)
    os.close(writer)
    _, said = process.communicate()
    assert process.returncode == 141 and b"rror" not in said, said


def test_a_file_that_cannot_be_written(new_folder):
    def refused(case):
        out_file, expected = case
        process = start(folder, [*SAMPLE, f"--out_file={out_file}"])
        printed, said = process.communicate()
        last = said.splitlines()[-1]
        assert process.returncode == 1 and printed == b"" and last.startswith(b"error: ") and expected in last
    folder = new_folder("a")
    in_pairs(refused, [("nowhere/a.jsonl", b"cannot write 'nowhere/a.jsonl': No such file"), ("out", b"out is no file"),
                       ("prompts.txt/a", b"cannot write 'prompts.txt/a': Not a directory"), ("x" * 300, b"name too long")])


def test_files_that_vanish_while_it_runs(new_folder, whole):
    """It goes on with what it has, or ends with one line before its first sample."""
    def lose(case):
        number, name = case
        folder, rng = new_folder(str(number)), random.Random(number)
        for moment in whole[2] * rng.random(), -0.2 * rng.random():
            process = start(folder, [*SAMPLE, "--out_file=a.jsonl"])
            wait(process, folder, 0, moment)
            with suppress(FileNotFoundError):
                (folder / name).rename(folder / "gone")
            printed, said = process.communicate()
            assert b"Traceback" not in said and not left(folder)
            if process.returncode == 0:
                assert printed == b"".join(whole[0])
            else:
                assert process.returncode == 1 and printed == b"" and said.splitlines()[-1].startswith(b"error: ") and moment > 0
            with suppress(FileNotFoundError):
                (folder / "gone").rename(folder / name)
            (folder / "a.jsonl").unlink(missing_ok=True)
    in_pairs(lose, enumerate(["a.jsonl", "prompts.txt", "out/ckpt.pt"]))


def test_signals_to_torchrun(new_folder, whole):
    """Its processes end with it, and one process takes the run up."""
    def interrupt(deadly):
        rng, folder = random.Random(3), new_folder(deadly.name)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--", *SAMPLE[1:], "--out_file=a.jsonl"]
        for moment in 3 * rng.random(), -0.3 * rng.random():
            kept = saved_in(folder).count(b"\n")
            process = start(folder, torchrun)
            wait(process, folder, kept, moment)
            process.send_signal(deadly)
            printed, said = process.communicate()
            # While torch is imported, torchrun may miss the signal: then this run, or the one before it, was whole.
            assert process.returncode != 0 or printed.endswith(whole[0][-1]) or kept == whole[1].count(b"\n"), said
            check(folder, whole, kept, printed)
            assert not left(folder)
        finish(folder, whole)
    in_pairs(interrupt, [signal.SIGINT, signal.SIGTERM])
