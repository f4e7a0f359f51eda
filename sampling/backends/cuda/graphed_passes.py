"""The passes of speculative decoding over the last tokens of a sequence, as CUDA graphs."""
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from model import KVCache, linear_dtype
from sampling.backends.cuda.decode_state import attended_keys
from sampling.backends.cuda.graphed_steps import GraphedSteps
from sampling.backends.cuda.self_check import SelfCheck
from sampling.backends.cuda.static_forward import StaticForward

MAX_TOKENS = 9 # of a pass that has a graph: 1 + MAX_PROPOSALS of draft_length.py


class PassCache:
    """The cache of one sequence, for a caller of CUDAGraphGPT.next_logits. The keys and values are in passes.cache.

    Once the caller drops it, the next sequence may use the tensors of passes.
    """

    def __init__(self, passes: "GraphedPasses"):
        self.passes, self.seq_len = passes, 0

    def select_rows(self, rows: list[int]) -> None:
        """Does nothing: there is one row."""


class GraphedPasses(GraphedSteps):
    """Passes of one row. The key of a pass is (T, number of positions that it attends to), for T tokens.

    lend_cache begins a sequence, and pass_logits computes the logits of its tokens. The next sequence uses the same
    tensors and graphs: otherwise every sample would capture its own.
    """

    def __init__(self, static_forward: StaticForward, checks: SelfCheck, capacity: int):
        model = static_forward.model
        super().__init__(checks, model.lm_head.weight.device)
        self.model, self.static_forward = model, static_forward
        self.capacity, self.dtype = capacity, linear_dtype(model)
        self.cache = KVCache(model.config, 1, capacity, self.device, self.dtype)
        self.ids = torch.zeros(1, capacity, dtype=torch.long, device=self.device) # the sequence
        self.position = torch.zeros(1, dtype=torch.long, device=self.device) # of the first token of the pass
        self.logits = torch.zeros(MAX_TOKENS, model.config.vocab_size, dtype=self.dtype, device=self.device)
        self.lent: Callable[[], PassCache | None] = lambda: None # the latest PassCache, or None if it was dropped

    def is_free(self, capacity: int) -> bool:
        """Whether a new sequence of this capacity can use these tensors: they are large enough, and no longer lent."""
        return self.lent() is None and self.capacity >= capacity

    def lend_cache(self) -> PassCache:
        """An empty cache for a new sequence."""
        cache = PassCache(self)
        self.lent = weakref.ref(cache)
        return cache

    def pass_logits(self, idx: Tensor, cache: PassCache, num_positions: int) -> Tensor:
        """Process ids (1, T), after the tokens in the cache: the logits (num_positions, V) of the last positions.

        The next call may overwrite the logits: a graph always writes them to the same memory.
        """
        T, start = idx.size(1), cache.seq_len
        cache.seq_len = end = start + T
        self.cache.seq_len = start
        self.ids[:, start:end] = idx
        if start == 0:
            for layer in self.cache.layers:
                layer.zero_() # attention multiplies masked values by 0, so they must not be NaN
        if start == 0 or T > MAX_TOKENS or not self.checks.use_static_forward:
            return self.plain_logits(idx, num_positions)
        self.position.fill_(start)
        self.run_or_replay((T, attended_keys(end, self.capacity)))
        return self.logits[T - num_positions:T]

    def plain_logits(self, idx: Tensor, num_positions: int) -> Tensor:
        """The same logits, from the plain model."""
        return self.model(idx, cache=self.cache, num_positions=num_positions)[0][0] # (1, n, V) -> (n, V)

    def step(self, key: tuple[int, int]) -> tuple[Tensor]:
        """Process the tokens of a pass. Returns their logits (T, V). See GraphedSteps.step."""
        T, num_keys = key
        positions = self.position + torch.arange(T, device=self.device)
        tokens = self.ids.index_select(1, positions) # (1, T)
        logits = self.static_forward.decode_step(tokens, positions, self.cache.layers, num_keys)
        return (self.logits[:T].copy_(logits[0]),)

    def run_and_check(self, key: tuple[int, int]) -> None:
        """Run a pass directly. If its key is new, compare it with a forward pass without a cache."""
        (logits,) = self.step(key)
        T = len(logits)
        end = self.cache.seq_len + T
        if (1, key) in self.checks.checked_shapes:
            return
        expected = self.model(self.ids[:, :end], num_positions=T)[0]
        if not self.checks.check_logits((1, key), logits, expected, self.dtype):
            self.drop_graphs()
            self.cache.seq_len = 0 # any of the keys and values may be wrong
            logits.copy_(self.plain_logits(self.ids[:, :end], T))
