"""Products of a few tokens with a weight (out, in), as embedding bags.

An embedding bag is a weighted sum of rows of a table. Here, a row of the table holds the weights of one input channel,
and the weights of the sum are the activations. FBGEMM's kernel for this reads memory faster than torch's matrix
products do. Threads share the bags equally.
"""
import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# What is fastest on AMD processors: rows of 192 bytes, read at 8 places.
MAX_ROW_BYTES = 192
NUM_STREAMS = 8
MAX_TERMS = 128 # of a sum in float32: a longer sum has a larger rounding error than nanoGPT's


def has_fbgemm() -> bool:
    """Whether torch was built with FBGEMM. Without it, embedding bags are slow."""
    return "fbgemm" in torch.backends.quantized.supported_engines


class BagLayout(NamedTuple):
    """How a weight (out, in) is stored as a table, in num_parts parts of width output channels.

    A part has a row for each input channel, in the order of interleaved_channels. The sums of a part fit in the
    processor's registers. The last part is filled with zeros. A part has num_chunks bags for each token, and each of
    them adds its share of the input channels.
    """
    out_features: int
    in_features: int
    num_parts: int
    width: int
    num_streams: int
    num_chunks: int

    @classmethod
    def of(cls, weight: Tensor, max_width: int, num_streams: int, num_chunks: int = 1) -> "BagLayout":
        """The layout of this weight, with at most max_width output channels in a part."""
        num_threads = torch.get_num_threads()
        num_parts = num_threads * math.ceil(len(weight) / (num_threads * max_width))
        return cls(*weight.shape, num_parts, math.ceil(len(weight) / num_parts), num_streams, num_chunks)

    def fill(self, table: Tensor, weight: Tensor) -> None:
        """Store a weight (out, in) in a table (num_parts * in, width) of zeros."""
        order = interleaved_channels(self.in_features, self.num_streams)
        for rows, part in zip(table.split(self.in_features), weight.split(self.width), strict=False):
            rows[:, :len(part)] = part.T[order]

    def weight_of(self, table: Tensor) -> Tensor:
        """The weight (out, in) that fill stored. Needs little more memory than the weight."""
        order = interleaved_channels(self.in_features, self.num_streams).argsort()
        weight = table.new_empty(self.num_parts, self.width, self.in_features)
        for rows, part in zip(table.split(self.in_features), weight, strict=True):
            part.copy_(rows[order].T)
        return weight.flatten(0, 1)[:self.out_features]

    def bag_weights(self, x: Tensor) -> Tensor:
        """Activations (N, in) as the weights of all bags, in the order of bag_indices."""
        return x.expand(self.num_parts, -1, -1).reshape(-1)

    def outputs(self, sums: Tensor) -> Tensor:
        """The results (num_parts * N * num_chunks, width) of all bags -> (N, out)."""
        if self.num_chunks > 1:
            sums = sums.view(-1, self.num_chunks, self.width).sum(dim=1)
        return sums.view(self.num_parts, -1, self.width).transpose(0, 1).flatten(1)[:, :self.out_features]


@lru_cache(maxsize=16) # few, because those of a large head for ten tokens need 30 MB
def bag_indices(layout: BagLayout, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The rows of each bag in the order of the channels, and where the bags start. All layers of a shape share them.

    The bags of a part follow each other, so that memory is read once for all tokens.
    """
    in_features = layout.in_features
    first_rows = torch.arange(0, layout.num_parts * in_features, in_features).repeat_interleave(num_tokens)
    indices = first_rows[:, None] + interleaved_channels(in_features, layout.num_streams).argsort()
    chunks = torch.arange(layout.num_chunks) * in_features // layout.num_chunks
    starts = torch.arange(0, indices.numel(), in_features)[:, None] + chunks
    return indices.int().flatten(), starts.int().flatten()


@cache
def interleaved_channels(in_features: int, num_streams: int) -> Tensor:
    """The input channels in the order of their rows in memory, such as 0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11.

    A bag adds the rows of channels 0, 1, 2, 3, ... So its thread reads at num_streams places in turn. The prefetcher of
    a core follows each of them, which keeps more requests in flight: it reads memory up to 1.7 times as fast.
    """
    num_streams = min(num_streams, in_features)
    return torch.cat([torch.arange(first, in_features, num_streams) for first in range(num_streams)])


class EmbeddingBagMatmul:
    """The product of one token with a weight (out, in), in float32 or bfloat16."""

    def __init__(self, weight: Tensor):
        # The result of a bag is rounded to the dtype of the weight. So bfloat16 needs a single one.
        num_chunks = math.ceil(weight.size(1) / MAX_TERMS) if weight.dtype == torch.float32 else 1
        self.layout = BagLayout.of(weight, MAX_ROW_BYTES // weight.element_size(), NUM_STREAMS, num_chunks)
        self.table = weight.new_zeros(self.layout.num_parts * self.layout.in_features, self.layout.width)
        self.layout.fill(self.table, weight)

    def __call__(self, x: Tensor) -> Tensor:
        """(1, in) -> (1, out), in the dtype of the weight."""
        indices, starts = bag_indices(self.layout, num_tokens=1)
        weights = self.layout.bag_weights(x.to(self.table.dtype))
        sums = F.embedding_bag(indices, self.table, starts, mode="sum", per_sample_weights=weights)
        return self.layout.outputs(sums)

    def weight(self) -> Tensor:
        """The weight (out, in)."""
        return self.layout.weight_of(self.table)
