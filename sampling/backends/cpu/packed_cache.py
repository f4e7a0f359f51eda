"""The KV cache of PackedGPT."""
import torch
from torch import Tensor

from model import GPTConfig


class PackedCache:
    """A KVCache with one tensor for the keys of all layers and one for the values, as DecodeStep needs.

    It is float32 for every dtype of the weights. In bfloat16, oneDNN would make and keep a new kernel for every length,
    and scores would be too coarse.
    """

    def __init__(self, config: GPTConfig, batch_size: int, capacity: int):
        N, H, D = config.n_layer, config.n_head, config.n_embd // config.n_head
        self.keys, self.values = (torch.empty(N, batch_size, H, capacity, D, dtype=torch.float32) for _ in range(2))
        self.seq_len = 0 # filled positions

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B or 1, H, T, D) in a layer, without changing seq_len. Returns all keys and values so far."""
        start, end = self.seq_len, self.seq_len + k.size(2)
        keys, values = self.keys[layer, :, :, :end], self.values[layer, :, :, :end] # (B, H, S, D) each
        keys[:, :, start:], values[:, :, start:] = k, v
        return (keys, values) if start else (k, v)

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only. They move to the front of the same memory, because a second cache might not fit.

        The memory of the other rows is not freed.
        """
        for tensor in self.keys, self.values:
            for layer in tensor[..., :self.seq_len, :]: # the rest is unused, and may not be in memory yet
                layer[:len(rows)] = layer[rows]
        self.keys, self.values = self.keys[:, :len(rows)], self.values[:, :len(rows)]
