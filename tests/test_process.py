"""The numbers that torchrun gives a process, how its waiting threads spin, its memory, and heap trimming."""
import os
import re
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
import torch

from models import make_gpt, save_checkpoint
from project import SCRIPT
from sampling import process

TORCHRUN = dict(TORCHELASTIC_RUN_ID="none", RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")


@pytest.mark.parametrize("variables, expected", [
    (TORCHRUN, [5, 8, 1, 4]), ({}, [0, 1, 0, 1]), (dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="3"), [0, 1, 0, 1])],
    ids=["torchrun's", "none", "a cluster's own"])
def test_a_process_has_the_numbers_of_torchrun_and_its_share_of_the_memory(variables, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1001))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {1: (900, 9999)}[device.index])
    numbers = process.rank, process.world_size, process.local_rank, process.local_world_size
    assert [number() for number in numbers] == expected
    assert process.free_memory(torch.device("cpu")) == 1001 // expected[3]
    assert process.free_memory(torch.device("cuda", 1)) == 900


def test_after_a_failed_capture_memory_that_torch_cannot_return_is_no_error(monkeypatch):
    error = RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache := MagicMock(side_effect=error))
    process.return_freed_memory()
    empty_cache.assert_called_once()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_loading_does_not_fragment_the_heap(char_checkpoint, tmp_path):
    def peak(folder): # a shell starts it, because a process inherits the peak memory of its parent
        command = '"$0" "$1" --out_dir="$2" --device=cpu --num_samples=1 --max_new_tokens=1; true'
        done = subprocess.run(["sh", "-c", command, sys.executable, SCRIPT, folder], capture_output=True, check=True)
        return int(re.search(rb"peak memory (\d+) MB", done.stderr)[1])
    model = make_gpt(n_embd=512, n_layer=12, n_head=8)
    save_checkpoint(tmp_path, model)
    weights = sum(p.nbytes for p in model.parameters()) / 2**20
    assert peak(tmp_path) - peak(char_checkpoint) < 1.3 * weights # measured: 1.04; 1.6 if trimming is off earlier


@pytest.mark.parametrize("num_running, num_cores, spin_count", [
    ("1", 2, "3000"), ("2", 2, "0"), ("21222", 2, "3000"), ("4", 8, "3000"), ("5", 8, "0"), ("?", 2, "3000")])
def test_waiting_threads_spin_unless_other_programs_use_half_of_the_cores(num_running, num_cores, spin_count,
                                                                          monkeypatch):
    counts = cycle(num_running)
    monkeypatch.setattr(Path, "read_text", lambda path: f"0.20 0.18 0.12 {next(counts)}/80 11206\n")
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    monkeypatch.setattr(os, "environ", {})
    process.shorten_spinning()
    assert os.environ == {"GOMP_SPINCOUNT": spin_count}
