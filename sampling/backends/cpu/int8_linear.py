"""Linear layers with weights in 8 bits, which a CPU reads in a quarter of the time.

Each row of a weight has a scale of its own. Each row of activations too, and it becomes two digits of 8 bits: the rows
of both digits share one product. For few rows, it takes hardly longer than one digit: it waits for the weights. So
activations have 16 bits, and the weights alone decide the error, even if a few channels are a hundred times larger than
the others. No row changes the result of another.

FBGEMM multiplies on Intel processors, oneDNN on others: each is the faster one there.
"""
import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sampling.backends.cpu.packed_linear import is_intel_cpu
from sampling.checkpoints.mapped_memory import pages_of, release_pages

MAX_WEIGHT = 127 # weights are whole numbers from -127 to 127
MAX_WEIGHTS = 2**17 # rounded at once, so that little memory is needed and left behind
MAX_ACTIVATIONS = 2**20 # split into digits at once: more do not stay in the processor's cache
TINY = torch.tensor(2.0**-100, dtype=torch.float32) # added to scales, so that a row of zeros is not divided by zero

# Whole numbers (N, in) as float32 -> their products with a weight, times its scales: (N, out), float32
Product = Callable[[Tensor], Tensor]


class Int8Rows(NamedTuple):
    """A matrix in 8 bits: values[i] * scales[i] is its row i."""
    values: Tensor # (out, in), int8
    scales: Tensor # (out,), float32


def round_rows(weight: Tensor) -> Int8Rows:
    """Round a weight (out, in) of any floating point dtype to 8 bits.

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
    return Int8Rows(values, scales)


class Int8Embedding:
    """Token ids (...) -> embeddings (..., E) in float32."""

    def __init__(self, rows: Int8Rows):
        self.rows = rows

    def __call__(self, idx: Tensor) -> Tensor:
        """See Int8Embedding."""
        return self.rows.values[idx] * self.rows.scales[idx].unsqueeze(-1)


class Int8Linear:
    """A LinearLayer with a weight in 8 bits. Inputs, results, bias and residual are float32."""

    def __init__(self, rows: Int8Rows, bias: Tensor | None = None):
        self.product = make_product(rows)
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
        high, low = self.product(digits).view(2, len(x), -1).unbind()
        y = torch.add(high, low, alpha=1 / (2 * self.max_digit))
        return y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale)


def split_digits(x: Tensor, max_digit: int) -> tuple[Tensor, Tensor]:
    """Split each row of x (N, in) into a scale times (high + low / (2 * max_digit)).

    Returns the digits (2 * N, in), first high, then low, and the scales (N, 1). Digits are from -max_digit to
    max_digit. High digits are whole numbers; a Product rounds the low ones.
    """
    scale = torch.add(TINY, x.abs().amax(-1, keepdim=True), alpha=1 / max_digit)
    x = x / scale
    high = x.round()
    return torch.cat((high, x.sub_(high).mul_(2 * max_digit))), scale


# ---- the products

def make_product(rows: Int8Rows) -> Product:
    """The Product with these weights. The choice depends only on the processor, so that a machine repeats its text."""
    return FBGEMMProduct(rows, max_digit()) if is_intel_cpu() else OneDNNProduct(rows, max_digit())


class FBGEMMProduct:
    """The Product of FBGEMM. Raises AttributeError or RuntimeError if torch lacks it."""

    def __init__(self, rows: Int8Rows, max_digit: int):
        self.zero_point, zero_points = max_digit + 1, torch.zeros(len(rows.scales), dtype=torch.long)
        self.multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore") # torch plans to remove these operators; then max_digit raises the error
            weight = torch._make_per_channel_quantized_tensor(rows.values, rows.scales.double(), zero_points, 0)
            self.packed = torch.ops.quantized.linear_prepack(weight, None)

    def __call__(self, digits: Tensor) -> Tensor:
        """See Product."""
        return self.multiply(digits, 1.0, self.zero_point, self.packed)


class OneDNNProduct:
    """The Product of oneDNN. Raises AttributeError or RuntimeError if torch lacks it."""

    def __init__(self, rows: Int8Rows, max_digit: int):
        self.zero_point, self.scales = max_digit + 1, rows.scales
        self.zero_points = torch.zeros(len(rows.scales), dtype=torch.int32)
        self.multiply = torch.ops.onednn.qlinear_pointwise
        self.packed = torch.ops.onednn.qlinear_prepack(rows.values, None)

    def __call__(self, digits: Tensor) -> Tensor:
        """See Product."""
        digits = digits.add(self.zero_point + 0.5).to(torch.uint8) # the conversion truncates, so this rounds
        return self.multiply(digits, 1.0, self.zero_point, self.packed, self.scales, self.zero_points,
                             None, 1.0, 0, torch.float32, "none", [], "") # no bias; float32; no other operation


@cache
def max_digit() -> int:
    """The largest digit whose products are exact here: 127, or 63 without VNNI, where sums of two products saturate.

    Raises ValueError if torch and the processor have no such products.
    """
    signs = torch.ones(16, 64, dtype=torch.int8)
    signs[::2] = -1
    rows = Int8Rows(MAX_WEIGHT * signs, torch.ones(16, dtype=torch.float32))
    make = FBGEMMProduct if is_intel_cpu() else OneDNNProduct
    try:
        for digit in 127, 63:
            digits = torch.full((3, 64), digit, dtype=torch.float32)
            digits[1] *= -1
            if torch.equal(make(rows, digit)(digits), digits @ rows.values.T.float()):
                return digit
    except (AttributeError, RuntimeError): # the operators are missing
        pass
    raise ValueError("dtype=int8 does not work with this torch on this processor: use dtype=float32")
