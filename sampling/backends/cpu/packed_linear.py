"""Linear layers with weights in oneDNN's own layout.

With one row, F.linear reaches less than half of the memory bandwidth, except on Intel processors. With hundreds of
rows, it reaches less than half of the arithmetic rate on every processor. A packed product reaches both, and fuses
bias, GELU and the residual addition. Inductor does the same when it freezes a model. On Intel processors, F.linear uses
MKL, which is faster than oneDNN for few rows: see PackThresholds. On AMD processors, a single row uses BagLinear.
"""
import math
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from sampling.backends.cpu.embedding_bag import has_fbgemm

# A layer with fewer inputs or outputs is narrow: a call of oneDNN takes 10 to 100 us, which is longer than multiplying
# a few rows takes.
NARROW = 256


class LinearLayer(Protocol):
    """A Linear that can also apply GELU ("none" or "tanh", as in F.gelu) or add a residual."""

    def __call__(self, x: Tensor, residual: Tensor | None = None, gelu: str | None = None) -> Tensor:
        """(..., in) -> (..., out). The residual has the shape of the result."""


class PackThresholds(NamedTuple):
    """The number of rows from which on a packed product is faster than F.linear, including the time to pack."""
    min_rows_repeated: int # if three consecutive products have the same number of rows
    min_rows_once: float # otherwise
    min_rows_narrow: int # with fewer rows, a narrow layer uses its plain weight, even after packing


INTEL = PackThresholds(min_rows_repeated=4, min_rows_once=math.inf, min_rows_narrow=64)
AMD = PackThresholds(min_rows_repeated=2, min_rows_once=math.inf, min_rows_narrow=8) # a single row uses bags
OTHERS = PackThresholds(min_rows_repeated=1, min_rows_once=64, min_rows_narrow=8)


def pack_thresholds(dtype: torch.dtype) -> PackThresholds:
    """The thresholds of this machine's processor."""
    if dtype != torch.float32:
        return OTHERS
    return INTEL if is_intel_cpu() else AMD if bags_are_faster() else OTHERS


def bags_are_faster() -> bool:
    """Whether BagLinear multiplies one row faster than oneDNN does: on AMD processors. On Intel's, it does not."""
    return has_fbgemm() and "AuthenticAMD" in cpu_info()


def is_intel_cpu() -> bool:
    """Whether the processor is from Intel."""
    return "GenuineIntel" in cpu_info()


@cache
def cpu_info() -> str:
    """What the operating system says about the processor. It names the vendor as the processor itself does."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError: # not Linux
        return platform.processor()


def is_supported(dtype: torch.dtype = torch.float32) -> bool:
    """Whether torch and the processor support the packed operators for this dtype. They are private to Inductor."""
    try:
        # This layer is narrow: with fewer rows, it would use its plain weight instead of the operators.
        x = torch.ones(pack_thresholds(dtype).min_rows_narrow, 16, dtype=dtype)
        layer = PackedLinear(torch.ones(16, 16, dtype=dtype), pack_eagerly=True)
        layer(layer(x, gelu="tanh"), residual=x)
        return True
    except (AttributeError, RuntimeError): # the operators are missing, or lack this dtype
        return False


class PackedLinear:
    """A LinearLayer, which also applies GELU or adds a residual in one pass.

    It packs its weight when that saves time, so that the first token does not wait. With pack_eagerly, it packs now.
    It is not a Module, because hooks and attribute look-ups of Modules take a tenth of a small model's step.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack_eagerly: bool = False):
        self.weight: Tensor | None = weight.detach() # None once only the packed weight is used
        self.packed: Tensor | None = None # the weight in oneDNN's layout
        self.bias, self.dtype = bias, weight.dtype
        self.thresholds = pack_thresholds(weight.dtype)
        self.previous_rows = 0 # of the latest product before packing
        self.num_repeats = 0 # how many consecutive products before it had the same number of rows
        if pack_eagerly:
            self.pack()

    def __call__(self, x: Tensor, residual: Tensor | None = None, gelu: str | None = None) -> Tensor:
        """See LinearLayer."""
        x = x.to(self.dtype)
        if self.packed is None and not torch.jit.is_tracing(): # a trace must not contain the packing
            rows = num_rows(x)
            self.num_repeats = self.num_repeats + 1 if rows == self.previous_rows else 0
            self.previous_rows = rows
            if self.should_pack(rows):
                self.pack()
        if self.packed is None or (self.weight is not None and num_rows(x) < self.thresholds.min_rows_narrow):
            y = F.linear(x, self.weight, self.bias)
            y = F.gelu(y, approximate=gelu) if gelu else y
            return y if residual is None else residual + y
        if residual is not None and residual.dtype == x.dtype:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")
        y = linear_pointwise(x, self.packed, self.bias, "gelu" if gelu else "none", gelu or "")
        return y if residual is None else residual + y # a float32 residual with bfloat16 layers, as under autocast

    def should_pack(self, rows: int) -> bool:
        """Whether it saves time to pack the weight before a product with this many rows."""
        is_repeated = self.num_repeats >= 2 # not 1: if all proposals are rejected, the draft is off by then
        return rows >= (self.thresholds.min_rows_repeated if is_repeated else self.thresholds.min_rows_once)

    def pack(self) -> None:
        """Convert the weight to oneDNN's layout. A narrow layer also keeps the plain weight."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        if min(self.weight.shape) >= NARROW:
            self.weight = None
        elif self.thresholds is INTEL:
            self.weight = self.weight.T.contiguous().T # the layout that MKL reads fastest

    def plain_weight(self) -> Tensor:
        """The weight (out, in). Copies it if only the packed weight is left."""
        return self.packed.to_dense() if self.weight is None else self.weight


@torch.jit.script_if_tracing # torch.jit.trace does not support the operator's empty list
def linear_pointwise(x: Tensor, packed: Tensor, bias: Tensor | None, operation: str, variant: str) -> Tensor:
    """oneDNN's product with a packed weight, plus the bias, then the operation."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, operation, [], variant)


def num_rows(x: Tensor) -> int:
    """The number of rows of x (..., in)."""
    return int(x.numel() // x.size(-1)) # torch.jit.trace makes sizes tensors
