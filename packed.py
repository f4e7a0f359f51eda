"""GPT's generation on a CPU: weights packed once for oneDNN, few operations a token, and none that no token needs.

F.linear reaches less than half of what memory gives at one row, and of what the arithmetic units give at
hundreds. In oneDNN's own layout a product reaches both, and adds bias, GELU or residual while the result
is still in a register. Inductor does the same when it freezes a network.
"""
import ctypes
from contextlib import suppress
from functools import cache, partial

import torch
import torch.nn as nn
from torch.nn import functional as F

from model import GPT

# Layers narrower than this keep their plain weights for fewer rows than that: there the call costs the most.
NARROW, FEW = 256, 8
# How many queries attend at once.
CHUNK = 64
# Bytes that FirstQKV may take.
TABLE = 2**27


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
    """Make a GPT a PackedGPT, where this torch can; it gives the same logits. Returns it."""
    if available(model.lm_head.weight.dtype):
        model.__class__ = PackedGPT # where it stands: a second one would take its memory again
        model.pack()
    return model


def available(dtype=torch.float32):
    """Whether this torch has the operators, which are Inductor's and not public, and for this dtype here."""
    try:
        x = torch.ones(1, 16, dtype=dtype)
        with torch.random.fork_rng(devices=[]): # a layer draws random numbers
            layer = PackedLinear(nn.Linear(16, 16, dtype=dtype))
        layer.plain = None
        layer(layer(x, gelu="tanh"), add=x)
        return True
    except (AttributeError, RuntimeError): # they are missing, or cannot
        return False


class PackedGPT(GPT):
    """A GPT that can only generate, in fewer steps and passes; not to be trained, copied or saved."""

    def pack(self):
        """Replace blocks and head by packed ones."""
        blocks = self.transformer.h
        self.glance = Glance(blocks[-1].attn)
        for i, block in enumerate(blocks):
            blocks[i] = PackedBlock(block)
        head = PackedLinear(self.lm_head)
        del self.lm_head # a module's place takes modules alone
        self.lm_head, self.ln_f = head, plain_norm(self.transformer.ln_f)
        self.embeddings = self.transformer.wte.weight, self.transformer.wpe.weight # modules are slow to look up
        self.first_qkv = FirstQKV(blocks[0], *self.embeddings)

    def new_cache(self, batch_size, capacity):
        """As GPT.new_cache."""
        return PackedCache(self.config, batch_size, capacity)

    @torch.no_grad()
    def forward(self, idx, *, cache=None):
        """As GPT.forward without targets."""
        T, start = idx.size(1), 0 if cache is None else cache.size
        end = start + T
        if end > self.config.block_size:
            raise ValueError(f"cannot read {end} tokens: block_size is {self.config.block_size}")
        with torch.autocast("cpu", enabled=False): # what it would cast is cast here
            wte, wpe = self.embeddings
            x = F.embedding(idx, wte) + wpe[start:end]
            if cache is None:
                x = self.read_window(x, idx)
            elif start and T == 1:
                x = self.read_token(x[:, 0], cache)
            else:
                x = self.read(x, cache)
            return self.lm_head(self.ln_f(x))[:, None], None

    def read(self, x, cache):
        """The blocks, for T more tokens: (B, T, E) -> (B, E) of the last. The cache grows by them."""
        T, last = x.size(1), self.config.n_layer - 1
        for i, block in enumerate(self.transformer.h):
            q, k, v = self.heads(block.qkv(x))
            if i == last: # where only the last position counts
                q, x = q[:, :, -1:], x[:, -1:].contiguous()
            x = block.rest(x, causal(q, *cache.add(i, k, v)))
        cache.size += T
        return x[:, -1]

    def read_token(self, x, cache):
        """read for one more token of each row: (B, E) -> (B, E)."""
        B, E = x.shape
        H = self.config.n_head
        scale = (E / H)**-0.5
        for block, k_slot, v_slot, keys, values in zip(self.transformer.h, *cache.next_token(), strict=True):
            q, k, v = block.qkv(x).view(B, 3, H, -1).unbind(1) # (B, H, D)
            k_slot.copy_(k)
            v_slot.copy_(v)
            q = q.reshape(B * H, 1, -1).float()
            scores = torch.baddbmm(cache.nothing, q, keys, beta=0, alpha=scale) # (B * H, 1, S)
            x = block.rest(x, torch.bmm(scores.softmax(-1), values).view(B, E))
        return x

    def read_window(self, x, idx):
        """read where nothing is kept; idx (B, T) are the tokens."""
        *blocks, last = self.transformer.h
        for i, block in enumerate(blocks):
            qkv = self.first_qkv(x, idx) if i == 0 else block.qkv(x)
            x = block.rest(x, causal(*self.heads(qkv)))
        return last.rest(x[:, -1].contiguous(), self.glance(last.ln_1(x)))

    def heads(self, qkv):
        """(B, T, 3 * E) -> the heads' queries, keys and values: three of (B, H, T, D)."""
        return qkv.unflatten(-1, (3, self.config.n_head, -1)).permute(2, 0, 3, 1, 4).unbind()


