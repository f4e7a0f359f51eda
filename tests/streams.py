"""Random prompts and numbers for the tests of backends, and text from a backend."""
import torch

from models import SHAPE
from sampling.sampler.sample_token import TokenSampler


def normal(*shape, seed=0):
    """Normally distributed numbers."""
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def random_prompt(length, rows=1, seed=0):
    """Token ids (rows, length) of the model that make_gpt makes."""
    return torch.randint(SHAPE["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def generate(gpt, idx, max_new_tokens, **settings):
    """The same result as GPT.generate, from a backend."""
    return torch.cat([idx, *gpt.generate_stream(idx, max_new_tokens, TokenSampler(**settings))], dim=1)
