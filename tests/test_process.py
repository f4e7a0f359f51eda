"""A process's threads, and the cores and memory that it may use."""
import os
from itertools import cycle
from pathlib import Path

import pytest
import torch

from models import as_checkpoint, make_gpt
from sampling import process
from sampling.backends import backend_choice
from sampling.backends.backend import return_freed_memory
from sampling.backends.backend_choice import prepare_backend
from sampling.process import is_out_of_memory
from sampling.settings import ModelOptions
from script_process import run_forked


def test_after_a_failed_capture_memory_that_torch_cannot_return_is_no_error(monkeypatch):
    def empty_cache():
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    return_freed_memory()


@pytest.mark.parametrize("text, expected", [
    ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
    ("CUBLAS_STATUS_ALLOC_FAILED when calling", True),
    ("CUBLAS_STATUS_NOT_INITIALIZED when calling", True),
    ("DefaultCPUAllocator: can't allocate memory", True),
    ("CUBLAS_STATUS_EXECUTION_FAILED when calling", False),
])
def test_out_of_memory_errors_are_recognised_also_behind_another_error(text, expected):
    error = ValueError("cannot load it")
    error.__context__ = RuntimeError(text)
    assert is_out_of_memory(error) == expected


@pytest.mark.parametrize("num_running, num_cores, spin_count", [
    ("2", 2, "0"),
    ("21222", 2, "3000"),
    ("4", 8, "3000"),
    ("5", 8, "0"),
    ("?", 2, "3000"),
])
def test_waiting_threads_spin_unless_other_programs_use_half_of_the_cores(
        num_running, num_cores, spin_count, monkeypatch, messages):
    """num_running: at each of the next moments, a digit. Here, torch is imported already."""
    counts = cycle(num_running)
    monkeypatch.setattr(Path, "read_text", lambda path: f"0.2 0.1 0.1 {next(counts)}/80 11206\n")
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    monkeypatch.setattr(os, "environ", {})
    process.shorten_spinning()
    process.shorten_spinning()
    assert os.environ == {"GOMP_SPINCOUNT": spin_count}
    assert [" call torch.set_num_threads(1)" in line for line in messages] == (
        [True] if spin_count == "0" else [])


# A made-up /sys/fs/cgroup. The process is in a group of its own inside the container's.
CONTAINER = {
    "own": "4:misc:/\n0::/box/job",
    "cpu.max": "max 100000",
    "box/cpu.max": "400000 100000",
    "box/job/cpu.max": "150000 100000",
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("num_threads, variables, expected", [
    (8, {}, 2), (1, {}, 1), (8, {"OMP_NUM_THREADS": "8"}, 8)])
def test_threads_follow_the_usable_cores_unless_the_user_chose_a_number(
        num_threads, variables, expected, tmp_path, monkeypatch):
    (tmp_path / "box" / "job").mkdir(parents=True)
    for name, content in CONTAINER.items():
        (tmp_path / name).write_text(f"{content}\n")
    monkeypatch.setattr(backend_choice, "CGROUPS", tmp_path)
    monkeypatch.setattr(backend_choice, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "environ", variables)
    torch.set_num_threads(num_threads)
    # In bfloat16, torch runs alone.
    prepare_backend(as_checkpoint(make_gpt()), torch.device("cpu"), torch.bfloat16, ModelOptions())
    assert torch.get_num_threads() == expected


FORK = """
import os, signal, torch, sampling
torch.set_num_threads(2)
def fork(use):
    if os.fork() == 0:
        signal.alarm(30) # ends a process that hangs
        try:
            use()
        except RuntimeError as error:
            os._exit(7 if "load it after the fork" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
for dtype in "float32", "bfloat16":
    gpt = sampling.load("demo", "cpu", dtype)
    gpt.generate("A" * 250, sampling.SamplingParams(max_new_tokens=2))
    fork(lambda: gpt.generate("B"))
fork(lambda: sampling.load("demo"))
"""


def test_a_fork_of_a_process_that_loaded_a_model_raises_instead_of_hanging():
    run_forked(FORK, script="-c")
