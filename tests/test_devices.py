"""What a machine has; GPUs are played, since few machines that run tests have each kind."""
from contextlib import nullcontext

import pytest
import torch

from devices import choose_dtype, out_of_memory


@pytest.mark.parametrize("native, emulated, name, expected", [
    (True, True, "auto", torch.bfloat16),
    (False, True, "auto", torch.float16), # a T4 can, slowly
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
        with pytest.raises(ValueError, match="this GPU has float16 and float32"):
            choose_dtype(gpu, name)
    else:
        assert choose_dtype(gpu, name) == expected
    assert asked == [gpu], "not of whichever is the current one"


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_elsewhere_auto_is_float32(device):
    assert choose_dtype(torch.device(device), "auto") == torch.float32
    assert choose_dtype(torch.device(device), "bfloat16") == torch.bfloat16


@pytest.mark.parametrize("text, memory", [
    ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
    ("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory", True),
    ("CUDA error: an illegal memory access was encountered", False),
])
def test_which_errors_mean_that_memory_ran_out(text, memory):
    assert out_of_memory(RuntimeError(text)) == memory
