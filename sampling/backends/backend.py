"""Backend: a GPT that was prepared for a device. It computes logits, and nothing else. And the two plain backends:
EagerBackend for MPS, compiled CPUs and short runs, and ExactBackend, nanoGPT's own operations, for exact=True.
"""
from types import SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor, nn

from model import GPT, GPTConfig, KVCache


class Cache(Protocol):
    """What a backend keeps of the tokens so far, such as keys and values. The caller owns it."""
    seq_len: int # filled positions. The caller may set it back, which undoes the latest tokens

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only."""


class Backend(Protocol):
    """A GPT prepared for one kind of device.

    All backends compute the same logits, up to rounding, except that ExactBackend uses the exact GELU for every model.
    """
    config: GPTConfig
    device: torch.device
    is_exact = False # whether it computes nanoGPT's logits bit for bit
    max_rows: int # how many samples to generate at once, at most, unless the user asks for more
    cache_itemsize = 4 # bytes of a number in the cache
    min_capacity = 1 # positions that each row of a cache has at least

    def new_cache(self, num_rows: int, capacity: int) -> Cache:
        """An empty cache with room for capacity positions in each row."""

    min_flush_steps, all_columns = 1, False

    def should_drop(self, num_rows, num_unfinished):
        return num_unfinished < num_rows

    def release(self, cache: Cache) -> None:
        """Take back a cache that the caller needs no more."""

    def logits(self, ids: Tensor, cache: Cache | None, num_positions: int = 1) -> Tensor:
        """Run the model on ids (B, T), which follow the tokens in the cache.

        Returns the logits of the last num_positions positions of each row: (B * num_positions, V). The next call may
        overwrite them.
        If ids has one row and the cache is empty, all rows of the cache get it: one prefill for equal prompts.
        """

    def bytes_per_row(self, length: int) -> int:
        """About how many bytes one more row of length tokens takes: cache, logits and, past block_size, the window."""
        config, num_tokens = self.config, min(max(length, self.min_capacity), self.config.block_size)
        cache_bytes = 2 * config.n_layer * config.n_embd * self.cache_itemsize # of the keys and values of a token
        window_bytes = 10 * 4 * config.n_embd if length > config.block_size else 0 # about ten activations of a token
        logits_bytes = 40 * config.vocab_size # also what sampling makes of them
        return num_tokens * (cache_bytes + window_bytes) + logits_bytes


def num_step_weights(config: GPTConfig) -> int:
    """How many weights a decode step reads: those of the linear layers and of the head."""
    E, inner = config.n_embd, config.n_inner or 4 * config.n_embd
    return config.n_layer * (4 * E * E + 2 * E * inner) + config.vocab_size * E


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
    def logits(self, ids: Tensor, cache: KVCache | None, num_positions: int = 1) -> Tensor:
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
    is_exact = all_columns = True
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
        return SimpleNamespace(seq_len=0, ids=torch.empty(1, 0, dtype=torch.long, device=self.device)) # (1, S)

    @torch.no_grad()
    def logits(self, ids: Tensor, cache: SimpleNamespace | None, num_positions: int = 1) -> Tensor:
        """Expects one row, and num_positions=1."""
        if cache is not None:
            cache.seq_len += ids.size(1)
            ids = cache.ids = torch.cat([cache.ids, ids], dim=1)
        transformer = self.model.transformer
        x = transformer.wte(ids) + transformer.wpe(torch.arange(ids.size(1), device=self.device)) # (1, T, E)
        for block in transformer.h:
            x = block(x)
        last = transformer.ln_f(x)[:, -1:].clone(memory_format=torch.contiguous_format) # aligned as nanoGPT's copy is
        return self.model.lm_head(last)[:, -1] # (1, 1, V) -> (1, V)
