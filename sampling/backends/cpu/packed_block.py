"""A block of a PackedGPT."""
from collections.abc import Callable

import torch
from torch import Tensor, nn

from model import Block
from sampling.backends.cpu.packed_linear import LinearLayer

IGNORED = torch.empty((), dtype=torch.float32) # an argument of baddbmm
MakeLinear = Callable[[Tensor, Tensor | None], LinearLayer] # from a weight and a bias


class PackedBlock:
    """The layers of a model.Block, packed."""

    def __init__(self, block: Block, linear: MakeLinear):
        self.ln_1, self.ln_2 = LayerNorm(block.ln_1), LayerNorm(block.ln_2)
        layers = block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj
        self.c_attn, self.attn_c_proj, self.c_fc, self.mlp_c_proj = (
            linear(layer.weight, layer.bias) for layer in layers)
        self.gelu, self.n_head = block.mlp.gelu.approximate, block.attn.n_head
        self.head_width = block.attn.c_proj.weight.size(0) // self.n_head # an int: in a trace, x.size() is a tensor

    def qkv(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side: (..., E) -> (..., 3 * E)."""
        return self.c_attn(self.ln_1(x))

    def post_attention(self, x: Tensor, y: Tensor) -> Tensor:
        """The residual stream x after the result y of attention and after the MLP: (..., E) each."""
        x = self.attn_c_proj(y, residual=x)
        return self.mlp_c_proj(self.c_fc(self.ln_2(x), gelu=self.gelu), residual=x)

    def decode_step(self, x: Tensor, keys: Tensor, values: Tensor, position: int | Tensor) -> Tensor:
        """The residual stream x (B, E) of one more token of each row, after this block: (B, E).

        Stores its key and value at this position, and attends to all up to it. keys, values: (B, H, capacity, D).
        """
        q, k, v = self.qkv(x).view(-1, 3, self.n_head, self.head_width).unbind(1) # (B, H, D) each
        keys.select(2, position).copy_(k)
        values.select(2, position).copy_(v)
        return self.post_attention(x, self.attention(q, keys, values, position))

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, position: int | Tensor) -> Tensor:
        """The query q (B, H, D) of this position attends to all positions up to it: (B, E).

        keys, values: (B, H, capacity, D).
        """
        H, D = self.n_head, self.head_width
        q = q.reshape(-1, 1, D).float() # (B * H, 1, D)
        keys, values = (tensor.flatten(0, 1)[:, :position + 1] for tensor in (keys, values)) # (B * H, S, D)
        # baddbmm with beta=0 ignores its first argument and scales the product; bmm would need a second pass.
        scores = torch.baddbmm(IGNORED, q, keys.mT, beta=0, alpha=D**-0.5) # (B * H, 1, S)
        return torch.bmm(scores.softmax(-1), values).view(-1, H * D)

    def repeated_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """attention for each of the queries (B, H, T, D), the last T of S positions; k, v: (B, H, S, D) -> (B, T, E).

        So the results are those of T calls of decode_step, to the last bit.
        """
        T, S = q.size(2), k.size(2)
        k, v = k.contiguous(), v.contiguous() # otherwise, attention may copy them for each query
        return torch.stack([self.attention(q[:, :, t], k, v, S - T + t) for t in range(T)], dim=1)


class LayerNorm:
    """A model's LayerNorm. It is not a Module, because calling a Module takes longer."""

    def __init__(self, module: nn.LayerNorm):
        self.shape, self.weight, self.bias, self.eps = module.normalized_shape, module.weight, module.bias, module.eps

    def __call__(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., E)."""
        return torch.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
