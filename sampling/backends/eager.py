"""The plain GPT as a backend: for MPS, for torch.compile on a CPU, and for CPUs without faster code."""
import torch
from torch import Tensor

from model import GPT, KVCache, linear_dtype
from sampling.backends.backend import Backend, estimate_bytes_per_row


class EagerBackend(Backend):
    """Runs GPT.forward. With compile, torch.compile compiles it."""
    max_rows = 64

    def __init__(self, model: GPT, compile: bool = False):
        self.model, self.config, self.device = model, model.config, model.lm_head.weight.device
        if compile:
            torch._dynamo.config.recompile_limit = 32 # prefill, steps and windows, each by batch size
            torch._inductor.config.freezing = self.device.type == "cpu" # packs the weights: twice as fast
            model.compile(dynamic=True)

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        return self.model.new_cache(num_rows, capacity)

    @torch.no_grad()
    def logits(self, ids: Tensor, cache: KVCache | None, num_positions: int = 1,
               num_needed: int | None = None) -> Tensor:
        """Computes all logits, whatever num_needed is."""
        ids = ids.clone(memory_format=torch.contiguous_format) # torch.compile compiles again for other strides
        return self.model(ids, cache=cache, num_positions=num_positions)[0].flatten(0, 1) # (B, n, V) -> (B * n, V)

    def bytes_per_row(self, length: int) -> int:
        return estimate_bytes_per_row(self.config, length, linear_dtype(self.model).itemsize)
