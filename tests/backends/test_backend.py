"""The plain backends: EagerBackend, also compiled, and ExactBackend."""
from unittest.mock import MagicMock

import pytest
import torch

from engines import decode, expected_ids
from models import as_checkpoint, make_gpt, random_prompt
from oracles import nanogpt_generate, nanogpt_logits
from recorded_graphs import ON_GPU
from sampling.backends.backend import EagerBackend, ExactBackend
from sampling.backends.cuda import CUDABackend
from sampling.backends.prepare import prepare_backend
from sampling.params import ModelOptions

SHAPE = dict(n_embd=128, n_head=4, block_size=64)
PROMPTS = random_prompt(5, 2).tolist()


def test_bytes_per_row_grow_with_the_cache_and_for_the_window():
    backend, cache_bytes = EagerBackend(make_gpt()), sum(layer.nbytes for layer in make_gpt().new_cache(1, 16).layers)
    assert backend.bytes_per_row(16) - backend.bytes_per_row(8) == cache_bytes / 2 # block_size is 16
    assert backend.bytes_per_row(16) < backend.bytes_per_row(17) == backend.bytes_per_row(1000)


# ---- compile

@pytest.fixture
def compiled(monkeypatch):
    """What torch.compile returns: it runs the model, or raises an error that a test sets as its side_effect."""
    def compile(model, dynamic):
        compiled.side_effect = compiled.side_effect or model
        return compiled
    compiled = MagicMock()
    monkeypatch.setattr(torch, "compile", compile)
    with torch._dynamo.config.patch(recompile_limit=8), torch._inductor.config.patch(freezing=False): # restores them
        yield compiled


@pytest.mark.parametrize("kind", [EagerBackend, CUDABackend])
def test_a_compiled_model_computes_all_logits_and_a_line_says_how_long_it_takes(kind, compiled, messages):
    backend = kind(make_gpt(), compile=True)
    assert decode(backend, PROMPTS, 20) == expected_ids(PROMPTS, 20) and compiled.call_count == 20
    assert messages == ["the model is compiled at its first tokens, which takes about a minute"]


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


# ---- exact

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_exact_logits_and_text_are_nanogpts_bit_for_bit_inside_the_window_and_past_it(device, dtype):
    """Also for a model with another GELU: nanoGPT has only the exact one. nanoGPT's autocast casts at every step."""
    checkpoint, model = as_checkpoint(make_gpt(**SHAPE, gelu="tanh")), make_gpt(**SHAPE).to(device)
    backend = prepare_backend(checkpoint, torch.device(device), dtype, ModelOptions(exact=True))
    assert backend.model.lm_head.weight.dtype == dtype, "it is cast once"
    prompt = random_prompt(54).to(device)
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        for length in 1, 5, 6, 54:
            found, expected = backend.logits(prompt[:, :length], None), nanogpt_logits(model, prompt[:, :length])
            assert found.dtype == dtype and torch.equal(found, expected)
        torch.manual_seed(5)
        expected = [nanogpt_generate(model, prompt, 20, 0.8, top_k=20)[0, 54:].tolist() for _ in range(3)]
        found = decode(backend, 3 * prompt.tolist(), 20, dtype=dtype, seed=5, temperature=0.8, top_k=20)
        assert found == expected


def test_exact_on_a_device_with_other_random_numbers_is_refused():
    with pytest.raises(ValueError, match="exact=True needs CUDA or a CPU; got device=meta"):
        ExactBackend(make_gpt().to("meta"))
