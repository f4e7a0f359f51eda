"""prepare_backend chooses the backend for a checkpoint."""
import os
import re
import subprocess
import sys
from unittest.mock import MagicMock

import pytest
import torch
from torch.torch_version import TorchVersion

from engines import ON_GPU, decode, expected_ids, without_facts
from models import as_checkpoint, make_gpt, random_prompt
from project import PROJECT
from sampling.backends import prepare
from sampling.backends.backend import EagerBackend
from sampling.backends.cpu import CPUBackend
from sampling.backends.cuda import CUDABackend
from sampling.backends.prepare import choose_device, choose_dtype, count_steps, prepare_backend
from sampling.model import GPTConfig
from sampling.params import ModelOptions
from script_process import start_script

CPU = torch.device("cpu")
PROMPTS = random_prompt(5, 2).tolist()


@pytest.mark.parametrize("num_steps, options, expected", [
    (None, {}, CPUBackend), (20, {}, EagerBackend)], ids=str)
def test_a_cpu_gets_a_backend_with_the_text_of_the_model(num_steps, options, expected):
    backend = prepare_backend(as_checkpoint(make_gpt()), CPU, torch.float32, ModelOptions(**options), num_steps)
    assert type(backend) is expected and backend.device == CPU
    assert decode(backend, PROMPTS, 20) == expected_ids(PROMPTS, 20)


@pytest.mark.parametrize("num_samples, batch_size, expected", [
    (10, None, 500), (64, None, 500), (65, None, 1000), (10, 4, 1500), (None, 4, None)])
def test_the_steps_of_a_run_are_those_of_full_batches(num_samples, batch_size, expected):
    assert count_steps(num_samples, 500, batch_size) == expected


GPT2 = GPTConfig()
DEMO = GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65)
SMALL = GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65) # its windows take long, not its steps


@pytest.mark.parametrize("config, device, num_steps, dtype, options, expected", [
    (GPT2, "cpu", 20, "float32", {}, True), (GPT2, "cpu", 5, "float32", {}, False),
    (SMALL, "cpu", 500, "float32", {}, True), (DEMO, "cpu", 50, "float32", {}, False),
    (DEMO, "cpu", 50, "int8", {}, True), (DEMO, "cpu", None, "bfloat16", {}, False),
    (DEMO, "cpu", None, "float32", dict(compile=True), False), (DEMO, "mps", None, "float32", {}, False)], ids=str)
def test_kernels_are_for_runs_of_a_second_in_float32_and_for_int8(config, device, num_steps, dtype, options, expected):
    device, dtype = torch.device(device), getattr(torch, dtype)
    assert prepare.wants_kernels(config, device, dtype, ModelOptions(**options), num_steps) == expected


@pytest.mark.parametrize("broken, reason", [
    ("llvmlite.py: raise OSError('no libLLVM')", "OSError: no libLLVM"), # which numba needs
    ("NUMBA_DISABLE_JIT", "NUMBA_DISABLE_JIT is set"),
    ("NUMBA_THREADING_LAYER", "ValueError: .*requested '1' is unknown.*")], ids=str)
def test_where_numba_does_not_work_a_line_says_so_and_torch_runs_alone(broken, reason, char_checkpoint, tmp_path):
    name, is_package, code = broken.partition(": " if ": " in broken else ":")
    if is_package: # an installed package that numba needs, or numba itself, is another one
        (tmp_path / name).write_text(code)
    process = start_script(f"--out_dir={char_checkpoint}", "--device=cpu", "--interactive", "--max_new_tokens=1",
                           env={"PYTHONPATH": str(tmp_path)} if is_package else {name: "1"})
    _, stderr = process.communicate()
    assert re.search(f"^warning: .* need numba \\({reason}\\): .*; continuing without the kernels, which is slower\n",
                     stderr.decode(), re.M) and process.returncode == 0, stderr


def test_without_numba_int8_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None) # then the import raises ImportError
    with pytest.raises(ValueError, match=r"^the compiled kernels .* dtype=int8, need numba \(ModuleNotFoundError: "):
        choose_dtype(CPU, "int8")


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


def test_two_first_loads_at_once_both_get_the_kernels_and_other_threads_may_import_meanwhile():
    subprocess.run([sys.executable, "-c", LOADS], cwd=PROJECT, check=True, timeout=100)


def test_a_gpu_gets_a_cuda_backend_and_nothing_is_allocated_on_another_gpu(monkeypatch):
    calls, gpu = [], torch.device("cuda", 1)
    monkeypatch.setattr(type(make_gpt()), "to", lambda gpt, device: calls.append(("to", device)) or gpt)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    torch.set_float32_matmul_precision("high")
    backend = prepare_backend(as_checkpoint(make_gpt()), gpu, torch.float32, ModelOptions())
    assert type(backend) is CUDABackend and calls == [("set_device", gpu), ("to", gpu)]
    assert torch.get_float32_matmul_precision() == "highest", "with TF32, another batch size could change a token"
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# ---- the choice of device and dtype. GPUs are simulated, because few test machines have every kind

NO_KERNEL = RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore lines")
GPU = torch.device("cuda", 1)


