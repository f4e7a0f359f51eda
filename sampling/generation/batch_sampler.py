"""Chooses the next tokens of a batch."""
from typing import NamedTuple

import torch
from torch import Tensor

from sampling.params import SamplingParams
from sampling.sampler.nanogpt_sampler import NanoGPTSampler
from sampling.sampler.per_row_rng import PerRowRNG
from sampling.sampler.sample_fn import Logits, SampleFn
from sampling.sampler.sample_token import TokenSampler


class Logprobs(NamedTuple):
    """Log-probabilities of the model itself: at temperature 1, over the whole vocabulary."""
    sampled: Tensor # (B, 1), of the sampled token
    top: Tensor # (B, n), of the n most likely tokens
    top_ids: Tensor # (B, n)


class BatchSampler(SampleFn):
    """Samples the next token of a row, or teacher-forces it while its prompt has more tokens.

    Its tensors stay in place from batch to batch of the same size, because CUDA graphs may hold them.
    """

    def __init__(self, params: SamplingParams, rng: PerRowRNG, num_logprobs: int | None, allow_sync: bool,
                 in_logits_dtype: bool = False, is_exact: bool = False):
        if is_exact:
            self.sample_fn: SampleFn = NanoGPTSampler(params.temperature, params.top_k, rng)
        else:
            self.sample_fn = TokenSampler(params.temperature, params.top_k, params.top_p, params.min_p,
                                          params.repetition_penalty, rng, allow_sync, in_logits_dtype)
        self.rng, self.num_logprobs = rng, num_logprobs
        self.forced_tokens = torch.empty(0, 1, dtype=torch.long) # (B, 1); -1: this row is sampled
        self.forced_by_step = self.forced_tokens[None] # (steps, B, 1)
        self.prompt_remainders: list[list[int]] = [] # each prompt without its first min_prompt_len tokens
        self.min_prompt_len = 0
        self.logprobs: Logprobs | None = None # of the latest step

    @property
    def num_logits_needed(self) -> int | None:
        """See SampleFn.num_logits_needed. Log-probabilities need all logits."""
        return self.sample_fn.num_logits_needed if self.num_logprobs is None else None

    def prefetch(self) -> None:
        """See SampleFn.prefetch."""
        self.sample_fn.prefetch()

    def repeat_noise(self) -> None:
        """See SampleFn.repeat_noise."""
        self.sample_fn.repeat_noise()

    def propose(self, logits: Logits, ids: Tensor, ahead: int) -> Tensor:
        """See SampleFn. The batch must have one row: then no prompt token is left to teacher-force."""
        return self.sample_fn.propose(logits, ids, ahead)

    def start_batch(self, prompts: list[list[int]], rng_states: list[Tensor], device: torch.device) -> None:
        """Begin a batch of prompts. rng_states are the generator states in which their samples start."""
        self.rng.set_rows(rng_states)
        B, self.min_prompt_len = len(prompts), min(map(len, prompts))
        self.prompt_remainders = remainders = [ids[self.min_prompt_len:] for ids in prompts]
        # All steps in one tensor: a copy from the host at each step would synchronise the GPU.
        self.forced_by_step = torch.tensor([[ids[step:step + 1] or [-1] for ids in remainders]
                                            for step in range(max(map(len, remainders)) + 1)], device=device)
        if len(self.forced_tokens) != B:
            self.forced_tokens = self.forced_by_step[0].clone()
            self.logprobs = self.new_logprobs(B, device)

    def new_logprobs(self, batch_size: int, device: torch.device) -> Logprobs | None:
        """Tensors for the log-probabilities of a step, if any are wanted."""
        if self.num_logprobs is None:
            return None
        top = torch.zeros(batch_size, self.num_logprobs, dtype=torch.float32, device=device)
        return Logprobs(torch.zeros(batch_size, 1, dtype=torch.float32, device=device), top, top.long())

    def start_step(self, step: int) -> None:
        """Begin a step, counted from 0 at the end of the shortest prompt."""
        if step >= len(self.forced_by_step): # every prompt has been read
            return
        self.forced_tokens.copy_(self.forced_by_step[step])
        for row, remainder in enumerate(self.prompt_remainders):
            if step == len(remainder):
                self.rng.restart(row) # undo the draws that were made during the prompt

    def __call__(self, logits: Logits, ids: Tensor) -> Tensor:
        """See SampleFn: logits and the ids (B, S) that the model saw -> the next ids (B, 1)."""
        token = torch.where(self.forced_tokens < 0, self.sample_fn(logits, ids), self.forced_tokens)
        if self.logprobs is not None:
            logprobs = logits.values.float().log_softmax(dim=-1) # (B, V)
            found = Logprobs(logprobs.gather(1, token), *logprobs.topk(self.num_logprobs))
            for target, value in zip(self.logprobs, found, strict=True):
                target.copy_(value)
        return token

    def copy_logprobs(self) -> Logprobs | None:
        """A copy of the log-probabilities of the latest step: the next step overwrites them."""
        return None if self.logprobs is None else Logprobs(*(tensor.clone() for tensor in self.logprobs))

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only."""
        self.rng.select_rows(rows)
        self.prompt_remainders = [self.prompt_remainders[i] for i in rows]
        self.forced_tokens, self.forced_by_step = self.forced_tokens[rows], self.forced_by_step[:, rows]
        if self.logprobs is not None:
            self.logprobs = Logprobs(*(tensor[rows] for tensor in self.logprobs))
