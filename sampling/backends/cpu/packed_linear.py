"""Linear layers whose weights lie in oneDNN's own layout.

F.linear reaches less than half of the memory bandwidth with one row, and less than half of the arithmetic rate with
hundreds of rows. A packed product reaches both, and adds bias, GELU or the residual while the result is still in a
register. Inductor does the same when it freezes a model. On Intel processors F.linear uses MKL, which is faster than
oneDNN for few rows.
"""
import math
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# A layer with fewer inputs or outputs is narrow: one oneDNN call takes 10 to 100 us, more than its product of few rows.
NARROW = 256


class PackThresholds(NamedTuple):
    """The fewest rows for which a packed product is faster, packing included."""
    min_rows_repeated: int # if two successive products have this many
    min_rows_once: float # if only one has
    min_rows_narrow: int # a narrow layer uses its plain weight below this, even once it is packed


INTEL = PackThresholds(min_rows_repeated=4, min_rows_once=math.inf, min_rows_narrow=64)
OTHERS = PackThresholds(min_rows_repeated=1, min_rows_once=64, min_rows_narrow=8)


def pack_thresholds(dtype: torch.dtype) -> PackThresholds:
    """The thresholds of this machine's processor."""
    return INTEL if dtype == torch.float32 and is_intel_cpu() else OTHERS


@cache
def is_intel_cpu() -> bool:
    """Whether the processor is an Intel, as far as the system says."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError: # not Linux
        return "GenuineIntel" in platform.processor()


def is_supported(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this torch and this processor have the operators for this dtype. They are Inductor's, and not public."""
    try:
        x = torch.ones(pack_thresholds(dtype).min_rows_narrow, 16, dtype=dtype)
        layer = PackedLinear(torch.ones(16, 16, dtype=dtype), pack_eagerly=True)
        layer(layer(x, gelu="tanh"), residual=x)
        return True
    except (AttributeError, RuntimeError): # the operators are missing, or lack this dtype
        return False


class PackedLinear:
    """A Linear that can also apply GELU ("none" or "tanh", as in F.gelu) or add a residual, in one pass.

    It packs its weight once that pays, so that the first token does not wait for it; with pack_eagerly, immediately.
    It is not a Module: module hooks and attribute look-ups take a tenth of a small model's step.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack_eagerly: bool = False):
        self.weight, self.bias = weight.detach(), bias
        self.plain_weight: Tensor | None = self.weight # None once only the packed weight is used
        self.thresholds = pack_thresholds(weight.dtype)
        self.previous_rows = 0
        if pack_eagerly:
            self.pack()

    def __call__(self, x: Tensor, residual: Tensor | None = None, gelu: str | None = None) -> Tensor:
        """(..., in) -> (..., out). The residual has the shape of the result."""
        x = x.to(self.weight.dtype)
        if self.plain_weight is not None and self.use_unpacked(x.numel() // x.size(-1)):
            y = F.linear(x, self.plain_weight, self.bias)
            y = F.gelu(y, approximate=gelu) if gelu else y
            return y if residual is None else residual + y
        if residual is not None and residual.dtype == x.dtype:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "gelu" if gelu else "none", [], gelu or "")
        return y if residual is None else residual + y # a float32 residual of bfloat16 layers, as under autocast

    def use_unpacked(self, rows: int) -> bool:
        """Whether the plain weight is faster for this product. Packs the weight if it is not."""
        repeated, self.previous_rows = rows == self.previous_rows, rows
        if self.weight is self.plain_weight: # not packed yet
            if rows < (self.thresholds.min_rows_repeated if repeated else self.thresholds.min_rows_once):
                return True
            self.pack()
        return self.plain_weight is not None and rows < self.thresholds.min_rows_narrow

    def pack(self) -> None:
        """Bring the weight into oneDNN's layout. A narrow layer keeps the plain weight too."""
        self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        if min(self.plain_weight.shape) >= NARROW:
            self.plain_weight = None
        elif self.thresholds is INTEL:
            self.plain_weight = self.plain_weight.T.contiguous().T # the layout that MKL reads fastest
