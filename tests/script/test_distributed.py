"""Runs that torchrun starts in several processes."""
import os
import re
import signal
import sys
import time
from subprocess import CompletedProcess

import psutil
import pytest
import torch.distributed.run

from project import PROJECT, SCRIPT
from sampling.torchrun import serve
from script_process import start_script

LINES = "--start=LINES:prompts.txt", "--batch_size=2", "--device=cpu"
PROMPTS = *LINES, "--num_samples=1", "--max_new_tokens=20"
TRAINING = f"""
import os, subprocess, sys
if os.environ["RANK"] == "0": # of 2, but no other process will come
    script = sys.executable, {str(SCRIPT)!r}, *sys.argv[1:]
    subprocess.run(["sh", "-c", '"$@"; exit $?', "sh", *script], check=True)
"""
SHELL = f'"{sys.executable}" "{SCRIPT}" "$@"\nexit $?\n'
slow = pytest.mark.slow


@pytest.fixture
def start(folder):
    """start(num_processes, *arguments) starts sample.py under torchrun.

    What still runs at the end is killed. If the folder has a sitecustomize.py, Python runs it.
    """
    started = []

    def start(num_processes, *arguments, program=("--", SCRIPT), **streams):
        launch = "--standalone", f"--nproc_per_node={num_processes}", *program
        process = start_script(*launch, *arguments, script=torch.distributed.run.__file__,
                               cwd=folder, PYTHONPATH=str(folder), **streams)
        started.append(process)
        return process
    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def torchrun(start):
    """torchrun(num_processes, *arguments) runs sample.py."""
    def run(*arguments, **settings):
        process = start(*arguments, **settings)
        output = ((text or b"").decode() for text in process.communicate(timeout=120))
        return CompletedProcess(arguments, process.returncode, *output)
    return run


@pytest.mark.parametrize("arguments", [
    [*PROMPTS, "--stop=e", "--seed=random"], # the last sample leaves a process without one
    pytest.param([*LINES, "--score"], marks=slow),
])
def test_samples_and_files_are_the_same_as_with_one_process(
        torchrun, run_script, folder, arguments):
    shared = torchrun(2, *arguments, "--out_file=shared.jsonl")
    seeds = [f"--seed={seed}" for seed in re.findall(r"seed: (\d+), drawn", shared.stderr)]
    alone = run_script(*arguments, *seeds, "--out_file=alone.jsonl", cwd=folder)
    assert shared.stdout == alone.stdout, shared.stderr
    assert (folder / "shared.jsonl").read_bytes() == (folder / "alone.jsonl").read_bytes()
    assert shared.stderr.count("parameters on cpu") == 1
    assert "error" not in shared.stderr


@slow
@pytest.mark.parametrize("program, content", [
    (["--", "train.py"], TRAINING), (["--no-python", "--", "sh", "run.sh"], SHELL)])
def test_a_training_or_a_shell_under_torchrun_may_call_the_script(
        torchrun, run_script, folder, program, content):
    (folder / program[-1]).write_text(content)
    done = torchrun(2, *PROMPTS, program=program)
    assert done.stdout == run_script(*PROMPTS, cwd=folder).stdout, done.stderr


def test_a_greeting_of_gloo_goes_to_stderr(capfd, monkeypatch):
    """Some versions of torch print one."""
    monkeypatch.setattr(os, "environ", dict(TORCHELASTIC_RUN_ID="none", WORLD_SIZE="8", RANK="0"))
    monkeypatch.setattr("torch.distributed.init_process_group",
                        lambda *_, **settings: os.write(1, b"a greeting"))
    serve(None) # rank 0 returns
    os.write(1, b"a sample")
    assert capfd.readouterr() == ("a sample", "a greeting")


@slow
def test_an_error_is_reported_once(torchrun, folder):
    """Only rank 0, which comes last here, finds it."""
    rank_0_is_last = "import os, time\ntime.sleep(os.environ.get('RANK') == '0')\n"
    (folder / "sitecustomize.py").write_text(rank_0_is_last)
    done = torchrun(2, "--out_file=prompts.txt")
    assert done.returncode != 0
    assert done.stdout == ""
    error, = re.findall("^error: .*", done.stderr, re.MULTILINE)
    assert "prompts.txt was not written by sample.py" in error


@slow
def test_a_process_that_fails_says_so_with_its_number_and_the_run_ends(torchrun, folder):
    (folder / "sitecustomize.py").write_text(f"""
import os, sys
if os.environ.get("RANK") == "1":
    sys.path.insert(0, {str(PROJECT)!r})
    from sampling.generation.batch import Batch
    def fail(*arguments):
        raise ValueError("something broke here")
    Batch.flush = fail
""")
    done = torchrun(2, *PROMPTS)
    assert done.returncode != 0
    assert "error: process 1: something broke here" in done.stderr


@slow
@pytest.mark.parametrize("rank, number", [("1", signal.SIGKILL), (None, signal.SIGINT)])
def test_a_run_that_ends_early_can_be_resumed(start, run_script, folder, rank, number):
    """A signal kills one process, or interrupts torchrun. A single process resumes the run."""
    run = *LINES, "--num_samples=10", "--max_new_tokens=60"
    path = folder / "a.jsonl"
    process = start(2, *run, "--out_file=a.jsonl")
    while not (path.exists() and path.stat().st_size):
        time.sleep(0.01)
    pids = {None: process.pid}
    for child in psutil.Process(process.pid).children():
        pids[child.environ().get("RANK", "")] = child.pid
    os.kill(pids[rank], number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    with pytest.raises(ProcessLookupError): # nothing of its session is left
        os.killpg(process.pid, 0)
    for name in "a.jsonl", "whole.jsonl":
        run_script(*run, f"--out_file={name}", cwd=folder)
    assert path.read_bytes() == (folder / "whole.jsonl").read_bytes()
