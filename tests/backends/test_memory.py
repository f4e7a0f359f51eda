"""Peak memory, the batch size that fits into memory, and heap trimming."""
import re
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from models import make_gpt, save_checkpoint
from project import PROJECT, SCRIPT
from sampling.backends import memory
from sampling.backends.eager import EagerGPT
from sampling.backends.memory import disable_malloc_trim, max_batch_size, peak_memory, return_freed_memory

needs_glibc = pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
CPU = torch.device("cpu")


@pytest.mark.parametrize("num_processes, bytes_per_sample, expected", [(1, 100, 5), (2, 100, 2), (1, 1, 64), (1, 10**6, 1)])
def test_a_batch_uses_at_most_half_of_the_free_memory(num_processes, bytes_per_sample, expected, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    backend = SimpleNamespace(device=CPU, is_exact=False, bytes_per_sample=lambda length: bytes_per_sample)
    assert max_batch_size(backend, 9, num_processes) == expected


@pytest.mark.parametrize("bytes_per_sample, expected", [(100, 5), (1, 128), (10**6, 1)])
def test_on_a_gpu_the_batch_size_depends_on_gpu_memory(bytes_per_sample, expected, monkeypatch):
    asked, gpu = [], torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (1000, 9999))
    backend = SimpleNamespace(device=gpu, is_exact=False, bytes_per_sample=lambda length: bytes_per_sample)
    assert max_batch_size(backend, 9, num_processes=2) == expected and asked == [gpu]


def test_bytes_per_sample_count_cache_logits_and_window():
    backend = EagerGPT(make_gpt()) # block_size is 16
    cache, logits = 2 * 2 * 24 * 4, 40 * 61 # keys and values, layers, width, bytes; vocab_size
    assert backend.bytes_per_sample(5) == 5 * cache + logits
    assert backend.bytes_per_sample(16) == 16 * cache + logits
    assert backend.bytes_per_sample(17) == backend.bytes_per_sample(1000) == 16 * (cache + 40 * 24) + logits


@pytest.mark.skipif(sys.platform == "win32", reason="not available on Windows")
def test_peak_memory_is_in_bytes_and_never_decreases():
    block = torch.zeros(2**24) # 64 MiB
    peak = peak_memory(CPU)
    del block
    assert 2**26 < peak < 2**36 and peak_memory(CPU) >= peak


FAULTS = """
import resource, sys, torch
if sys.argv[1] == "disabled":
    from sampling.backends.memory import disable_malloc_trim
    disable_malloc_trim()
for i in range(40):
    if i == 30: # depending on its addresses, the heap grows for up to 13 turns
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(8 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@needs_glibc
def test_without_trimming_freed_memory_causes_no_page_faults():
    def faults(trimming):
        return int(subprocess.run([sys.executable, "-c", FAULTS, trimming], cwd=PROJECT, capture_output=True, check=True).stdout)
    assert faults("disabled") < 100 < faults("enabled")


@pytest.mark.slow
@needs_glibc
def test_loading_does_not_fragment_the_heap(char_checkpoint, tmp_path):
    def peak(folder): # a shell starts it, because a process inherits the peak memory of its parent
        run = '"$0" "$1" --out_dir="$2" --device=cpu --num_samples=1 --max_new_tokens=1; true'
        done = subprocess.run(["sh", "-c", run, sys.executable, SCRIPT, folder], capture_output=True, text=True, check=True)
        return int(re.search(r"peak memory (\d+) MB", done.stderr)[1])
    model = make_gpt(n_embd=512, n_layer=12, n_head=8)
    save_checkpoint(tmp_path, model)
    weights = sum(p.nbytes for p in model.parameters()) / 2**20
    assert peak(tmp_path) - peak(char_checkpoint) < 1.3 * weights # measured: 1.04; 1.6 if trimming is disabled from the start


@pytest.mark.parametrize("missing", [AttributeError, OSError, TypeError])
def test_without_glibc_nothing_happens(missing, monkeypatch):
    def no_library(name):
        raise missing
    monkeypatch.setattr(memory.ctypes, "CDLL", no_library)
    disable_malloc_trim()
    return_freed_memory()


@pytest.mark.parametrize("has_gpu", [True, False])
def test_released_memory_includes_that_of_a_gpu_in_use(has_gpu, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    return_freed_memory()
    assert calls == ["empty_cache"] * has_gpu