@pytest.fixture
def simulate_devices(monkeypatch):
    """simulate_devices(gpus, mps, error) makes torch find these devices. The first kernel raises the error."""
    def have(gpus=0, mps=False, error=None):
        def first_kernel(size, device):
            if error:
                raise error
            return torch.ones(size)
        for name, value in {"is_available": gpus > 0, "device_count": gpus}.items():
            monkeypatch.setattr(torch.cuda, name, MagicMock(return_value=value))
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


def test_for_a_gpu_whose_first_kernel_fails_the_cpu_stands_in_with_one_line_or_it_is_an_error(simulate_devices,
                                                                                              messages):
    expected = r"^the GPU cannot run torch .* \(CUDA error: no kernel image is available .*\): update its driver, or "
    simulate_devices(gpus=1, error=NO_KERNEL)
    assert choose_device("auto") == torch.device("cpu") and len(messages) == 1
    assert re.match(expected, messages[0]) and messages[0].endswith("; continuing on the CPU")
    with pytest.raises(ValueError, match=expected):
        choose_device("cuda")
    simulate_devices(gpus=1, error=torch.OutOfMemoryError("CUDA out of memory")) # the GPU itself is usable
    with pytest.raises(torch.OutOfMemoryError):
        choose_device("auto")


@pytest.mark.parametrize("native, emulated, name, is_nanogpts, expected", [
    (True, True, "auto", False, torch.bfloat16),
    (False, True, "auto", False, torch.float16), # a T4 emulates bfloat16, which is slow
    (False, True, "auto", True, torch.bfloat16), # as nanoGPT does
    (False, True, "bfloat16", False, torch.bfloat16),
    (False, False, "bfloat16", False, "bfloat16 is not available on this GPU; use dtype=float16 or dtype=float32"),
    (True, True, "int8", False, "dtype=int8 runs only on a CPU; got device=cuda:1: use dtype=bfloat16, or device=cpu"),
])
def test_choose_dtype_on_a_gpu(native, emulated, name, is_nanogpts, expected, monkeypatch):
    asked = MagicMock()
    monkeypatch.setattr(torch.cuda, "device", asked)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: emulated if including_emulation else native)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"^{expected}$"):
            choose_dtype(GPU, name, is_nanogpts)
    else:
        assert choose_dtype(GPU, name, is_nanogpts) == expected
        asked.assert_called_once_with(GPU) # it asks about this GPU, not the current one


def test_on_mps_auto_is_float32_and_half_precision_needs_torch_2_11(monkeypatch):
    mps = torch.device("mps")
    assert choose_dtype(mps, "auto") == torch.float32
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    assert choose_dtype(mps, "float16") == torch.float16
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.1"))
    with pytest.raises(ValueError, match=r"^dtype=float16 on MPS needs torch 2\.11 .*; got torch 2\.10\.1: use"):
        choose_dtype(mps, "float16")


# ---- the plain backend, also compiled

def test_bytes_per_row_grow_with_the_cache_and_for_the_window():
    backend, cache_bytes = EagerBackend(make_gpt()), sum(layer.nbytes for layer in make_gpt().new_cache(1, 16).layers)
    assert backend.bytes_per_row(16) - backend.bytes_per_row(8) == cache_bytes / 2 # block_size is 16
    assert backend.bytes_per_row(16) < backend.bytes_per_row(17) == backend.bytes_per_row(1000)


@pytest.fixture
def compiled(monkeypatch):
    """What torch.compile returns: it runs the model, or raises an error that a test sets as its side_effect."""
    def compile(model, dynamic):
        compiled.side_effect = compiled.side_effect or model
        return compiled
    compiled = MagicMock()
    monkeypatch.setattr(torch, "compile", compile)
    with torch.compiler.config.patch(recompile_limit=8): # restores it
        yield compiled


@pytest.mark.parametrize("kind", [EagerBackend, CUDABackend])
def test_a_compiled_model_computes_all_logits_and_a_line_says_how_long_it_takes(kind, compiled, messages):
    backend = kind(make_gpt(), compile=True)
    assert decode(backend, PROMPTS, 20) == expected_ids(PROMPTS, 20) and compiled.call_count == 20
    assert without_facts(messages) == ["the model is compiled at its first tokens, which takes about a minute"]


@pytest.mark.parametrize("error, message", [
    (RuntimeError("no C++ compiler"), "compile=True does not work here (RuntimeError: no C++ compiler): leave it out"),
    (MemoryError("full"), "full")], ids=repr)
def test_a_failing_compiler_is_one_line_but_out_of_memory_is_raised(error, message, compiled):
    compiled.side_effect = error
    backend = prepare_backend(as_checkpoint(make_gpt()), torch.device("cpu"), torch.float32, ModelOptions(compile=True))
    with pytest.raises(ValueError if message.startswith("compile") else type(error)) as raised:
        backend.logits(random_prompt(5), None)
    assert str(raised.value) == message


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore") # torch's compiler warns about torch
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("kind", [EagerBackend, CUDABackend])
def test_a_compiled_model_gives_the_same_text(kind, device):
    backend = kind(make_gpt().to(device), compile=True)
    assert decode(backend, PROMPTS, 20) == expected_ids(PROMPTS, 20, device=device)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
