"""Linear layers of 8 bits for drafts on Intel processors: quicker than Int8Linear for one token, and less exact."""
import warnings

import torch
from torch import Tensor

from sampling.backends.cpu.int8_linear import MAX_WEIGHT, TINY, Int8Linear, QuantizedWeight, max_digit
from sampling.backends.cpu.packed_linear import is_intel_cpu

MAX_TOKENS = 2 # a draft reads one token at a time, or two after a round in which all its proposals were accepted


class PerTensorInt8Linear(Int8Linear):
    """An Int8Linear that quantizes activations to 8 bits per tensor: all tokens share a scale and a zero point.

    A single operator of FBGEMM does all of it, in half the time. The target checks what a draft proposes, so its last
    bits do not matter. The first token of a prompt often has much larger activations than others, so those of a
    prompt are scaled first. Raises AttributeError or RuntimeError if torch lacks the operator.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None):
        values, scales, zero_points = *weight, torch.zeros(len(weight.scales), dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore") # torch plans to remove the operators
            quantized = torch._make_per_channel_quantized_tensor(values, scales.double(), zero_points, 0)
            self.packed = torch.ops.quantized.linear_prepack(quantized, None)
        self.bias = None if bias is None else bias.detach()

    def multiply(self, x: Tensor) -> Tensor:
        """See Int8Linear.multiply."""
        if len(x) <= MAX_TOKENS:
            y = torch.ops.quantized.linear_dynamic(x, self.packed)
        else:
            scale = x.abs().amax(-1, keepdim=True).add_(TINY)
            y = torch.ops.quantized.linear_dynamic(x / scale, self.packed).mul_(scale)
        return y if self.bias is None else y.add_(self.bias)


def draft_int8_linear(weight: QuantizedWeight, bias: Tensor | None = None) -> Int8Linear:
    """A PerTensorInt8Linear on an Intel processor where its sums do not saturate; otherwise an Int8Linear."""
    if is_intel_cpu() and max_digit() == MAX_WEIGHT:
        try:
            return PerTensorInt8Linear(weight, bias)
        except (AttributeError, RuntimeError): # the operators are missing
            pass
    return Int8Linear(weight, bias)
