"""The tensors of a batch that CUDA graphs read and write, and the graphs of its steps."""
import torch
from torch import Tensor

from model import KVCache, linear_dtype, window_length
from sampling.backends.cuda.graphed_steps import GraphedSteps
from sampling.backends.cuda.self_check import SelfCheck
from sampling.backends.cuda.static_forward import StaticForward
from sampling.sampler.sample_fn import Logits, SampleFn

# Each step attends to a multiple of this number of cached positions, or to all. Each number has its own graph.
BUCKET = 128
WINDOW = "window" # the key of the step that moves a full window


class DecodeState(GraphedSteps):
    """A batch of B rows.

    prefill starts the batch, and each advance samples one more token. The latest tokens are in token (B, 1).
    The key of a step is the number of positions that it attends to, or WINDOW.
    """

    def __init__(self, static_forward: StaticForward, checks: SelfCheck, batch_size: int, capacity: int,
                 sample_fn: SampleFn | None):
        model = static_forward.model
        super().__init__(checks, model.lm_head.weight.device)
        self.model, self.static_forward = model, static_forward
        self.sample_fn, self.capacity = sample_fn, capacity
        self.block_size, self.dtype = model.config.block_size, linear_dtype(model)
        self.cache = KVCache(model.config, batch_size, capacity, self.device, self.dtype)
        for layer in self.cache.layers:
            layer.zero_() # attention multiplies masked values by 0, so they must not be NaN
        self.token = torch.zeros(batch_size, 1, dtype=torch.long, device=self.device)
        self.position = torch.zeros(1, dtype=torch.long, device=self.device) # of the last token in the cache
        # The tokens that the model sees. If there are fewer than block_size, copies of the first token fill the rest:
        # for the repetition penalty, a repeated token changes nothing.
        self.window = torch.zeros(batch_size, self.block_size, dtype=torch.long, device=self.device)
        # The sum of all logits so far: NaN or infinite once a logit was.
        self.logits_sum = torch.zeros((), dtype=torch.float32, device=self.device)

    def fits(self, batch_size: int, capacity: int, sample_fn: SampleFn | None) -> bool:
        """Whether this state, with its graphs, can generate such a batch."""
        return len(self.token) == batch_size and self.capacity >= capacity and self.sample_fn is sample_fn

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only. The steps then need new graphs."""
        self.drop_graphs()
        self.cache.select_rows(rows)
        self.token, self.window = self.token[rows], self.window[rows]

    def prefill(self, idx: Tensor) -> None:
        """Prefill: process ids (B, T) with an empty cache, and sample the next token."""
        shared = idx[:1] if (idx == idx[:1]).all() else idx # equal rows need one forward pass
        self.cache.seq_len = 0
        self.window.copy_(idx[:, :1].expand_as(self.window)) # (B, 1) -> (B, block_size)
        self.window[:, :idx.size(1)] = idx
        self.sample(self.model(shared, cache=self.cache)[0])
        self.position.fill_(idx.size(1) - 1)

    def advance(self, context_shift: bool) -> None:
        """Process the latest token and sample the next one."""
        seq_len = self.cache.seq_len
        length = window_length(seq_len + 1, self.block_size, context_shift)
        if length > seq_len: # the cache has room for the token
            self.cache.seq_len = length
            self.run_or_replay(attended_keys(length, self.capacity))
        elif length < self.block_size:
            self.prefill(torch.cat([self.window, self.token], dim=1)[:, -length:]) # (B, length)
        else:
            self.run_or_replay(WINDOW)

    def step(self, key: int | str) -> tuple[Tensor, Tensor]:
        """Process the latest token and sample the next one: logits (B, V) and token (B, 1). See GraphedSteps.step."""
        self.append_token(key)
        return self.sample(self.logits(key)), self.token

    def append_token(self, key: int | str) -> None:
        """Write the latest token into the window."""
        if key == WINDOW:
            self.window.copy_(torch.cat([self.window[:, 1:], self.token], dim=1))
        else:
            self.position.add_(1)
            self.window.index_copy_(1, self.position, self.token)

    def logits(self, key: int | str) -> Tensor:
        """The logits (B, 1, V) after the latest token, which is in the window already.

        When the window moves, the model reads all of it: positions are learned and absolute, so all keys and values
        change.
        """
        if not self.checks.use_static_forward:
            return self.plain_logits(key)
        if key == WINDOW:
            return self.static_forward.forward_window(self.window)
        return self.static_forward.decode_step(self.token, self.position, self.cache.layers, key)

    def plain_logits(self, key: int | str) -> Tensor:
        """The same logits (B, 1, V), from the plain model."""
        if key == WINDOW:
            return self.model(self.window)[0]
        self.cache.seq_len -= 1 # advance has counted the token, and the model counts it too
        return self.model(self.token, cache=self.cache)[0]

    def sample(self, logits: Tensor) -> Tensor:
        """Sample the next token of each row from logits (B or 1, 1, V), and store it in token. Returns (B, V)."""
        values = logits[:, -1].expand(len(self.token), -1) # (B or 1, 1, V) -> (B, V)
        self.logits_sum.add_(values.sum(dtype=torch.float32))
        self.token.copy_(self.sample_fn(Logits(values), self.window))
        return values

    def run_and_check(self, key: int | str) -> None:
        """Run a step directly. If the batch size or key is new, compare row 0 with a forward pass without a cache."""
        self.append_token(key)
        logits, shape = self.logits(key), (len(self.token), key)
        if self.checks.use_static_forward and shape not in self.checks.checked_shapes:
            expected = self.model(self.window[:1, :self.cache.seq_len])[0]
            if not self.checks.check_logits(shape, logits[:1], expected, self.dtype):
                self.drop_graphs()
                logits = self.plain_logits(key)
        self.sample(logits)

    def save(self) -> list[Tensor]:
        """See GraphedSteps.save."""
        return [tensor.clone() for tensor in (self.position, self.window, self.token, self.logits_sum)]

    def restore(self, saved: list[Tensor]) -> None:
        """See GraphedSteps.restore."""
        for tensor, value in zip((self.position, self.window, self.token, self.logits_sum), saved, strict=True):
            tensor.copy_(value)
        self.sample_fn.repeat_noise()


def attended_keys(seq_len: int, capacity: int) -> int:
    """How many positions of a cache a step attends to if seq_len are filled: seq_len, rounded up to a bucket."""
    return min(round_up(seq_len, BUCKET), capacity)


def cache_capacity(num_tokens: int, block_size: int) -> int:
    """How many positions a cache needs for num_tokens: rounded up to a bucket, and at most those of a window."""
    return min(round_up(num_tokens, BUCKET), round_up(block_size, 8)) # attention with a mask needs multiples of 8


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is at least the number."""
    return -(-number // multiple) * multiple
