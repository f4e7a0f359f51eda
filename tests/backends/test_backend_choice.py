"""prepare_backend chooses the backend for a checkpoint."""
import inspect
import os
import re
import resource
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch.torch_version import TorchVersion

from engines import ON_GPU, decode, expected_ids, without_facts
from models import as_checkpoint, make_gpt, random_prompt
from pages import DEFAULTS
from project import SCRIPT
from sampling.backends import backend_choice
from sampling.backends.backend import EagerBackend
from sampling.backends.backend_choice import choose_device, choose_dtype, is_short_run
from sampling.backends.cpu import CPUBackend
from sampling.backends.cuda import CUDABackend
from sampling.model import GPT
from sampling.settings import ModelOptions
from script_process import run_python

CPU = torch.device("cpu")
GPU = torch.device("cuda", 1)
PROMPTS = random_prompt(5, 2).tolist()


def prepare_backend(device=CPU, is_short=False, dtype=torch.float32, **options):
    """The backend for a small model."""
    checkpoint = as_checkpoint(make_gpt())
    options = ModelOptions(**options)
    return backend_choice.prepare_backend(checkpoint, device, dtype, options, is_short)


@pytest.mark.parametrize("dtype, options, is_short, expected", [
    (torch.float32, {}, False, CPUBackend),
    (torch.float32, {}, True, EagerBackend), # loading the kernels would take longer
    (torch.int8, {}, True, CPUBackend),
    (torch.bfloat16, {}, False, EagerBackend),
    (torch.float32, {"compile": True}, False, EagerBackend),
])
def test_a_cpu_gets_the_kernels_in_float32_and_int8_unless_the_run_is_short(
        dtype, options, is_short, expected, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: model) # which takes seconds
    backend = prepare_backend(CPU, is_short, dtype, **options)
    assert type(backend) is expected
    assert backend.device == CPU


@pytest.mark.parametrize("settings, expected", [
    (dict(max_new_tokens=49, num_samples=64), True), # 49 steps of a full batch
    (dict(max_new_tokens=50), False),
    (dict(max_new_tokens=49, num_samples=65), False),
    (dict(max_new_tokens=20, num_samples=8, batch_size=4), True),
    (dict(max_new_tokens=20, num_samples=9, batch_size=4), False),
    (dict(max_new_tokens=5, start="LINES:prompts.txt"), False), # of any number
    (dict(max_new_tokens=5, interactive=True), False),
    (dict(score=True), True), # it takes no steps
])
def test_a_run_is_short_if_its_steps_in_full_batches_are_few(settings, expected):
    assert is_short_run(DEFAULTS | settings) == expected


@pytest.mark.slow
@pytest.mark.parametrize("variable, value, reason", [
    ("NUMBA_DISABLE_JIT", "1", "NUMBA_DISABLE_JIT is set"),
    ("NUMBA_OPT", "x", "RuntimeWarning: .*'NUMBA_OPT' is .* 'x' could not be parsed."),
    ("NUMBA_THREADING_LAYER", "1", "ValueError: .*requested '1' is unknown.*"),
])
def test_where_numba_does_not_work_a_line_says_so_and_torch_runs_alone(
        variable, value, reason, char_checkpoint, tmp_path):
    run = f"--out_dir={char_checkpoint}", "--device=cpu", "--interactive", "--max_new_tokens=1"
    messages = run_python(SCRIPT, *run, cwd=tmp_path, **{variable: value}).stderr
    line = (rf"warning: .* need numba \({reason}\): .*; "
            "continuing without the kernels, which is slower")
    assert re.search(f"^{line}$", messages, re.MULTILINE), messages


def test_without_numba_int8_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None) # then the import raises ImportError
    message = r"^the compiled kernels .* dtype=int8, need numba \(ModuleNotFoundError: "
    with pytest.raises(ValueError, match=message):
        choose_dtype(CPU, "int8")


