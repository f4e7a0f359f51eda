"""The plain GPT as a backend, for MPS, compiled CPUs and short runs; and nanoGPT's own operations, for exact=True."""
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from model import GPT, KVCache
from sampling.backends.backend import Backend


class EagerBackend(Backend):
    """Runs GPT.forward. With compile, torch.compile compiles it."""
    max_rows = 64

    def __init__(self, model: GPT, compile: bool = False):
        self.model, self.config, self.device = model, model.config, model.lm_head.weight.device
        self.cache_itemsize = model.lm_head.weight.itemsize
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


class ExactBackend(Backend):
    """Runs a GPT as nanoGPT does. Its Linears must be cast already, which gives the weights that autocast would give.

    A GPU chooses its kernels by the shapes of the operations, and other kernels round differently. So each operation
    has nanoGPT's shape: the batch is 1, each step computes the whole window, and ln_f runs on all rows of it. Then the
    same GPU and torch compute nanoGPT's logits bit for bit, in any dtype. Sampler(all_columns=True,
    in_logits_dtype=True) does the same for the choice of a token.
    Changes torch's matmul precision and attention kernels to nanoGPT's, for the whole process. Raises ValueError if the
    device is neither CUDA nor a CPU.
    """
    is_exact = True
    max_rows = 1

    def __init__(self, model: GPT):
        self.model, self.config, self.device = model, model.config, model.lm_head.weight.device
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high") # TF32
            torch.backends.cuda.enable_cudnn_sdp(True) # the default, which CUDABackend changes
        elif self.device.type != "cpu": # the random numbers would be the CPU's
            raise ValueError(f"exact=True needs CUDA or a CPU; got device={self.device.type}")
        for module in model.modules():
            if isinstance(module, nn.GELU):
                module.approximate = "none" # nanoGPT has only this form

    def new_cache(self, num_rows: int, capacity: int) -> SimpleNamespace:
        """The tokens so far: all that nanoGPT keeps."""
        return SimpleNamespace(ids=torch.empty(1, 0, dtype=torch.long, device=self.device)) # (1, S)

    @torch.no_grad()
    def logits(self, ids: Tensor, cache: SimpleNamespace | None, num_positions: int = 1,
               num_needed: int | None = None) -> Tensor:
        """Expects one row, and num_positions=1."""
        if cache is not None:
            ids = cache.ids = torch.cat([cache.ids, ids], dim=1)
        transformer = self.model.transformer
        x = transformer.wte(ids) + transformer.wpe(torch.arange(ids.size(1), device=self.device)) # (1, T, E)
        for block in transformer.h:
            x = block(x)
        last = transformer.ln_f(x)[:, -1:].clone(memory_format=torch.contiguous_format) # aligned as nanoGPT's copy is
        return self.model.lm_head(last)[:, -1] # (1, 1, V) -> (1, V)
