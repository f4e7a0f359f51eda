"""How many random numbers nanoGPT draws to initialise a model."""
import pytest
import torch

from model import GPT, GPTConfig
from models import make_gpt
from sampling.checkpoints.init_draws import count_init_draws
from sampling.sampler.mt19937 import advance_mt19937


@pytest.mark.parametrize("shape", [
    dict(), dict(bias=False), dict(n_embd=7, n_head=1, vocab_size=33, block_size=10), dict(n_layer=1, vocab_size=50304),
    dict(n_embd=3, n_head=3, block_size=3, vocab_size=17), dict(n_embd=4, vocab_size=3), dict(n_embd=4, block_size=2),
    dict(n_embd=1, n_head=1, block_size=5, vocab_size=7), # an odd number of weights
    dict(n_embd=768, n_head=12, n_layer=2, block_size=1024, vocab_size=1000),
], ids=str)
def test_count_init_draws_equals_the_draws_of_the_initialisation(shape):
    model = make_gpt(**shape)
    torch.manual_seed(5)
    GPT(GPTConfig(**vars(model.config)))
    generator = torch.Generator().manual_seed(5)
    advance_mt19937(generator, count_init_draws(model.state_dict()))
    assert torch.equal(torch.empty(700).exponential_(generator=generator), torch.empty(700).exponential_())
