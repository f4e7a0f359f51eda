"""Prepares the draft: the model that proposes tokens in speculative decoding."""
from dataclasses import replace
from typing import NamedTuple

import torch

from model import GPTConfig
from sampling.backends.backend import Backend, num_step_weights
from sampling.backends.prepare import prepare_backend
from sampling.checkpoints.checkpoint import Checkpoint, named_errors
from sampling.checkpoints.nanogpt import load_by_name
from sampling.messages import Log, warn

OVERHEAD_BYTES_PER_LAYER = 7_000_000 # what norms, attention and calls of operators take as long as reading


class Draft(NamedTuple):
    """A prepared draft."""
    backend: Backend
    relative_cost: float # the time of one of its steps, in steps of the target
    is_copy: bool = False # whether it is the target itself, in int8


def prepare_draft(name: str, target: Checkpoint, target_dtype: torch.dtype, log: Log = warn) -> Draft:
    """The draft of a target, which is on a CPU and still has its weights. name: "int8" is the target itself in int8,
    otherwise a model's name, folder or file. Raises ValueError or OSError if that cannot be the draft.
    """
    with named_errors(f"draft={name}"):
        if name == "int8":
            checkpoint, dtype = replace(target, state_dict=dict(target.state_dict)), torch.int8
        else:
            checkpoint, dtype = load_by_name(name, log=log), target_dtype
        size, target_size = checkpoint.config.vocab_size, target.config.vocab_size
        if size != target_size:
            raise ValueError(f"it has a vocabulary of {size} tokens, but the model has {target_size}: the two must be "
                             "equal; choose another draft, or leave it out")
        backend = prepare_backend(checkpoint, torch.device("cpu"), dtype, log=log)
    target_cost = step_cost(target.config, target_dtype.itemsize)
    return Draft(backend, step_cost(backend.config, dtype.itemsize) / target_cost, is_copy=name == "int8")


def step_cost(config: GPTConfig, bytes_per_weight: int) -> float:
    """The cost of a step of one row, which mostly waits for memory: the bytes that it reads, and the overhead."""
    return num_step_weights(config) * bytes_per_weight + config.n_layer * OVERHEAD_BYTES_PER_LAYER
