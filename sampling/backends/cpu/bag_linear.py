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
    pack_eagerly, at the first one. Then an unpacked PackedLinear, which has served only a prompt, gives up its weight.
    For another prompt, it is made again from the table. So only a run of several prompts or batches has the weight in
    memory twice.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack_eagerly: bool = False):
        self.packed_linear: PackedLinear | None = PackedLinear(weight, bias, pack_eagerly)
        self.bag_matmul: EmbeddingBagMatmul | None = None # there is always at least one of the two
        self.bias, self.min_single_rows = bias, 1 if pack_eagerly else 3
        self.num_single_rows = 0 # in succession

    def __call__(self, x: Tensor, residual: Tensor | None = None, gelu: str | None = None) -> Tensor:
        """See LinearLayer."""
        self.num_single_rows = self.num_single_rows + 1 if num_rows(x) == 1 else 0
        if self.bag_matmul is None and self.num_single_rows >= self.min_single_rows and not torch.jit.is_tracing():
            self.make_table()
        if self.bag_matmul is None or num_rows(x) > 1:
            self.packed_linear = self.packed_linear or PackedLinear(self.bag_matmul.weight(), self.bias)
            return self.packed_linear(x, residual, gelu)
        y = self.bag_matmul(x.flatten(0, -2)).view(*x.shape[:-1], -1)
        y = y if self.bias is None else y + self.bias
        y = F.gelu(y, approximate=gelu) if gelu else y
        return y if residual is None else residual + y

    def make_table(self) -> None:
        """Make the table of the bags. Keep the PackedLinear if it is packed: then batches use it."""
        self.bag_matmul = EmbeddingBagMatmul(self.packed_linear.plain_weight())
        if self.packed_linear.packed is None:
            self.packed_linear = None
