"""Exact products of activations with int8 weights: EmbeddingBagMatmul for a few tokens, TwoDigitMatmul for many.

The weights are whole numbers from -127 to 127. Activations become whole numbers too, as large as they can be if all
sums of products must stay below 2**24. float32 adds such numbers exactly, in any order. So both classes have the same
results to the last bit.
"""
import math
from functools import cache, lru_cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor

MAX_WEIGHT = 127
MAX_SUM = 2**24 - 2**16 # float32 has all whole numbers up to 2**24; the rest is for the rounding of norms
NUM_STREAMS = 4 # a thread reads a part of the table at so many places in turn: see interleaved_channels


def max_norm(values: Tensor) -> float:
    """The largest norm of a row of activations, before rounding, for which every product with values is exact.

    A product is exact if its partial sums stay below MAX_SUM. By the Cauchy-Schwarz inequality, a partial sum is at
    most the norm of the activations times the norm of a row of values. EmbeddingBagMatmul adds each term in two steps,
    first with -128 and then with the weight + 128. Between them, the sum is off by 128 times one activation, which is
    at most 128 times the norm: hence the 128 below. Rounding changes each activation by at most 1/2.

    TwoDigitMatmul needs no other bound. Its low digits are not larger than the activations. base times its high digits
    is at most twice as large, but the sums of these are multiples of base, so float32 has them exactly. split_digits
    sets the second limit: no activation is larger than the norm.
    """
    largest = max(rows.float().norm(dim=1).max().item() for rows in values.split(1024)) # few rows need little memory
    return min(MAX_SUM / (largest + 128) - math.sqrt(values.size(1)) / 2, max_activation(onednn_limits().base))


def has_fbgemm() -> bool:
    """Whether torch was built with FBGEMM. Without it, EmbeddingBagMatmul is slow."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def max_bag_width() -> int:
    """How many sums fit in the processor's registers: 16 in each of 24 with AVX512, and 8 in each of 12 without."""
    return 384 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 96


def max_bag_tokens() -> int:
    """The number of tokens up to which EmbeddingBagMatmul is at least as fast as TwoDigitMatmul.

    Without VNNI, oneDNN is slow for few tokens.
    """
    return 10 if onednn_limits().base < 256 else 1


class EmbeddingBagMatmul:
    """The product of few tokens with a weight (out, in) of whole numbers: FBGEMM's embedding bag.

    An embedding bag is a weighted sum of rows of an 8-bit table. Here, a row of the table holds the weights of one
    input channel, and the weights of the sum are the activations. Of torch's operators for 8 bits, it reads memory
    fastest, and it does not round the activations. A part of the table holds up to max_bag_width() output channels. Its
    rows are in the order of interleaved_channels. Each part has a bag for each token. Threads share the parts equally.
    """

    def __init__(self, values: Tensor):
        self.out_features, self.in_features = values.shape
        num_threads = torch.get_num_threads()
        self.num_parts = num_threads * math.ceil(self.out_features / (num_threads * max_bag_width()))
        width = math.ceil(self.out_features / self.num_parts)
        self.table = torch.zeros(self.num_parts * self.in_features, width + 8, dtype=torch.uint8)
        order = interleaved_channels(self.in_features)
        for rows, part in zip(self.table.split(self.in_features), values.split(width), strict=False):
            rows[:, :len(part)] = part.T[order].view(torch.uint8) ^ 128 # adds 128
        self.table[:, width:] = torch.tensor([1.0, -128.0], dtype=torch.float32).view(torch.uint8) # scale and offset

    def __call__(self, x: Tensor, scale: Tensor) -> Tensor:
        """x (N, in) divided by scale (N, 1) and rounded, times the weight -> (N, out)."""
        N = len(x)
        x = (x / scale).round_().expand(self.num_parts, -1, -1)
        indices, starts = bag_indices(self.num_parts, N, self.in_features)
        y = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            self.table, indices, starts, per_sample_weights=x.reshape(-1)) # (parts * N, width)
        return y.view(self.num_parts, N, -1).transpose(0, 1).flatten(1)[:, :self.out_features]

    def values(self) -> Tensor:
        """The weight (out, in), int8."""
        values = torch.empty(self.num_parts, self.table.size(1) - 8, self.in_features, dtype=torch.uint8)
        order = interleaved_channels(self.in_features).argsort()
        for rows, part in zip(self.table.split(self.in_features), values, strict=True): # little memory: part by part
            part.copy_(rows[order, :-8].T)
        return values.flatten(0, 1)[:self.out_features].bitwise_xor_(128).view(torch.int8)


@lru_cache(maxsize=16) # few, because those of a large head for ten tokens need 30 MB
def bag_indices(num_parts: int, num_tokens: int, in_features: int) -> tuple[Tensor, Tensor]:
    """The rows of each bag in the order of the channels, and where the bags start. All layers of a shape share them.

    The bags of a part follow each other, so that memory is read once for all tokens.
    """
    first_rows = torch.arange(0, num_parts * in_features, in_features).repeat_interleave(num_tokens) # of each bag
    indices = first_rows[:, None] + interleaved_channels(in_features).argsort()
    return indices.int().flatten(), torch.arange(0, indices.numel(), in_features, dtype=torch.int32)


@cache
def interleaved_channels(in_features: int) -> Tensor:
    """The input channels in the order of their rows in memory, such as 0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11.

    A bag adds the rows of channels 0, 1, 2, 3, ... So its thread reads at NUM_STREAMS places in turn. The prefetcher of
    a core follows each of them, which keeps more requests in flight: it reads memory up to 1.7 times as fast.
    """
    return torch.cat([torch.arange(first, in_features, NUM_STREAMS) for first in range(NUM_STREAMS)])


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
    raise ValueError("dtype=int8 does not work with this torch on this processor: use dtype=float32")
