"""Exact products of activations with int8 weights: Int8BagMatmul for few tokens, TwoDigitMatmul for many.

The weights are whole numbers from -127 to 127. Activations become whole numbers too, as large as they can be if all
sums of products must stay below 2**24. float32 adds such numbers exactly, in any order. So both classes have the same
results to the last bit.
"""
import math
from functools import cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from sampling.backends.cpu.embedding_bag import BagLayout, bag_indices

MAX_WEIGHT = 127
MAX_SUM = 2**24 - 2**16 # float32 has all whole numbers up to 2**24; the rest is for the rounding of norms
NUM_STREAMS = 4 # see interleaved_channels


def max_norm(values: Tensor) -> float:
    """The largest norm of a row of activations, before rounding, for which every product with values is exact.

    A product is exact if its partial sums stay below MAX_SUM. By the Cauchy-Schwarz inequality, a partial sum is at
    most the norm of the activations times the norm of a row of values. Int8BagMatmul adds each term in two steps,
    first with -128 and then with the weight + 128. Between them, the sum is off by 128 times one activation, which is
    at most 128 times the norm: hence the 128 below. Rounding changes each activation by at most 1/2.

    TwoDigitMatmul needs no other bound. Its low digits are not larger than the activations. base times its high digits
    is at most twice as large, but the sums of these are multiples of base, so float32 has them exactly. split_digits
    sets the second limit: no activation is larger than the norm.
    """
    largest = max(rows.float().norm(dim=1).max().item() for rows in values.split(1024)) # few rows need little memory
    return min(MAX_SUM / (largest + 128) - math.sqrt(values.size(1)) / 2, max_activation(onednn_limits().base))


def max_bag_width() -> int:
    """How many sums fit in the processor's registers: 16 in each of 24 with AVX512, and 8 in each of 12 without."""
    return 384 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 96


def max_bag_tokens() -> int:
    """The number of tokens up to which Int8BagMatmul is at least as fast as TwoDigitMatmul.

    Without VNNI, oneDNN is slow for few tokens.
    """
    return 10 if onednn_limits().base < 256 else 1


class Int8BagMatmul:
    """The product of few tokens with a weight (out, in) of whole numbers: FBGEMM's embedding bag for 8-bit tables.

    Of torch's operators for 8 bits, it reads memory fastest, and it does not round the activations.
    """

    def __init__(self, values: Tensor):
        self.layout = BagLayout.of(values, max_bag_width(), NUM_STREAMS)
        width = self.layout.width
        self.table = torch.zeros(self.layout.num_parts * self.layout.in_features, width + 8, dtype=torch.uint8)
        self.layout.fill(self.table[:, :width].view(torch.int8), values)
        self.table[:, :width].bitwise_xor_(128) # adds 128
        self.table[:, width:] = torch.tensor([1.0, -128.0], dtype=torch.float32).view(torch.uint8) # scale and offset

    def __call__(self, x: Tensor, scale: Tensor) -> Tensor:
        """x (N, in) divided by scale (N, 1) and rounded, times the weight -> (N, out)."""
        indices, starts = bag_indices(self.layout, num_tokens=len(x))
        weights = self.layout.bag_weights((x / scale).round_())
        return self.layout.outputs(torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            self.table, indices, starts, per_sample_weights=weights))

    def values(self) -> Tensor:
        """The weight (out, in), int8."""
        return self.layout.weight_of(self.table[:, :-8]).bitwise_xor_(128).view(torch.int8)


class TwoDigitMatmul:
    """The product of many tokens with a weight (out, in) of whole numbers: oneDNN's, which Inductor uses too.

    It takes activations of 8 bits. So each activation becomes two digits, and both digits share one product. With few
    tokens, that takes hardly longer than one digit, because the product waits for the weights.
    """

    def __init__(self, values: Tensor):
        self.limits = onednn_limits()
        self.matmuls = [OneDNNMatmul(part.contiguous()) for part in values.split(self.limits.max_inputs, dim=1)]

    def __call__(self, x: Tensor, scale: Tensor) -> Tensor:
        """x (N, in) divided by scale (N, 1) and rounded, times the weight -> (N, out)."""
        base, max_inputs = self.limits
        digits = split_digits((x / scale).round_(), base).split(max_inputs, dim=1)
        sums = (matmul(part, base // 2) for matmul, part in zip(self.matmuls, digits, strict=True))
        high, low = reduce(torch.add, sums).chunk(2)
        return torch.add(low, high, alpha=base)


def split_digits(x: Tensor, base: int) -> Tensor:
    """Split whole numbers x (N, in) into high * base + low. Returns the digits plus base / 2, as uint8: (2 * N, in),
    first high, then low. Overwrites x."""
    digits = torch.empty((2 * len(x), x.size(1)), dtype=torch.uint8)
    high, low = digits.chunk(2)
    x = x.div_(base).add_((base + 1) / 2) # exact, because base is a power of two
    high.copy_(x) # the conversion drops the fraction
    low.copy_(x.frac_().mul_(base))
    return digits


def max_activation(base: int) -> int:
    """The largest whole number that split_digits can split."""
    return base * base // 2 - base // 2 - 1


class OneDNNMatmul:
    """The product with an int8 weight (out, in). Raises AttributeError or RuntimeError if it is not available."""

    def __init__(self, values: Tensor):
        self.packed = torch.ops.onednn.qlinear_prepack(values, None)
        self.ones = torch.ones(len(values), dtype=torch.float32)
        self.zeros = torch.zeros(len(values), dtype=torch.int32)

    def __call__(self, digits: Tensor, zero_point: int) -> Tensor:
        """Digits (N, in), uint8, which stand for digits - zero_point -> their products (N, out), float32."""
        return qlinear(digits.contiguous(), zero_point, self.packed, self.ones, self.zeros)


@torch.jit.script_if_tracing # torch.jit.trace does not support the operator's empty list
def qlinear(digits: Tensor, zero_point: int, packed: Tensor, ones: Tensor, zeros: Tensor) -> Tensor:
    """oneDNN's product with a packed weight, without a bias or another operation."""
    return torch.ops.onednn.qlinear_pointwise(digits, 1.0, zero_point, packed, ones, zeros, None, 1.0, 0, torch.float32,
                                              "none", [], "")


class OneDNNLimits(NamedTuple):
    """What oneDNN multiplies exactly here: digits below base, with weights of at most max_inputs input channels."""
    base: int
    max_inputs: int


@cache
def onednn_limits() -> OneDNNLimits:
    """The limits of this processor. Raises ValueError if torch and the processor have no such products.

    2**20 inputs are more than any model has. Without VNNI, sums of two products saturate. With AMX, a sum becomes
    float32 before the share of the zero point is subtracted, so it must be below 2**24 even then.
    """
    try:
        for base, max_inputs in (256, 2**20), (256, 512), (128, 2**20), (128, 512):
            weight = torch.full((64, min(max_inputs, 4097)), MAX_WEIGHT, dtype=torch.int8)
            digits = torch.tensor(16 * [0, base - 1, base // 2 + 1], dtype=torch.uint8)[:, None]
            digits = digits.expand(-1, weight.size(1)) # 4097 of them have sums above 2**24 that float32 must round
            expected = (digits.double() - base // 2) @ weight.T.double()
            if torch.equal(OneDNNMatmul(weight)(digits, base // 2), expected.float()):
                return OneDNNLimits(base, max_inputs)
    except (AttributeError, RuntimeError): # the operators are missing
        pass
    raise ValueError("int8 does not work with this torch on this processor: use dtype=float32, without draft=int8")
