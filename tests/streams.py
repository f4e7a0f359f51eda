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


def generate(gpt, idx, max_new_tokens, sampler=None, context_shift=False, **settings):
    """The same result as GPT.generate, from a backend. Without a sampler, it is a TokenSampler with these settings."""
    return torch.cat([idx, *gpt.generate_stream(idx, max_new_tokens, sampler or TokenSampler(**settings), context_shift)], dim=1)


def num_compiled_graphs():
    """How many graphs torch.compile has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
