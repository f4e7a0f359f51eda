"""The loop that samples tokens. It is nanoGPT's: logits, a token, append, crop.

Axes: B rows, S tokens that the model sees, V vocabulary.
"""
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sampling.backends.backend import Backend
from sampling.sampler.row_streams import RowStreams
from sampling.sampler.sampler import Sampler, are_valid


class Step(NamedTuple):
    """The tokens of one step.

    logprobs are those of the model itself: at temperature 1, over the whole vocabulary. They are of the sampled tokens
    (B,) and of the n most likely ones (B, n), followed by the ids of the latter (B, n).
    """
    ids: Tensor # (B, 1)
    is_valid: Tensor # one bool: whether tokens can be sampled from the logits
    logprobs: tuple[Tensor, Tensor, Tensor] | None


@dataclass
class Decoder:
    """Samples tokens after prompts. Each row of a batch gets the tokens that it would get alone.

    num_logprobs: how many of the most likely tokens to return with their log-probabilities; None: return none.
    context_shift is for text longer than block_size. With it, as in llama.cpp, a full window drops its older half, and
    the rest is prefilled once. Without it, every token recomputes the whole window, as in nanoGPT.
    """
    backend: Backend
    sampler: Sampler
    num_logprobs: int | None = None
    context_shift: bool = False

    def __post_init__(self):
        # How many of the largest logits must be exact. Log-probabilities need all of them.
        self.num_needed = self.sampler.num_needed if self.num_logprobs is None else None

    def decode(self, prompts: list[list[int]], streams: RowStreams,
               num_steps: int) -> Generator[Step, list[int] | None, None]:
        """Continue prompts, of at most block_size tokens each, by num_steps from the end of the shortest one.

        All rows decode in lockstep. A longer prompt is teacher-forced while the others are sampled: the first_steps of
        its streams are how much longer it is. The caller may send a list of row indices, to keep only these rows.
        """
        backend, block_size, length = self.backend, self.backend.config.block_size, min(map(len, prompts))
        window = torch.tensor([ids[:length] for ids in prompts], device=backend.device) # (B, S)
        rests = [torch.tensor(ids[length:], dtype=torch.long) for ids in prompts] # to be teacher-forced
        # One tensor, because a copy from the host at each step would synchronise the GPU. -1: the row has none left.
        forced = pad_sequence(rests, padding_value=-1).to(backend.device)[..., None] # (steps, B, 1)
        unread = window[:1] if all(ids[:length] == prompts[0][:length] for ids in prompts) else window
        cache = backend.new_cache(len(prompts), min(length + num_steps, block_size))
        try:
            for step in range(num_steps):
                logits = backend.logits(unread, cache, num_needed=self.num_needed).expand(len(window), -1) # (B, V)
                output = self.sample(logits, window, streams, forced[step] if step < len(forced) else None)
                rows = yield output
                token = output.ids
                if rows is not None:
                    window, token, forced = window[rows], token[rows], forced[:, rows]
                    streams.select_rows(rows)
                    if cache is not None:
                        cache.select_rows(rows)
                window, unread = torch.cat([window, token], dim=1), token
                if window.size(1) > block_size:
                    # Positions are learned and absolute: once the window moves, all keys and values change.
                    window = unread = crop(window, block_size, self.context_shift)
                    if self.context_shift:
                        cache.seq_len = 0
                    elif cache is not None: # from now on, the window moves at every step
                        backend.release(cache)
                        cache = None
        finally:
            if cache is not None:
                backend.release(cache)

    def sample(self, logits: Tensor, ids: Tensor, streams: RowStreams, forced: Tensor | None = None) -> Step:
        """Sample the tokens after ids (B, S) from logits (B, V), or take those of forced (B, 1) that are not -1."""
        token, logprobs = self.sampler(logits, ids, None if self.sampler.is_greedy else streams.next()), None
        if forced is not None:
            token = torch.where(forced < 0, token, forced)
        if self.num_logprobs is not None:
            values = logits.float().log_softmax(dim=-1) # (B, V)
            logprobs = values.gather(1, token)[:, 0], *values.topk(min(self.num_logprobs, values.size(-1)))
        return Step(token, are_valid(logits), logprobs)


def crop(ids: Tensor, block_size: int, context_shift: bool) -> Tensor:
    """The tokens (B, S) that the model sees of a text (B, block_size + 1)."""
    return ids[:, -(block_size - block_size // 2 if context_shift else block_size):]
