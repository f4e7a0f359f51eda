"""GPT's layers for generation on a CPU, their weights packed once for oneDNN.

F.linear reaches less than half of what memory gives at one row, and of what the arithmetic units give at
hundreds. In oneDNN's own layout a product reaches both, and adds bias, GELU or residual while the result
is still in a register. Inductor does the same when it freezes a network.
"""
import ctypes
from contextlib import suppress
from functools import partial

import torch
import torch.nn as nn
from torch.nn import functional as F

# Layers narrower than this keep their plain weights for fewer rows than that: there the call costs the most.
NARROW, FEW = 256, 8


def hold_memory():
    """Have the C library keep what is freed, where it is glibc.

    Every step takes and frees the same megabytes. Given back to the system each time, they return page by
    page, a fault for each: a third of the time of a small network past its window.
    """
    with suppress(AttributeError, OSError, TypeError): # another system, or another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, -1) # M_TRIM_THRESHOLD, as large as can be: the heap never shrinks
        libc.mallopt(-4, 0) # M_MMAP_MAX: all of it is on the heap


def return_memory():
    """Give what hold_memory kept back to the system, which may want it for what lies elsewhere."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def pack(model):
    """Replace a GPT's blocks and head by packed ones that give the same logits, where this torch can.

    It can only generate from then on. Returns the model.
    """
    if available(model.lm_head.weight.dtype):
        blocks = model.transformer.h
        for i, block in enumerate(blocks):
            blocks[i] = PackedBlock(block, last=i + 1 == len(blocks))
        head = PackedLinear(model.lm_head)
        del model.lm_head # a module's place takes modules alone
        model.lm_head = head
    return model


def available(dtype=torch.float32):
    """Whether this torch has the operators, which are Inductor's and not public, and for this dtype here."""
    try:
        x = torch.ones(1, 16, dtype=dtype)
        layer = PackedLinear(nn.Linear(16, 16, dtype=dtype))
        layer.plain = None
        layer(layer(x, gelu="tanh"), add=x)
        return True
    except (AttributeError, RuntimeError): # they are missing, or cannot
        return False


class PackedLinear:
    """A Linear that can also add a residual, or apply GELU ("none" or "tanh", as in F.gelu), in one pass.

    No Module: the hooks and look-ups of modules are a tenth of a small network's step.
    """

    def __init__(self, linear):
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias
        self.plain = linear if linear.in_features < NARROW else None

    def __call__(self, x, add=None, gelu=None):
        """(B, T, in) -> (B, T, out); add, of that shape too, is the residual."""
        if self.plain is not None and x.numel() < FEW * x.size(-1):
            y = self.plain(x)
            y = F.gelu(y, approximate=gelu) if gelu else y
            return y if add is None else add + y
        x = x.to(self.weight.dtype)
        if add is not None and add.dtype == x.dtype:
            return torch.ops.mkldnn._linear_pointwise.binary(x, add, self.weight, self.bias, "add")
        y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "gelu" if gelu else "none", [], gelu or "")
        return y if add is None else add + y # a float32 residual of bfloat16 layers, as autocast has it


class PackedBlock(nn.Module):
    """model.Block in fewer passes; the last one computes only the last position where no cache wants the rest."""

    def __init__(self, block, last):
        super().__init__()
        self.ln_1, self.ln_2 = plain_norm(block.ln_1), plain_norm(block.ln_2)
        self.c_attn, self.attn_c_proj = PackedLinear(block.attn.c_attn), PackedLinear(block.attn.c_proj)
        self.c_fc, self.c_proj = PackedLinear(block.mlp.c_fc), PackedLinear(block.mlp.c_proj)
        self.n_head, self.gelu, self.last = block.attn.n_head, block.mlp.gelu.approximate, last

    def forward(self, x, past=None):
        """(B, T, E) -> (B, T, E), or (B, 1, E) where only the last position is computed."""
        qkv = self.c_attn(self.ln_1(x))
        q, k, v = qkv.view(*x.shape[:2], 3, self.n_head, -1).permute(2, 0, 3, 1, 4).unbind() # (B, H, T, D)
        if past is not None:
            y = attend(q, k, v, *past)
        elif self.last:
            x = x[:, -1:].contiguous()
            y = F.scaled_dot_product_attention(q[:, :, -1:], k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.attn_c_proj(y.transpose(1, 2).flatten(2), add=x)
        return self.c_proj(self.c_fc(self.ln_2(x), gelu=self.gelu), add=x)


def plain_norm(norm):
    """A LayerNorm as a function."""
    return partial(torch.layer_norm, normalized_shape=norm.normalized_shape, weight=norm.weight, bias=norm.bias,
                   eps=norm.eps)


def attend(q, k, v, keys, values, start):
    """What queries (B, H, T, D) make of what is cached and of k and v, which are added; the rest is KVCache.layer's.

    For single queries plain products are quicker than the fused kernel, in bfloat16 twice as quick, if the
    keys lie transposed: that is how the cache's memory holds them here.
    """
    B, H, S, D = keys.shape
    T = k.size(2)
    end = start + T
    keys = keys.view(B, H, D, S)
    keys.narrow(3, start, T).copy_(k.mT) # one row fills all: a prompt they share is read once
    values.narrow(2, start, T).copy_(v)
    if start == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = torch.bmm((q * D**-0.5).flatten(0, 1), keys.narrow(3, 0, end).flatten(0, 1)) # (B * H, T, end)
    if T > 1:
        future = torch.ones(T, end, dtype=torch.bool, device=q.device).triu(start + 1)
        scores = scores.masked_fill(future, -torch.inf)
    return torch.bmm(scores.softmax(-1), values.narrow(2, 0, end).flatten(0, 1)).view(B, H, T, D)
