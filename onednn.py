"""Linear layers in oneDNN's own layout of the weights.

F.linear reaches less than half of what memory gives at one row, and of what the arithmetic units give at
hundreds. Packed, a product reaches both, and adds bias, GELU or residual while the result is still in a
register. Inductor does the same when it freezes a network. On Intel's processors F.linear, their own MKL, does
better at few rows.
"""
import math
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

NARROW = 256 # inputs or outputs: with fewer, a call of oneDNN's, 10 to 100 us, costs more than a product of few rows


class Limits(NamedTuple):
    """The fewest rows that make packing worth while."""
    twice: int # of two uses in succession
    once: float # of a single use
    narrow: int # of every use of a narrow layer, which stays plain for fewer even once it is packed


INTEL, OTHERS = Limits(twice=4, once=math.inf, narrow=64), Limits(twice=1, once=64, narrow=8)


def limits(dtype):
    """The Limits of this machine's processor."""
    return INTEL if dtype == torch.float32 and made_by_intel() else OTHERS


@cache
def made_by_intel():
    """Whether the processor is one of Intel's, as far as the system tells."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError: # no Linux
        return "GenuineIntel" in platform.processor()


def available(dtype=torch.float32):
    """Whether this torch has the operators, which are Inductor's and not public, and for this dtype here."""
    try:
        x = torch.ones(limits(dtype).narrow, 16, dtype=dtype)
        layer = PackedLinear(torch.ones(16, 16, dtype=dtype), now=True)
        layer(layer(x, gelu="tanh"), add=x)
        return True
    except (AttributeError, RuntimeError): # they are missing, or cannot
        return False


class PackedLinear:
    """A Linear that can also add a residual, or apply GELU ("none" or "tanh", as in F.gelu), in one pass.

    It is packed now, or when its uses come to be worth it: the first token need not wait for that.
    No Module: the hooks and look-ups of modules are a tenth of a small network's step.
    """

    def __init__(self, weight, bias=None, now=False):
        self.weight, self.bias = weight.detach(), bias
        self.plain, self.limits = self.weight, limits(weight.dtype)
        self.rows = 0 # of its latest use
        if now:
            self.pack()

    def __call__(self, x, add=None, gelu=None):
        """(..., in) -> (..., out); add, of that shape too, is the residual."""
        x = x.to(self.weight.dtype)
        if self.plain is not None and self.stays_plain(x.numel() // x.size(-1)):
            y = F.linear(x, self.plain, self.bias)
            y = F.gelu(y, approximate=gelu) if gelu else y
            return y if add is None else add + y
        if add is not None and add.dtype == x.dtype:
            return torch.ops.mkldnn._linear_pointwise.binary(x, add, self.weight, self.bias, "add")
        y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "gelu" if gelu else "none", [], gelu or "")
        return y if add is None else add + y # a float32 residual of bfloat16 layers, as autocast has it

    def stays_plain(self, rows):
        """Whether this use, for so many rows, is one of a plain layer. Where it is not, the weight is packed by now."""
        before, self.rows = self.rows, rows
        if self.weight is self.plain:
            if rows < (self.limits.twice if rows == before else self.limits.once):
                return True
            self.pack()
        return self.plain is not None and rows < self.limits.narrow

    def pack(self):
        """Bring the weight into oneDNN's layout. A narrow layer keeps the plain one too."""
        self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        if min(self.plain.shape) >= NARROW:
            self.plain = None
        elif self.limits is INTEL:
            self.plain = self.plain.T.contiguous().T # which MKL reads sooner
