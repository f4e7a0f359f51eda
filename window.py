"""Attention over many positions on a CPU, without what no token needs of it.

So prompts are read, and a window that has moved: all of it again for every token.
"""
from functools import cache

import torch
from torch.nn import functional as F

TABLE = 2**27 # bytes that FirstQKV may take


def causal(q, k, v):
    """What queries (B, H, T, D), the last T of S positions, make of keys and values (B, H, S, D): (B, T, E).

    Few at once: the fused kernel computes what it masks, up to 512 keys of it.
    """
    T, S = q.size(2), k.size(2)
    few, found = 32 if S <= 512 else 64, []
    for i in range(0, T, few):
        some = q[:, :, i:i + few].to(k.dtype)
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

    Making the table costs as much as reading as many tokens as it has rows: it is made once so many have been read.
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
