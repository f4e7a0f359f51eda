"""GPT's generation on a CPU: weights packed where that is quicker, few operations a token, none that no token needs."""
from functools import partial

import torch
import torch.nn as nn
from torch.nn import functional as F

from head import Head
from model import GPT
from onednn import PackedLinear, available
from window import FirstQKV, Glance, causal


def pack(model, now=False):
    """Make a GPT a PackedGPT, where this torch can; it gives the same logits. Returns it.

    now: before the first token, so that its logits are the same to the last bit whenever they are made.
    """
    if available(model.lm_head.weight.dtype):
        model.__class__ = PackedGPT # where it stands: a second one would take its memory again
        model.pack(now)
    return model


class PackedGPT(GPT):
    """A GPT that can only generate, in fewer steps and passes; not to be trained, copied or saved."""

    def pack(self, now=False):
        """Replace blocks and head by packed ones."""
        blocks = self.transformer.h
        self.glance = Glance(blocks[-1].attn)
        for i, block in enumerate(blocks):
            blocks[i] = PackedBlock(block, now)
        head = Head(self.lm_head.weight, kept=self.lm_head.weight is self.transformer.wte.weight, now=now)
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
        return self.next_logits(idx, cache)[0][:, None], None

    @torch.no_grad()
    def next_logits(self, idx, cache, enough=None):
        """As GPT.next_logits."""
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
            return self.lm_head(self.ln_f(x), enough)

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

    def __init__(self, block, now=False):
        super().__init__()
        self.ln_1, self.ln_2 = plain_norm(block.ln_1), plain_norm(block.ln_2)
        layers = block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj
        self.c_attn, self.attn_c_proj, self.c_fc, self.c_proj = (
            PackedLinear(layer.weight, layer.bias, now) for layer in layers)
        self.gelu = block.mlp.gelu.approximate

    def qkv(self, x):
        """Queries, keys and values side by side: (..., E) -> (..., 3 * E)."""
        return self.c_attn(self.ln_1(x))

    def rest(self, x, y):
        """The residual stream x after what attention found, y, and the MLP: (..., E) each."""
        x = self.attn_c_proj(y, add=x)
        return self.c_proj(self.c_fc(self.ln_2(x), gelu=self.gelu), add=x)


def plain_norm(norm):
    """A LayerNorm as a function."""
    return partial(torch.layer_norm, normalized_shape=norm.normalized_shape, weight=norm.weight, bias=norm.bias,
                   eps=norm.eps)
