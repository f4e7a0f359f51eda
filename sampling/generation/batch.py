"""Batch: the rows that are decoded together, and all that belongs to them.

Axes: B rows, S tokens that the model sees.
"""
import time
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sampling.backends.backend import Backend
from sampling.generation.detokenizer import Detokenizer
from sampling.sampler.row_streams import RunStream
from sampling.settings import SamplingParams

NOT_FINITE = ("the model's logits are NaN or infinite: the checkpoint may be damaged, its training "
              "may have diverged, or dtype=float16 overflows (try dtype=bfloat16 or float32)")
MAX_FLUSH_SECONDS = 0.4 # between two flushes, so that a progress bar moves


class Step(NamedTuple):
    """The tokens of one step, and what is known about them.

    All tensors are on the backend's device.

    The log-probabilities are those of the model itself: at temperature 1, over the whole
    vocabulary. They are of the sampled tokens, and then of the n most likely ones. Without
    log-probabilities, ids and numbers have one column.
    """
    token: Tensor # (B, 1)
    ids: Tensor # (B, 1 + n): the token, and the most likely ones
    numbers: Tensor # (B, 2 + n): the largest logit, and the log-probabilities, in float32


class Batch:
    """Prompts, of which the model sees at most block_size tokens, and their samples.

    All rows decode in lockstep from the end of the shortest prompt. The rest of a longer prompt is
    teacher-forced while the other rows are sampled. Each row gets the tokens that it would get
    alone.

    window (B, S): the tokens that the model sees. cache: the keys and values of the first
    cache.seq_len of them; None once the window moves. rows: the texts of the samples. The maker of
    a Batch must call release.
    """

    def __init__(self, rows: list[Detokenizer], backend: Backend, run_stream: RunStream,
                 params: SamplingParams):
        self.rows = rows
        self.backend = backend
        self.params = params
        block_size = backend.config.block_size
        prompts = [row.sample.prompt_ids[-block_size:] for row in rows]
        length = min(map(len, prompts))
        self.window = torch.tensor([ids[:length] for ids in prompts], device=backend.device)
        # The steps in which the rows get their first new tokens.
        self.first_steps = [len(ids) - length for ids in prompts]
        # The tokens of longer prompts, for each step. One tensor, because a copy from the host at
        # each step would synchronise the GPU. -1: the row has none left, so its token is sampled.
        rests = [torch.tensor(ids[length:], dtype=torch.long) for ids in prompts]
        # (steps, B, 1)
        self.forced = pad_sequence(rests, padding_value=-1).to(backend.device)[..., None]
        self.streams = run_stream.for_rows([row.sample.index for row in rows], self.first_steps)
        self.num_steps = 0 # so far
        self.pending: list[Step] = [] # the latest steps, whose tokens are not on the host yet
        self.flush_time = time.monotonic()
        self.cache = backend.new_cache(len(rows), min(length + self.num_steps_left, block_size))

    @property
    def unread(self) -> Tensor:
        """The tokens that are not in the cache: (B, T); (1, T) for equal prompts, read once."""
        if self.cache is None:
            return self.window
        ids = self.window[:, self.cache.seq_len:]
        if self.num_steps == 0 and (ids == ids[0]).all():
            return ids[:1]
        return ids

    @property
    def num_steps_left(self) -> int:
        return max(self.first_steps) + self.params.max_new_tokens - self.num_steps

    def append(self, step: Step) -> None:
        """Append the tokens of a step. Past block_size, the window moves."""
        self.pending.append(step)
        self.num_steps += 1
        if self.cache is not None:
            self.cache.seq_len = self.window.size(1) # a draft may have read wrong proposals
        self.window = torch.cat([self.window, step.token], dim=1)
        block_size = self.backend.config.block_size
        if self.window.size(1) <= block_size:
            return
        # Positions are learned and absolute: once the window moves, all keys and values change.
        # As in llama.cpp: drop the older half, and prefill the rest once.
        if self.params.context_shift:
            self.window = self.window[:, -(block_size - block_size // 2):]
            self.cache.seq_len = 0
        else: # as in nanoGPT: from now on, every step recomputes the whole window
            self.window = self.window[:, -block_size:]
            self.release()

    def flush(self) -> None:
        """Append the tokens of the pending steps to the samples.

        Raises ValueError if their logits were not finite.

        It copies two tensors, because each copy to the host waits for the GPU.
        """
        first = self.num_steps - len(self.pending) # the number of the first pending step
        ids = torch.stack([step.ids for step in self.pending]).tolist()
        numbers = torch.stack([step.numbers for step in self.pending]).cpu()
        if not numbers[..., 0].isfinite().all():
            raise ValueError(NOT_FINITE)
        logprobs = numbers[..., 1:].tolist()
        self.pending = []
        self.flush_time = time.monotonic()
        for i, (row, first_step) in enumerate(zip(self.rows, self.first_steps, strict=True)):
            for step in range(max(0, first_step - first), len(ids)):
                if not row.is_finished:
                    token_id, *top_ids = ids[step][i]
                    logprob, *top = logprobs[step][i] or [None]
                    row.append(token_id, logprob, top, top_ids)

    def is_due(self, flush_steps: int) -> bool:
        """Whether to flush: after flush_steps or slow steps, or when a row may be finished."""
        if self.cache is None: # each step recomputes the window
            flush_steps = self.backend.min_flush_steps
        may_finish = self.num_steps - self.params.max_new_tokens in self.first_steps
        is_slow = time.monotonic() - self.flush_time > MAX_FLUSH_SECONDS
        return bool(self.pending) and (len(self.pending) >= flush_steps or may_finish or is_slow)

    def drop_finished(self) -> None:
        """Keep the unfinished rows only, if the backend gains by it. No step may be pending.

        If there are none, the batch is over.
        """
        kept = [i for i, row in enumerate(self.rows) if not row.is_finished]
        if not kept:
            self.rows = []
            self.release()
        elif self.backend.should_drop(len(self.rows), len(kept)):
            self.rows = [self.rows[i] for i in kept]
            self.first_steps = [self.first_steps[i] for i in kept]
            self.window = self.window[kept]
            self.forced = self.forced[:, kept]
            self.streams.select_rows(kept)
            if self.cache is not None:
                self.cache.select_rows(kept)

    def release(self) -> None:
        if self.cache is not None:
            self.backend.release(self.cache)
            self.cache = None
