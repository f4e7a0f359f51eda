"""Random prompts and numbers, and text from a backend."""
import torch

from models import SHAPE
from sampling.generation.decode import Decoder
from sampling.sampler.row_streams import RowStreams, RunStream
from sampling.sampler.sampler import Sampler


def normal(*shape, seed=0):
    """Normally distributed numbers."""
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def random_prompt(length, rows=1, seed=0):
    """Token ids (rows, length) of the model that make_gpt makes."""
    return torch.randint(SHAPE["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def decode(backend, prompts, num_tokens, seed=3, context_shift=False, **settings):
    """The num_tokens ids with which a run continues each of prompts (lists of ids). max_rows rows decode together."""
    run = RunStream(seed, backend.device, draws_per_sample=num_tokens, vocab_size=backend.config.vocab_size)
    decoder, found = Decoder(backend, Sampler(**settings), context_shift=context_shift), []
    visible = [ids[-backend.config.block_size:] for ids in prompts]
    for start in range(0, len(prompts), backend.max_rows):
        rows = visible[start:start + backend.max_rows]
        shortest, longest = min(map(len, rows)), max(map(len, rows))
        streams = RowStreams(run, list(range(start, start + len(rows))), [len(ids) - shortest for ids in rows])
        steps = list(decoder.decode(rows, streams, num_tokens + longest - shortest))
        assert all(step.is_valid for step in steps)
        tokens = torch.cat([step.ids for step in steps], dim=1).tolist()
        found += [row[len(ids) - shortest:][:num_tokens] for row, ids in zip(tokens, rows, strict=True)]
    return found
