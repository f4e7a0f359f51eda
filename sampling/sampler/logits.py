"""Changes to logits before a token is sampled: a repetition penalty, temperature, and filters of unlikely tokens.

They work as in transformers. Axes: B rows, V vocabulary entries, S tokens so far.
"""
import math

import torch
from torch import Tensor

NUM_EXTRA_FOR_TIES = 64 # bfloat16 logits nearly always tie with the k-th largest: the first topk has room for ties
NOT_FINITE = ("the model's logits are NaN or infinite: the checkpoint may be damaged, its training may have diverged, "
              "or dtype=float16 overflows (try dtype=bfloat16 or float32)")


def apply_repetition_penalty(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Make the tokens ids (B, S) of the text so far less likely: logits (B, V) -> (B, V).

    Positive logits are divided by the penalty, negative ones multiplied (CTRL, Keskar et al., 2019).
    """
    seen = logits.gather(1, ids) # (B, S)
    return logits.scatter(1, ids, torch.where(seen < 0, seen * penalty, seen / penalty))


def apply_top_k(logits: Tensor, k: int) -> Tensor:
    """Set the logits (B, V) below the k-th largest of their row to -inf. Ties with the k-th stay."""
    kth = logits.topk(k, sorted=False).values.amin(dim=-1, keepdim=True) # (B, 1); sorting them takes a GPU longer
    return logits.masked_fill(logits < kth, -torch.inf)


def top_k_with_ties(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row and all that tie with the k-th: logits (B, V) -> values and ids, (B, K) each.

    This keeps the same logits as apply_top_k, but later steps have K columns instead of V. It synchronises a GPU. Rows
    with fewer ties than others are padded with -inf.
    """
    values, ids = logits.topk(min(k + NUM_EXTRA_FOR_TIES, logits.size(-1)))
    if (values[:, -1] == values[:, k - 1]).any(): # there may be more ties than topk returned
        num_kept = (logits >= values[:, k - 1:k]).sum(dim=-1).max()
        values, ids = logits.topk(int(num_kept))
    return values.masked_fill(values < values[:, k - 1:k], -torch.inf), ids


def apply_top_p(logits: Tensor, top_p: float | None) -> Tensor:
    """Keep the fewest logits (B, V) whose probabilities add up to top_p, and set the others to -inf.

    This is nucleus sampling (Holtzman et al., 2019). None or 1 keeps all.
    """
    if top_p is None or top_p >= 1:
        return logits
    ascending, order = logits.sort(dim=-1)
    removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    removed[:, -1] = False # the most likely token always stays
    return logits.masked_fill(torch.empty_like(removed).scatter_(1, order, removed), -torch.inf)


def apply_min_p(logits: Tensor, min_p: float | None) -> Tensor:
    """Set logits (B, V) to -inf if their probability is below min_p times the largest one (Nguyen et al., 2024)."""
    if not min_p:
        return logits
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), -torch.inf)


def apply_temperature(logits: Tensor, temperature: float, allow_sync: bool = True) -> Tensor:
    """Divide logits (B, V) by a temperature above 0.

    Raises ValueError if a logit is NaN or infinite. If the division overflows in a row, only the largest logits of the
    row are kept, as in the limit of low temperatures. With allow_sync=False, neither is checked.
    """
    scaled = logits / float(temperature) # torch refuses an int of more than 64 bits
    if not allow_sync or has_finite_range(scaled):
        return scaled
    require_finite(logits)
    limit = torch.zeros_like(logits).masked_fill(logits < logits.amax(dim=-1, keepdim=True), -torch.inf)
    return torch.where(scaled.isfinite().all(dim=-1, keepdim=True), scaled, limit)


def apply_temperature_as_nanogpt(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits (B, V) by a temperature above 0 in their own dtype, as nanoGPT does under autocast.

    float16 can overflow, and then nanoGPT fails. Here, such logits are divided in float32.
    """
    scaled = logits / float(temperature)
    if logits.dtype != torch.float16:
        return scaled
    return torch.where(scaled.isfinite(), scaled.float(), logits.float() / float(temperature))


def has_finite_range(logits: Tensor) -> bool:
    """Whether all logits and their largest difference are finite. Takes a single pass over the logits."""
    low, high = logits.aminmax()
    return math.isfinite(high - low)


def require_finite(logits: Tensor) -> None:
    """Raises ValueError if a logit is NaN or infinite."""
    if not logits.isfinite().all():
        raise ValueError(NOT_FINITE)
