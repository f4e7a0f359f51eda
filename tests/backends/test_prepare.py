"""prepare_backend chooses the backend for a checkpoint."""
import sys
from unittest.mock import MagicMock

import pytest
import torch

from engines import expected_ids
from model import GPTConfig
from models import as_checkpoint, make_gpt
from sampling.backends import prepare
from sampling.backends.backend import EagerBackend, ExactBackend
from sampling.backends.cpu import CPUBackend
from sampling.backends.cuda import CUDABackend
from sampling.backends.prepare import cast_linears, choose_dtype, count_steps, prepare_backend, wants_kernels
from sampling.params import ModelOptions
from streams import decode, random_prompt

CPU = torch.device("cpu")
PROMPTS = random_prompt(5, 2).tolist()


@pytest.fixture(autouse=True)
def disable_malloc_trim(monkeypatch):
    """Leave the heap settings of the test process unchanged."""
    monkeypatch.setattr(prepare, "disable_malloc_trim", function := MagicMock())
    return function


@pytest.mark.parametrize("num_steps, options, expected", [
    (None, {}, CPUBackend), (20, {}, EagerBackend), (None, dict(exact=True), ExactBackend)], ids=str)
def test_a_cpu_gets_a_backend_with_the_text_of_the_model(num_steps, options, expected, disable_malloc_trim):
    checkpoint = as_checkpoint(make_gpt())
    backend = prepare_backend(checkpoint, CPU, torch.float32, ModelOptions(**options), num_steps)
    assert type(backend) is expected and not checkpoint.state_dict
    assert decode(backend, PROMPTS, 20) == expected_ids(PROMPTS, 20)
    assert backend.device == CPU
    disable_malloc_trim.assert_called_once()


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
    assert wants_kernels(config, device, dtype, ModelOptions(**options), num_steps) == expected


def test_without_numba_a_line_says_that_the_kernels_are_missing_and_int8_is_an_error(monkeypatch, messages):
    monkeypatch.setitem(sys.modules, "numba", None) # then the import raises ImportError
    backend = prepare_backend(as_checkpoint(make_gpt()), CPU, torch.float32)
    assert type(backend) is EagerBackend and len(messages) == 1
    assert messages[0].endswith(": pip install numba; continuing without the kernels, which is slower")
    with pytest.raises(ValueError, match=r"^the compiled kernels .* dtype=int8, need numba .*: pip install numba$"):
        choose_dtype(CPU, "int8")


def test_a_gpu_gets_a_cuda_backend_and_nothing_is_allocated_on_another_gpu(monkeypatch):
    calls, gpu = [], torch.device("cuda", 1)
    monkeypatch.setattr(type(make_gpt()), "to", lambda gpt, device: calls.append(("to", device)) or gpt)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    torch.set_float32_matmul_precision("high")
    backend = prepare_backend(as_checkpoint(make_gpt()), gpu, torch.float32)
    assert type(backend) is CUDABackend and calls == [("set_device", gpu), ("to", gpu)]
    assert torch.get_float32_matmul_precision() == "highest", "with TF32, another batch size could change a token"
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_cast_linears_give_the_logits_of_autocast():
    """Autocast would cast the same weights again at every step."""
    ids, model = random_prompt(14, 2), cast_linears(make_gpt(), torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(ids)[0], make_gpt()(ids)[0])
        assert model.new_cache(1, 1).layers[0].dtype == torch.bfloat16
    assert model.transformer.wte.weight.dtype == torch.float32
    tied = cast_linears(make_gpt(), torch.float32)
    assert tied.lm_head.weight is tied.transformer.wte.weight, "two parameters would take twice the memory on a GPU"
