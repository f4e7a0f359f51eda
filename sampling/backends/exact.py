"""The backend for exact=True: nanoGPT's own operations, for one sample at a time, without a KV cache.

A GPU chooses its kernels by the shapes of the operations, and other kernels round differently. So each operation has
nanoGPT's shape: the batch is 1, each step computes the whole window, and ln_f runs on all rows of it. Then the same GPU
and torch compute nanoGPT's logits bit for bit, in any dtype. CUDA graphs run the same kernels with less overhead.
"""
import torch
from torch import Tensor, nn

from model import GPT
from sampling.backends.backend import Backend, TokenStream
from sampling.backends.cuda.graphed_steps import GraphedSteps
from sampling.backends.cuda.self_check import SelfCheck
from sampling.backends.memory import estimate_bytes_per_sample
from sampling.log import Log, warn
from sampling.sampler.sample_fn import Logits, SampleFn


class ExactGPT(GraphedSteps, Backend):
    """Runs a GPT as nanoGPT does. Its Linears must be cast already, which gives the weights that autocast would give.

    A step reads a window of tokens and computes logits. Its key is the number of tokens.
    cuda_graphs=False runs every step directly. log gets a message if CUDA graphs do not work.
    """
    is_exact = True

    def __init__(self, model: GPT, cuda_graphs: bool = True, log: Log = warn):
        weight = model.lm_head.weight
        super().__init__(SelfCheck(log, use_graphs=cuda_graphs), weight.device)
        self.model, self.config = model, model.config
        for module in model.modules():
            if isinstance(module, nn.GELU):
                module.approximate = "none" # nanoGPT has only this form
        self.window = torch.zeros(1, self.config.block_size, dtype=torch.long, device=self.device)
        self.logits = torch.empty(1, self.config.vocab_size, dtype=weight.dtype, device=self.device)

    @torch.no_grad()
    def generate_stream(self, idx: Tensor, max_new_tokens: int, sample_fn: SampleFn,
                        context_shift: bool = False) -> TokenStream:
        """See Backend.generate_stream. idx must have one row. Raises ValueError with context_shift."""
        if idx.size(1) == 0:
            raise ValueError("there is nothing to continue: idx must hold at least one token")
        if len(idx) > 1 or context_shift:
            raise ValueError("exact=True generates one sample at a time, without context_shift")
        for _ in range(max_new_tokens):
            window = idx[:, -self.config.block_size:]
            token = sample_fn(Logits(self.window_logits(window)), window)
            if (yield token) == []:
                return
            idx = torch.cat([window, token], dim=1)

    def window_logits(self, window: Tensor) -> Tensor:
        """The logits (1, V) after the ids (1, T), from a graph if there is one. The next call overwrites them."""
        T = window.size(1)
        self.window[:, :T] = window
        self.run_or_replay(T)
        return self.logits

    def step(self, key: int) -> tuple[Tensor]:
        """Process the first key tokens of the window. See GraphedSteps.step."""
        return (self.logits.copy_(self.forward(self.window[:, :key])),)

    run_and_check = step # no check is needed: forward runs nanoGPT's own operations

    def forward(self, idx: Tensor) -> Tensor:
        """Process ids (1, T) as nanoGPT does. Returns the logits (1, V) of the last position."""
        transformer = self.model.transformer
        x = transformer.wte(idx) + transformer.wpe(torch.arange(idx.size(1), device=idx.device)) # (1, T, E)
        for block in transformer.h:
            x = block(x)
        last = transformer.ln_f(x)[:, -1:].clone(memory_format=torch.contiguous_format) # aligned as nanoGPT's copy is
        return self.model.lm_head(last)[:, -1] # (1, 1, V) -> (1, V)

    def release_memory(self) -> None:
        """See Backend.release_memory."""
        self.drop_graphs()

    def bytes_per_sample(self, length: int) -> int:
        """See Backend.bytes_per_sample."""
        return estimate_bytes_per_sample(self.config, self.config.block_size + 1, cache_itemsize=0)
