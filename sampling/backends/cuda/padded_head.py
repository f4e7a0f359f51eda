"""A head with a padded vocabulary, for half precision on a GPU."""
import torch
from torch import Tensor, nn
from torch.nn import functional as F

MULTIPLE = 64 # GPUs multiply half-precision matrices of other sizes more slowly; GPT-2's vocabulary is 50257


class PaddedHead(nn.Module):
    """Computes the logits of head, a Linear without bias. Rows of zeros make the size of its weight a multiple."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.vocab_size = len(head.weight)
        padded = F.pad(head.weight.detach(), (0, 0, 0, -self.vocab_size % MULTIPLE)) # (V, E) -> (padded V, E)
        self.weight = nn.Parameter(padded, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., V)."""
        return F.linear(x, self.weight)[..., :self.vocab_size]


def needs_padding(head: nn.Linear) -> bool:
    """Whether a PaddedHead may be faster than this head."""
    return head.weight.dtype != torch.float32 and len(head.weight) % MULTIPLE != 0
