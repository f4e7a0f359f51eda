"""The backend for NVIDIA GPUs: nearly every step after the prompt is one CUDA graph.

A step of a small model is a hundred kernels of a few microseconds each, and launching them one by one takes longer
than running them. A CUDA graph launches all of them at once. Sampling is part of the graph, so the GPU does not wait
for the CPU. Only the kernels of PerRowRNG and a few small copies are launched outside the graph. SelfCheck compares
the first step of each kind with the plain model. Tests on a CPU also run the steps without graphs.

In speculative decoding, the model and its draft are two CUDAGraphGPTs. GraphedPasses has the graphs of their passes,
which do not sample.
"""
import torch
from torch import Tensor

from model import GPT, KVCache, linear_dtype
from sampling.backends.backend import Backend, TokenStream
from sampling.backends.cuda.decode_state import DecodeState, attended_keys, cache_capacity
from sampling.backends.cuda.graphed_passes import GraphedPasses, PassCache
from sampling.backends.cuda.self_check import SelfCheck
from sampling.backends.cuda.static_forward import StaticForward
from sampling.backends.memory import estimate_bytes_per_sample
from sampling.log import Log, warn
from sampling.sampler.logits import require_finite
from sampling.sampler.sample_fn import Logits, SampleFn


class CUDAGraphGPT(Backend):
    """Generates the same tokens as its GPT. With compile, torch.compile fuses the kernels of the graphs.

    The sample_fn of generate_stream runs inside a graph: it must not synchronise, and its tensors must stay in place.
    cuda_graphs=False launches the kernels one by one. log gets messages for the user.
    """
    allow_sync = False

    def __init__(self, model: GPT, compile: bool = False, cuda_graphs: bool = True, log: Log = warn):
        self.model, self.config, self.device = model, model.config, model.lm_head.weight.device
        self.is_compiled, self.static_forward = compile, StaticForward(model, compile)
        # On a GPU, an idle row takes little time, capturing new graphs much, and compiling them most.
        self.compaction_ratio = 0.0 if compile else 0.5
        self.checks = SelfCheck(log, use_graphs=cuda_graphs)
        self.checks.check_random_numbers(self.device, self.config.vocab_size)
        self.state: DecodeState | None = None # the state of the latest stream, after its end, for the next stream
        self.passes: GraphedPasses | None = None # of the latest cache, for the next cache
        self.logits_sum = torch.zeros((), dtype=torch.float32) # of the latest stream; 0 after new_cache

    @torch.no_grad()
    def generate_stream(self, idx: Tensor, max_new_tokens: int, sample_fn: SampleFn,
                        context_shift: bool = False) -> TokenStream:
        """See Backend.generate_stream. Raises ValueError at the end if logits were NaN or infinite."""
        if max_new_tokens == 0 or idx.size(1) == 0: # yields nothing, or raises ValueError
            yield from self.model.generate_stream(idx, max_new_tokens, sample_fn, context_shift)
            return
        state = self.take_state(len(idx), idx.size(1) + max_new_tokens, sample_fn)
        for step in range(max_new_tokens):
            sample_fn.prefetch()
            if step == 0:
                state.prefill(idx[:, -self.config.block_size:])
            else:
                state.advance(context_shift)
            rows = yield state.token.clone()
            if rows == []:
                break
            if rows is not None:
                state.select_rows(rows)
        require_finite(state.logits_sum)
        self.state = state # only here: a stream that failed or was abandoned may leave an inconsistent state

    def new_cache(self, batch_size: int, capacity: int) -> PassCache | KVCache:
        """See CausalLM. Passes of one row run as graphs. A cache that is dropped leaves its graphs to the next one."""
        self.logits_sum = torch.zeros((), dtype=torch.float32, device=self.device)
        if batch_size != 1:
            return self.model.new_cache(batch_size, capacity)
        capacity = cache_capacity(capacity, self.config.block_size)
        if self.passes is None or not self.passes.is_free(capacity):
            self.passes = None # frees its memory before the new one takes more
            self.passes = GraphedPasses(self.static_forward, self.checks, capacity)
        return self.passes.lend_cache()

    @torch.no_grad()
    def next_logits(self, idx: Tensor, cache: PassCache | KVCache | None, num_logits_needed: int | None = None,
                    num_positions: int = 1) -> Logits:
        """See CausalLM. The next call with the same cache may overwrite the logits.

        logits_are_finite does not cover them, because the caller may not use all of them.
        """
        if isinstance(cache, PassCache):
            return Logits(cache.passes.pass_logits(idx, cache, num_positions))
        return self.model.next_logits(idx, cache, num_logits_needed, num_positions)

    def logits_are_finite(self) -> Tensor:
        """See Backend.logits_are_finite."""
        return self.logits_sum.isfinite()

    def take_state(self, batch_size: int, length: int, sample_fn: SampleFn | None) -> DecodeState:
        """A DecodeState for a batch of length tokens. Reuses that of the latest stream, with its graphs, if it fits."""
        if self.is_compiled:
            length = self.config.block_size # another capacity would need another compilation
        capacity = cache_capacity(length, self.config.block_size)
        state, self.state = self.state, None # no other stream may use it at the same time
        if state is None or not state.fits(batch_size, capacity, sample_fn):
            state = None # frees its memory before the new one takes more
            state = DecodeState(self.static_forward, self.checks, batch_size, capacity, sample_fn)
        self.logits_sum = state.logits_sum
        return state

    def release_memory(self) -> None:
        """See Backend.release_memory."""
        self.state = self.passes = None

    @torch.no_grad()
    def warm_up_compile(self, idx: Tensor, max_new_tokens: int, context_shift: bool = False) -> None:
        """See Backend.warm_up_compile."""
        length = idx.size(1) + max_new_tokens
        state = self.take_state(len(idx), length, sample_fn=None) # nothing is sampled
        seq_lens = range(1, min(length, state.capacity) + 1)
        for num_keys in sorted({attended_keys(seq_len, state.capacity) for seq_len in seq_lens}):
            self.static_forward.decode_step(state.token, state.position, state.cache.layers, num_keys)
        if length > self.config.block_size and not context_shift:
            self.static_forward.forward_window(state.window)

    def bytes_per_sample(self, length: int) -> int:
        """See Backend.bytes_per_sample."""
        if self.is_compiled:
            length = max(length, self.config.block_size) # the cache of compiled steps always has this size
        return estimate_bytes_per_sample(self.config, length, linear_dtype(self.model).itemsize)
