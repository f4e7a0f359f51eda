"""The backend for NVIDIA GPUs. Each decode step is one CUDA graph; where graphs do not work, it is
the plain model's.

A step of a small model is a hundred kernels of a few microseconds each, and launching them one by
one takes longer than running them. A CUDA graph launches all of them at once, but needs tensors
that stay in place. So a StaticCache holds the tensors that a step reads and writes, and attention
covers a bucket of positions, of which a mask hides those that are not filled. Each graph is checked
when it is captured, on the user's own GPU: it must compute the logits of the plain model.
"""
import logging
import threading
import weakref
from collections import defaultdict

import torch
from torch import Tensor
from torch.nn import functional as F

from sampling.backends.backend import EagerBackend
from sampling.model import GPT, Block, KVCache, linear_dtype
from sampling.process import is_out_of_memory
from sampling.values import first_sentence

logger = logging.getLogger(__name__)
# A step attends to a multiple of this many positions, or to all. Each number has its own graph.
BUCKET = 128
# A process may have one capture at a time, which synchronises the GPU.
capture_lock = threading.RLock()
# The streams of caches that are gone.
free_streams: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


class StaticCache(KVCache):
    """A KV cache, the inputs of a decode step, and the graphs that read and write both in place.

    It refers to no step and no backend, which refer to it: such a cycle would keep its memory until
    a garbage collection.
    """

    def __init__(self, model: GPT, num_rows: int, capacity: int, device: torch.device):
        super().__init__(model.config, num_rows, capacity, device, linear_dtype(model))
        self.capacity = capacity
        # What the step processes.
        self.token = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device) # this token's
        # A graph for each number of keys, with its logits.
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # The stream and the pool of the captures. The graphs share the pool: they never run at the
        # same time.
        self.stream = self.pool = None

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only, which need new graphs."""
        self.graphs = {} # first, because the old graphs hold memory
        super().select_rows(rows)
        self.token = self.token[:len(rows)] # the next step replaces it


class CUDABackend(EagerBackend):
    """Computes the logits of a GPT, whose Linears must be cast already: a graph cannot keep cast
    copies of weights.

    Without cuda_graphs, with compile, and once a graph has failed, the plain model runs. Changes
    the precision of matrix products and the choice of attention kernels for the whole process.
    Thread-safe: a lock admits one thread.
    """
    max_batch_bytes = 2**33
    max_rows = 128 # a guess: the random numbers of each row need a kernel
    full_vocabulary = True
    min_flush_steps = 4 # each copy synchronises the GPU

    def __init__(self, model: GPT, compile: bool = False, cuda_graphs: bool = True):
        super().__init__(model, compile)
        # No TF32: it selects kernels by shape, so that another batch size could change a token in
        # float32.
        torch.set_float32_matmul_precision("highest")
        # cuDNN needs a new plan for every shape, and so for every length.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.has_graphs = cuda_graphs and not compile
        # The latest one that was released: the next batch may use its graphs.
        self.idle: StaticCache | None = None
        self.lock = threading.RLock() # the thread that has it may sample in a signal handler

    def new_cache(self, num_rows: int, capacity: int) -> StaticCache:
        # Attention needs multiples of 8.
        capacity = min(round_up(capacity, BUCKET), round_up(self.config.block_size, 8))
        with self.lock:
            cache = self.idle
            self.idle = None
            if cache is None or len(cache.token) != num_rows or cache.capacity < capacity:
                cache = None # frees its memory before the new cache takes more
                cache = StaticCache(self.model, num_rows, capacity, self.device)
            for layer in cache.layers:
                layer.zero_() # attention multiplies masked values by 0, so they must not be NaN
        cache.seq_len = 0
        return cache

    def release(self, cache: StaticCache) -> None:
        self.idle = cache

    def free_buffers(self) -> None:
        self.idle = None

    def should_drop(self, num_rows: int, num_unfinished: int) -> bool:
        # With fewer, the new graphs would cost more.
        return num_rows > 32 and 2 * num_unfinished <= num_rows

    def logits(self, ids: Tensor, cache: StaticCache | None, num_positions: int = 1) -> Tensor:
        with self.lock: # another thread must not write the inputs of a step before it runs
            is_decode_step = cache is not None and cache.seq_len > 0 and ids.size(1) == 1
            # A prompt, a full window, or a text that is scored.
            if not (is_decode_step and self.has_graphs):
                return super().logits(ids, cache, num_positions)
            num_keys = min(round_up(cache.seq_len + 1, BUCKET), cache.capacity)
            cache.token.copy_(ids)
            cache.position.fill_(cache.seq_len)
            if num_keys not in cache.graphs:
                return self.first_logits(cache, num_keys)
            graph, logits = cache.graphs[num_keys]
            graph.replay()
            cache.seq_len += 1
            return logits

    def first_logits(self, cache: StaticCache, num_keys: int) -> Tensor:
        """The logits of the first step with num_keys, which is captured, and checked by the plain
        model. Raises what means out of memory; then the next step with num_keys is the first one
        again.
        """
        try:
            with capture_lock:
                graph, logits = self.capture(cache, num_keys)
        except Exception as error: # a driver, an operator or too little memory: each has its own
            if is_out_of_memory(error):
                raise
            self.disable_graphs(error)
        expected = super().logits(cache.token, cache)
        if not (self.has_graphs and self.check_logits(logits, expected)):
            return expected
        cache.graphs[num_keys] = graph, logits
        return logits

    def capture(self, cache: StaticCache, num_keys: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of the step, which has run once, and its logits (B, V)."""
        graph = torch.cuda.CUDAGraph()
        caller = torch.cuda.current_stream(self.device)
        # Caches may not share one: cuBLAS keeps a workspace for each stream.
        if cache.stream is None:
            streams = free_streams[self.device]
            cache.stream = streams.pop() if streams else torch.cuda.Stream(self.device)
            weakref.finalize(cache, streams.append, cache.stream)
        if not cache.graphs: # torch refuses a pool whose graphs are gone
            cache.pool = torch.cuda.graph_pool_handle()
        cache.stream.wait_stream(caller)
        try:
            # torch.cuda.graph may leave its own stream current when it fails: the outer block
            # returns to the caller's. It also selects the stream's device.
            with torch.cuda.stream(cache.stream):
                # The first run creates what must not be created during a capture, such as the
                # workspace of cuBLAS.
                self.decode_step(cache, num_keys)
                # thread_local: what another thread allocates meanwhile does not end the capture.
                with torch.cuda.graph(graph, pool=cache.pool, stream=cache.stream,
                                      capture_error_mode="thread_local"):
                    logits = self.decode_step(cache, num_keys)
        finally: # also if the capture fails, because the first step has written the cache
            caller.wait_stream(cache.stream)
        graph.replay()
        torch.cuda.synchronize(self.device) # raises the errors of the replay
        return graph, logits

    def disable_graphs(self, error: Exception) -> None:
        """Continue without CUDA graphs after this error.

        Raises ValueError if the GPU cannot be used any more.
        """
        while error.__context__ is not None: # the first error says more than those that it caused
            error = error.__context__
        reason = f"{type(error).__name__}: {first_sentence(error)}"
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            raise ValueError("a CUDA graph failed, and the GPU accepts nothing more from this "
                             "process: run it again, and pass cuda_graphs=False "
                             f"({reason})") from None
        self.has_graphs = False
        logger.warning(f"CUDA graphs do not work here ({reason}): continuing without them, which "
                       "is slower")

    def check_logits(self, found: Tensor, expected: Tensor) -> bool:
        """Whether the logits (B, V) of a graph agree with the plain model's, as far as rounding
        allows. If not, go on without CUDA graphs. A constant added to all logits changes no
        probability, so the mean of the difference is left out. GPT-2's logits lie around -60 to
        -115, where bfloat16 numbers are 0.5 apart: half of that is allowed.
        """
        std, mean = torch.std_mean(expected.float(), dim=-1, correction=0) # (B,) each
        error = (found.float() - expected.float()).std(dim=-1, correction=0)
        # A wrong key or mask gives more.
        tolerance = 0.005 if expected.dtype == torch.float32 else 0.05
        limit = tolerance * std + torch.finfo(expected.dtype).eps / 2 * mean.abs()
        # Logits that are not finite get their own error.
        if (error <= limit).all() or not expected.isfinite().all():
            return True
        worst = (error - limit).argmax()
        self.has_graphs = False
        difference = error[worst] / std[worst]
        allowed = limit[worst] / std[worst]
        logger.warning("the fast path for GPUs computes other logits than the plain model here (a "
                       f"difference of {difference:.3g} standard deviations; {allowed:.3g} is "
                       "allowed): continuing with the plain model, which is slower")
        return False

    def decode_step(self, cache: StaticCache, num_keys: int) -> Tensor:
        """Process cache.token at cache.position, with S = num_keys -> logits (B, V)."""
        transformer = self.model.transformer
        x = transformer.wte(cache.token) + transformer.wpe(cache.position) # (B, 1, E)
        zeros = torch.zeros(1, num_keys, device=self.device, dtype=self.dtype)
        # (1, S)
        positions = torch.arange(num_keys, device=self.device)
        mask = zeros.masked_fill(positions > cache.position, -torch.inf)
        for block, layer in zip(transformer.h, cache.layers, strict=True):
            x = block_step(block, x, layer, cache.position, mask, num_keys)
        return self.model.lm_head(transformer.ln_f(x))[:, 0] # (B, 1, E) -> (B, V)


def block_step(block: Block, x: Tensor, layer: Tensor, position: Tensor, mask: Tensor,
               num_keys: int) -> Tensor:
    """Block.forward for one more token: (B, 1, E) -> (B, 1, E).

    Its key and value go into layer (2, B, H, capacity, D). mask (1, S) is added to the scores of
    the S keys.
    """
    qkv = block.attn.split_heads(block.ln_1(x)) # (B, 1, E) -> (3, B, H, 1, D)
    layer.index_copy_(3, position, qkv[1:])
    keys, values = layer[..., :num_keys, :] # (2, B, H, capacity, D) -> two of (B, H, S, D)
    # (B, H, 1, D), one kernel.
    y = F.scaled_dot_product_attention(qkv[0], keys, values, attn_mask=mask)
    x = x + block.attn.c_proj(block.attn.merge_heads(y)) # (B, H, 1, D) -> (B, 1, E)
    return x + block.mlp(block.ln_2(x))


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
