"""EagerGPT, the backend that runs a GPT without changes, with and without torch.compile."""
import pytest
import torch

from models import make_gpt
from sampling.backends.eager import EagerGPT
from sampling.sampler.sample_token import TokenSampler
from streams import generate, num_compiled_graphs, random_prompt


@pytest.mark.parametrize("context_shift", [False, True])
def test_it_samples_the_same_tokens_as_gpt(context_shift):
    model, idx = make_gpt(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    torch.manual_seed(3)
    expected = model.generate(idx, 30, 0.8, 20, context_shift=context_shift)
    torch.manual_seed(3)
    assert torch.equal(generate(EagerGPT(model), idx, 30, TokenSampler(0.8, 20), context_shift), expected)


@pytest.mark.usefixtures("compile_settings")
@pytest.mark.filterwarnings("ignore") # torch's compiler warns about torch
@pytest.mark.parametrize("max_new_tokens, context_shift", [
    (9, False), pytest.param(20, False, marks=pytest.mark.slow), pytest.param(20, True, marks=pytest.mark.slow)]) # block_size is 16
def test_a_compiled_model_samples_the_same_tokens_and_compiles_only_during_warm_up(max_new_tokens, context_shift):
    """With one layer: test_sample.py compiles two."""
    model, idx, at_first = make_gpt(n_layer=1), random_prompt(5, 2), num_compiled_graphs()
    torch.manual_seed(3)
    expected = model.generate(idx, max_new_tokens, context_shift=context_shift)
    backend = EagerGPT(model, compile=True)
    backend.warm_up_compile(idx, max_new_tokens, context_shift)
    warm = num_compiled_graphs()
    assert warm > at_first
    torch.manual_seed(3)
    assert torch.equal(generate(backend, idx, max_new_tokens, context_shift=context_shift), expected)
    assert num_compiled_graphs() == warm, "nothing is compiled while it generates"
