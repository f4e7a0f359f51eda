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
from sampling.params import ModelOptions

# A step of one row mostly waits for memory: it reads all weights. Each layer also takes time for norms, attention and
# calls of operators, about as long as reading this many bytes.
OVERHEAD_BYTES_PER_LAYER = 7_000_000


class Draft(NamedTuple):
    """A prepared draft. relative_cost is the time of one of its steps, in steps of the target.

    is_copy: whether it is the target itself, in int8.
    """
    backend: Backend
    relative_cost: float
    is_copy: bool = False


def prepare_draft(target: Checkpoint, target_dtype: torch.dtype, options: ModelOptions, log: Log = warn) -> Draft:
    """The options.draft of a target: "int8" is the target itself in int8, otherwise a model's name, folder or file.

    Call this before prepare_backend takes the weights of the target. The other arguments are those of the target, which
    is on a CPU. Raises ValueError or OSError if there is no such model, or if it cannot be the draft of this target.
    """
    name, target_config = options.draft, GPTConfig(**target.model_args)
    with named_errors(f"draft={name}"):
        if name == "int8":
            checkpoint, dtype = replace(target, state_dict=dict(target.state_dict)), torch.int8
        else:
            checkpoint, dtype = load_by_name(name, log=log), target_dtype
        size, target_size = checkpoint.vocab_size, target_config.vocab_size
        if size != target_size:
            raise ValueError(f"draft={name} has a vocabulary of {size} tokens, but the model has {target_size}: "
                             "the two must be equal; choose another draft, or leave it out")
        backend = prepare_backend(checkpoint, torch.device("cpu"), dtype, log=log)
    cost = step_cost(backend.config, dtype.itemsize) / step_cost(target_config, target_dtype.itemsize)
    return Draft(backend, cost, is_copy=name == "int8")


def step_cost(config: GPTConfig, bytes_per_weight: int) -> float:
    """The cost of a step of one row: the bytes of its weights, and OVERHEAD_BYTES_PER_LAYER."""
    return num_step_weights(config) * bytes_per_weight + config.n_layer * OVERHEAD_BYTES_PER_LAYER
