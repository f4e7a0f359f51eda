"""The backend for exact=True: nanoGPT's own operations, for one sample at a time, without a KV cache.

A GPU chooses its kernels by the shapes of the operations, and other kernels round differently. So each operation has
nanoGPT's shape: the batch is 1, each step reads the whole window, and ln_f runs on all rows of it. Then the same GPU
and torch compute nanoGPT's logits bit for bit, in any dtype. CUDA graphs run the same kernels with less overhead.
"""

import torch
from torch import Tensor, nn

from model import GPT
from sampling.backends.backend import TokenStream
from sampling.backends.cuda.graph_capture import capture_graph
from sampling.backends.cuda.self_check import SelfCheck
from sampling.backends.memory import estimate_bytes_per_sample
from sampling.log import Log, warn
from sampling.sampler.sample_fn import Logits, SampleFn


class ExactGPT:
    """Runs a GPT as nanoGPT does. Its Linears must be cast already, which gives the weights that autocast would give.

    cuda_graphs=False runs every step directly. log gets a message if CUDA graphs do not work.
    """
    is_exact = True
    compaction_ratio = 1.0
    allow_sync = True # the sampler checks the logits at every step

    def __init__(self, model: GPT, cuda_graphs: bool = True, log: Log = warn):
        self.model, self.config, self.device = model, model.config, model.lm_head.weight.device
        for module in model.modules():
            if isinstance(module, nn.GELU):
                module.approximate = "none" # nanoGPT has only this form
        self.checks = SelfCheck(log, use_graphs=cuda_graphs and self.device.type == "cuda")
        self.lengths: set[int] = set() # of all windows so far
        self.graphs: dict[int, torch.cuda.CUDAGraph | None] = {} # by length; None: it gave other logits
        self.pool: tuple[int, int] | None = None # memory that the graphs share: they never run at the same time
        # The graphs read window and write logits.
        self.window = torch.zeros(1, self.config.block_size, dtype=torch.long, device=self.device)
        self.logits: Tensor | None = None # (1, V)

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
        """The logits (1, V) after the ids (1, T), from a graph if there is one. The next call may overwrite them.

        The first window of a length runs directly. The second one is also captured, so that a run of a single sample
        does not wait for graphs that it never replays.
        """
        T = window.size(1)
        if graph := self.graphs.get(T):
            self.window[:, :T] = window
            graph.replay()
            return self.logits
        logits = self.forward(window)
        if self.checks.use_graphs and T in self.lengths and T not in self.graphs:
            self.graphs[T] = self.try_capture(window, logits)
        self.lengths.add(T)
        return logits

    def forward(self, idx: Tensor) -> Tensor:
        """Read ids (1, T) as nanoGPT does: returns the logits (1, V) of the last position."""
        transformer = self.model.transformer
        x = transformer.wte(idx) + transformer.wpe(torch.arange(idx.size(1), device=idx.device)) # (1, T, E)
        for block in transformer.h:
            x = block(x)
        last = transformer.ln_f(x)[:, -1:].clone(memory_format=torch.contiguous_format) # aligned as nanoGPT's copy is
        return self.model.lm_head(last)[:, -1] # (1, 1, V) -> (1, V)

    def try_capture(self, window: Tensor, logits: Tensor) -> torch.cuda.CUDAGraph | None:
        """A CUDA graph for windows of this length. None if graphs fail here, or if its logits differ in any bit.

        Raises ValueError if the GPU cannot go on in this process.
        """
        if self.logits is None:
            self.logits = torch.empty_like(logits)
        graph = None
        try:
            with torch.cuda.device(self.device):
                graph = self.capture(window, logits)
        except Exception as error: # a driver, an operator or too little memory: each has its own
            self.checks.graphs_failed(error, self.device)
            self.release_memory()
        if graph is None and not any(self.graphs.values()):
            self.pool = None # torch closes the pool when none of its graphs is kept
        return graph

    def capture(self, window: Tensor, logits: Tensor) -> torch.cuda.CUDAGraph | None:
        """The graph of try_capture. Raises the error of a capture or replay that fails."""
        T = window.size(1)
        self.window[:, :T] = window
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph, _ = capture_graph(lambda: self.logits.copy_(self.forward(self.window[:, :T])), self.pool, self.device)
        self.logits.fill_(torch.nan) # so that the replay must write all of them
        graph.replay()
        return graph if torch.equal(self.logits, logits) else None

    def logits_are_finite(self) -> None:
        """None: the sampler has checked every step."""

    def release_memory(self) -> None:
        """See Backend.release_memory."""
        self.graphs, self.pool = {}, None

    def warm_up_compile(self, idx: Tensor, max_new_tokens: int, context_shift: bool = False) -> None:
        """Does nothing: nanoGPT does not compile what it samples with."""

    def bytes_per_sample(self, length: int) -> int:
        """See Backend.bytes_per_sample."""
        return estimate_bytes_per_sample(self.config, 0, self.config.block_size + 1)
