"""The KV cache of PackedGPT."""
import torch
from torch import Tensor

from model import GPTConfig


class PackedCache:
    """A KVCache whose layers share one tensor, so that a step makes its views of all layers at once.

    Keys are stored transposed, for plain matrix products: with a single query, these are faster than the fused kernel.
    The cache is float32 for every dtype of the weights. In bfloat16, oneDNN would make and keep a new kernel for every
    length, and scores would be too coarse.
    """

    def __init__(self, config: GPTConfig, batch_size: int, capacity: int):
        N, H, D = config.n_layer, config.n_head, config.n_embd // config.n_head
        self.keys = torch.empty(N, batch_size, H, D, capacity, dtype=torch.float32)
        self.values = torch.empty(N, batch_size, H, capacity, D, dtype=torch.float32)
        self.seq_len = 0 # filled positions

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B or 1, H, T, D) in a layer, without changing seq_len. Returns all keys and values so far."""
        start, end = self.seq_len, self.seq_len + k.size(2)
        keys, values = self.keys[layer, ..., :end], self.values[layer, :, :, :end]
        keys[..., start:] = k.mT
        values[:, :, start:] = v
        return (keys.mT, values) if start else (k, v)

    def next_position(self) -> tuple[tuple[Tensor, ...], ...]:
        """Advance by one position. Returns, for every layer, the slots (B, H, D) for its key and its value, and all
        keys (B * H, D, S) and values (B * H, S, D), the new position included."""
        i = self.seq_len
        self.seq_len = end = i + 1
        return (self.keys[..., i].unbind(), self.values[..., i, :].unbind(),
                self.keys[..., :end].flatten(1, 2).unbind(), self.values[..., :end, :].flatten(1, 2).unbind())

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only."""
        self.keys = self.keys[:, rows]
        self.values = self.values[:, rows] # a separate statement, so that the old keys are freed first
