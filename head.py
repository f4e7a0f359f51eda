"""GPT's head on a CPU, where only the k largest logits count: most of it is read in half its bytes.

For a single row a product takes as long as reading its weights does, and the head holds a third of GPT-2's.
"""
from functools import cached_property

import torch
from torch.nn import functional as F

from onednn import PackedLinear, available

LARGE = 2**23 # weights: as many do not stay in a processor's cache
SHARE = 16 # of the tokens at most one in so many is worth reading twice
PATIENCE = 16 # failures after which that is given up; two successes make up for one


class Head:
    """lm_head: (B, E) -> logits (B, V). kept: whether the weight stays in memory anyway."""

    def __init__(self, weight, kept):
        self.whole = PackedLinear(weight)
        large = kept and weight.dtype == torch.float32 and weight.numel() >= LARGE
        self.most = len(weight) // SHARE if large and available(torch.bfloat16) else 0
        self.rows = weight.detach() if self.most else None
        self.patience = PATIENCE

    @property
    def weight(self):
        """Of which the shape may be another."""
        return self.whole.weight

    @cached_property
    def sketch(self):
        """It in half the bytes."""
        return Sketch(self.rows)

    def __call__(self, x, k=None):
        """A tuple of the logits and, where these alone are right, the ids (K,) that the k largest of them have.

        k: how many of the largest are needed, and all that tie with the last of them; None: all.
        """
        if k and k <= self.most and len(x) == 1 and self.whole.used and self.patience > 0:
            logits, ids = self.sketch.largest(x, k)
            if k <= len(ids) <= self.most:
                self.patience = min(self.patience + 0.5, PATIENCE)
                logits[:, ids] = x @ F.embedding(ids, self.rows).T
                return logits, ids
            self.patience -= 1
        return (self.whole(x),)


class Sketch:
    """Weights in bfloat16, and how far off it makes logits.

    x @ w and x @ (w - dw) differ by |x| |dw| at most (Cauchy and Schwarz), and so for x. What all rows have in common,
    of trained ones most of their length, changes no order: it is left out and added in float32.
    """

    def __init__(self, weight):
        self.mean = weight.mean(dim=0)
        rounded = torch.empty_like(weight, dtype=torch.bfloat16)
        self.longest = self.lost = torch.zeros(())
        for rows, short in zip(weight.split(1024), rounded.split(1024), strict=True):
            rows = rows - self.mean
            short.copy_(rows)
            self.longest = rows.norm(dim=1).max().maximum(self.longest)
            self.lost = (rows - short).norm(dim=1).max().maximum(self.lost)
        self.product = PackedLinear(rounded, now=True)
        self.lost += 2**-22 * weight.size(1) * (self.longest + self.mean.norm()) # by the sums, in any order

    def __call__(self, x):
        """x (1, E) -> logits (1, V), and by how much each may be wrong."""
        rounded = x.bfloat16().float()
        near = self.product(rounded).float()
        error = self.lost * rounded.norm() + self.longest * (x - rounded).norm() + 2**-8 * near.abs().max()
        return near.add_(x[0] @ self.mean), error

    def largest(self, x, k):
        """x (1, E) -> logits (1, V), about, and the ids (K,) that hold the k largest, those that tie and some more."""
        logits, error = self(x)
        size = min(64, logits.size(1) // (2 * k))
        groups = logits[0, :logits.size(1) // size * size].view(-1, size).amax(dim=1)
        kth = groups.topk(k).values[-1] # or a smaller one, found in less time
        return logits, (logits[0] >= kth - 2 * error).nonzero().squeeze(1)