class PackedCache:
    """A KVCache whose layers are one tensor: a step's view of all of them is made at once.

    Keys lie transposed: plain products with single queries, quicker than the fused kernel, want them so. In float32
    whatever the weights: for less, oneDNN makes and keeps new kernels for every length, and scores round too coarsely.
    """

    def __init__(self, config, batch_size, capacity):
        N, H, D = config.n_layer, config.n_head, config.n_embd // config.n_head
        self.keys = torch.empty(N, batch_size, H, D, capacity)
        self.values = torch.empty(N, batch_size, H, capacity, D)
        self.nothing = torch.empty(())
        self.size = 0

    def add(self, layer, k, v):
        """Add (B or 1, H, T, D) to a layer; returns the keys and values to attend to. size stays."""
        start, end = self.size, self.size + k.size(2)
        keys, values = self.keys[layer, ..., :end], self.values[layer, :, :, :end]
        keys[..., start:] = k.mT
        values[:, :, start:] = v
        return (keys.mT, values) if start else (k, v)

    def next_token(self):
        """Make room for one more position: of every layer, where its keys go, its values, and (B * H, ...) of all."""
        i = self.size
        self.size = end = i + 1
        return (self.keys[..., i].unbind(), self.values[..., i, :].unbind(),
                self.keys[..., :end].flatten(1, 2).unbind(), self.values[..., :end, :].flatten(1, 2).unbind())

    @property
    def nbytes(self):
        """The memory it takes."""
        return self.keys.nbytes + self.values.nbytes

    def keep(self, rows):
        """Forget all but these rows."""
        self.keys = self.keys[:, rows]
        self.values = self.values[:, rows] # in two lines: the one's memory goes before the other's comes


class PackedBlock(nn.Module):
    """The parts of a model.Block."""

    def __init__(self, block):
        super().__init__()
        self.ln_1, self.ln_2 = plain_norm(block.ln_1), plain_norm(block.ln_2)
        self.c_attn, self.attn_c_proj = PackedLinear(block.attn.c_attn), PackedLinear(block.attn.c_proj)
        self.c_fc, self.c_proj = PackedLinear(block.mlp.c_fc), PackedLinear(block.mlp.c_proj)
        self.gelu = block.mlp.gelu.approximate

    def qkv(self, x):
        """Queries, keys and values side by side: (..., E) -> (..., 3 * E)."""
        return self.c_attn(self.ln_1(x))

    def rest(self, x, y):
        """The residual stream x after what attention found, y, and the MLP: (..., E) each."""
        x = self.attn_c_proj(y, add=x)
        return self.c_proj(self.c_fc(self.ln_2(x), gelu=self.gelu), add=x)


class PackedLinear:
    """A Linear that can also add a residual, or apply GELU ("none" or "tanh", as in F.gelu), in one pass.

    No Module: the hooks and look-ups of modules are a tenth of a small network's step.
    """

    def __init__(self, linear):
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias
        self.plain = linear if linear.in_features < NARROW else None

    def __call__(self, x, add=None, gelu=None):
        """(..., in) -> (..., out); add, of that shape too, is the residual."""
        x = x.to(self.weight.dtype)
        if self.plain is not None and x.numel() < FEW * x.size(-1):
            y = self.plain(x)
            y = F.gelu(y, approximate=gelu) if gelu else y
            return y if add is None else add + y
        if add is not None and add.dtype == x.dtype:
            return torch.ops.mkldnn._linear_pointwise.binary(x, add, self.weight, self.bias, "add")
        y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "gelu" if gelu else "none", [], gelu or "")
        return y if add is None else add + y # a float32 residual of bfloat16 layers, as autocast has it


