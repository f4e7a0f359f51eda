"""The backend for NVIDIA GPUs. Each decode step is one CUDA graph.

A step of a small model is a hundred kernels of a few microseconds each, and launching them one by one takes longer
than running them. A CUDA graph launches all of them at once, but needs tensors that stay in place. So a StaticCache
holds the tensors that a step reads and writes, and attention covers a bucket of positions, of which a mask hides those
that are not filled. Tests on a CPU run the same steps without graphs.

The first step of each kind is checked on the user's own GPU: it must compute what the plain model computes.
"""
import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from model import GPT, Block, KVCache, linear_dtype
from sampling.backends.backend import Backend
from sampling.messages import is_out_of_memory

logger = logging.getLogger(__name__)
BUCKET = 128 # a step attends to a multiple of this many positions, or to all. Each number has its own graph
TOLERANCE_FLOAT32, TOLERANCE_HALF = 0.005, 0.05 # see compare_logits; a wrong key, mask or position gives more


@dataclass
class SelfCheck:
    """Which path this GPU may use. If a check or a graph fails, it becomes a slower one, and a warning says so.

    path: "graphs": CUDA graphs of the steps of CUDABackend; "steps": these steps themselves; "plain": the plain model.
    """
    path: str

    def check_logits(self, found: Tensor, expected: Tensor) -> bool:
        """Whether the logits (B, V) of a step agree with those of the plain model. If not, use no steps any more."""
        error, limit = compare_logits(found, expected) # (B,) each
        if (error <= limit).all() or not expected.isfinite().all(): # logits that are not finite get their own error
            return True
        worst = (error - limit).argmax()
        self.path = "plain"
        logger.warning(f"the fast path for GPUs computes other logits than the plain model here (a difference of "
                 f"{error[worst]:.3g} standard deviations; {limit[worst]:.3g} is allowed): continuing with the plain "
                 "model, which is slower")
        return False

    def disable_graphs(self, error: Exception, device: torch.device) -> None:
        """Continue without CUDA graphs after this error. Raises ValueError if the GPU cannot be used any more."""
        while error.__context__ is not None: # the first error says more than those that it caused
            error = error.__context__
        reason = f"{type(error).__name__}: {error!s:.200}".partition("\n")[0]
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            raise ValueError("a CUDA graph failed, and the GPU accepts nothing more from this process: run it again "
                             f"with --cuda_graphs=False ({reason})") from None
        self.path = "steps"
        logger.warning(f"CUDA graphs do not work here ({reason}): continuing without them, which is slower")


class GraphSet:
    """The CUDA graphs of steps that read and write the same tensors, which stay in place. Each step has a key."""

    def __init__(self, checks: SelfCheck, device: torch.device):
        self.checks, self.device = checks, device
        # By key: the graph and the logits that it writes; None: the step was checked, and runs without a graph.
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        self.stream = self.pool = None # of the captures. The graphs share the pool: they never run at the same time

    def run(self, key: Hashable, step: Callable[[], Tensor], plain: Callable[[], Tensor]) -> Tensor:
        """The logits (B, V) of a step: from its graph, which is captured and checked at the first call with this key.

        plain computes the same with the plain model. Raises what means out of memory; the next call captures again.
        """
        if self.checks.path == "plain":
            return plain()
        if key not in self.graphs:
            graph, logits = self.capture(step) if self.checks.path == "graphs" else (None, step())
            expected = plain()
            if not self.checks.check_logits(logits, expected):
                return expected
            self.graphs[key] = (graph, logits) if graph else None
            return logits
        if self.graphs[key] is None or self.checks.path == "steps":
            return step()
        graph, logits = self.graphs[key]
        graph.replay()
        return logits

    def capture(self, step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph | None, Tensor]:
        """Capture the step, and run it once: from its graph, or directly if graphs do not work."""
        try:
            graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
            if self.stream is None: # cuBLAS keeps a workspace for each stream: none dangles when this set is gone
                self.stream, self.pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
            self.stream.wait_stream(caller)
            # torch.cuda.graph may leave its own stream current when it fails: the outer block returns to the caller's.
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                step() # creates what must not be created during a capture, such as the workspace of cuBLAS
                # thread_local: what another thread allocates meanwhile does not end the capture.
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    logits = step()
            caller.wait_stream(self.stream)
            graph.replay()
            torch.cuda.synchronize(self.device) # raises the errors of the replay
            return graph, logits
        except Exception as error: # a driver, an operator or too little memory: each has its own
            if is_out_of_memory(error):
                raise
            self.checks.disable_graphs(error, self.device)
        return None, step()


