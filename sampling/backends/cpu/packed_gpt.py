"""The backend for CPUs: packed weights, and few operations per token.

Which layers multiply, by processor and dtype:

    processor, dtype    one row                                      several rows
    Intel, float32      F.linear, with MKL                           PackedLinear, with oneDNN
    AMD, not int8       BagLinear, with embedding bags               PackedLinear
    otherwise           PackedLinear                                 PackedLinear
    all, int8           Int8BagMatmul, with embedding bags           TwoDigitMatmul, with oneDNN

Each of them converts its weight when that has begun to pay, mostly at the third such product in succession. Until then,
F.linear multiplies, or in int8 the Int8BagMatmul. In float32, a large LM head computes the logits of one row in
bfloat16, and only the largest again in float32 (ShortlistLMHead).

A layer with fewer than 256 inputs or outputs is narrow, and uses F.linear for few rows. DecodeStep runs the blocks for
one token of each row, and traces them after 0.3 seconds.
"""
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import GPT
from sampling.backends.backend import Backend, estimate_bytes_per_row
from sampling.backends.cpu.bag_linear import make_linear
from sampling.backends.cpu.int8_linear import Int8Linear, int8_embedding, quantize_weight
from sampling.backends.cpu.lm_head import ShortlistLMHead
from sampling.backends.cpu.packed_block import LayerNorm, MakeLinear, PackedBlock
from sampling.backends.cpu.packed_cache import PackedCache
from sampling.backends.cpu.traced_blocks import DecodeStep
from sampling.backends.memory import return_freed_memory


class PackedGPT(Backend):
    """Computes the logits of a GPT. It takes over the GPT's layers: afterwards, the GPT itself has no layers.

    pack_eagerly: pack all layers now. Otherwise each layer is packed when packing saves time, and the last bits of the
    logits depend on when that happens.
    use_int8: quantize all weights to int8 now. While there is a cache, the logits of a row do not depend, to the last
    bit, on the other rows or on how its tokens are split into passes.
    """
    device, max_rows = torch.device("cpu"), 64

    def __init__(self, gpt: GPT, pack_eagerly: bool = False, use_int8: bool = False):
        self.config, self.use_int8 = gpt.config, use_int8
        self.wpe, self.ln_f = gpt.transformer.wpe.weight.detach(), LayerNorm(gpt.transformer.ln_f)
        wte, head = gpt.transformer.wte.weight.detach(), gpt.lm_head.weight.detach()
        is_tied = gpt.lm_head.weight is gpt.transformer.wte.weight
        del gpt.lm_head, gpt.transformer.wte # otherwise, weights would stay in memory after they are packed
        if use_int8: # the head first: packing needs a second copy of a layer, and the head is the largest one
            quantized = quantize_weight(head)
            linear = Int8Linear(quantized)
            self.lm_head = lambda x, k: linear(x) # computes all logits, whatever k is
            self.embed = partial(int8_embedding, weight=quantized if is_tied else quantize_weight(wte))
            self.blocks = pack_blocks(gpt.transformer.h, quantize_linear)
        else:
            self.embed = partial(F.embedding, weight=wte)
            self.blocks = pack_blocks(gpt.transformer.h, partial(make_linear, pack_eagerly=pack_eagerly))
            self.lm_head = ShortlistLMHead(head, weight_is_shared=is_tied, pack_eagerly=pack_eagerly)
        self.decode_step = DecodeStep(self.blocks)

    def new_cache(self, num_rows: int, capacity: int) -> PackedCache:
        return PackedCache(self.config, num_rows, capacity)

    @torch.inference_mode() # has a little less overhead than no_grad
    def logits(self, ids: Tensor, cache: PackedCache | None, num_positions: int = 1,
               num_needed: int | None = None) -> Tensor:
        """Raises ValueError if there are more than block_size tokens."""
        T, start = ids.size(1), 0 if cache is None else cache.seq_len
        if start + T > self.config.block_size:
            raise ValueError(f"cannot process {start + T} tokens: block_size is {self.config.block_size}")
        with torch.autocast("cpu", enabled=False): # the layers cast their inputs themselves
            x = self.embed(ids) + self.wpe[start:start + T] # (B, T, E)
            x = self.decode_step(x[:, 0], cache) if T == 1 and start else self.prefill(x, cache, num_positions)
            return self.lm_head(self.ln_f(x), num_needed)

    def prefill(self, x: Tensor, cache: PackedCache | None, num_positions: int) -> Tensor:
        """Run the blocks for T tokens: (B, T, E) -> (B * num_positions, E), those of the last num_positions tokens.

        Appends keys and values to the cache.
        """
        T, last = x.size(1), len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            q, k, v = self.split_heads(block.qkv(x))
            if cache is not None:
                k, v = cache.append(i, k, v)
            if i == last: # from here on, only the last positions are needed
                q, x = q[:, :, -num_positions:], x[:, -num_positions:].contiguous()
            # In int8, rounding activations can turn a difference in the last bit into one that is thousands of times
            # larger. repeated_attention does not differ from decode_step. For the few queries of the last layer,
            # causal_attention depends on the batch: on some AMD processors, its threads round differently.
            is_repeated = self.use_int8 and (cache is not None or i == last)
            attention = block.repeated_attention if is_repeated else causal_attention
            x = block.post_attention(x, attention(q, k, v))
        if cache is not None:
            cache.seq_len += T
            self.decode_step.forget(cache)
        return x.flatten(0, 1)

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """(B, T, 3 * E) -> queries, keys and values of every head: three of (B, H, T, D)."""
        return qkv.unflatten(-1, (3, self.config.n_head, -1)).permute(2, 0, 3, 1, 4).unbind()

    def bytes_per_row(self, length: int) -> int:
        return estimate_bytes_per_row(self.config, length, torch.float32.itemsize)


def pack_blocks(blocks: nn.ModuleList, linear: MakeLinear) -> list[PackedBlock]:
    """Pack the blocks one by one. Empties the list, so that each one's memory is free before the next one is packed."""
    return [PackedBlock(blocks.pop(0), linear) for _ in range(len(blocks))]


def quantize_linear(weight: Tensor, bias: Tensor | None) -> Int8Linear:
    """The int8 layer of this weight. Returns the memory that quantizing needed to the system."""
    layer = Int8Linear(quantize_weight(weight), bias)
    return_freed_memory()
    return layer


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries (B, H, T, D), the last T of S positions, with keys and values (B, H, S, D) -> (B, T, E)."""
    T, S = q.size(2), k.size(2)
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T) if 1 < T < S else None # is_causal needs T == S
    y = F.scaled_dot_product_attention(q.to(k.dtype), k, v, attn_mask=mask, is_causal=1 < T == S)
    return y.transpose(1, 2).flatten(2)