def plain_norm(norm):
    """A LayerNorm as a function."""
    return partial(torch.layer_norm, normalized_shape=norm.normalized_shape, weight=norm.weight, bias=norm.bias,
                   eps=norm.eps)


def causal(q, k, v):
    """What queries (B, H, T, D), the last T of S positions, make of keys and values (B, H, S, D): (B, T, E).

    Few at once: the fused kernel computes what it masks, up to 512 keys of it.
    """
    T, S = q.size(2), k.size(2)
    found = []
    for i in range(0, T, CHUNK):
        some = q[:, :, i:i + CHUNK].to(k.dtype)
        n = some.size(2)
        end = S - T + i + n
        mask = F.pad(future(n, k.dtype), (end - n, 0)) if n > 1 else None
        y = F.scaled_dot_product_attention(some, k[:, :, :end], v[:, :, :end], attn_mask=mask)
        found.append(y.transpose(1, 2).flatten(2))
    return torch.cat(found, dim=1) if len(found) > 1 else found[0]


@cache
def future(n, dtype):
    """What to add to the scores (n, n) of as many positions among themselves: -inf where a key comes later."""
    return torch.full((n, n), -torch.inf, dtype=dtype).triu(1)


class Glance:
    """Attention for the last position alone, without the other positions' keys and values.

    q @ (W_k h) is (W_k.T q) @ h, and the weighted sum of W_v h is W_v times that of h: two products with h for each
    head, not with two matrices for each position (absorption, DeepSeek-V2, 2024). A bias of the keys adds the same to
    every score, which softmax does not see. All of it is so little that float32 will do.
    """

    def __init__(self, attention):
        weight, bias, H = attention.c_attn.weight.detach().float(), attention.c_attn.bias, attention.n_head
        q, self.k, self.v = weight.view(3, H, -1, weight.size(1)).unbind() # (H, D, E)
        self.q = q.flatten(0, 1)
        self.q_bias, _, self.v_bias = (None,) * 3 if bias is None else bias.detach().float().chunk(3)

    def __call__(self, h):
        """(B, T, E), normed -> (B, E)."""
        H, D, _ = self.k.shape
        q = F.linear(h[:, -1], self.q, self.q_bias).view(-1, H, D).transpose(0, 1) * D**-0.5 # (H, B, D)
        scores = (q @ self.k).transpose(0, 1) @ h.mT # (B, H, T)
        seen = scores.softmax(-1) @ h # (B, H, E)
        y = (seen.transpose(0, 1) @ self.v.mT).transpose(0, 1).flatten(1)
        return y if self.v_bias is None else y + self.v_bias


class FirstQKV:
    """PackedBlock.qkv of the first block, looked up: there it depends on a token and its position alone.

    The table costs as much as it saves over its own number of tokens, so it is made when so many have been read.
    """

    def __init__(self, block, wte, wpe):
        self.block, self.wte, self.wpe = block, wte, wpe
        self.rows, self.read, self.table = len(wte) * len(wpe), 0, None
        self.wanted = self.rows * 3 * wte.size(1) * 4 <= TABLE

    def __call__(self, x, idx):
        """(B, T, E) that come of idx (B, T) -> (B, T, 3 * E)."""
        self.read += idx.numel()
        if self.wanted and self.read >= self.rows:
            self.wanted = False # even where memory does not suffice
            self.table = self.make()
        if self.table is None:
            return self.block.qkv(x)
        return F.embedding(idx * len(self.wpe) + torch.arange(idx.size(1)), self.table)

    def make(self):
        """The table: (V * block_size, 3 * E)."""
        table = torch.empty(self.rows, 3 * self.wte.size(1), dtype=self.block.c_attn.weight.dtype)
        for rows, token in zip(table.split(len(self.wpe)), self.wte, strict=True):
            rows.copy_(self.block.qkv(token + self.wpe))
        return table