def test_too_small_a_limit_of_memory_is_named_before_numba_takes_any(monkeypatch, messages):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**20, 2**60))
    assert backend_choice.has_numba(is_required=False), "it has its memory already"
    monkeypatch.delitem(sys.modules, "numba")
    assert not backend_choice.has_numba(is_required=False)
    assert messages == [
        "the compiled kernels for CPUs, and dtype=int8, need numba (which takes 512 MB, and less "
        "is left below the limit of memory): raise the limit, which ulimit -v shows in KiB; "
        "continuing without the kernels, which is slower"]


LOADS = """
import threading
from concurrent.futures import ThreadPoolExecutor
import torch, yaml, sampling
def load(dtype):
    return type(sampling.load("demo", "cpu", dtype).backend).__name__
def import_again():
    while not is_loaded.wait(0.001):
        import yaml
is_loaded = threading.Event()
with ThreadPoolExecutor(3) as pool:
    other = pool.submit(import_again)
    try:
        found = [*pool.map(load, ["float32", "int8"])]
    finally:
        is_loaded.set()
    other.result()
assert found == ["CPUBackend", "CPUBackend"], found
import yaml
"""


@pytest.mark.slow
def test_two_first_loads_at_once_both_get_the_kernels_and_other_threads_may_import():
    run_python("-c", LOADS)


def test_int8_does_not_follow_an_edited_model_py(monkeypatch, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(Path(inspect.getfile(GPT)).read_text().replace("self.c_proj", "self.c_fc"))
    monkeypatch.setattr(backend_choice.inspect, "getfile", lambda cls: str(path))
    with pytest.raises(ValueError, match=f"^dtype=int8 does not follow the edits of {path}: "):
        prepare_backend(dtype=torch.int8)


def test_a_gpu_gets_a_cuda_backend_and_nothing_is_allocated_on_another_gpu(monkeypatch):
    places = []
    monkeypatch.setattr(GPT, "to", lambda gpt, device: places.append(device) or gpt)
    monkeypatch.setattr(torch.cuda, "set_device", places.append)
    torch.set_float32_matmul_precision("high")
    assert type(prepare_backend(GPU)) is CUDABackend
    assert places == [GPU, GPU]
    # With TF32, another batch size could change a token.
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# ---- the choice of device and dtype. Few test machines have every kind of GPU: they are simulated

@pytest.fixture
def simulate_devices(monkeypatch):
    """simulate_devices(gpus, mps, error) makes torch find these devices.

    The first kernel raises the error.
    """
    def have(gpus=0, mps=False, error=None):
        def first_kernel(size, device):
            if error:
                raise error
            return torch.ones(size)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch, "zeros", first_kernel)
    return have


@pytest.mark.parametrize("found, name, local_rank, expected", [
    (dict(), "auto", None, "cpu"),
    (dict(gpus=2, mps=True), "auto", None, "cuda"),
    (dict(gpus=2), "cuda:1", "0", "cuda:1"),
    (dict(gpus=2), "cuda", "5", "cuda:1"), # each process has its own GPU
])
def test_the_named_device_or_the_best_one_is_used_or_refused(
        found, name, local_rank, expected, simulate_devices, monkeypatch):
    if local_rank:
        torchrun = dict(TORCHELASTIC_RUN_ID="none", LOCAL_RANK=local_rank, WORLD_SIZE="9")
        monkeypatch.setattr(os, "environ", torchrun)
    simulate_devices(**found)
    assert choose_device(name) == torch.device(expected)
    message = r"^device=cuda:2 is not available here; found: .*cpu; use one of these"
    with pytest.raises(ValueError, match=message):
        choose_device("cuda:2")


