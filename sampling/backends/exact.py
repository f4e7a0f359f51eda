"""The backend for exact=True: nanoGPT's own operations, for one sample at a time, without a KV cache.

A GPU chooses its kernels by the shapes of the operations, and other kernels round differently. So each operation has
nanoGPT's shape: the batch is 1, each step computes the whole window, and ln_f runs on all rows of it. Then the same GPU
and torch compute nanoGPT's logits bit for bit, in any dtype. Sampler(all_columns=True, in_logits_dtype=True) does the
same for the choice of a token: torch.multinomial draws the numbers of RowStreams, and takes the same maximum.
"""
import torch
from torch import Tensor, nn

from model import GPT
from sampling.backends.backend import Backend, estimate_bytes_per_row


class TokenCache:
    """The tokens (1, S) so far: all that nanoGPT keeps."""

    def __init__(self, device: torch.device):
        self.ids = torch.empty(1, 0, dtype=torch.long, device=device)

    @property
    def seq_len(self) -> int:
        """The number of tokens."""
        return self.ids.size(1)


class ExactBackend(Backend):
    """Runs a GPT as nanoGPT does. Its Linears must be cast already, which gives the weights that autocast would give.

    Sets those settings of torch that nanoGPT sets. Raises ValueError except on CUDA and a CPU.
    """
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

    def new_cache(self, num_rows: int, capacity: int) -> TokenCache:
        """num_rows must be 1."""
        return TokenCache(self.device)

    @torch.no_grad()
    def logits(self, ids: Tensor, cache: TokenCache | None, num_positions: int = 1,
               num_needed: int | None = None) -> Tensor:
        """num_positions must be 1."""
        if cache is not None:
            ids = cache.ids = torch.cat([cache.ids, ids], dim=1)
        transformer = self.model.transformer
        x = transformer.wte(ids) + transformer.wpe(torch.arange(ids.size(1), device=self.device)) # (1, T, E)
        for block in transformer.h:
            x = block(x)
        last = transformer.ln_f(x)[:, -1:].clone(memory_format=torch.contiguous_format) # aligned as nanoGPT's copy is
        return self.model.lm_head(last)[:, -1] # (1, 1, V) -> (1, V)

    def bytes_per_row(self, length: int) -> int:
        return estimate_bytes_per_row(self.config, self.config.block_size + 1, cache_itemsize=0)
