"""The plain GPT as a backend: for MPS, torch.compile on a CPU, and CPUs without oneDNN.

It is also the reference for the other backends.
"""
from itertools import islice

import torch

from model import GPT, KVCache, linear_dtype
from sampling.backends.backend import Backend, TokenStream
from sampling.backends.memory import estimate_bytes_per_sample
from sampling.sampler.sample_fn import Logits, SampleFn


class EagerGPT(Backend):
    """Runs GPT.generate_stream. With compile, torch.compile compiles GPT.forward."""
    def __init__(self, model: GPT, compile: bool = False):
        self.model, self.config, self.device = model, model.config, model.lm_head.weight.device
        if compile:
            torch._dynamo.config.recompile_limit = 32 # prefill, steps and windows, each by batch size
            torch._inductor.config.freezing = self.device.type == "cpu" # packs the weights: twice as fast
            model.compile(dynamic=True)

    def generate_stream(self, idx, max_new_tokens: int, sample_fn: SampleFn,
                        context_shift: bool = False) -> TokenStream:
        """See Backend.generate_stream."""
        return self.model.generate_stream(idx, max_new_tokens, sample_fn, context_shift)

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """See CausalLM."""
        return self.model.new_cache(batch_size, capacity)

    def next_logits(self, idx, cache: KVCache | None, num_logits_needed: int | None = None,
                    num_positions: int = 1) -> Logits:
        """See CausalLM."""
        return self.model.next_logits(idx, cache, num_logits_needed, num_positions)

    def warm_up_compile(self, idx, max_new_tokens: int, context_shift: bool = False) -> None:
        """See Backend.warm_up_compile."""
        # The same arguments as in the later call, because a cache of another capacity would need another graph.
        list(islice(self.generate_stream(idx, max_new_tokens, Greedy(), context_shift), 3))
        edge = self.config.block_size - 1
        if idx.size(1) <= edge < idx.size(1) + max_new_tokens:
            list(self.generate_stream(idx[:, :1].repeat(1, edge), 4, Greedy(), context_shift))

    def bytes_per_sample(self, length: int) -> int:
        """See Backend.bytes_per_sample."""
        return estimate_bytes_per_sample(self.config, length, linear_dtype(self.model).itemsize)


class Greedy(SampleFn):
    """Takes the most likely token and adds nothing to compile."""

    def __call__(self, logits: Logits, ids):
        """See SampleFn."""
        return logits.values.argmax(dim=-1, keepdim=True)
