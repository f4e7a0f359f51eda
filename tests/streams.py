"""Random prompts and numbers, and text from a backend."""
import torch

from engines import Generator, run
from models import SHAPE
from sampling.params import Prompt, Sample, SamplingParams


def normal(*shape, seed=0):
    """Normally distributed numbers."""
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def random_prompt(length, rows=1, seed=0):
    """Token ids (rows, length) of the model that make_gpt makes."""
    return torch.randint(SHAPE["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def decode(backend, prompts, num_tokens, seed=3, context_shift=False, temperature=1.0, top_k=None,
           dtype=torch.float32, **settings):
    """The num_tokens ids with which a run continues each of prompts (lists of ids)."""
    params = SamplingParams(num_tokens, temperature, top_k, seed=seed, context_shift=context_shift, **settings)
    samples = [Sample(i, Prompt("a"), ids) for i, ids in enumerate(prompts)]
    gpt = Generator(IdTokenizer(), backend)
    gpt.dtype = dtype
    return [sample.token_ids for sample in run(gpt, samples, params)]


class IdTokenizer:
    """The text of each token is one character."""
    joins_spaces = False

    def decode(self, ids):
        return "".join(chr(token_id + 32) for token_id in ids)

    def incremental_decoder(self, prompt_ids=()):
        return lambda token_id, last=False: chr(token_id + 32)
