"""Linear layers in oneDNN's own layout of the weights.

F.linear reaches less than half of what memory gives at one row, and of what the arithmetic units give at
hundreds. Packed, a product reaches both, and adds bias, GELU or residual while the result is still in a
register. Inductor does the same when it freezes a network.
"""
import torch
from torch.nn import functional as F

SHORT = 64 # rows, fewer than which are read sooner by plain layers than by layers that have to be packed first
# From then on layers with fewer than NARROW inputs stay plain for fewer than FEW rows: oneDNN's call costs more than
# the product.
NARROW, FEW = 256, 8


def available(dtype=torch.float32):
    """Whether this torch has the operators, which are Inductor's and not public, and for this dtype here."""
    try:
        x = torch.ones(FEW, 16, dtype=dtype)
        layer = PackedLinear(torch.ones(16, 16, dtype=dtype), now=True)
        layer(layer(x, gelu="tanh"), add=x)
        return True
    except (AttributeError, RuntimeError): # they are missing, or cannot
        return False


class PackedLinear:
    """A Linear that can also add a residual, or apply GELU ("none" or "tanh", as in F.gelu), in one pass.

    It is packed now, or once it is used for many rows or a second time: the first token need not wait for that.
    No Module: the hooks and look-ups of modules are a tenth of a small network's step.
    """

    def __init__(self, weight, bias=None, now=False):
        self.weight, self.bias = weight.detach(), bias
        self.plain, self.used = self.weight, False
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
        first, self.used = not self.used, True
        if first and rows < SHORT:
            return True
        if self.weight is self.plain:
            self.pack()
        return self.plain is not None and rows < FEW

    def pack(self):
        """Bring the weight into oneDNN's layout. A narrow layer keeps the plain one too."""
        self.weight, self.used = torch.ops.mkldnn._reorder_linear_weight(self.weight), True
        if self.plain.size(1) >= NARROW:
            self.plain = None
