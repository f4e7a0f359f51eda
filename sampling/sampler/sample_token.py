"""Samples the next token from logits.

torch.multinomial(probs, 1) computes argmax(probs / q), with one exponential random number q for each vocabulary
entry, in the order of the ids. sample_token computes the same from numbers that its caller provides. So the random
numbers of a sample do not depend on its batch.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from sampling.sampler.logits import (
    apply_min_p,
    apply_repetition_penalty,
    apply_temperature,
    apply_temperature_as_nanogpt,
    apply_top_k,
    apply_top_p,
    require_finite,
    top_k_with_ties,
)
from sampling.sampler.per_row_rng import PerRowRNG
from sampling.sampler.sample_fn import Logits, Noise, SampleFn

MIN_TEMPERATURE_WITHOUT_SYNC = 1e-30 # below it, float32 logits may overflow, and a check would synchronise a GPU


def exponential_noise(shape: tuple[int, int], ids: Tensor | None, device: torch.device) -> Tensor:
    """Exponential random numbers from torch's global generator, as Noise describes."""
    source = "cpu" if device.type == "mps" else device # exponential_ on MPS has returned wrong numbers
    q = torch.empty(shape, dtype=torch.float32, device=source).exponential_().to(device)
    return q if ids is None else q.gather(1, ids) # (B, V) -> (B, K)


def sample_token(logits: Logits, ids: Tensor, temperature: float = 1.0, top_k: int | None = None,
                 top_p: float | None = None, min_p: float | None = None, repetition_penalty: float = 1.0, *,
                 noise: Noise, allow_sync: bool = True, in_logits_dtype: bool = False) -> Tensor:
    """Logits and the ids (B, S) of the text so far -> the next ids (B, 1). The logits are not modified.

    The settings apply in this order, as in transformers: repetition_penalty; temperature (0 takes the most likely
    token and draws no noise); top_k with all ties (None or 0: every token); top_p; min_p.

    Raises ValueError if a logit is NaN or infinite. allow_sync=False does nothing that would synchronise a GPU: it does
    not check logits, and top_k keeps all V columns. in_logits_dtype=True applies temperature and top_k in the dtype of
    the logits, as nanoGPT does under autocast; all else is computed in float32. With allow_sync=False or
    in_logits_dtype=True, a temperature below 1e-30 counts as 0.
    """
    values, shape = logits.values if in_logits_dtype else logits.values.float(), logits.values.shape
    candidates = None # (B, K) the ids of the columns of values; None: values still has all V columns
    if repetition_penalty != 1:
        values = apply_repetition_penalty(values.float(), ids, repetition_penalty)
    if logits.candidate_ids is not None:
        values = values[:, logits.candidate_ids] # (B, V) -> (B, K)
        candidates = logits.candidate_ids.expand(len(values), -1) # (K,) -> (B, K)
    is_greedy = temperature == 0 or ((in_logits_dtype or not allow_sync) and temperature < MIN_TEMPERATURE_WITHOUT_SYNC)
    if allow_sync and (is_greedy or in_logits_dtype): # otherwise apply_temperature checks
        require_finite(values)
    if is_greedy:
        return argmax_id(values, candidates)
    if in_logits_dtype:
        values = apply_temperature_as_nanogpt(values, temperature)
    else:
        values = apply_temperature(values, temperature, allow_sync)
    if top_k and top_k < values.size(-1):
        if allow_sync:
            values, kept = top_k_with_ties(values, top_k) # (B, V) -> (B, K)
            candidates = kept if candidates is None else candidates.gather(1, kept)
        else:
            values = apply_top_k(values, top_k)
    values = apply_min_p(apply_top_p(values.float(), top_p), min_p)
    return argmax_id(values.softmax(dim=-1) / noise(shape, candidates, values.device), candidates)


def argmax_id(scores: Tensor, candidates: Tensor | None) -> Tensor:
    """The ids (B, 1) of the largest scores. candidates (B, K) are the ids of the columns; None: column i is id i."""
    best = scores.argmax(dim=-1, keepdim=True) # (B, K) -> (B, 1)
    return best if candidates is None else candidates.gather(1, best)


@dataclass(frozen=True)
class TokenSampler(SampleFn):
    """Calls sample_token with fixed settings. Raises ValueError if top_k is negative."""
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    noise: Noise = exponential_noise
    allow_sync: bool = True
    in_logits_dtype: bool = False

    def __post_init__(self):
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k must be at least 1, or None or 0 for every token; got {self.top_k}")

    @property
    def num_logits_needed(self) -> int | None:
        """See SampleFn.num_logits_needed."""
        if self.repetition_penalty != 1:
            return None # the penalty may make a small logit the largest
        return 1 if self.temperature == 0 else self.top_k or None

    def prefetch(self) -> None:
        """See SampleFn.prefetch. torch's global generator needs no prefetch: CUDA graphs support it."""
        if self.temperature and isinstance(self.noise, PerRowRNG):
            self.noise.prefetch()

    def repeat_noise(self) -> None:
        """See SampleFn.repeat_noise."""
        if self.temperature and isinstance(self.noise, PerRowRNG):
            self.noise.repeat()

    def propose(self, logits: Logits, ids: Tensor, ahead: int) -> Tensor:
        """See SampleFn."""
        return self.sample(logits, ids, lambda *arguments: self.noise.peek(ahead, *arguments))

    def __call__(self, logits: Logits, ids: Tensor) -> Tensor:
        """See SampleFn."""
        return self.sample(logits, ids, self.noise)

    def sample(self, logits: Logits, ids: Tensor, noise: Noise) -> Tensor:
        """Sample with these random numbers."""
        return sample_token(logits, ids, self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty,
                            noise=noise, allow_sync=self.allow_sync, in_logits_dtype=self.in_logits_dtype)
