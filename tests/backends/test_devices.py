"""The choice of device and dtype. GPUs are simulated, because few test machines have every kind."""
from contextlib import nullcontext

import pytest
import torch

from sampling.backends.devices import choose_device, choose_dtype


@pytest.fixture
def simulate_devices(monkeypatch):
    """simulate_devices(gpus, mps) makes torch report these devices."""
    def have(gpus=0, mps=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    return have


@pytest.mark.parametrize("found, name, expected", [
    (dict(), "auto", "cpu"),
    (dict(mps=True), "auto", "mps"),
    (dict(gpus=2), "auto", "cuda"),
    (dict(gpus=2), "cuda:1", "cuda:1"),
    (dict(gpus=2, mps=True), "cpu", "cpu"),
])
def test_choose_device_returns_the_named_device_or_the_best_one(found, name, expected, simulate_devices):
    simulate_devices(**found)
    assert choose_device(name) == torch.device(expected)


@pytest.mark.parametrize("found, name, message", [
    (dict(), "cuda", "device=cuda is not available here; found: cpu"),
    (dict(mps=True), "cuda:1", "device=cuda:1 is not available here; found: mps, cpu"),
    (dict(gpus=2), "cuda:2", "device=cuda:2 is not available here; found: cuda, cuda:0, cuda:1, cpu"),
    (dict(), "mps", "device=mps is not available here; found: cpu"),
])
def test_a_device_that_is_not_available_raises(found, name, message, simulate_devices):
    simulate_devices(**found)
    with pytest.raises(ValueError, match=f"^{message}; use one of these, or auto$"):
        choose_device(name)


@pytest.mark.parametrize("name, rank, expected", [("auto", 1, "cuda:1"), ("cuda", 0, "cuda:0"), ("cuda", 5, "cuda:1"),
                                                  ("cuda:1", 0, "cuda:1"), ("cuda", None, "cuda"), ("cpu", 1, "cpu")])
def test_each_process_uses_its_own_gpu(name, rank, expected, simulate_devices):
    simulate_devices(gpus=2)
    assert choose_device(name, rank) == torch.device(expected)


@pytest.mark.parametrize("native, emulated, name, expected", [
    (True, True, "auto", torch.bfloat16),
    (False, True, "auto", torch.float16), # a T4 emulates bfloat16, which is slow
    (False, True, "bfloat16", torch.bfloat16),
    (False, False, "auto", torch.float16),
    (False, False, "float32", torch.float32),
    (False, False, "bfloat16", None),
])
def test_choose_dtype_on_a_gpu(native, emulated, name, expected, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: asked.append(device) or nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: emulated if including_emulation else native)
    gpu = torch.device("cuda", 1)
    if expected is None:
        with pytest.raises(ValueError, match="bfloat16 is not available on this GPU; use dtype=float16 or dtype=float32"):
            choose_dtype(gpu, name)
    else:
        assert choose_dtype(gpu, name) == expected
    assert asked == [gpu], "it asks about this GPU, not the current one"


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_auto_dtype_is_float32_on_cpu_and_mps(device):
    assert choose_dtype(torch.device(device), "auto") == torch.float32
    assert choose_dtype(torch.device(device), "bfloat16") == torch.bfloat16


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
def test_int8_needs_a_cpu(device):
    with pytest.raises(ValueError, match=f"^dtype=int8 runs only on a CPU; got device={device}: use dtype=bfloat16, or device=cpu$"):
        choose_dtype(torch.device(device), "int8")

