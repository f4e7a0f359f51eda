"""Runs that torchrun starts in several processes."""
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from models import make_gpt, save_checkpoint
from project import PROJECT, SCRIPT

PROMPTS = ("--start=LINES:prompts.txt", "--num_samples=3", "--max_new_tokens=20", "--batch_size=2", "--device=cpu")
ON_TERMINAL = sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])" # runs the rest of the command
slow = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt())
    (tmp_path / "prompts.txt").write_text("The \nO\nWhat is it?\nyes\nAnd then they all went home. \n")
    return tmp_path


@pytest.fixture
def torchrun(folder, tiktoken_cache):
    """torchrun(num_processes, *arguments) starts sample.py. Processes that still run at the end are killed.

    If the folder has a sitecustomize.py, Python runs it first.
    """
    started = []
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tiktoken_cache), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
           "PYTHONPATH": str(folder)}

    def start(num_processes, *arguments, prefix=(), program=("--", SCRIPT)):
        launcher = "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"
        started.append(subprocess.Popen([*prefix, sys.executable, *launcher, *program, *arguments], cwd=folder, env=env,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        start_new_session=True))
        return started[-1]
    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("num_processes, arguments", [
    pytest.param(2, [*PROMPTS, "--stop=e"], id="many-prompts"),
    pytest.param(2, ["--start=LINES:prompts.txt", "--score", "--device=cpu"], id="score", marks=slow),
    pytest.param(3, ["--start=O", "--num_samples=1", "--max_new_tokens=5"], id="fewer-samples", marks=slow)])
def test_samples_and_files_are_the_same_as_with_one_process(torchrun, run_script, folder, num_processes, arguments):
    alone = run_script(*arguments, "--out_file=alone.jsonl", cwd=folder)
    shared = torchrun(num_processes, *arguments, "--out_file=shared.jsonl")
    printed, messages = shared.communicate(timeout=120)
    assert shared.returncode == 0, messages
    assert printed == alone.stdout and alone.returncode == 0
    assert (folder / "alone.jsonl").read_bytes() == (folder / "shared.jsonl").read_bytes()
    assert messages.count("parameters on cpu") == 1 and "error" not in messages


def test_a_training_under_torchrun_may_call_the_script(torchrun, run_script, folder):
    """Its variables say RANK=0 of 2, but no other process will come."""
    (folder / "train.py").write_text(f"""
import os, subprocess, sys
if os.environ["RANK"] == "0":
    subprocess.run(["sh", "-c", '"$@"; exit $?', "sh", sys.executable, {str(SCRIPT)!r}, *sys.argv[1:]], check=True)
""")
    printed, messages = torchrun(2, *PROMPTS, program=["--", "train.py"]).communicate(timeout=120)
    assert printed == run_script(*PROMPTS, cwd=folder).stdout, messages


@slow
def test_torchrun_may_start_the_script_through_a_shell(torchrun, run_script, folder):
    (folder / "run.sh").write_text(f'"{sys.executable}" "{SCRIPT}" "$@"\nexit $?\n')
    printed, messages = torchrun(2, *PROMPTS, program=["--no-python", "--", "sh", "run.sh"]).communicate(timeout=120)
    assert printed == run_script(*PROMPTS, cwd=folder).stdout, messages


@slow
def test_on_a_terminal_where_all_processes_stream_each_sample_is_saved_once(torchrun, run_script, folder):
    run_script(*PROMPTS, "--out_file=alone.jsonl", cwd=folder)
    _, messages = torchrun(2, *PROMPTS, "--out_file=shared.jsonl", prefix=ON_TERMINAL).communicate(timeout=120)
    assert (folder / "alone.jsonl").read_bytes() == (folder / "shared.jsonl").read_bytes(), messages


@slow
def test_a_random_seed_is_the_same_for_all_processes(torchrun, run_script, folder):
    printed, messages = torchrun(2, *PROMPTS, "--seed=random").communicate(timeout=120)
    (drawn,) = re.findall(r"seed: (\d+), drawn at random", messages)
    assert printed == run_script(*PROMPTS, f"--seed={drawn}", cwd=folder).stdout


@slow
@pytest.mark.parametrize("arguments, message", [
    (["--out_file=prompts.txt"], "prompts.txt was not written by sample.py"), # only rank 0 finds it
    (["--interactive"], "interactive=True")], ids=str)
def test_an_error_is_reported_once(torchrun, folder, arguments, message):
    rank_0_is_last = "import os, time\ntime.sleep(os.environ.get('RANK') == '0')\n"
    (folder / "sitecustomize.py").write_text(rank_0_is_last)
    process = torchrun(2, *arguments)
    printed, messages = process.communicate(timeout=120)
    errors = [line for line in messages.splitlines() if line.startswith("error: ")]
    assert process.returncode != 0 and printed == ""
    assert len(errors) == 1 and message in errors[0], messages


@slow
@pytest.mark.parametrize("module, name", [
    ("sampling.checkpoints.nanogpt", "load_nanogpt"), ("sampling.generation.batch", "Batch.flush")])
def test_a_process_that_fails_says_so_with_its_number_and_the_run_ends(torchrun, folder, module, name):
    (folder / "sitecustomize.py").write_text(f"""
import os, sys
if os.environ.get("RANK") == "1":
    sys.path.insert(0, {str(PROJECT)!r})
    import {module} as module
    def fail(*arguments):
        raise ValueError("something broke here")
    module.{name} = fail
""")
    process = torchrun(2, *PROMPTS)
    _, messages = process.communicate(timeout=120)
    assert process.returncode != 0 and "error: process 1: something broke here" in messages, messages


@slow
@pytest.mark.parametrize("rank, number", [("1", signal.SIGKILL), (None, signal.SIGINT)], ids=["a-process", "torchrun"])
def test_a_run_that_ends_early_can_be_resumed(torchrun, run_script, folder, rank, number):
    """A signal kills one process, or interrupts torchrun. A single process can resume the run, too."""
    run = ("--start=LINES:prompts.txt", "--num_samples=20", "--max_new_tokens=60", "--batch_size=2", "--device=cpu")
    process = torchrun(3, *run, "--out_file=a.jsonl")
    while not (folder / "a.jsonl").exists() or (folder / "a.jsonl").stat().st_size == 0:
        time.sleep(0.01)
    children = {child.environ().get("RANK"): child.pid for child in psutil.Process(process.pid).children()}
    os.kill(process.pid if rank is None else children[rank], number)
    _, messages = process.communicate(timeout=60)
    assert process.returncode != 0
    # torchrun reports a lost process, and rank 0 too, unless torchrun has ended it before.
    assert rank is None or f"Signal {int(number)}" in messages, messages
    with pytest.raises(ProcessLookupError): # nothing of its session is left
        os.killpg(process.pid, 0)
    assert run_script(*run, "--out_file=a.jsonl", cwd=folder).returncode == 0
    assert run_script(*run, "--out_file=whole.jsonl", cwd=folder).returncode == 0
    assert (folder / "a.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
