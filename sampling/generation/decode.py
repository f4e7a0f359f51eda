"""The loop that samples tokens. It is nanoGPT's: logits, a token, append, crop.

Axes: B rows, S tokens that the model sees, V vocabulary.
"""
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sampling.backends.backend import Backend, Cache
from sampling.sampler.row_streams import RowStreams
from sampling.sampler.sampler import Sampler, are_valid


class Logprobs(NamedTuple):
    """Log-probabilities of the model itself: at temperature 1, over the whole vocabulary."""
    sampled: Tensor # (B, 1), of the sampled token
    top: Tensor # (B, n), of the n most likely tokens
    top_ids: Tensor # (B, n)


class Step(NamedTuple):
    """The tokens of one step."""
    ids: Tensor # (B, 1)
    is_valid: Tensor # one bool: whether tokens can be sampled from the logits
    logprobs: Logprobs | None


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
    idle_caches: list[Cache] = field(default_factory=list, repr=False) # the latest one, if it keeps CUDA graphs

    @torch.no_grad()
    def decode(self, prompts: list[list[int]], streams: RowStreams,
               num_steps: int) -> Generator[Step, list[int] | None, None]:
        """Continue prompts, of at most block_size tokens each, by num_steps from the end of the shortest one.

        All rows decode in lockstep. A longer prompt is teacher-forced while the others are sampled.
        The caller may send a list of row indices, to keep only these rows.
        """
        length = min(map(len, prompts))
        cache = self.take_cache(len(prompts), min(length + num_steps, self.backend.config.block_size))
        kept = [cache] if self.backend.keeps_graphs else []
        steps = self.decode_with(cache, prompts, length, streams, num_steps)
        del cache # decode_with frees its memory when the window moves
        try:
            yield from steps
        finally:
            self.idle_caches[:] = kept

    def decode_with(self, cache: Cache | None, prompts: list[list[int]], length: int, streams: RowStreams,
                    num_steps: int) -> Generator[Step, list[int] | None, None]:
        """decode, with an empty cache. length: that of the shortest prompt."""
        backend, block_size = self.backend, self.backend.config.block_size
        window = torch.tensor([ids[:length] for ids in prompts], device=backend.device) # (B, S)
        forced = forced_tokens([ids[length:] for ids in prompts], backend.device) # (steps, B, 1)
        num_forced = [len(ids) - length for ids in prompts] # of each row
        unread = window[:1] if all(ids[:length] == prompts[0][:length] for ids in prompts) else window
        for step in range(num_steps):
            for row, count in enumerate(num_forced):
                if step == count > 0: # undo the draws that were made during the prompt
                    streams.restart(row)
            logits = backend.logits(unread, cache, num_needed=self.num_needed).expand(len(window), -1) # (B, V)
            output = self.sample(logits, window, streams, forced[step] if step < len(forced) else None)
            rows, token = (yield output), output.ids
            if rows is not None:
                window, token, forced = window[rows], token[rows], forced[:, rows]
                num_forced = [num_forced[i] for i in rows]
                streams.select_rows(rows)
                if cache is not None:
                    cache.select_rows(rows)
            window, unread = torch.cat([window, token], dim=1), token
            if window.size(1) > block_size:
                # Positions are learned and absolute: once the window moves, all keys and values change.
                window = unread = crop(window, block_size, self.context_shift)
                if self.context_shift:
                    cache.seq_len = 0
                else:
                    cache = None # from now on, the window moves at every step

    def sample(self, logits: Tensor, ids: Tensor, streams: RowStreams, forced: Tensor | None = None) -> Step:
        """Sample the tokens after ids (B, S) from logits (B, V), or take those of forced (B, 1) that are not -1."""
        token = self.sampler(logits, ids, None if self.sampler.is_greedy else streams.next())
        if forced is not None:
            token = torch.where(forced < 0, token, forced)
        return Step(token, are_valid(logits), self.logprobs(logits, token))

    def logprobs(self, logits: Tensor, token: Tensor) -> Logprobs | None:
        """The log-probabilities of token (B, 1) and of the most likely tokens, from logits (B, V)."""
        if self.num_logprobs is None:
            return None
        logprobs = logits.float().log_softmax(dim=-1) # (B, V)
        return Logprobs(logprobs.gather(1, token), *logprobs.topk(min(self.num_logprobs, logits.size(-1))))

    @property
    def num_needed(self) -> int | None:
        """How many of the largest logits must be exact. Log-probabilities need all of them."""
        return self.sampler.num_needed if self.num_logprobs is None else None

    def take_cache(self, num_rows: int, capacity: int) -> Cache:
        """An empty cache: an idle one, if it fits."""
        cache = None
        with suppress(IndexError): # another thread may have taken it
            cache = self.idle_caches.pop()
        if cache is None or cache.num_rows != num_rows or cache.capacity < capacity:
            del cache # frees its memory before the new one takes more
            return self.backend.new_cache(num_rows, capacity)
        cache.seq_len = 0
        return cache


def crop(ids: Tensor, block_size: int, context_shift: bool) -> Tensor:
    """The tokens (B, S) that the model sees of a text (B, block_size + 1)."""
    return ids[:, -(block_size - block_size // 2 if context_shift else block_size):]


def forced_tokens(remainders: list[list[int]], device: torch.device) -> Tensor:
    """The tokens (steps, B, 1) of the remainders of prompts, step by step; -1: the row has none left.

    They are one tensor, because a copy from the host at each step would synchronise the GPU.
    """
    steps = range(max(map(len, remainders)))
    tokens = [[ids[step:step + 1] or [-1] for ids in remainders] for step in steps]
    return torch.tensor(tokens, dtype=torch.long, device=device).view(len(steps), len(remainders), 1)
