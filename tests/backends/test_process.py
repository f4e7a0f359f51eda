"""How waiting threads spin, the batch size that fits into memory, and heap trimming."""
import os
import re
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from models import make_gpt, save_checkpoint
from project import SCRIPT
from sampling.backends.backend import EagerBackend
from sampling.backends.cuda import CUDABackend
from sampling.backends.prepare import default_batch_size
from sampling.backends.process import shorten_spinning

needs_glibc = pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize("device, num_processes, bytes_per_row, expected", [
    (CPU, 1, 100, 5), (CPU, 2, 100, 2), (CPU, 1, 1, 64), (CPU, 1, 10**6, 1), (GPU, 2, 100, 5)])
def test_a_batch_uses_at_most_half_of_the_free_memory(device, num_processes, bytes_per_row, expected, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {GPU: (1000, 9999)}[device])
    backend = SimpleNamespace(device=device, max_rows=64, bytes_per_row=lambda length: bytes_per_row)
    assert default_batch_size(backend, 9, num_processes) == expected


def test_bytes_per_row_grow_with_the_cache_and_for_the_window():
    cache_bytes = sum(layer.nbytes for layer in make_gpt().new_cache(1, 16).layers) # block_size is 16
    eager, cuda = EagerBackend(make_gpt()), CUDABackend(make_gpt())
    for backend in eager, cuda:
        assert backend.bytes_per_row(16) - backend.bytes_per_row(8) == cache_bytes / 2
        assert backend.bytes_per_row(16) < backend.bytes_per_row(17) == backend.bytes_per_row(1000)
    cuda.min_capacity = 16
    assert cuda.bytes_per_row(5) == eager.bytes_per_row(16), "a compiled step needs a cache of this size"


@pytest.mark.slow
@needs_glibc
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
    shorten_spinning()
    assert os.environ == {"GOMP_SPINCOUNT": spin_count}
