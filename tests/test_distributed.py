"""A run shared by several processes, as torchrun starts them."""
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from distributed import LOST, TOLD, Team

from conftest import PROJECT, make_gpt, save_checkpoint

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="torchrun's processes are forked")
MANY = ("--start=LINES:prompts.txt", "--num_samples=3", "--max_new_tokens=20", "--batch_size=2", "--device=cpu")


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt())
    (tmp_path / "prompts.txt").write_text("The \nO\nWhat is it?\nyes\nAnd then they all went home. \n")
    return tmp_path


@pytest.fixture
def torchrun(folder, vocabulary):
    """Starts sample.py in so many processes; kills what is left of them."""
    started = []

    def start(processes, *arguments):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "--",
                   str(PROJECT / "sample.py"), *arguments]
        env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(vocabulary), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        start_new_session=True))
        return started[-1]
    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("processes, arguments", [
    (2, [*MANY]),
    (3, [*MANY, "--stop=e", "--repetition_penalty=1.2"]),
    (2, ["--start=O", "--num_samples=7", "--max_new_tokens=30", "--batch_size=1"]),
    (3, ["--start=O", "--num_samples=1", "--max_new_tokens=5"]),
], ids=["many-prompts", "stop", "one-prompt", "nothing-for-most"])
def test_the_text_and_the_files_are_those_of_one_process(torchrun, sample, folder, processes, arguments):
    alone = sample(*arguments, "--out_file=alone.jsonl", "--html_file=alone.html", cwd=folder)
    shared = torchrun(processes, *arguments, "--out_file=shared.jsonl", "--html_file=shared.html")
    printed, said = shared.communicate(timeout=120)
    assert shared.returncode == 0, said
    assert printed == alone.stdout and alone.returncode == 0
    assert (folder / "alone.jsonl").read_bytes() == (folder / "shared.jsonl").read_bytes()
    alone, shared = ((folder / name).read_text() for name in ("alone.html", "shared.html"))
    data = re.compile(r'<script type="application/json">.*?</script>') # whose last digits depend on who shares a batch
    assert data.sub("", alone) == data.sub("", shared) and len(data.findall(alone)) == len(data.findall(shared)) > 0
    assert said.count("parameters on cpu") == 1 and "error" not in said


@pytest.mark.parametrize("size, at_once", [(1, 1), (1, 4), (2, 3), (3, 2), (4, 5)])
def test_the_sizes_of_batches_are_known_before(size, at_once):
    for total in [None, *range(1, 50)]:
        team, drawn = Team(), [set() for _ in range(size)]
        team.size, samples = size, iter([SimpleNamespace(kept=False)] * (100 * size * at_once if total is None else total))
        while None not in (shares := team.share_out(samples, SimpleNamespace(at_once=at_once))):
            for sizes, share in zip(drawn, shares, strict=True):
                sizes |= {len(share)} - {0}
        for team.rank in range(size):
            assert team.batch_sizes(total, at_once) == drawn[team.rank]


@pytest.mark.parametrize("arguments, said", [
    (["--temprature=1"], "did you mean temperature?"), (["--out_dir=nowhere"], "there is no checkpoint at nowhere"),
    (["--start=LINES:nothing.txt"], "cannot read the prompt file"), (["--start=¡"], "the prompt has characters"),
    (["--interactive"], "interactive=True"), (["--out_file=prompts.txt"], "nothing is overwritten"),
], ids=str)
def test_a_mistake_is_told_once(torchrun, arguments, said):
    process = torchrun(2, *arguments)
    printed, stderr = process.communicate(timeout=120)
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert process.returncode != 0 and printed == ""
    assert len(errors) == 1 and said in errors[0], stderr


@pytest.mark.parametrize("victim", [1, 2])
def test_a_process_that_dies_ends_the_run_and_the_same_command_takes_it_up(torchrun, sample, folder, victim):
    run = ("--start=LINES:prompts.txt", "--num_samples=20", "--max_new_tokens=60", "--batch_size=2", "--device=cpu")
    process = torchrun(3, *run, "--out_file=a.jsonl")
    while not (folder / "a.jsonl").exists() or (folder / "a.jsonl").stat().st_size == 0:
        time.sleep(0.01)
    os.kill(process_of_rank(process.pid, victim), signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    # Process 0 notices it, or torchrun has, whichever comes first.
    assert process.returncode != 0 and (f"error: {LOST}" in said or f"error: {TOLD}" in said)
    kept = (folder / "a.jsonl").read_bytes()
    again = torchrun(3, *run, "--out_file=a.jsonl")
    _, said = again.communicate(timeout=120)
    lines = kept.count(b"\n")
    assert again.returncode == 0 and f"holds {lines} samples" in said
    assert sample(*run, "--out_file=whole.jsonl", cwd=folder).returncode == 0
    assert (folder / "a.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()


def process_of_rank(launcher, rank):
    """The id of torchrun's process of that rank."""
    children = shlex.split(subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True, text=True).stdout)
    for child in children:
        with open(f"/proc/{child}/environ") as f:
            if f"\0RANK={rank}\0" in "\0" + f.read():
                return int(child)
    raise ValueError(f"no process of rank {rank}")