def compare_logits(found: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """The difference of each row of logits (B, V), and the largest that rounding explains: (B,) each, in standard
    deviations of expected.

    The mean of the difference is left out, because a constant added to all logits does not change their probabilities.
    GPT-2's logits lie around -60 to -115, where neighbouring bfloat16 numbers are 0.5 apart: half of that is allowed.
    """
    logits, difference = expected.float(), found.float() - expected.float()
    std = logits.std(dim=-1, correction=0).clamp(min=1e-30)
    rounding = torch.finfo(expected.dtype).eps / 2 * logits.mean(dim=-1).abs()
    base = TOLERANCE_FLOAT32 if expected.dtype == torch.float32 else TOLERANCE_HALF
    return difference.std(dim=-1, correction=0) / std, base + rounding / std


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
    min_flush_steps, all_columns = 4, True

    def should_drop(self, num_rows, num_unfinished):
        return num_rows > 32 and 2 * num_unfinished <= num_rows

    max_rows = 128 # a guess: the random numbers of each row need a kernel

    def __init__(self, model: GPT, compile: bool = False, cuda_graphs: bool = True):
        self.model, self.config, self.device = model, model.config, model.lm_head.weight.device
        # No TF32: it selects kernels by shape, so that another batch size could change a token in float32.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.enable_cudnn_sdp(False) # cuDNN needs a new plan for every shape, and so for every length
        self.checks = SelfCheck("graphs" if cuda_graphs and self.device.type == "cuda" else "steps")
        self.window: tuple[Tensor, GraphSet] | None = None # ids (B, block_size), and the graph that reads them
        self.idle: StaticCache | None = None # the latest one that was released: the next batch may use its graphs
        self.lock = threading.Lock()
        self.cache_itemsize = model.lm_head.weight.itemsize
        # The blocks are compiled one by one, because all blocks share the compiled code of the first one.
        self.block_step, self.forward = block_step, model.forward
        if compile:
            self.min_capacity = self.config.block_size # each capacity would need another compilation
            torch._dynamo.config.recompile_limit = 64 # one graph for each number of keys and batch size
            self.block_step = torch.compile(block_step, dynamic=False)
            self.forward = torch.compile(model.forward, dynamic=False)

    def new_cache(self, num_rows: int, capacity: int) -> StaticCache:
        capacity = round_up(max(capacity, self.min_capacity), BUCKET)
        capacity = min(capacity, round_up(self.config.block_size, 8)) # attention with a mask needs multiples of 8
        with self.lock:
            cache, self.idle = self.idle, None
            if cache is None or len(cache.token) != num_rows or cache.capacity < capacity:
                cache = None # frees its memory before the new one takes more
                cache = StaticCache(self.model, num_rows, capacity, GraphSet(self.checks, self.device))
            for layer in cache.layers:
                layer.zero_() # attention multiplies masked values by 0, so they must not be NaN
        cache.seq_len = 0
        return cache

    def release(self, cache: StaticCache) -> None:
        self.idle = cache

    @torch.no_grad()
    def logits(self, ids: Tensor, cache: StaticCache | None, num_positions: int = 1) -> Tensor:
        with self.lock: # another thread must not write the inputs of a graph before it runs
            if cache is None:
                return self.window_logits(ids).clone() # another thread may use the same window
            start = cache.seq_len
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
        """Process cache.token at cache.position, attending to the S = num_keys first positions -> logits (B, V)."""
        transformer = self.model.transformer
        x = transformer.wte(cache.token) + transformer.wpe(cache.position) # (B, 1, E)
        zeros = torch.zeros(1, num_keys, device=self.device, dtype=cache.layers[0].dtype)
        mask = zeros.masked_fill(torch.arange(num_keys, device=self.device) > cache.position, -torch.inf) # (1, S)
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
