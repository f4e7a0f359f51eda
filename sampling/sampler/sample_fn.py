"""SampleFn: what a backend needs to choose tokens. Its input is Logits, and Noise is its source of random numbers."""
from abc import abstractmethod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Logits(NamedTuple):
    """A model's logits for the next token."""
    values: Tensor # (B, V)
    candidate_ids: Tensor | None = None # (K,): only these entries are exact, and the largest logits are among them


class Noise(Protocol):
    """A source of exponential random numbers."""

    def __call__(self, shape: tuple[int, int], ids: Tensor | None, device: torch.device) -> Tensor:
        """Draw one number for each entry of shape (B, V). Return the numbers of ids (B, K), or all if ids is None."""


class SampleFn(Protocol):
    """Chooses the next token of each row of a batch. By default, it needs all logits, and draws nothing ahead."""

    @property
    def num_logits_needed(self) -> int | None:
        """How many of the largest logits of a row must be exact; None: all."""

    def prefetch(self) -> None:
        """Draw the random numbers of the next __call__, before a CUDA graph that holds __call__ runs."""

    def repeat_noise(self) -> None:
        """Let the next __call__ use the same random numbers as the latest one. Needs PerRowRNG."""

    def propose(self, logits: Logits, ids: Tensor, ahead: int) -> Tensor:
        """The ids (1, 1) that a later __call__ would return: ahead=0 is the next call, ahead=1 the one after it.

        It draws those random numbers now, and __call__ uses them later. Needs PerRowRNG, and a batch of one row.
        """
        raise NotImplementedError

    @abstractmethod
    def __call__(self, logits: Logits, ids: Tensor) -> Tensor:
        """Logits and the ids (B, S) that the model saw -> the next ids (B, 1)."""
