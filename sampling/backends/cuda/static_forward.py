"""GPT.forward with static shapes and tensors, which CUDA graphs need."""
import torch
from torch import Tensor
from torch.nn import functional as F

from model import GPT, Block


class StaticForward:
    """The forward passes of a GPT that CUDA graphs hold. With compile, torch.compile fuses their kernels.

    Under autocast, the model's Linears must be cast already: a graph cannot keep cast copies of their weights.
    """

    def __init__(self, model: GPT, compile: bool = False):
        self.model = model
        if compile:
            torch._dynamo.config.recompile_limit = 64 # one graph for each number of keys and batch size
        # The blocks are compiled one by one, because all blocks share the compiled code of the first one.
        self.block_step = torch.compile(block_step, dynamic=False) if compile else block_step
        self.model_forward = torch.compile(model.forward, dynamic=False) if compile else model.forward

    def decode_step(self, tokens: Tensor, positions: Tensor, layers: list[Tensor], num_keys: int) -> Tensor:
        """Process tokens (B, T) at the positions (T,), attending to the first num_keys positions of KVCache.layers.

        T is 1 without a draft. Writes the tokens' keys and values into the layers. Returns logits (B, T, V).
        """
        transformer, device = self.model.transformer, tokens.device
        x = transformer.wte(tokens) + transformer.wpe(positions) # (B, T) -> (B, T, E)
        is_future = torch.arange(num_keys, device=device) > positions[:, None] # (T, S), S being num_keys
        mask = torch.zeros(is_future.shape, device=device, dtype=layers[0].dtype).masked_fill(is_future, -torch.inf)
        for block, layer in zip(transformer.h, layers, strict=True):
            x = self.block_step(block, x, layer, positions, mask, num_keys)
        return self.model.lm_head(transformer.ln_f(x)) # (B, T, E) -> (B, T, V)

    def forward_window(self, idx: Tensor) -> Tensor:
        """Process ids (B, T) without a cache. Returns the logits (B, 1, V) of the last position."""
        return self.model_forward(idx)[0]


def block_step(block: Block, x: Tensor, layer: Tensor, positions: Tensor, mask: Tensor, num_keys: int) -> Tensor:
    """Block.forward for T more tokens: (B, T, E) -> (B, T, E). mask (T, S) is added to the scores of the S keys.

    Writes the tokens' keys and values into layer (2, B, H, capacity, D).
    """
    qkv = block.attn.split_heads(block.ln_1(x)) # (B, T, E) -> (3, B, H, T, D)
    layer.index_copy_(3, positions, qkv[1:])
    keys, values = layer[..., :num_keys, :] # (2, B, H, capacity, D) -> two of (B, H, S, D)
    y = F.scaled_dot_product_attention(qkv[0], keys, values, attn_mask=mask) # (B, H, T, D), one kernel
    x = x + block.attn.c_proj(block.attn.merge_heads(y)) # (B, H, T, D) -> (B, T, E)
    return x + block.mlp(block.ln_2(x))
