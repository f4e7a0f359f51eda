"""Prepares the draft: the model that proposes tokens in speculative decoding."""
import copy
from typing import NamedTuple

import torch

from model import GPT, GPTConfig
from sampling.backends.backend import Backend
from sampling.backends.cpu.packed_gpt import PackedGPT
from sampling.backends.prepare import prepare_backend
from sampling.checkpoints.build import build_gpt
from sampling.checkpoints.by_name import load_by_name
from sampling.checkpoints.checkpoint import named_errors
from sampling.log import Log, warn
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


def prepare_draft(target: GPT, dtype: torch.dtype, options: ModelOptions, log: Log = warn) -> Draft:
    """The options.draft of a target: "int8" is the target itself in int8, otherwise a model's name, folder or file.

    Call this before prepare_backend takes the layers of the target. The other arguments are those of the target, which
    is on a CPU. Raises ValueError or OSError if there is no such model, or if it cannot be the draft of this target.
    """
    name = options.draft
    with named_errors(f"draft={name}"):
        if name == "int8":
            backend = PackedGPT(share_weights(target), use_int8=True)
        else:
            gpt = build_gpt(load_by_name(name, copy_weights=dtype != torch.int8))
            size, target_size = gpt.config.vocab_size, target.config.vocab_size
            if size != target_size:
                raise ValueError(f"draft={name} has a vocabulary of {size} tokens, but the model has {target_size}: "
                                 "the two must be equal; choose another draft, or leave it out")
            backend = prepare_backend(gpt, torch.device("cpu"), dtype, options, log)
    draft_dtype = torch.int8 if name == "int8" else dtype
    cost = step_cost(backend.config, draft_dtype.itemsize) / step_cost(target.config, dtype.itemsize)
    return Draft(backend, cost, is_copy=name == "int8")


def share_weights(gpt: GPT) -> GPT:
    """Another GPT with the same weights in memory. It can lose its layers, and gpt keeps them."""
    return copy.deepcopy(gpt, {id(tensor): tensor for tensor in gpt.state_dict(keep_vars=True).values()})


def step_cost(config: GPTConfig, bytes_per_weight: int) -> float:
    """The cost of a step of one row: the bytes of its weights, and OVERHEAD_BYTES_PER_LAYER."""
    E, inner = config.n_embd, config.n_inner or 4 * config.n_embd
    num_weights = config.n_layer * (4 * E * E + 2 * E * inner) + config.vocab_size * E
    return num_weights * bytes_per_weight + config.n_layer * OVERHEAD_BYTES_PER_LAYER
