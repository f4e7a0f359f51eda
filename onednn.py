"""Linear layers in oneDNN's own layout of the weights.

F.linear reaches less than half of what memory gives at one row, and of what the arithmetic units give at
hundreds. Packed, a product reaches both, and adds bias, GELU or residual while the result is still in a
register. Inductor does the same when it freezes a network.
"""
import torch
from torch.nn import functional as F

# Layers with fewer than NARROW inputs are plain for fewer than FEW rows: oneDNN's call costs more than the product.
NARROW, FEW = 256, 8
SHORT = 64 # rows that all layers read sooner as they are than packed


def available(dtype=torch.float32):
    """Whether this torch has the operators, which are Inductor's and not public, and for this dtype here."""
    try:
        x = torch.ones(1, 16, dtype=dtype)
        layer = PackedLinear(torch.ones(16, 16, dtype=dtype), now=True)
        layer(layer(x, gelu="tanh"), add=x)
        return True
    except (AttributeError, RuntimeError): # they are missing, or cannot
        return False


class PackedLinear:
    """A Linear that can also add a residual, or apply GELU ("none" or "tanh", as in F.gelu), in one pass.

    It is packed once it is used a second time, or for many rows: the first token need not wait for that. Or now.
    No Module: the hooks and look-ups of modules are a tenth of a small network's step.
    """

    def __init__(self, weight, bias=None, now=False):
        self.weight, self.bias = weight.detach(), bias
        self.plain, self.packed, self.used = self.weight, False, False
        if now:
            self.pack()
            self.plain = None

    def __call__(self, x, add=None, gelu=None):
        """(..., in) -> (..., out); add, of that shape too, is the residual."""
        x = x.to(self.weight.dtype)
        if self.plain is not None and self.better_plain(x.numel() // x.size(-1)):
            y = F.linear(x, self.plain, self.bias)
            y = F.gelu(y, approximate=gelu) if gelu else y
            return y if add is None else add + y
        if add is not None and add.dtype == x.dtype:
            return torch.ops.mkldnn._linear_pointwise.binary(x, add, self.weight, self.bias, "add")
        y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "gelu" if gelu else "none", [], gelu or "")
        return y if add is None else add + y # a float32 residual of bfloat16 layers, as autocast has it

    def better_plain(self, rows):
        """Whether so many rows should be read as they are; packs the weight where they should not."""
        narrow = self.plain.size(1) < NARROW
        few = SHORT if not self.used else FEW if narrow else 0
        self.used = True
        if rows < few:
            return True
        if not self.packed:
            self.pack()
        if not narrow:
            self.plain = None
        return False

    def pack(self):
        """Bring the weight into oneDNN's layout."""
        self.weight, self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight), True
