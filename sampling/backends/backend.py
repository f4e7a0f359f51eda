"""What the engine needs of a model that was prepared for a device."""
from collections.abc import Generator
from typing import Protocol

import torch
from torch import Tensor

from model import GPTConfig
from sampling.sampler.sample_token import SampleFn

TokenStream = Generator[Tensor, list[int] | None, None]


class Backend(Protocol):
    """A GPT prepared for one kind of device. All backends sample the same tokens; they differ in speed."""
    config: GPTConfig
    device: torch.device
    # Finished rows leave a batch once at most this share of its rows still grows: new graphs cost more than idle rows.
    compaction_ratio: float
    # Whether check_finite looks at the logits, because a look at each step would synchronise the GPU.
    defers_finite_check: bool

    def generate_stream(self, idx: Tensor, max_new_tokens: int, sample_fn: SampleFn,
                        context_shift: bool = False) -> TokenStream:
        """Continue token ids (B, T): yields the ids (B, 1) of each step, max_new_tokens times.

        Sending a list of row indices goes on with these rows only; sending an empty list ends the stream.
        context_shift drops the older half of a full window instead of reading the whole window again for every token.
        """

    def check_finite(self) -> None:
        """Raises ValueError if logits of the latest stream were NaN or infinite and nothing has said so yet."""

    def warm_up_compile(self, idx: Tensor, max_new_tokens: int, context_shift: bool = False) -> None:
        """Run what generate_stream will run for such a call, so that torch.compile compiles it now."""

    def bytes_per_sample(self, length: int) -> int:
        """About how much memory one more row of length tokens takes."""
