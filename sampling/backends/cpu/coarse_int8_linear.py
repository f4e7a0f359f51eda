"""Linear layers of 8 bits for drafts: quicker than Int8Linear for one token, and less exact."""
import torch
from torch import Tensor

from sampling.backends.cpu.int8_linear import MAX_WEIGHT, Int8Linear, Int8Rows, max_digit
from sampling.backends.cpu.packed_linear import is_intel_cpu

MAX_ROWS = 2 # a draft reads one token at a time, or two after a round in which all its proposals were accepted


class CoarseInt8Linear(Int8Linear):
    """An Int8Linear that rounds the activations of one or two rows to 8 bits. They share a scale and a zero point.

    A single operator does all of it, in half the time. The target checks what a draft proposes, so its last bits do
    not matter. A prompt, whose first token often has much larger activations than others, is read as by Int8Linear.
    """

    def multiply(self, x: Tensor) -> Tensor:
        """See Int8Linear.multiply."""
        if len(x) > MAX_ROWS:
            return super().multiply(x)
        y = torch.ops.quantized.linear_dynamic(x, self.product.packed)
        return y if self.bias is None else y.add_(self.bias)


def coarse_int8_linear(rows: Int8Rows, bias: Tensor | None = None) -> Int8Linear:
    """A CoarseInt8Linear where FBGEMM is used and does not saturate, otherwise an Int8Linear."""
    saturates = max_digit() < MAX_WEIGHT
    return Int8Linear(rows, bias) if saturates or not is_intel_cpu() else CoarseInt8Linear(rows, bias)
