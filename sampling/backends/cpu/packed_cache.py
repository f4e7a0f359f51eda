"""The KV cache of PackedGPT."""
import torch
from torch import Tensor

from model import GPTConfig


class PackedCache:
    """A KVCache whose layers share one tensor, so that a step makes its views of all layers at once.

    It is float32 for every dtype of the weights. In bfloat16, oneDNN would make and keep a new kernel for every length,
    and scores would be too coarse.
    """

    def __init__(self, config: GPTConfig, batch_size: int, capacity: int):
        N, H, D = config.n_layer, config.n_head, config.n_embd // config.n_head
        self.kv = torch.empty(N, 2, batch_size, H, capacity, D, dtype=torch.float32) # keys and values of each layer
        self.seq_len = 0 # filled positions

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B or 1, H, T, D) in a layer, without changing seq_len. Returns all keys and values so far."""
        start, end = self.seq_len, self.seq_len + k.size(2)
        keys, values = self.kv[layer, ..., :end, :].unbind() # (B, H, S, D) each
        keys[:, :, start:], values[:, :, start:] = k, v
        return (keys, values) if start else (k, v)

    def next_position(self) -> tuple[tuple[Tensor, ...], ...]:
        """Advance by one position. Returns three tuples, with an entry for each layer: the slot (2, B, H, D) of the new
        key and value, all keys, and all values (B * H, S, D each, with the new position)."""
        i = self.seq_len
        self.seq_len = end = i + 1
        keys, values = self.kv[..., :end, :].flatten(2, 3).unbind(1) # (N, B * H, S, D) each
        return self.kv[..., i, :].unbind(), keys.unbind(), values.unbind()

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only. They move to the front of the same memory, because a second cache might not fit.

        The memory of the other rows is not freed.
        """
        for layer in self.kv[..., :self.seq_len, :]: # the rest is unused, and may not be in memory yet
            layer[:, :len(rows)] = layer[:, rows]
        self.kv = self.kv[:, :, :len(rows)]
