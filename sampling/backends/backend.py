"""Backend: a GPT that was prepared for a device. It computes logits, and nothing else."""
from typing import Protocol

import torch
from torch import Tensor

from model import GPTConfig


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

    def release(self, cache: Cache) -> None:
        """Take back a cache that the caller needs no more."""

    def logits(self, ids: Tensor, cache: Cache | None, num_positions: int = 1, num_needed: int | None = None) -> Tensor:
        """Run the model on ids (B, T), which follow the tokens in the cache.

        Returns the logits of the last num_positions positions of each row: (B * num_positions, V). The next call may
        overwrite them.
        If ids has one row and the cache is empty, all rows of the cache get it: one prefill for equal prompts.
        num_needed: how many of the largest logits of a row must be exact; any other may be -inf. None: all.
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