def test_a_gpu_whose_first_kernel_fails_is_an_error_or_the_cpu_is_used_with_one_line(
        simulate_devices, messages):
    reason = "CUDA error: no kernel image is available for execution on the device"
    simulate_devices(gpus=1, error=RuntimeError(f"{reason}\nmore lines"))
    expected = rf"^the GPU cannot run torch .* \({reason}\): update its driver, or "
    assert choose_device("auto") == CPU
    line, = messages
    assert re.match(expected, line)
    assert line.endswith("; continuing on the CPU")
    with pytest.raises(ValueError, match=expected):
        choose_device("cuda")
    # With this error, the GPU itself is usable.
    simulate_devices(gpus=1, error=torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        choose_device("auto")


@pytest.mark.parametrize("native, emulated, name, runs_itself, expected", [
    (True, True, "auto", False, torch.bfloat16),
    (False, True, "auto", False, torch.float16), # a T4 emulates bfloat16, which is slow
    (False, True, "auto", True, torch.bfloat16), # as nanoGPT does
    (False, True, "bfloat16", False, torch.bfloat16),
    (False, False, "bfloat16", False,
     "bfloat16 is not available on this GPU; use dtype=float16 or dtype=float32"),
    (True, True, "int8", False,
     "dtype=int8 runs only on a CPU; got device=cuda:1: use dtype=bfloat16, or device=cpu"),
])
def test_the_dtype_on_a_gpu_or_the_error(
        native, emulated, name, runs_itself, expected, monkeypatch):
    def is_supported(including_emulation=True):
        current.assert_called_once_with(GPU) # the question is about this GPU
        return emulated if including_emulation else native
    current = MagicMock()
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    try:
        found = choose_dtype(GPU, name, runs_itself)
    except ValueError as error:
        found = str(error)
    assert found == expected


def test_on_mps_auto_is_float32_and_half_precision_needs_torch_2_11(monkeypatch):
    mps = torch.device("mps")
    assert choose_dtype(mps, "auto") == torch.float32
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    assert choose_dtype(mps, "float16") == torch.float16
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.1"))
    message = r"^dtype=float16 on MPS needs torch 2\.11 .*; got torch 2\.10\.1: use"
    with pytest.raises(ValueError, match=message):
        choose_dtype(mps, "float16")


# ---- the plain backend, also compiled

def test_bytes_per_row_grow_with_the_cache_and_for_the_window():
    backend = EagerBackend(make_gpt()) # block_size is 16
    half, whole, window, same = map(backend.bytes_per_row, (8, 16, 17, 1000))
    cache = backend.new_cache(1, 8)
    assert whole - half == sum(layer.nbytes for layer in cache.layers)
    assert whole < window == same


@pytest.mark.parametrize("kind", [EagerBackend, CUDABackend])
def test_a_compiled_model_computes_all_logits_and_a_line_says_how_long_it_takes(
        kind, monkeypatch, messages):
    def compile(model, dynamic):
        return lambda *arguments, **settings: (2 * model(*arguments, **settings)[0], None)
    monkeypatch.setattr(torch, "compile", compile)
    backend = kind(make_gpt(), compile=True)
    assert decode(backend, PROMPTS, 20) == expected_ids(PROMPTS, 20, temperature=0.5)
    line = "the model is compiled at its first tokens, which takes about a minute"
    assert without_facts(messages) == [line]


@pytest.mark.parametrize("error, expected", [
    (RuntimeError("no C++ compiler"),
     ValueError("compile=True does not work here (RuntimeError: no C++ compiler): leave it out")),
    (MemoryError("full"), MemoryError("full"))])
def test_a_failing_compiler_is_one_line_but_out_of_memory_is_raised(error, expected, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: MagicMock(side_effect=error))
    backend = prepare_backend(compile=True)
    with pytest.raises(type(expected)) as raised:
        backend.logits(random_prompt(5), None)
    assert str(raised.value) == str(expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore") # torch's compiler warns about torch
@pytest.mark.parametrize("device", [ON_GPU])
def test_a_compiled_model_gives_the_same_text(device):
    backend = CUDABackend(make_gpt().to(device), compile=True)
    assert decode(backend, PROMPTS, 20) == expected_ids(PROMPTS, 20, device=device)
