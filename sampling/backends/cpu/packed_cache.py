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
        """Advance by one position. Returns, for every layer, the slot (2, B, H, D) for its key and its value, and all
        keys and values (B * H, S, D), the new position included."""
        i = self.seq_len
        self.seq_len = end = i + 1
        keys, values = self.kv[..., :end, :].flatten(2, 3).unbind(1) # (N, B * H, S, D) each
        return self.kv[..., i, :].unbind(), keys.unbind(), values.unbind()

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only. Their memory stays as it is, because a second cache might not fit into memory."""
        for layer in self.kv:
            layer[:, :len(rows)] = layer[:, rows]
        self.kv = self.kv[:, :, :len(rows)]
