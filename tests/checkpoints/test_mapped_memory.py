"""How much memory it takes to load a checkpoint."""
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from models import make_gpt, save_checkpoint
from project import PROJECT
from sampling.checkpoints import state_dict
from sampling.checkpoints.mapped_memory import pages_of, release_pages
from sampling.checkpoints.nanogpt import load_checkpoint
from sampling.checkpoints.state_dict import crc32_of
from sampling.checkpoints.torch_files import read_torch_file

PROGRAM = """
import re, sys
from sampling.backends.cpu.packed_gpt import PackedGPT
from sampling.checkpoints.build import build_gpt
from sampling.checkpoints.nanogpt import load_checkpoint
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1000
before, in_int8 = peak(), len(sys.argv) > 2
checkpoint = load_checkpoint(sys.argv[1], copy_weights=not in_int8)
if in_int8:
    model = PackedGPT(build_gpt(checkpoint), use_int8=True)
print(peak() - before)
"""
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")


def peak_of_loading(path, *in_int8):
    """By how many MB the peak memory of a process grows when it loads a checkpoint, or also rounds it to 8 bits."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, path, *in_int8], cwd=PROJECT, capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.slow
@needs_proc
def test_optimizer_state_is_never_read(tmp_path):
    path = save_checkpoint(tmp_path, make_gpt(), optimizer={"state": torch.ones(50_000_000)}) # 200 MB
    assert peak_of_loading(path) < 50


@pytest.mark.slow
@needs_proc
@pytest.mark.skipif(sys.platform != "linux", reason="pages are released on Linux only")
def test_copying_tensors_keeps_only_one_copy_in_memory(tmp_path):
    tensors = {f"transformer.h.0.x{i}": torch.ones(5_000_000) for i in range(10)} # 200 MB
    torch.save({"model": tensors, "model_args": {"n_layer": 1}}, tmp_path / "ckpt.pt")
    assert 200 < peak_of_loading(tmp_path / "ckpt.pt") < 280


@needs_proc
@pytest.mark.skipif(sys.platform != "linux", reason="pages are released on Linux only")
def test_a_model_in_8_bits_is_never_all_in_memory_as_float32(tmp_path):
    path = save_checkpoint(tmp_path, make_gpt(n_embd=512, n_head=4, n_layer=6), optimizer=None) # 76 MB
    assert 19 < peak_of_loading(path, "in int8") < 55


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_are_not_copied_have_the_same_checksum(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(state_dict, "ROWS_AT_ONCE", 10)
    path = save_checkpoint(tmp_path, make_gpt().to(dtype))
    copied, mapped = (load_checkpoint(path, copy_weights=copy_weights) for copy_weights in (True, False))
    assert crc32_of(copied.state_dict) == crc32_of(mapped.state_dict)
    for name, tensor in mapped.state_dict.items():
        assert torch.equal(tensor.float(), copied.state_dict[name])
        is_weight = tensor.dim() == 2 and "wpe" not in name
        assert tensor.dtype == (dtype if is_weight else torch.float32)
        assert bool(pages_of([tensor])) == (is_weight and sys.platform == "linux"), "a training run may overwrite the file"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("name", ["ckpt.pt", "a name\twith\r spaces.pt"])
def test_pages_are_released_after_they_are_read(name, tmp_path):
    path = tmp_path / name
    torch.save({"a": torch.arange(2**20)}, path)

    def resident_kb():
        lines = pathlib.Path("/proc/self/smaps").read_text().split("\n")
        at = next(i for i, line in enumerate(lines) if line.startswith(start))
        return int(next(line for line in lines[at:] if line.startswith("Rss:")).split()[1])

    mapped = read_torch_file(path)[0]["a"]
    start = f"{pages_of([mapped])[0][0]:x}-"
    assert mapped.sum() == 2**20 * (2**20 - 1) // 2 and resident_kb() >= 8192
    release_pages(pages_of([mapped]))
    assert resident_kb() == 0 and mapped[12345] == 12345
    assert pages_of([torch.ones(2**20)]) == [], "pages that are not mapped from a file would lose their content"
