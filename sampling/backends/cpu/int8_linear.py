"""Linear layers with int8 weights, which a CPU reads in a quarter of the time.

Weights are quantized to 8 bits per output channel, and activations to 9 to 15 bits per token: each channel and each
token has a scale. So nearly all of the error comes from the weights, even if a few channels are a hundred times larger
than the others. Products are exact, so the tokens of a batch do not change each other's results.
"""
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sampling.backends.cpu.embedding_bag import has_fbgemm
from sampling.backends.cpu.int8_matmul import MAX_WEIGHT, Int8BagMatmul, TwoDigitMatmul, max_bag_tokens, max_norm
from sampling.checkpoints.mapped_memory import pages_of, release_pages

WEIGHTS_PER_CHUNK = 2**18 # quantized at once, so that their float32 copies need little memory
ACTIVATIONS_PER_CHUNK = 2**20 # multiplied at once: more do not fit in the processor's cache
MAX_SERIAL_GELU = 2**14 # elements: torch's GELU uses several threads for a larger tensor
# On an AMD EPYC, making a TwoDigitMatmul takes as long as multiplying about 200 tokens with an Int8BagMatmul.
MIN_TOKENS_ONCE = 128 # a product of this many tokens makes it; with fewer tokens, the third product does
MIN_PRODUCTS = 3
MIN_SCALE = torch.tensor(2.0**-100, dtype=torch.float32) # added to scales: a row of zeros must not be divided by 0


class QuantizedWeight(NamedTuple):
    """An int8 weight: values[i] * scales[i] is its row i, the weights of output channel i."""
    values: Tensor # (out, in), int8
    scales: Tensor # (out,), float32


def quantize_weight(weight: Tensor) -> QuantizedWeight:
    """Quantize a weight (out, in) of any floating point dtype to int8, per output channel.

    The memory of a weight that is mapped from a file is released: part by part, or at the end if the weight is
    transposed, as Hugging Face's are.
    """
    values, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight), dtype=torch.float32)
    pages, size = pages_of([weight]), max(1, WEIGHTS_PER_CHUNK // weight.size(1))
    parts = zip(weight.detach().split(size), values.split(size), scales.split(size), strict=True)
    for part, part_values, part_scales in parts:
        part = part.contiguous().float()
        part_scales.copy_(part.abs().amax(dim=1)).div_(MAX_WEIGHT).add_(MIN_SCALE)
        part_values.copy_((part / part_scales[:, None]).round_())
        if weight.is_contiguous(): # otherwise, each part is on all pages
            release_pages(pages)
    release_pages(pages)
    return QuantizedWeight(values, scales)


def int8_embedding(idx: Tensor, weight: QuantizedWeight) -> Tensor:
    """Token ids (...) -> embeddings (..., E) in float32."""
    return weight.values[idx] * weight.scales[idx].unsqueeze(-1)


class Int8Linear:
    """A LinearLayer with an int8 weight. Inputs, results, bias and residual are float32."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None):
        values, self.scales = weight
        self.bias = None if bias is None else bias.detach()
        self.scale_per_norm = torch.tensor(1 / max_norm(values), dtype=torch.float32)
        # With both, the weight is in memory twice.
        self.bag_matmul = Int8BagMatmul(values) if has_fbgemm() else None
        self.two_digit_matmul = None if self.bag_matmul else TwoDigitMatmul(values)
        self.num_large_products = 0 # of more than max_bag_tokens() tokens, before there was a TwoDigitMatmul

    def __call__(self, x: Tensor, residual: Tensor | None = None, gelu: str | None = None) -> Tensor:
        """See LinearLayer."""
        rows = x.flatten(0, -2)
        size = max(1, ACTIVATIONS_PER_CHUNK // rows.size(1))
        y = self.multiply(rows) if len(rows) <= size else torch.cat([self.multiply(part) for part in rows.split(size)])
        y = apply_gelu(y, gelu) if gelu else y
        y = y.view(*x.shape[:-1], -1)
        return y if residual is None else residual + y

    def multiply(self, x: Tensor) -> Tensor:
        """(N, in) -> (N, out): the product with the weight, plus the bias."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(MIN_SCALE, norm, self.scale_per_norm) # (N, 1)
        y = self.matmul_for(len(x))(x, scale).mul_(scale)
        return y.mul_(self.scales) if self.bias is None else torch.addcmul(self.bias, y, self.scales)

    def matmul_for(self, num_tokens: int) -> Int8BagMatmul | TwoDigitMatmul:
        """The matmul that multiplies this many tokens sooner. Both have the same results.

        A TwoDigitMatmul is made when many tokens need it. One sample with a short prompt does not, so its weights are
        in memory once.
        """
        if self.bag_matmul and num_tokens <= max_bag_tokens():
            return self.bag_matmul
        if self.two_digit_matmul is None:
            self.num_large_products += 1
            if num_tokens < MIN_TOKENS_ONCE and self.num_large_products < MIN_PRODUCTS:
                return self.bag_matmul
            self.two_digit_matmul = TwoDigitMatmul(self.bag_matmul.values())
        return self.two_digit_matmul


def apply_gelu(x: Tensor, approximate: str) -> Tensor:
    """F.gelu of x (N, width). No row changes another, if the width is a multiple of 32.

    For "tanh", torch computes the last elements of a thread's share with another function, whose last bit may differ.
    The shares depend on N. So x is computed in parts that are too small to be shared.
    """
    size = max(1, MAX_SERIAL_GELU // x.size(1))
    if approximate == "none" or len(x) <= size:
        return F.gelu(x, approximate=approximate)
    return torch.cat([F.gelu(rows, approximate=approximate) for rows in x.split(size)])
