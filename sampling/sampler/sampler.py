"""Chooses the next tokens: logits and random numbers in, token ids out.

torch.multinomial(probs, 1) computes argmax(probs / q), with one exponential random number q for
each vocabulary entry, in the order of the ids. Sampler computes the same from numbers that its
caller provides, so the random numbers of a sample do not depend on its batch.

Axes: B rows, V vocabulary entries, S tokens so far, K candidates.
"""
import math
from collections.abc import Callable

import torch
from torch import Tensor

from sampling.sampler.row_streams import exponentials

Kernel = Callable[[Tensor, float, int | None, Tensor], tuple[Tensor, Tensor]]
ROOM_FOR_TIES = 64 # bfloat16 logits nearly always tie with the k-th largest
MAX_LOGIT = 1e9 # no model has larger ones


class Sampler:
    """Chooses tokens with fixed settings, which apply in this order, as in transformers:
    repetition_penalty; temperature (0: always the most likely token); top_k with all ties (None or
    0: every token); top_p; min_p.

    full_vocabulary: for top_k, mask all V logits, as nanoGPT does, without waiting for a GPU.
    Otherwise, continue with the K largest if they have all ties with the k-th, which takes half of
    the time, and a twentieth with top_p.

    in_logits_dtype: apply temperature and top_k in the dtype of the logits, as nanoGPT does under
    autocast. Otherwise, and in all other steps, compute in float32.

    kernel: chooses instead of torch if only temperature and top_k are set: see choose_ids in
    kernels.py.
    """

    def __init__(self, temperature: float = 1.0, top_k: int | None = None,
                 top_p: float | None = None, min_p: float | None = None,
                 repetition_penalty: float = 1.0, *, full_vocabulary: bool = False,
                 in_logits_dtype: bool = False, kernel: Kernel | None = None):
        self.penalty = repetition_penalty
        self.temperature = float(temperature)
        self.top_k = top_k
        self.top_p = top_p or 1.0 # 1: every token
        self.min_p = min_p
        self.full_vocabulary = full_vocabulary
        self.is_greedy = temperature == 0
        self.in_logits_dtype = in_logits_dtype
        has_filter = repetition_penalty != 1 or min_p or self.top_p < 1
        # With temperature 0, each logit overflows.
        can_use = not has_filter and never_overflows(self.temperature, torch.float32)
        self.kernel = kernel if can_use else None

    def __call__(self, logits: Tensor, ids: Tensor, noise: Tensor | None) -> Tensor:
        """Logits (B, V) and the ids (B, S) that the model saw -> the next ids (B, 1).

        noise (B, V): see exponentials; None if is_greedy. The largest logit of each row must be
        finite.
        """
        if self.kernel:
            return self.kernel(logits, self.temperature, self.top_k, noise)[0]
        return self.pick(*self.scores(logits, ids, noise))

    def propose(self, logits: Tensor, ids: Tensor, noise: Tensor | None) -> tuple[Tensor, float]:
        """The next id (1, 1) of a single row, and how far its score is ahead of the next one: the
        difference of their logarithms.
        """
        if self.kernel:
            token, lead = self.kernel(logits, self.temperature, self.top_k, noise)
            return token, float(lead)
        scores, candidates = self.scores(logits, ids, noise)
        return self.pick(scores, candidates), self.lead(scores)

    def scores(self, logits: Tensor, ids: Tensor,
               noise: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The scores (B, K) of the candidates, and their ids (B, K), or None for all V in order.

        The best score wins. Without noise, a score is a logit; otherwise it is a probability
        divided by noise.
        """
        if not self.in_logits_dtype:
            logits = logits.float()
        if self.penalty != 1: # the tokens in the text have it (CTRL, Keskar et al., 2019)
            logits = logits.float()
            seen = logits.gather(1, ids) # (B, S)
            penalised = torch.where(seen < 0, seen * self.penalty, seen / self.penalty)
            logits = logits.scatter(1, ids, penalised)
        if self.is_greedy:
            return logits, None
        logits = apply_temperature(logits, self.temperature)
        candidates = None
        if self.top_k and self.top_k < logits.size(-1):
            K = self.top_k
            if not self.full_vocabulary:
                K = min(K + ROOM_FOR_TIES, logits.size(-1))
            # A GPU takes longer to sort them.
            largest, largest_ids = logits.topk(K, sorted=not self.full_vocabulary) # (B, K) each
            # Ties with the k-th stay, as in nanoGPT.
            kth = largest[:, :self.top_k].amin(dim=-1, keepdim=True)
            if not self.full_vocabulary and not (largest[:, -1:] == kth).any():
                # In the order of their ids: mask_top_p removes equal logits in this order.
                candidates, order = largest_ids.sort()
                logits = largest.gather(1, order)
                noise = noise.gather(1, candidates)
            logits = logits.masked_fill(logits < kth, -torch.inf)
        logits = logits.float()
        if self.top_p < 1:
            logits = mask_top_p(logits, self.top_p)
        if self.min_p: # Nguyen et al., 2024
            probs = logits.softmax(dim=-1)
            least = self.min_p * probs.amax(dim=-1, keepdim=True)
            logits = logits.masked_fill(probs < least, -torch.inf)
        return logits.softmax(dim=-1) / exponentials(noise), candidates

    @staticmethod
    def pick(scores: Tensor, candidates: Tensor | None) -> Tensor:
        """The ids (B, 1) with the best scores."""
        best = scores.argmax(dim=-1, keepdim=True)
        return best if candidates is None else candidates.gather(1, best)

    def lead(self, scores: Tensor) -> float:
        """How far the best of the scores (1, K) is ahead of the next one."""
        if scores.size(1) == 1:
            return math.inf
        best = scores[0].topk(2).values
        return -float((best if self.is_greedy else best.log()).diff())


def never_overflows(temperature: float, dtype: torch.dtype) -> bool:
    """Whether logits / temperature stays finite: no model has a logit above MAX_LOGIT."""
    return temperature * torch.finfo(dtype).max > MAX_LOGIT


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits (B, V) by a temperature above 0.

    nanoGPT fails if the largest logit of a row overflows.
    """
    scaled = logits / temperature
    if never_overflows(temperature, logits.dtype):
        return scaled
    # What the probabilities are in the limit of low temperatures: only the largest logits are left.
    largest = logits.amax(dim=-1, keepdim=True)
    limit = torch.zeros_like(logits).masked_fill(logits < largest, -torch.inf)
    return torch.where(scaled.amax(dim=-1, keepdim=True).isfinite(), scaled, limit)


def mask_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the fewest logits (B, V) whose probabilities reach top_p (Holtzman et al., 2019)."""
    ascending, order = logits.sort(dim=-1, stable=True)
    # In float32, CUDA adds up a single row in an order of its own.
    dtype = torch.float64 if logits.is_cuda else None
    removed = ascending.softmax(dim=-1).cumsum(dim=-1, dtype=dtype) <= 1 - top_p
    removed[:, -1] = False # the most likely token always stays
    return logits.masked_fill(torch.empty_like(removed).scatter_(1, order, removed), -torch.inf)
