"""The choice of device and dtype. GPUs are simulated, because few test machines have every kind."""
import os
import re
from unittest.mock import MagicMock

import pytest
import torch
from torch.torch_version import TorchVersion

from sampling.backends.prepare import choose_device, choose_dtype

NO_KERNEL = RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore lines")
GPU = torch.device("cuda", 1)


@pytest.fixture
def simulate_devices(monkeypatch):
    """simulate_devices(gpus, mps, error) makes torch find these devices. The first kernel of GPU 0 raises the error."""
    def have(gpus=0, mps=False, error=None):
        def first_kernel(size, device):
            if error and device.index in (None, 0):
                raise error
            return torch.ones(size)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch, "zeros", first_kernel)
    return have


@pytest.mark.parametrize("found, name, local_rank, expected", [
    (dict(), "auto", None, "cpu"), (dict(gpus=2, mps=True), "auto", None, "cuda"),
    (dict(gpus=2), "cuda:1", "0", "cuda:1"), (dict(gpus=2), "cuda", "5", "cuda:1")]) # each process has its own GPU
def test_the_named_device_or_the_best_one_is_used_or_refused(found, name, local_rank, expected, simulate_devices,
                                                             monkeypatch):
    if local_rank:
        environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": local_rank, "WORLD_SIZE": "9"}
        monkeypatch.setattr(os, "environ", environment)
    simulate_devices(**found)
    assert choose_device(name) == torch.device(expected)
    with pytest.raises(ValueError, match=r"^device=cuda:2 is not available here; found: .*cpu; use one of these"):
        choose_device("cuda:2")


def test_a_gpu_whose_first_kernel_fails_is_left_out_with_one_line_or_is_an_error(simulate_devices, messages):
    expected = (r"^this GPU \(Tesla V100, compute capability 7\.0\) cannot run torch .* \(CUDA error: no kernel image "
                r"is available for execution on the device\): update its driver, or ")
    for found, next_device in (dict(gpus=1), "cpu"), (dict(gpus=1, mps=True), "mps"), (dict(gpus=2), "cuda:1"):
        simulate_devices(**found, error=NO_KERNEL)
        messages.clear()
        assert choose_device("auto") == torch.device(next_device)
        message, = messages
        assert re.match(expected, message) and message.endswith("; trying the next device")
        with pytest.raises(ValueError, match=expected):
            choose_device("cuda")
    simulate_devices(gpus=1, error=torch.OutOfMemoryError("CUDA out of memory")) # the GPU itself is usable
    with pytest.raises(torch.OutOfMemoryError):
        choose_device("auto")


@pytest.mark.parametrize("native, emulated, name, exact, expected", [
    (True, True, "auto", False, torch.bfloat16),
    (False, True, "auto", False, torch.float16), # a T4 emulates bfloat16, which is slow
    (False, True, "auto", True, torch.bfloat16), # as nanoGPT does
    (False, True, "bfloat16", False, torch.bfloat16),
    (False, False, "bfloat16", False, "bfloat16 is not available on this GPU; use dtype=float16 or dtype=float32"),
    (True, True, "int8", False, "dtype=int8 runs only on a CPU; got device=cuda:1: use dtype=bfloat16, or device=cpu"),
])
def test_choose_dtype_on_a_gpu(native, emulated, name, exact, expected, monkeypatch):
    asked = MagicMock()
    monkeypatch.setattr(torch.cuda, "device", asked)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: emulated if including_emulation else native)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"^{expected}$"):
            choose_dtype(GPU, name, exact)
    else:
        assert choose_dtype(GPU, name, exact) == expected
        asked.assert_called_once_with(GPU) # it asks about this GPU, not the current one


def test_on_mps_auto_is_float32_and_half_precision_needs_torch_2_11(monkeypatch):
    mps = torch.device("mps")
    assert choose_dtype(mps, "auto") == torch.float32
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    assert choose_dtype(mps, "float16") == torch.float16
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.1"))
    with pytest.raises(ValueError, match=r"^dtype=float16 on MPS needs torch 2\.11 .*; got torch 2\.10\.1: use"):
        choose_dtype(mps, "float16")
