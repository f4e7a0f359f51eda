"""The backend for NVIDIA GPUs. Each decode step is one CUDA graph.

A step of a small model is a hundred kernels of a few microseconds each, and launching them one by one takes longer
than running them. A CUDA graph launches all of them at once, but needs tensors that stay in place. So a StaticCache
holds the tensors that a step reads and writes, and attention covers a bucket of positions, of which a mask hides those
that are not filled. Tests on a CPU run the same steps without graphs.
"""
import threading

import torch
from torch import Tensor
from torch.nn import functional as F

from model import GPT, Block, KVCache, linear_dtype
from sampling.backends.backend import Backend
from sampling.backends.cuda_graphs import GraphSet, SelfCheck
from sampling.messages import Log, warn

BUCKET = 128 # a step attends to a multiple of this many positions, or to all. Each number has its own graph


class StaticCache(KVCache):
    """A KV cache, the inputs of a decode step, and the graphs that hold both in place."""

    def __init__(self, model: GPT, num_rows: int, capacity: int, graphs: GraphSet):
        super().__init__(model.config, num_rows, capacity, graphs.device, linear_dtype(model))
        self.capacity = capacity
        self.token = torch.zeros(num_rows, 1, dtype=torch.long, device=graphs.device) # that the step processes
        self.position = torch.zeros(1, dtype=torch.long, device=graphs.device) # of this token
        self.graphs = graphs

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only. The steps then need new graphs."""
        self.graphs = GraphSet(self.graphs.checks, self.graphs.device) # first, because the old ones hold memory
        super().select_rows(rows)
        self.token = self.token[rows]


class CUDABackend(Backend):
    """Computes the logits of a GPT, whose Linears must be cast already: a graph cannot keep cast copies of weights.

    compile: torch.compile fuses the kernels of the steps before they are captured. cuda_graphs=False launches the
    kernels one by one. Changes the precision of matrix products and the choice of attention kernels for the whole
    process. Several threads may use it, one at a time.
    """
    max_rows = 128 # a guess: the random numbers of each row need a kernel

    def __init__(self, model: GPT, compile: bool = False, cuda_graphs: bool = True, log: Log = warn):
        self.model, self.config, self.device = model, model.config, model.lm_head.weight.device
        # No TF32: it selects kernels by shape, so that another batch size could change a token in float32.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.enable_cudnn_sdp(False) # cuDNN needs a new plan for every shape, and so for every length
        self.checks = SelfCheck(log, use_graphs=cuda_graphs and self.device.type == "cuda")
        self.window: tuple[Tensor, GraphSet] | None = None # ids (B, block_size), and the graph that reads them
        self.idle: StaticCache | None = None # the latest one that was released: the next batch may use its graphs
        self.lock = threading.Lock()
        self.cache_itemsize = model.lm_head.weight.itemsize
        self.min_capacity = self.config.block_size if compile else 1 # each capacity would need another compilation
        # The blocks are compiled one by one, because all blocks share the compiled code of the first one.
        self.block_step, self.forward = block_step, model.forward
        if compile:
            torch._dynamo.config.recompile_limit = 64 # one graph for each number of keys and batch size
            self.block_step = torch.compile(block_step, dynamic=False)
            self.forward = torch.compile(model.forward, dynamic=False)

    def new_cache(self, num_rows: int, capacity: int) -> StaticCache:
        capacity = round_up(max(capacity, self.min_capacity), BUCKET)
        capacity = min(capacity, round_up(self.config.block_size, 8)) # attention with a mask needs multiples of 8
        with self.lock:
            cache, self.idle = self.idle, None
        if cache is not None and len(cache.token) == num_rows and cache.capacity >= capacity:
            cache.seq_len = 0
            return cache
        cache = None # frees its memory before the new one takes more
        return StaticCache(self.model, num_rows, capacity, GraphSet(self.checks, self.device))

    def release(self, cache: StaticCache) -> None:
        self.idle = cache

    @torch.no_grad()
    def logits(self, ids: Tensor, cache: StaticCache | None, num_positions: int = 1,
               num_needed: int | None = None) -> Tensor:
        with self.lock: # another thread must not write the inputs of a graph before it runs
            if cache is None:
                return self.window_logits(ids).clone() # another thread may use the same window
            start = cache.seq_len
            if start == 0:
                for layer in cache.layers:
                    layer.zero_() # attention multiplies masked values by 0, so they must not be NaN
            if start == 0 or ids.size(1) > 1:
                return self.plain_logits(ids, cache, start, num_positions)
            cache.token.copy_(ids)
            cache.position.fill_(start)
            num_keys = min(round_up(start + 1, BUCKET), cache.capacity)
            logits = cache.graphs.run(num_keys, lambda: self.decode_step(cache, num_keys),
                                      lambda: self.plain_logits(cache.token, cache, start))
            cache.seq_len = start + 1
            return logits

    def plain_logits(self, ids: Tensor, cache: StaticCache, start: int, num_positions: int = 1) -> Tensor:
        """The logits of the plain model for ids (B, T) at the positions from start on."""
        cache.seq_len = start
        return self.model(ids, cache=cache, num_positions=num_positions)[0].flatten(0, 1) # (B, n, V) -> (B * n, V)

    def decode_step(self, cache: StaticCache, num_keys: int) -> Tensor:
        """Process cache.token at cache.position, attending to the first num_keys positions -> logits (B, V)."""
        transformer = self.model.transformer
        x = transformer.wte(cache.token) + transformer.wpe(cache.position) # (B, 1, E)
        is_future = torch.arange(num_keys, device=self.device) > cache.position # (S,), S being num_keys
        mask = torch.zeros(1, num_keys, device=self.device, dtype=cache.layers[0].dtype)
        mask = mask.masked_fill(is_future, -torch.inf) # (1, S)
        for block, layer in zip(transformer.h, cache.layers, strict=True):
            x = self.block_step(block, x, layer, cache.position, mask, num_keys)
        return self.model.lm_head(transformer.ln_f(x))[:, 0] # (B, 1, E) -> (B, V)

    def window_logits(self, ids: Tensor) -> Tensor:
        """The logits (B, V) after a full window (B, block_size)."""
        window, self.window = self.window, None # so that a failure, such as out of memory, frees it
        if window is None or window[0].shape != ids.shape:
            window = None # frees its memory before the new one takes more
            window = ids.clone(), GraphSet(self.checks, self.device)
        window_ids, graphs = window
        window_ids.copy_(ids)
        logits = graphs.run("window", lambda: self.forward(window_ids)[0][:, -1],
                            lambda: self.model(window_ids)[0][:, -1])
        self.window = window
        return logits

    def bytes_per_row(self, length: int) -> int:
        return super().bytes_per_row(max(length, self.min_capacity))


def block_step(block: Block, x: Tensor, layer: Tensor, position: Tensor, mask: Tensor, num_keys: int) -> Tensor:
    """Block.forward for one more token: (B, 1, E) -> (B, 1, E). mask (1, S) is added to the scores of the S keys.

    Writes the token's key and value into layer (2, B, H, capacity, D).
    """
    qkv = block.attn.split_heads(block.ln_1(x)) # (B, 1, E) -> (3, B, H, 1, D)
    layer.index_copy_(3, position, qkv[1:])
    keys, values = layer[..., :num_keys, :] # (2, B, H, capacity, D) -> two of (B, H, S, D)
    y = F.scaled_dot_product_attention(qkv[0], keys, values, attn_mask=mask) # (B, H, 1, D), one kernel
    x = x + block.attn.c_proj(block.attn.merge_heads(y)) # (B, H, 1, D) -> (B, 1, E)
    return x + block.mlp(block.ln_2(x))


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
