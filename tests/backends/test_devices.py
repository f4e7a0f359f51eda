"""Which device and dtype are used. GPUs are simulated, since few machines that run tests have each kind."""
from contextlib import nullcontext

import pytest
import torch

from sampling.backends.devices import choose_device, choose_dtype


@pytest.fixture
def machine(monkeypatch):
    """machine(gpus, mps): let torch find these devices."""
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
def test_a_device_is_the_one_named_or_the_best(found, name, expected, machine):
    machine(**found)
    assert choose_device(name) == torch.device(expected)


@pytest.mark.parametrize("found, name, message", [
    (dict(), "cuda", "CUDA is not available here; found: cpu"),
    (dict(mps=True), "cuda:1", "CUDA:1 is not available here; found: mps, cpu"),
    (dict(gpus=2), "cuda:2", "CUDA:2 is not available here; found: cuda, cuda:0, cuda:1, cpu"),
    (dict(), "mps", "MPS is not available here; found: cpu"),
])
def test_a_device_that_is_not_available_raises(found, name, message, machine):
    machine(**found)
    with pytest.raises(ValueError, match=f"^{message}$"):
        choose_device(name)


@pytest.mark.parametrize("name, rank, expected", [("auto", 1, "cuda:1"), ("cuda", 0, "cuda:0"), ("cuda", 5, "cuda:1"),
                                                  ("cuda:1", 0, "cuda:1"), ("cuda", None, "cuda"), ("cpu", 1, "cpu")])
def test_each_process_takes_its_own_gpu(name, rank, expected, machine):
    machine(gpus=2)
    assert choose_device(name, rank) == torch.device(expected)


@pytest.mark.parametrize("native, emulated, name, expected", [
    (True, True, "auto", torch.bfloat16),
    (False, True, "auto", torch.float16), # a T4 can compute in bfloat16, slowly
    (False, True, "bfloat16", torch.bfloat16),
    (False, False, "auto", torch.float16),
    (False, False, "float32", torch.float32),
    (False, False, "bfloat16", None),
])
def test_the_dtype_of_a_gpu(native, emulated, name, expected, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: asked.append(device) or nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: emulated if including_emulation else native)
    gpu = torch.device("cuda", 1)
    if expected is None:
        with pytest.raises(ValueError, match="bfloat16 is not available on this GPU; use dtype=float16 or dtype=float32"):
            choose_dtype(gpu, name)
    else:
        assert choose_dtype(gpu, name) == expected
    assert asked == [gpu], "not the current GPU"


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_elsewhere_auto_is_float32(device):
    assert choose_dtype(torch.device(device), "auto") == torch.float32
    assert choose_dtype(torch.device(device), "bfloat16") == torch.bfloat16
