"""ExactBackend computes nanoGPT's logits bit for bit."""
import pytest
import torch

from models import as_checkpoint, make_gpt
from oracles import nanogpt_generate, nanogpt_logits
from recorded_graphs import ON_GPU
from sampling.backends.backend import ExactBackend
from sampling.backends.prepare import prepare_backend
from sampling.params import ModelOptions
from streams import decode, random_prompt

SHAPE = dict(n_embd=128, n_head=4, block_size=64)
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def autocast(device, dtype):
    return torch.autocast(device, dtype, enabled=dtype != torch.float32)


@EACH_DTYPE
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_exact_logits_and_text_are_nanogpts_bit_for_bit_inside_the_window_and_past_it(device, dtype):
    """Also for a model with another GELU: nanoGPT has only the exact one. nanoGPT's autocast casts at every step."""
    checkpoint, model = as_checkpoint(make_gpt(**SHAPE, gelu="tanh")), make_gpt(**SHAPE).to(device)
    backend = prepare_backend(checkpoint, torch.device(device), dtype, ModelOptions(exact=True))
    assert backend.model.lm_head.weight.dtype == dtype, "it is cast once"
    cache, prompt = backend.new_cache(1, 64), random_prompt(54).to(device)
    with autocast(device, dtype):
        for ids in random_prompt(64).to(device).split([5, 1, 1, 56, 1], dim=1):
            found, expected = backend.logits(ids, cache), nanogpt_logits(model, cache.ids)
            assert found.dtype == dtype and torch.equal(found, expected)
        torch.manual_seed(5)
        expected = [nanogpt_generate(model, prompt, 20, 0.8, top_k=20)[0, 54:].tolist() for _ in range(3)]
        settings = dict(temperature=0.8, top_k=20, all_columns=True, in_logits_dtype=True)
        assert decode(backend, 3 * prompt.tolist(), 20, seed=5, **settings) == expected


def test_exact_on_a_device_with_other_random_numbers_is_refused():
    with pytest.raises(ValueError, match="exact=True needs CUDA or a CPU; got device=meta"):
        ExactBackend(make_gpt().to("meta"))
