"""prepare_backend chooses the backend for a checkpoint, and compile_steps compiles it."""
import os
import subprocess
import sys

import pytest
import torch

from engines import expected_ids
from model import GPTConfig
from models import as_checkpoint, make_gpt, save_checkpoint
from project import PROJECT
from sampling.backends import prepare
from sampling.backends.cpu import CPUBackend
from sampling.backends.cuda import CUDABackend
from sampling.backends.eager import EagerBackend, ExactBackend
from sampling.backends.prepare import cast_linears, compile_steps, converter, has_loops, prepare_backend
from sampling.checkpoints.nanogpt import load_nanogpt
from sampling.params import ModelOptions
from streams import decode, random_prompt

CPU = torch.device("cpu")
PROMPTS = random_prompt(5, 2).tolist()


@pytest.fixture(autouse=True)
def trim_calls(monkeypatch):
    """Leave the heap settings of the test process unchanged. Returns the list of calls that would have changed them."""
    calls = []
    monkeypatch.setattr(prepare, "disable_malloc_trim", lambda: calls.append("disable_malloc_trim"))
    return calls


@pytest.mark.parametrize("num_steps, expected", [(None, CPUBackend), (20, EagerBackend)])
def test_a_cpu_gets_a_backend_with_the_text_of_the_model(num_steps, expected, trim_calls):
    checkpoint = as_checkpoint(make_gpt())
    backend = prepare_backend(checkpoint, CPU, torch.float32, num_steps=num_steps)
    assert type(backend) is expected and not checkpoint.state_dict
    assert decode(backend, PROMPTS, 20) == expected_ids(PROMPTS, 20)
    assert backend.device == CPU and trim_calls == ["disable_malloc_trim"]


DEMO = GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65)


@pytest.mark.parametrize("config, num_steps, dtype, options, expected", [
    (GPTConfig(), 20, torch.float32, {}, True), (GPTConfig(), 5, torch.float32, {}, False),
    (DEMO, 500, torch.float32, {}, True), (DEMO, 50, torch.float32, {}, False), (DEMO, None, torch.float32, {}, True),
    (DEMO, 50, torch.int8, {}, True), (DEMO, None, torch.bfloat16, {}, False), (DEMO, None, torch.float16, {}, False),
    (DEMO, None, torch.float32, dict(compile=True), False), (DEMO, None, torch.float32, dict(exact=True), False),
], ids=str)
def test_the_loops_are_for_runs_of_a_second_in_float32_and_for_int8(config, num_steps, dtype, options, expected):
    assert has_loops(config, CPU, dtype, ModelOptions(**options), num_steps, pytest.fail) == expected


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_the_loops_run_only_on_a_cpu(device):
    assert not has_loops(DEMO, torch.device(device), torch.float32, ModelOptions(), None, pytest.fail)


def test_without_numba_a_line_says_that_the_loops_are_missing_and_int8_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None) # then the import raises ImportError
    lines = []
    backend = prepare_backend(as_checkpoint(make_gpt()), CPU, torch.float32, log=lines.append)
    assert type(backend) is EagerBackend and len(lines) == 1
    assert lines[0].endswith(": pip install numba; continuing without the loops, which is slower")
    for call in lambda: converter(torch.int8), lambda: prepare_backend(as_checkpoint(make_gpt()), CPU, torch.int8):
        message = r"^the loops for CPUs, and dtype=int8, need numba \(.*\): pip install numba$"
        with pytest.raises(ValueError, match=message):
            call()
    assert converter(torch.float32) is None and converter(torch.bfloat16) is None


def test_a_short_run_does_not_import_numba():
    code = """
import sys, torch
from models import as_checkpoint, make_gpt
from sampling.backends.prepare import prepare_backend
for num_steps in 30, 5000:
    prepare_backend(as_checkpoint(make_gpt()), torch.device("cpu"), torch.float32, num_steps=num_steps)
    print("numba" in sys.modules)"""
    env = {**os.environ, "PYTHONPATH": f"{PROJECT}{os.pathsep}{PROJECT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, stdout=subprocess.PIPE)
    assert done.stdout == b"False\nTrue\n"


def test_weights_may_be_rounded_to_int8_while_they_are_read(tmp_path):
    path, ids = save_checkpoint(tmp_path, make_gpt(n_embd=64)), random_prompt(9, 2)
    rounded = load_nanogpt(path, converter(torch.int8))
    later, earlier = (prepare_backend(loaded, CPU, torch.int8) for loaded in (load_nanogpt(path), rounded))
    assert torch.equal(later.logits(ids, None), earlier.logits(ids, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cpu_generates_in_half_precision(dtype):
    with torch.autocast("cpu", dtype):
        backend = prepare_backend(as_checkpoint(make_gpt()), CPU, dtype)
        assert [len(ids) for ids in decode(backend, PROMPTS, 20)] == [20, 20]


@pytest.mark.usefixtures("compile_settings")
@pytest.mark.filterwarnings("ignore") # torch's compiler warns about torch
@pytest.mark.parametrize("options, expected", [(dict(compile=True), EagerBackend), (dict(exact=True), ExactBackend)])
def test_an_option_chooses_the_backend(options, expected):
    backend = prepare_backend(as_checkpoint(make_gpt()), CPU, torch.float32, ModelOptions(**options))
    assert type(backend) is expected


@pytest.mark.parametrize("index, expected", [(1, ["set_device", "to"]), (None, ["to"])])
def test_a_gpu_gets_a_cuda_backend_and_nothing_is_allocated_on_another_gpu(index, expected, monkeypatch):
    calls, messages, gpu = [], [], torch.device("cuda", index)
    monkeypatch.setattr(type(make_gpt()), "to", lambda gpt, device: calls.append(("to", device)) or gpt)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    torch.set_float32_matmul_precision("high")
    backend = prepare_backend(as_checkpoint(make_gpt()), gpu, torch.float32, log=messages.append)
    assert type(backend) is CUDABackend and calls == [(name, gpu) for name in expected]
    assert torch.get_float32_matmul_precision() == "highest", "with TF32, another batch size could change a token"
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    backend.checks.log("hello")
    assert messages == ["hello"]


def test_cast_linears_give_the_logits_of_autocast():
    """Autocast would cast the same weights again at every step."""
    ids, model = random_prompt(14, 2), cast_linears(make_gpt(), torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(ids)[0], make_gpt()(ids)[0])
        assert model.new_cache(1, 1).layers[0].dtype == torch.bfloat16
    assert model.transformer.wte.weight.dtype == torch.float32


def test_in_float32_the_head_stays_tied():
    """Two parameters would be copied to a GPU separately, and take twice the memory."""
    model = cast_linears(make_gpt(), torch.float32)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("error, message", [
    (RuntimeError("no C++ compiler"), "compile=True does not work here (RuntimeError: no C++ compiler): leave it out"),
    (MemoryError("full"), "full"), (RuntimeError("CUDA out of memory"), "CUDA out of memory")], ids=repr)
def test_a_failing_compiler_is_an_error_that_says_what_to_do_but_out_of_memory_is_raised(error, message, monkeypatch):
    def fail(*arguments, **settings):
        raise error
    backend = EagerBackend(make_gpt())
    monkeypatch.setattr(backend.model, "forward", fail)
    with pytest.raises(ValueError if message.startswith("compile") else type(error)) as raised:
        compile_steps(backend, 1, lambda message: None)
    assert str(raised.value) == message
