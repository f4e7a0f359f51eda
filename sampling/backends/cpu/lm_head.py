"""The head of a GPT on a CPU. If only the k largest logits count, most of its weight is read in half the bytes.

With a single row, a product takes as long as reading its weight, and the head holds a third of GPT-2's weights. So a
bfloat16 copy gives approximate logits with an error bound. Only the tokens whose logits may be among the k largest,
the shortlist, get exact float32 logits.
"""
import torch
from torch import Tensor
from torch.nn import functional as F

from sampling.backends.cpu.packed_linear import PackedLinear, is_supported
from sampling.sampler.sample_token import Logits

MIN_PARAMS = 2**23 # a smaller weight stays in the processor's cache
MIN_WIDTH = 256 # in a narrower head, the work for each token takes longer than reading its row
MAX_SHORTLIST_FRACTION = 1 / 16 # a longer shortlist is not worth reading its rows twice
FAILURE_BUDGET = 16 # -1 a miss, +0.5 a hit; at 0 the shortlist is disabled
TINY = 2**-50 # float32 may lose this much of a norm whose square underflows


class ShortlistLMHead:
    """lm_head: (B, E) -> Logits.

    weight_is_shared: whether the embedding keeps the weight in memory anyway.
    """

    def __init__(self, weight: Tensor, weight_is_shared: bool, pack_eagerly: bool = False):
        self.linear = PackedLinear(weight, pack_eagerly=pack_eagerly)
        is_large = weight.numel() >= MIN_PARAMS and weight.size(1) >= MIN_WIDTH
        self.max_shortlist = 0 # tokens; 0: no shortlist is tried
        if weight_is_shared and weight.dtype == torch.float32 and is_large and is_supported(torch.bfloat16):
            self.max_shortlist = int(len(weight) * MAX_SHORTLIST_FRACTION)
        self.weight = weight.detach() if self.max_shortlist else None
        self.approximation: Bfloat16Approximation | None = None # made at its first use
        self.k, self.budget = None, FAILURE_BUDGET
        self.ready = pack_eagerly # the first token does not wait until the bfloat16 copy is made

    def __call__(self, x: Tensor, k: int | None = None) -> Logits:
        """(B, E) -> Logits (B, V). k: how many of the largest are needed, and all that tie with the last of them;
        None: all of them."""
        if k and 0 < k <= self.max_shortlist and len(x) == 1 and self.ready and self.worth_trying(k):
            self.approximation = self.approximation or Bfloat16Approximation(self.weight)
            logits, shortlist = self.approximation.shortlist(x, k)
            if k <= len(shortlist) <= self.max_shortlist:
                self.budget = min(self.budget + 0.5, FAILURE_BUDGET)
                logits[:, shortlist] = exact_logits(x, self.weight, shortlist)
                return Logits(logits, shortlist)
            self.budget -= 1
        self.ready = True
        return Logits(self.linear(x))

    def worth_trying(self, k: int) -> bool:
        """Whether the failure budget for this k is not used up."""
        if self.k != k:
            self.k, self.budget = k, FAILURE_BUDGET
        if self.budget <= 0:
            self.approximation = None # frees its memory
        return self.budget > 0


class Bfloat16Approximation:
    """Weights (V, E) in bfloat16, and a bound on the error of the logits that they give.

    Cauchy and Schwarz: |x @ w - x @ (w - dw)| <= |x| |dw|, and the same for an error in x. The rows of a trained weight
    have most of their length in common. This mean adds the same to every logit, so it is left out of the rounded
    weights and added in float32.
    """

    def __init__(self, weight: Tensor):
        self.mean = weight.mean(dim=0) # (E,)
        rounded = torch.empty_like(weight, dtype=torch.bfloat16)
        max_norm = max_error = torch.tensor(TINY)
        for rows, target in zip(weight.split(1024), rounded.split(1024), strict=True):
            rows = rows - self.mean
            target.copy_(rows)
            max_norm = rows.norm(dim=1).max().maximum(max_norm)
            max_error = (rows - target).norm(dim=1).max().maximum(max_error)
        self.linear = PackedLinear(rounded, pack_eagerly=True)
        self.max_norm = max_norm + TINY
        # A float32 sum of E products loses at most E * 2**-24, in any order. Three sums are made: two with rows, one
        # with the mean.
        self.max_error = max_error + TINY + weight.size(1) * 2**-22 * (max_norm + self.mean.norm())

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(1, E) -> approximate logits (1, V), and how far each may be from the exact one."""
        rounded = x.bfloat16().float()
        logits = self.linear(rounded).float() # the product is rounded to bfloat16 too, which has 8 bits
        error = (self.max_error * (rounded.norm() + TINY) + self.max_norm * ((x - rounded).norm() + TINY)
                 + 2**-8 * logits.abs().max())
        return logits.add_(x[0] @ self.mean), error

    def shortlist(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(1, E) -> approximate logits (1, V), and the ids (K,) of all tokens that may be among the k largest."""
        logits, error = self(x)
        # The k-th largest maximum of groups is at most the k-th largest logit, and takes less time to find.
        size = min(64, logits.size(1) // (2 * k))
        groups = logits[0, :logits.size(1) // size * size].view(-1, size).amax(dim=1)
        kth = groups.topk(k).values[-1]
        return logits, (logits[0] >= kth - 2 * error).nonzero().squeeze(1)


def exact_logits(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """x (1, E) times the rows ids (K,) of the weight: (1, K). Equal rows give equal logits.

    MKL computes blocks of 16 rows, and sums the rows that are left over in another order. Padding avoids that.
    """
    rows = F.embedding(F.pad(ids, (0, -len(ids) % 16)), weight)
    return (x @ rows.T)[:, :len(ids)]
