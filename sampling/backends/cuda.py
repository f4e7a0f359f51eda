"""The backend for NVIDIA GPUs. Each decode step is one CUDA graph.

A step of a small model is a hundred kernels of a few microseconds each, and launching them one by one takes longer
than running them. A CUDA graph launches all of them at once, but needs tensors that stay in place. So a StaticCache
holds the tensors that a step reads and writes, and attention covers a bucket of positions, of which a mask hides those
that are not filled. GraphSet has the graphs, and compares the first step of each kind with the plain model. Tests on a
CPU run the same steps without graphs.
"""
import threading

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from model import GPT, Block, KVCache, linear_dtype
from sampling.backends.backend import Backend, estimate_bytes_per_row
from sampling.backends.cuda_graphs import GraphSet, SelfCheck
from sampling.messages import Log, warn

BUCKET = 128 # a step attends to a multiple of this many positions, or to all. Each number has its own graph
HEAD_MULTIPLE = 64 # GPUs multiply half-precision matrices of other sizes more slowly; GPT-2's vocabulary is 50257


class StaticCache:
    """A KV cache, the inputs of a decode step, and the graphs that hold both in place."""

    def __init__(self, model: GPT, num_rows: int, capacity: int, checks: SelfCheck):
        self.kv, self.checks = model.new_cache(num_rows, capacity), checks
        self.capacity, self.seq_len = capacity, 0
        device = self.kv.layers[0].device
        self.token = torch.zeros(num_rows, 1, dtype=torch.long, device=device) # that the step processes
        self.position = torch.zeros(1, dtype=torch.long, device=device) # of this token
        self.graphs = GraphSet(checks, device)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.token)

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only. The steps then need new graphs."""
        self.graphs = GraphSet(self.checks, self.token.device) # first, because the old ones hold memory
        self.kv.select_rows(rows)
        self.token = self.token[rows]


class Window:
    """A full window (B, block_size) of ids, and the graph of its forward pass."""

    def __init__(self, ids: Tensor, checks: SelfCheck):
        self.ids, self.graphs = ids.clone(), GraphSet(checks, ids.device)


class CUDABackend(Backend):
    """Computes the logits of a GPT, whose Linears must be cast already: a graph cannot keep cast copies of weights.

    compile: torch.compile fuses the kernels of the steps before they are captured. cuda_graphs=False launches the
    kernels one by one. log gets messages for the user. Changes the precision of matrix products and the choice of
    attention kernels for the whole process. Several threads may use it, one at a time.
    """
    keeps_graphs = True
    max_rows = 128 # a guess: the random numbers of each row need a kernel

    def __init__(self, model: GPT, compile: bool = False, cuda_graphs: bool = True, log: Log = warn):
        self.model, self.config, self.device = model, model.config, model.lm_head.weight.device
        # No TF32: it selects kernels by shape, so that another batch size could change a token in float32.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.enable_cudnn_sdp(False) # cuDNN needs a new plan for every shape, and so for every length
        self.checks = SelfCheck(log, use_graphs=cuda_graphs and self.device.type == "cuda")
        self.is_compiled, self.window, self.lock = compile, None, threading.Lock()
        self.head = model.lm_head.weight # (V, E), or with rows of zeros that fill its size
        if self.head.dtype != torch.float32:
            padded = F.pad(self.head.detach(), (0, 0, 0, -len(self.head) % HEAD_MULTIPLE))
            self.head = Parameter(padded, requires_grad=False)
            model.lm_head.weight = Parameter(padded[:self.config.vocab_size], requires_grad=False) # no second copy
        # The blocks are compiled one by one, because all blocks share the compiled code of the first one.
        self.block_step, self.forward = block_step, model.forward
        if compile:
            torch._dynamo.config.recompile_limit = 64 # one graph for each number of keys and batch size
            self.block_step = torch.compile(block_step, dynamic=False)
            self.forward = torch.compile(model.forward, dynamic=False)

    def new_cache(self, num_rows: int, capacity: int) -> StaticCache:
        if self.is_compiled: # another capacity would need another compilation
            capacity = self.config.block_size
        most = round_up(self.config.block_size, 8) # attention with a mask needs multiples of 8
        return StaticCache(self.model, num_rows, min(round_up(capacity, BUCKET), most), self.checks)

    @torch.no_grad()
    def logits(self, ids: Tensor, cache: StaticCache | None, num_positions: int = 1,
               num_needed: int | None = None) -> Tensor:
        with self.lock: # another thread must not write the inputs of a graph before it runs
            if cache is None:
                return self.window_logits(ids).clone() # another thread may use the same window
            start, cache.seq_len = cache.seq_len, cache.seq_len + ids.size(1)
            if start == 0:
                for layer in cache.kv.layers:
                    layer.zero_() # attention multiplies masked values by 0, so they must not be NaN
            if start == 0 or ids.size(1) > 1:
                return self.plain_logits(ids, cache.kv, start, num_positions)
            cache.token.copy_(ids)
            cache.position.fill_(start)
            num_keys = min(round_up(start + 1, BUCKET), cache.capacity)
            return cache.graphs.run(num_keys, lambda: self.decode_step(cache, num_keys),
                                    lambda: self.plain_logits(cache.token, cache.kv, start))

    def plain_logits(self, ids: Tensor, kv: KVCache, start: int, num_positions: int = 1) -> Tensor:
        """The logits of the plain model for ids (B, T) at the positions from start on."""
        kv.seq_len = start
        return self.model(ids, cache=kv, num_positions=num_positions)[0].flatten(0, 1) # (B, n, V) -> (B * n, V)

    def decode_step(self, cache: StaticCache, num_keys: int) -> Tensor:
        """Process cache.token at cache.position, attending to the first num_keys positions -> logits (B, V).

        Writes the key and the value of the token into the cache.
        """
        transformer = self.model.transformer
        x = transformer.wte(cache.token) + transformer.wpe(cache.position) # (B, 1, E)
        is_future = torch.arange(num_keys, device=self.device) > cache.position # (S,), S being num_keys
        mask = torch.zeros(num_keys, device=self.device, dtype=cache.kv.layers[0].dtype)
        mask = mask.masked_fill(is_future, -torch.inf)[None] # (1, S)
        for block, layer in zip(transformer.h, cache.kv.layers, strict=True):
            x = self.block_step(block, x, layer, cache.position, mask, num_keys)
        return F.linear(transformer.ln_f(x)[:, 0], self.head)[:, :self.config.vocab_size] # (B, E) -> (B, V)

    def window_logits(self, ids: Tensor) -> Tensor:
        """The logits (B, V) after a full window (B, block_size)."""
        if self.window is None or self.window.ids.shape != ids.shape:
            self.window = None # frees its memory before the new one takes more
            self.window = Window(ids, self.checks)
        window = self.window
        window.ids.copy_(ids)
        try:
            return window.graphs.run("window", lambda: self.forward(window.ids)[0][:, -1],
                                     lambda: self.model(window.ids)[0][:, -1])
        except BaseException: # such as out of memory: then the engine goes on with fewer rows
            self.window = None
            raise

    def bytes_per_row(self, length: int) -> int:
        if self.is_compiled:
            length = max(length, self.config.block_size) # as in new_cache
        return estimate_bytes_per_row(self.config, length, linear_dtype(self.model).itemsize)


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
    """The smallest multiple that is at least the number."""
    return -(-number // multiple) * multiple
