"""Backend: what the engine needs from a model that was prepared for a device."""
from abc import abstractmethod
from collections.abc import Generator
from typing import Protocol

import torch
from torch import Tensor

from model import GPTConfig
from sampling.sampler.sample_fn import SampleFn

TokenStream = Generator[Tensor, list[int] | None, None]


class Backend(Protocol):
    """A GPT prepared for one kind of device.

    All backends sample the same tokens, up to rounding, except that ExactGPT uses the exact GELU for every model. They
    differ in speed. A class that inherits from Backend need not define what has a default here.
    """
    config: GPTConfig
    device: torch.device
    # Finished rows leave a batch when at most this share of its rows is unfinished. It is below 1 if new CUDA graphs
    # cost more than idle rows.
    compaction_ratio: float = 1.0
    # Whether sample_token may synchronise with the GPU, to check that logits are finite. If not, the engine calls
    # logits_are_finite.
    allow_sync: bool = True
    # Whether each sample must be generated alone, with nanoGPT's own operations.
    is_exact: bool = False

    @abstractmethod
    def generate_stream(self, idx: Tensor, max_new_tokens: int, sample_fn: SampleFn,
                        context_shift: bool = False) -> TokenStream:
        """Continue token ids (B, T): yields the ids (B, 1) of each step, max_new_tokens times.

        The caller may send a list of row indices to keep only these rows. An empty list ends the stream.
        context_shift drops the older half of a full window, instead of recomputing the whole window for every token.
        """

    def logits_are_finite(self) -> Tensor | None:
        """Whether all logits of the latest stream were finite: a tensor of one bool, on the device.

        None with allow_sync: then sample_token raises the error.
        """

    def release_memory(self) -> None:
        """Free what is kept for the next stream, such as CUDA graphs. By default, nothing is kept."""

    def warm_up_compile(self, idx: Tensor, max_new_tokens: int, context_shift: bool = False) -> None:
        """Run the steps that generate_stream would run with these arguments, so that torch.compile compiles them now.

        By default, nothing is compiled.
        """

    @abstractmethod
    def bytes_per_sample(self, length: int) -> int:
        """About how much memory one more row of length tokens takes."""
