"""The tensors of a batch that CUDA graphs read and write, and the graphs of its steps."""
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from model import KVCache, linear_dtype, window_length
from sampling.backends.cuda.static_forward import StaticForward
from sampling.sampler.sample_token import Logits, SampleFn

# Each step attends to a multiple of this number of cached positions, or to all. Each number has its own graph.
BUCKET = 128


class DecodeState:
    """A batch of B rows. Its tensors stay in place: a graph reads and writes the memory that it was captured with.

    prefill starts the batch, and each advance samples one more token. The latest tokens are in token (B, 1).
    """

    def __init__(self, forward: StaticForward, batch_size: int, capacity: int, sample_fn: SampleFn | None):
        self.forward, self.sample_fn, self.capacity = forward, sample_fn, capacity
        self.graphs: dict[int | str, torch.cuda.CUDAGraph | None] = {} # by number of attended positions, or "window"
        self.pool = None # memory that the graphs share: they never run at the same time
        model, self.device = forward.model, forward.model.lm_head.weight.device
        self.block_size = model.config.block_size
        self.cache = KVCache(model.config, batch_size, capacity, self.device, linear_dtype(model))
        for layer in self.cache.layers:
            layer.zero_() # attention multiplies masked values by 0, so they must not be NaN
        self.token = torch.zeros(batch_size, 1, dtype=torch.long, device=self.device)
        self.position = torch.zeros(1, dtype=torch.long, device=self.device) # of the last token in the cache
        # The tokens that the model sees. If there are fewer than block_size, copies of the first token fill the rest.
        self.window = torch.zeros(batch_size, self.block_size, dtype=torch.long, device=self.device)
        # Of all steps; NaN or infinite once any logit was.
        self.logits_sum = torch.zeros((), dtype=torch.float32, device=self.device)

    @property
    def uses_graphs(self) -> bool:
        """Whether steps run as CUDA graphs. On a CPU they run directly, which only tests use."""
        return self.device.type == "cuda"

    def fits(self, batch_size: int, capacity: int, sample_fn: SampleFn | None) -> bool:
        """Whether this state, with its graphs, can generate such a batch."""
        return len(self.token) == batch_size and self.capacity >= capacity and self.sample_fn is sample_fn

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only. The steps then need new graphs."""
        self.graphs, self.pool = {}, None
        self.cache.select_rows(rows)
        self.token, self.window = self.token[rows], self.window[rows]

    def num_keys(self, seq_len: int) -> int:
        """How many positions of the cache a step attends to if seq_len are filled: seq_len, rounded up to a bucket."""
        return min(round_up(seq_len, BUCKET), self.capacity)

    def prefill(self, idx: Tensor) -> None:
        """Read (B, T) ids into the empty cache and sample the next token."""
        shared = idx[:1] if (idx == idx[:1]).all() else idx # equal rows need one forward pass
        self.cache.seq_len = 0
        self.window.copy_(idx[:, :1].expand_as(self.window)) # (B, 1) -> (B, block_size)
        self.window[:, :idx.size(1)] = idx
        self.sample(self.forward.model(shared, cache=self.cache)[0])
        self.position.fill_(idx.size(1) - 1)

    def advance(self, context_shift: bool) -> None:
        """Read the latest token and sample the next one."""
        seq_len = self.cache.seq_len
        length = window_length(seq_len + 1, self.block_size, context_shift)
        if length > seq_len: # the cache has room for the token
            self.cache.seq_len, num_keys = length, self.num_keys(length)
            self.run_or_replay(num_keys, partial(self.decode_step, num_keys))
        elif length < self.block_size:
            self.prefill(torch.cat([self.window, self.token], dim=1)[:, -length:]) # (B, length)
        else:
            self.run_or_replay("window", self.slide_window)

    def decode_step(self, num_keys: int) -> None:
        """Read the latest token, which attends to the first num_keys positions, and sample the next one."""
        self.position.add_(1)
        self.window.index_copy_(1, self.position, self.token)
        self.sample(self.forward.decode_step(self.token, self.position, self.cache.layers, num_keys))

    def slide_window(self) -> None:
        """Move the window by one token, read all of it and sample the next token.

        Positions are learned and absolute: when the window moves, all keys and values change.
        """
        self.window.copy_(torch.cat([self.window[:, 1:], self.token], dim=1))
        self.sample(self.forward.forward_window(self.window))

    def sample(self, logits: Tensor) -> None:
        """Sample the next token of each row from logits (B or 1, 1, V), and store it in token."""
        values = logits[:, -1].float().expand(len(self.token), -1) # (B or 1, 1, V) -> (B, V)
        self.logits_sum.add_(values.sum())
        self.token.copy_(self.sample_fn(Logits(values), self.window))

    def run_or_replay(self, key: int | str, step: Callable[[], None]) -> None:
        """Run the step of this key: the first time directly, the second time captured as a graph, then replayed.

        The first run creates what must not be created during a capture, such as the workspaces of cuBLAS.
        """
        if not self.uses_graphs or key not in self.graphs:
            self.graphs[key] = None
            step()
            return
        with torch.cuda.device(self.device):
            if self.graphs[key] is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self.pool):
                    step()
                self.graphs[key], self.pool = graph, graph.pool()
            self.graphs[key].replay()


def cache_capacity(num_tokens: int, block_size: int) -> int:
    """How many positions a cache needs for num_tokens: rounded up to a bucket, and at most those of a window."""
    return min(round_up(num_tokens, BUCKET), round_up(block_size, 8)) # attention with a mask needs multiples of 8


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is at least the number."""
    return -(-number // multiple) * multiple
