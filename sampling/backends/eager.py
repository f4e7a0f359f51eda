"""The plain GPT as a backend: for MPS, for torch.compile on a CPU, and the reference for the other backends."""
from itertools import islice

import torch

from model import GPT
from sampling.backends.backend import TokenStream
from sampling.backends.memory import estimate_bytes_per_sample
from sampling.sampler.sample_token import Logits, SampleFn


class EagerGPT:
    """Runs GPT.generate_stream. With compile, torch.compile compiles GPT.forward."""
    compaction_ratio = 1.0
    defers_finite_check = False # sample_token checks at every step

    def __init__(self, model: GPT, compile: bool = False):
        self.model, self.config, self.device = model, model.config, model.lm_head.weight.device
        if compile:
            torch._dynamo.config.recompile_limit = 32 # prompt, token and window have a graph each, for every batch size
            torch._inductor.config.freezing = self.device.type == "cpu" # packs the weights; half as fast without it
            model.compile(dynamic=True)

    def generate_stream(self, idx, max_new_tokens: int, sample_fn: SampleFn,
                        context_shift: bool = False) -> TokenStream:
        """As Backend.generate_stream."""
        return self.model.generate_stream(idx, max_new_tokens, sample_fn, context_shift)

    def check_finite(self) -> None:
        """Nothing is left to check."""

    def warm_up_compile(self, idx, max_new_tokens: int, context_shift: bool = False) -> None:
        """As Backend.warm_up_compile."""
        # The first steps of this very call: a cache of another capacity would need another graph.
        list(islice(self.generate_stream(idx, max_new_tokens, Greedy()), 3))
        edge = self.config.block_size - 1
        if idx.size(1) <= edge < idx.size(1) + max_new_tokens:
            list(self.generate_stream(idx[:, :1].repeat(1, edge), 4, Greedy(), context_shift))

    def bytes_per_sample(self, length: int) -> int:
        """As Backend.bytes_per_sample."""
        cache = self.model.new_cache(1, 1)
        return estimate_bytes_per_sample(self.config, sum(layer.nbytes for layer in cache.layers), length)


class Greedy:
    """A SampleFn that takes the most likely token and adds nothing to compile."""
    num_logits_needed = None

    def prefetch(self) -> None:
        """No random numbers are drawn."""

    def __call__(self, logits: Logits, ids):
        return logits.values.argmax(dim=-1, keepdim=True)
