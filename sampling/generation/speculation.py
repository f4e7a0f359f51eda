"""Speculative decoding that keeps the text: an int8 copy of the model proposes tokens, and the model checks them.

The copy samples with the random numbers that the model will use at the same positions. So it mostly proposes the
model's own tokens, and one pass of the model computes the logits after several of them. docs/speculation.md explains
why the text stays the same.
"""
import torch
from torch import Tensor

from sampling.backends.backend import Backend
from sampling.generation.batch import Batch
from sampling.sampler.sampler import Sampler

MAX_PROPOSALS = 12 # in a row
MIN_LEAD = 0.05 # of a proposal's score over the next one, as a logarithm: below it, the draft is unsure


def propose(draft: Backend, batch: Batch, sampler: Sampler) -> Tensor:
    """The tokens (1, k) that the draft samples after the window of a single row, up to the first of which it is unsure.

    draft: the copy, which reads and writes the cache of the model itself. The keys and values that it writes are
    replaced by the model's own when the model reads the proposals.
    """
    ids, cache = batch.window, batch.cache # (1, S)
    if cache is None or cache.seq_len == 0: # past the window, or before the prefill
        return ids[:, :0]
    streams, seq_len, room = batch.streams.fork(), cache.seq_len, batch.backend.config.block_size - ids.size(1)
    for _ in range(min(MAX_PROPOSALS, room, batch.num_steps_left - 1)): # the model samples one token more
        logits = draft.logits(ids[:, cache.seq_len:], cache)
        scores, candidates = sampler.scores(logits, ids, None if sampler.is_greedy else streams.next())
        token = sampler.pick(scores, candidates)
        ids = torch.cat([ids, token], dim=1)
        if sampler.lead(scores) < MIN_LEAD:
            break
    cache.seq_len = seq_len
    return ids[:, batch.window.size(1):]
