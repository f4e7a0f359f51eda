"""Linear layers for AMD processors, on which embedding bags multiply a single row fastest."""
import torch
from torch import Tensor
from torch.nn import functional as F

from sampling.backends.cpu.embedding_bag import EmbeddingBagMatmul
from sampling.backends.cpu.packed_linear import NARROW, LinearLayer, PackedLinear, bags_are_faster, num_rows


def make_linear(weight: Tensor, bias: Tensor | None = None, pack_eagerly: bool = False) -> LinearLayer:
    """The fastest layer for this weight on this processor."""
    layer = BagLinear if min(weight.shape) >= NARROW and bags_are_faster() else PackedLinear
    return layer(weight, bias, pack_eagerly)


class BagLinear:
    """A LinearLayer that multiplies a single row with embedding bags, and several with a PackedLinear.

    It makes the table of the bags at the third single row in succession, so that the first token does not wait; with
    pack_eagerly, at the first one. The weight is in memory twice at most.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack_eagerly: bool = False):
        self.several_rows = PackedLinear(weight, bias, pack_eagerly)
        self.weight: Tensor | None = weight.detach() # None once the table is made
        self.matmul: EmbeddingBagMatmul | None = None
        self.bias, self.min_single_rows = bias, 1 if pack_eagerly else 3
        self.num_single_rows = 0 # in succession

    def __call__(self, x: Tensor, residual: Tensor | None = None, gelu: str | None = None) -> Tensor:
        """See LinearLayer."""
        self.num_single_rows = self.num_single_rows + 1 if num_rows(x) == 1 else 0
        if self.matmul is None and self.num_single_rows >= self.min_single_rows and not torch.jit.is_tracing():
            self.matmul, self.weight = EmbeddingBagMatmul(self.weight), None
        if self.matmul is None or num_rows(x) > 1:
            return self.several_rows(x, residual, gelu)
        y = self.matmul(x.flatten(0, -2)).view(*x.shape[:-1], -1)
        y = y if self.bias is None else y + self.bias
        y = F.gelu(y, approximate=gelu) if gelu else y
        return y if residual is None else residual + y
