"""GPT's head on a CPU, where only the k largest logits count: most of it is read in half its bytes.

For a single row a product takes as long as reading its weights does, and the head holds a third of GPT-2's.
"""
from functools import cached_property

import torch
from torch.nn import functional as F

from onednn import PackedLinear, available

LARGE = 2**23 # weights: as many do not stay in a processor's cache
WIDE = 256 # inputs: with fewer, what is done for every token costs more than reading its row
SHARE = 16 # of the tokens at most one in so many is worth reading twice
PATIENCE = 16 # a failure costs 1, a success earns back a half: nothing left, and it is given up
TINY = 2**-50 # what float32 may lose of a length whose square it cannot hold


class Head:
    """lm_head: (B, E) -> logits (B, V).

    kept: whether the weight stays in memory anyway, for the embedding; now: as PackedLinear's.
    """

    def __init__(self, weight, kept, now=False):
        self.whole = PackedLinear(weight, now=now)
        large = kept and weight.dtype == torch.float32 and weight.numel() >= LARGE and weight.size(1) >= WIDE
        self.most = len(weight) // SHARE if large and available(torch.bfloat16) else 0
        self.rows = weight.detach() if self.most else None
        self.k, self.patience = None, PATIENCE
        self.begun = now # or else the first token does not wait for a sketch

    @property
    def weight(self):
        """Packed or not: its dtype and device are what counts."""
        return self.whole.weight

    @cached_property
    def sketch(self):
        """It in half the bytes."""
        return Sketch(self.rows)

    def __call__(self, x, k=None):
        """A tuple of the logits and, where only some of them are right, the ids (K,) of these.

        k: how many of the largest are needed, with all that tie with the last of them; None: all.
        """
        if k and 0 < k <= self.most and len(x) == 1 and self.begun and self.promises(k):
            logits, ids = self.sketch.largest(x, k)
            if k <= len(ids) <= self.most:
                self.patience = min(self.patience + 0.5, PATIENCE)
                logits[:, ids] = products(x, self.rows, ids)
                return logits, ids
            self.patience -= 1
        self.begun = True
        return (self.whole(x),)

    def promises(self, k):
        """Whether the sketch has not failed too often for this k."""
        if self.k != k:
            self.k, self.patience = k, PATIENCE
        if self.patience <= 0:
            vars(self).pop("sketch", None) # its memory
        return self.patience > 0


class Sketch:
    """Weights (V, E) in bfloat16, and how far off they make logits.

    x @ w and x @ (w - dw) differ by |x| |dw| at most (Cauchy and Schwarz), and so for x. What all rows have in common,
    of trained ones most of their length, changes no order: it is left out and added in float32.
    """

    def __init__(self, weight):
        self.mean = weight.mean(dim=0)
        rounded = torch.empty_like(weight, dtype=torch.bfloat16)
        longest = lost = torch.tensor(TINY)
        for rows, short in zip(weight.split(1024), rounded.split(1024), strict=True):
            rows = rows - self.mean
            short.copy_(rows)
            longest = rows.norm(dim=1).max().maximum(longest)
            lost = (rows - short).norm(dim=1).max().maximum(lost)
        self.product = PackedLinear(rounded, now=True)
        self.longest = longest + TINY
        # A sum of E products loses E * 2**-24 at most, in any order; three are made, of what is left and of the mean.
        self.lost = lost + TINY + weight.size(1) * 2**-22 * (longest + self.mean.norm())

    def __call__(self, x):
        """x (1, E) -> logits (1, V), and by how much each may be wrong."""
        rounded = x.bfloat16().float()
        logits = self.product(rounded).float() # which are rounded too, to 8 bits
        error = (self.lost * (rounded.norm() + TINY) + self.longest * ((x - rounded).norm() + TINY)
                 + 2**-8 * logits.abs().max())
        return logits.add_(x[0] @ self.mean), error

    def largest(self, x, k):
        """x (1, E) -> logits (1, V), about, and the ids (K,) that hold the k largest, those that tie and some more."""
        logits, error = self(x)
        size = min(64, logits.size(1) // (2 * k))
        groups = logits[0, :logits.size(1) // size * size].view(-1, size).amax(dim=1)
        kth = groups.topk(k).values[-1] # or a smaller one, found in less time
        return logits, (logits[0] >= kth - 2 * error).nonzero().squeeze(1)


def products(x, weight, ids):
    """x (1, E) with these rows of the weight: (1, K), the same for rows that are the same.

    MKL takes them by the block, and adds up the products of what is left over in another order.
    """
    rows = F.embedding(F.pad(ids, (0, -len(ids) % 16)), weight)
    return (x @ rows.T)[:, :len(ids)]
