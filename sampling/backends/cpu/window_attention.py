"""Attention over many positions on a CPU, for prompts and for a window that moves at every token."""
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from model import CausalSelfAttention
from sampling.backends.cpu.packed_linear import PackedLinear

MAX_TABLE_BYTES = 2**27


def chunked_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries (B, H, T, D), the last T of S positions, with keys and values (B, H, S, D) -> (B, T, E).

    The queries are split into chunks, because the fused kernel also computes masked scores, for up to 512 keys.
    """
    T, S = q.size(2), k.size(2)
    chunk_size = 32 if S <= 512 else 64
    outputs = []
    for i in range(0, T, chunk_size):
        chunk = q[:, :, i:i + chunk_size].to(k.dtype)
        n = chunk.size(2)
        end = S - T + i + n # keys from here on come after all queries of the chunk
        mask = F.pad(causal_mask(n, k.dtype), (end - n, 0)) if n > 1 else None
        y = F.scaled_dot_product_attention(chunk, k[:, :, :end], v[:, :, :end], attn_mask=mask)
        outputs.append(y.transpose(1, 2).flatten(2)) # (B, n, E)
    return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]


@cache
def causal_mask(n: int, dtype: torch.dtype) -> Tensor:
    """The mask (n, n) that is added to the scores of n positions: -inf where the key comes after the query."""
    return torch.full((n, n), -torch.inf, dtype=dtype).triu(1)


class AbsorbedLastQueryAttention:
    """Attention of the last position only, without computing the keys and values of the other positions.

    q @ (W_k h) equals (W_k.T q) @ h, and the weighted sum of all W_v h equals W_v times the weighted sum of all h. So
    each head needs two products with h, instead of two products with a matrix for each position (absorption,
    DeepSeek-V2, 2024). The bias of the keys adds the same number to every score, which softmax ignores. The work is so
    little that it is done in float32 for every dtype.
    """

    def __init__(self, attention: CausalSelfAttention):
        weight, bias, H = attention.c_attn.weight.detach().float(), attention.c_attn.bias, attention.n_head
        w_q, self.w_k, self.w_v = weight.view(3, H, -1, weight.size(1)).unbind() # (H, D, E) each
        self.w_q = w_q.flatten(0, 1) # (H * D, E)
        self.q_bias, _, self.v_bias = (None,) * 3 if bias is None else bias.detach().float().chunk(3)

    def __call__(self, h: Tensor) -> Tensor:
        """h (B, T, E), after the LayerNorm -> (B, E)."""
        H, D, _ = self.w_k.shape
        q = F.linear(h[:, -1], self.w_q, self.q_bias).view(-1, H, D).transpose(0, 1) * D**-0.5 # (H, B, D)
        scores = (q @ self.w_k).transpose(0, 1) @ h.mT # (B, H, E) @ (B, E, T) -> (B, H, T)
        mixed = scores.softmax(-1) @ h # (B, H, E)
        y = (mixed.transpose(0, 1) @ self.w_v.mT).transpose(0, 1).flatten(1) # (H, B, D) -> (B, E)
        return y if self.v_bias is None else y + self.v_bias


class FirstLayerQKVTable:
    """A table of the first layer's queries, keys and values, which depend only on the token and its position.

    Making the table takes as long as reading as many tokens as it has rows. So it is made after that many tokens.
    """

    def __init__(self, ln_1, c_attn: PackedLinear, wte: Tensor, wpe: Tensor):
        self.ln_1, self.c_attn, self.wte, self.wpe = ln_1, c_attn, wte, wpe
        self.num_rows, self.num_read = len(wte) * len(wpe), 0
        self.table: Tensor | None = None
        self.wanted = self.num_rows * 3 * wte.size(1) * 4 <= MAX_TABLE_BYTES

    def __call__(self, x: Tensor, idx: Tensor) -> Tensor:
        """x (B, T, E), the embedding of idx (B, T) -> (B, T, 3 * E)."""
        self.num_read += idx.numel()
        if self.wanted and self.num_read >= self.num_rows:
            self.wanted = False # if memory runs out, the next call does not try again
            self.table = self.make_table()
        if self.table is None:
            return self.c_attn(self.ln_1(x))
        return F.embedding(idx * len(self.wpe) + torch.arange(idx.size(1)), self.table)

    def make_table(self) -> Tensor:
        """The table (V * block_size, 3 * E)."""
        table = torch.empty(self.num_rows, 3 * self.wte.size(1), dtype=self.c_attn.weight.dtype)
        for rows, token in zip(table.split(len(self.wpe)), self.wte, strict=True):
            rows.copy_(self.c_attn(self.ln_1(token + self.wpe)))
        return table
