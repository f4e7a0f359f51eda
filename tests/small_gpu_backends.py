"""A small CUDAGraphGPT with its messages, and its samples beside those of the plain model."""
import torch

from models import make_gpt
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.sampler.per_row_rng import PerRowRNG
from sampling.sampler.sample_token import TokenSampler
from streams import random_prompt

STEPS = 30
PROMPT = random_prompt(5)


def make_backend(device="cpu", **settings):
    """A CUDAGraphGPT with messages, the list of the lines that it logs."""
    messages = []
    gpt = CUDAGraphGPT(make_gpt().to(device), log=messages.append, **settings)
    gpt.messages = messages
    return gpt


def generate(gpt, rows=3, context_shift=False, **sampling):
    """The token ids of the first samples of seed 5, and the same from the plain model."""
    rng = PerRowRNG(5, gpt.device, draws_per_sample=STEPS, vocab_size=61)
    states, idx = [rng.state_for_sample(index) for index in range(rows)], PROMPT.to(gpt.device)
    rng.set_rows(states)
    sampler = TokenSampler(**sampling, noise=rng, allow_sync=False)
    found = torch.cat(list(gpt.generate_stream(idx.expand(rows, -1), STEPS, sampler, context_shift)), dim=1).tolist()
    expected = []
    for state in states:
        rng.set_rows([state])
        expected += make_gpt().to(gpt.device).generate(idx, STEPS, context_shift=context_shift, noise=rng, **sampling)[:, 5:].tolist()
    return found, expected
