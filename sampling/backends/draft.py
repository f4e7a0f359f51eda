"""Prepares the draft: the model that proposes tokens in speculative decoding."""
from typing import NamedTuple, Protocol

import torch

from model import GPT, CausalLM, GPTConfig
from sampling.backends.backend import Backend
from sampling.backends.prepare import prepare_model
from sampling.checkpoints.by_name import load_by_name
from sampling.checkpoints.checkpoint import named_errors

# A step of one row takes the time to read its weights, and about the time of reading so many bytes for each layer:
# norms, attention and the calls of all operators.
OVERHEAD_BYTES_PER_LAYER = 10_000_000


class ReversibleBackend(Backend, CausalLM, Protocol):
    """A Backend that can also run single passes. Setting seq_len of its cache to a lower number undoes passes."""


class Draft(NamedTuple):
    """A prepared draft. relative_cost is the time of one of its steps, in steps of the target."""
    backend: ReversibleBackend
    relative_cost: float


def prepare_draft(name: str, target: GPT, device: torch.device, dtype: torch.dtype,
                  pack_eagerly: bool = False) -> Draft:
    """The draft for a target: the model of this name, folder or file.

    Call this before prepare_model takes the layers of the target. device, dtype: those of the target.
    Raises ValueError or OSError if there is no such model, or if its vocabulary has another size than the target's.
    """
    with named_errors(f"draft={name}"):
        gpt = GPT.from_checkpoint(load_by_name(name))
        size, target_size = gpt.config.vocab_size, target.config.vocab_size
        if size != target_size:
            raise ValueError(f"draft={name} has a vocabulary of {size} tokens, but the model has {target_size}: the "
                             "two must be equal; choose another draft, or leave it out")
        cost = step_bytes(gpt.config, dtype.itemsize) / step_bytes(target.config, dtype.itemsize)
        backend = prepare_model(gpt, device, dtype, pack_eagerly=pack_eagerly, is_reversible=True)
    return Draft(backend, cost)


def step_bytes(config: GPTConfig, bytes_per_weight: int) -> int:
    """The time of a step of one row, as the number of bytes that a processor reads in that time."""
    E, inner = config.n_embd, config.n_inner or 4 * config.n_embd
    num_weights = config.n_layer * (4 * E * E + 2 * E * inner) + config.vocab_size * E
    return num_weights * bytes_per_weight + config.n_layer * OVERHEAD_BYTES_PER_LAYER
