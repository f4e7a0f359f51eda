"""Linear layers with weights in 8 bits, which a CPU reads in a quarter of the time.

Weights are quantized per output channel, activations per token: each has a scale. The activations of a token become
two digits of 8 bits, and both digits share one product. With few tokens, that takes hardly longer than one digit,
because the product waits for the weights. So activations have 16 bits, and the weights alone decide the error, even if
a few channels are a hundred times larger than the others. No token changes the result of another.

The operators are oneDNN's. Inductor uses the same ones for quantized models.
"""
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sampling.checkpoints.mapped_memory import pages_of, release_pages

MAX_WEIGHT = 127 # weights are whole numbers from -127 to 127
MAX_WEIGHTS = 2**17 # rounded at once, so that little memory is needed and left behind
MAX_ACTIVATIONS = 2**20 # split into digits at once: more do not stay in the processor's cache
TINY = 2.0**-100 # added to scales, so that a row of zeros is not divided by zero


class QuantizedWeight(NamedTuple):
    """A weight in 8 bits: values[i] * scales[i] is its row i, the weights of output channel i."""
    values: Tensor # (out, in), int8
    scales: Tensor # (out,), float32


def quantize_weight(weight: Tensor) -> QuantizedWeight:
    """Round a weight (out, in) of any floating point dtype to 8 bits, per output channel.

    The memory of a weight that is mapped from a file is released part by part, so that it is never all in memory.
    """
    values, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight), dtype=torch.float32)
    pages, size = pages_of([weight]), max(1, MAX_WEIGHTS // weight.size(1))
    weight = weight.detach().contiguous() # Hugging Face's are transposed: each part would read all pages again
    parts = zip(weight.split(size), values.split(size), scales.split(size), strict=True)
    for part, part_values, part_scales in parts:
        part = part.float()
        part_scales.copy_(part.abs().amax(dim=1)).div_(MAX_WEIGHT).add_(TINY)
        part_values.copy_((part / part_scales[:, None]).round_())
        release_pages(pages)
    return QuantizedWeight(values, scales)


class Int8Embedding:
    """Token ids (...) -> embeddings (..., E) in float32."""

    def __init__(self, weight: QuantizedWeight):
        self.weight = weight

    def __call__(self, idx: Tensor) -> Tensor:
        """See Int8Embedding."""
        return self.weight.values[idx] * self.weight.scales[idx].unsqueeze(-1)


class Int8Product:
    """The product with a weight in 8 bits. Raises AttributeError or RuntimeError if torch or the processor lacks it."""

    def __init__(self, weight: QuantizedWeight):
        self.scales, self.zero_points = weight.scales, torch.zeros(len(weight.scales), dtype=torch.int32)
        self.multiply = torch.ops.onednn.qlinear_pointwise
        self.packed = torch.ops.onednn.qlinear_prepack(weight.values, None)

    def __call__(self, digits: Tensor, zero_point: int) -> Tensor:
        """Digits (N, in), uint8, which stand for digits - zero_point -> their products (N, out), float32."""
        return self.multiply(digits, 1.0, zero_point, self.packed, self.scales, self.zero_points,
                             None, 1.0, 0, torch.float32, "none", [], "") # no bias, no other operation


class Int8Linear:
    """A LinearLayer with a weight in 8 bits. Inputs, results, bias and residual are float32."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None):
        self.product = Int8Product(weight)
        self.max_digit = max_digit()
        self.bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor, residual: Tensor | None = None, gelu: str | None = None) -> Tensor:
        """See LinearLayer."""
        rows = x.flatten(0, -2)
        size = max(1, MAX_ACTIVATIONS // rows.size(1))
        y = self.multiply(rows) if len(rows) <= size else torch.cat([self.multiply(part) for part in rows.split(size)])
        y = y.view(*x.shape[:-1], -1)
        y = F.gelu(y, approximate=gelu) if gelu else y
        return y if residual is None else residual + y

    def multiply(self, x: Tensor) -> Tensor:
        """(N, in) -> (N, out): the product with the weight, plus the bias."""
        digits, scale = split_digits(x, self.max_digit)
        high, low = self.product(digits, self.max_digit + 1).chunk(2)
        y = torch.add(high, low, alpha=1 / (2 * self.max_digit))
        return y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale)


def split_digits(x: Tensor, max_digit: int) -> tuple[Tensor, Tensor]:
    """Split each row of x (N, in) into scale * (high + low / (2 * max_digit)), with digits up to +-max_digit.

    Returns the digits (2 * N, in), first high, then low, with max_digit + 1 added, as uint8; and the scales (N, 1).
    """
    scale = torch.add(scalar(TINY), x.abs().amax(-1, keepdim=True), alpha=1 / max_digit)
    digits = torch.empty((2 * len(x), x.size(1)), dtype=torch.uint8)
    high, low = digits.chunk(2)
    x = torch.addcdiv(scalar(max_digit + 1.5), x, scale)
    high.copy_(x) # the conversion truncates, so this rounds: a half was added
    low.copy_(torch.add(scalar(1.5), x.frac_(), alpha=2 * max_digit))
    return digits, scale


@cache
def scalar(value: float) -> Tensor:
    """The value as a tensor, which operators that do two operations at once require."""
    return torch.tensor(value, dtype=torch.float32)


@cache
def max_digit() -> int:
    """The largest digit whose products are exact here: 127, or 63 without VNNI, where sums of two products saturate.

    Raises ValueError if torch and the processor have no such products.
    """
    signs = torch.ones(16, 64, dtype=torch.int8)
    signs[::2] = -1
    try:
        product = Int8Product(QuantizedWeight(MAX_WEIGHT * signs, torch.ones(16, dtype=torch.float32)))
        for digit in 127, 63:
            digits = torch.tensor([digit, -digit, digit], dtype=torch.float32)[:, None].expand(3, 64)
            expected = digits @ (MAX_WEIGHT * signs).T.float()
            if torch.equal(product((digits + digit + 1).to(torch.uint8), digit + 1), expected):
                return digit
    except (AttributeError, RuntimeError): # the operators are missing
        pass
    raise ValueError("dtype=int8 does not work with this torch on this processor: use dtype=float32")
