"""The LM head of a GPT on a CPU. If only the k largest logits are needed, it reads about half the bytes.

With a single row, a product takes as long as reading its weight, and the head has a third of GPT-2's weights. So a
bfloat16 copy of the weight gives approximate logits with an error bound. The tokens whose logits may be among the k
largest are the shortlist. Only these tokens get exact float32 logits.
"""
import torch
from torch import Tensor
from torch.nn import functional as F

from sampling.backends.cpu.bag_linear import make_linear
from sampling.backends.cpu.embedding_bag import EmbeddingBagMatmul
from sampling.backends.cpu.packed_linear import PackedLinear, bags_are_faster, is_supported

MIN_PARAMS = 2**23 # a smaller weight stays in the processor's cache
MIN_WIDTH = 256 # in a narrower head, the work for each token takes longer than reading its row
MAX_SHORTLIST_FRACTION = 1 / 16 # of the vocabulary; the rows of a longer shortlist take too long to read again
FAILURE_BUDGET = 16 # -1 a miss, +0.5 a hit; at 0 the shortlist is disabled
UNDERFLOW = 2**-50 # a float32 norm may be too small by this much, if its square underflows


def has_bfloat16_products() -> bool:
    """Whether torch and the processor multiply bfloat16 weights fast."""
    return bags_are_faster() or is_supported(torch.bfloat16)


class ShortlistLMHead:
    """lm_head: (B, E) -> logits (B, V).

    weight_is_shared: whether the embedding also keeps the weight in memory.
    """

    def __init__(self, weight: Tensor, weight_is_shared: bool, pack_eagerly: bool = False):
        self.linear = make_linear(weight, pack_eagerly=pack_eagerly)
        is_large = weight.numel() >= MIN_PARAMS and weight.size(1) >= MIN_WIDTH
        self.max_shortlist = 0 # in tokens; 0: the shortlist is disabled
        if weight_is_shared and weight.dtype == torch.float32 and is_large and has_bfloat16_products():
            self.max_shortlist = int(len(weight) * MAX_SHORTLIST_FRACTION)
        self.weight = weight.detach() if self.max_shortlist else None
        self.approximation: Bfloat16Approximation | None = None # made at its first use
        self.k, self.budget = None, FAILURE_BUDGET
        self.skip_shortlist = not pack_eagerly # in the first call: it should not wait for the bfloat16 copy

    def __call__(self, x: Tensor, k: int | None = None) -> Tensor:
        """(B, E) -> logits (B, V). Only the k largest, and those that tie with the k-th, need to be exact, and the
        others may be -inf; None: all are exact."""
        logits = None
        if not self.skip_shortlist and len(x) == 1 and k is not None and k <= self.max_shortlist:
            logits = self.try_shortlist(x, k)
        self.skip_shortlist = False
        return self.linear(x) if logits is None else logits

    def try_shortlist(self, x: Tensor, k: int) -> Tensor | None:
        """The logits of __call__, exact for a shortlist. None if it is too long, or if this k has no budget left."""
        if self.k != k:
            self.k, self.budget = k, FAILURE_BUDGET
        if self.budget <= 0:
            return None
        self.approximation = self.approximation or Bfloat16Approximation(self.weight)
        logits, shortlist = self.approximation.shortlist(x, k)
        if k <= len(shortlist) <= self.max_shortlist:
            self.budget = min(self.budget + 0.5, FAILURE_BUDGET)
            exact = exact_logits(x, self.weight, shortlist)
            return torch.full_like(logits, -torch.inf).index_copy_(1, shortlist, exact)
        self.budget -= 1
        if self.budget <= 0:
            self.approximation = None # frees its memory
        return None


class Bfloat16Approximation:
    """Weights (V, E) in bfloat16, and a bound on the error of the logits that they give.

    The bound is the Cauchy-Schwarz inequality: |x @ w - x @ (w - dw)| <= |x| |dw|, and the same for an error in x. The
    rows of a trained weight have a large mean in common. It is subtracted before rounding, which makes the errors
    smaller. Its product with x, which is the same for every logit, is added in float32.
    """

    def __init__(self, weight: Tensor):
        self.mean = weight.mean(dim=0) # (E,)
        rounded = torch.empty_like(weight, dtype=torch.bfloat16)
        max_norm = max_error = torch.tensor(UNDERFLOW, dtype=torch.float32)
        for rows, target in zip(weight.split(1024), rounded.split(1024), strict=True):
            rows = rows - self.mean
            target.copy_(rows)
            max_norm = rows.norm(dim=1).max().maximum(max_norm)
            max_error = (rows - target).norm(dim=1).max().maximum(max_error)
        self.linear = EmbeddingBagMatmul(rounded) if bags_are_faster() else PackedLinear(rounded, pack_eagerly=True)
        self.max_norm = max_norm + UNDERFLOW
        # The error of a float32 sum of E products is at most E * 2**-24 times the product of the norms, in any order.
        # There are three such sums: two with rows, one with the mean.
        self.max_error = max_error + UNDERFLOW + weight.size(1) * 2**-22 * (max_norm + self.mean.norm())

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(1, E) -> approximate logits (1, V), and a bound on their error."""
        rounded = x.bfloat16().float()
        logits = self.linear(rounded).float() # the product is rounded to bfloat16 too, which has 8 bits
        error = (self.max_error * (rounded.norm() + UNDERFLOW) + self.max_norm * ((x - rounded).norm() + UNDERFLOW)
                 + 2**-8 * logits.abs().max())
        return logits.add_(x[0] @ self.mean), error

    def shortlist(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(1, E) -> approximate logits (1, V), and the ids (K,) of all tokens that may be among the k largest."""
        logits, error = self(x)
        # The logits are split into groups. The k-th largest maximum of a group is at most the k-th largest logit, and
        # takes less time to find.
        size = min(64, logits.size(1) // (2 * k))
        groups = logits[0, :logits.size(1) // size * size].view(-1, size).amax(dim=1)
        kth = groups.topk(k).values[-1]
        return logits, (logits[0] >= kth - 2 * error).nonzero().squeeze(1)


def exact_logits(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """x (1, E) times the rows ids (K,) of the weight: (1, K). Equal rows give equal logits.

    MKL computes blocks of 16 rows, and sums the remaining rows in another order. Padding to 16 avoids that.
    """
    rows = F.embedding(F.pad(ids, (0, -len(ids) % 16)), weight)
    return (x @ rows.T)[:, :len(ids)]
