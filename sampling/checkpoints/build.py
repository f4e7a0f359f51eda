"""Checks that the tensors of a checkpoint fit its model, and builds a GPT from them."""
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from model import GPT, GPTConfig
from sampling.checkpoints.checkpoint import Checkpoint

INIT_FUNCTIONS = "kaiming_uniform_", "uniform_", "normal_", "fill_", "zero_"


def require_fit(model_args: dict, tensors: Mapping[str, Any]) -> GPTConfig:
    """The configuration of a model with these tensors, of which only the shapes matter.

    Raises ValueError if model_args, or the names and shapes of the tensors, do not fit.
    """
    if unknown := set(model_args) - set(GPTConfig.__dataclass_fields__):
        raise ValueError(f"model_args has fields that GPT does not have: {', '.join(sorted(map(str, unknown)))}")
    config = GPTConfig(**model_args)
    require_same_tensors(empty_gpt(config).state_dict(), tensors)
    return config


def build_gpt(checkpoint: Checkpoint) -> GPT:
    """A model in eval mode that holds the tensors of a Checkpoint, not copies. Takes them out of the Checkpoint."""
    model = empty_gpt(GPTConfig(**checkpoint.model_args))
    model.load_state_dict(checkpoint.state_dict, assign=True)
    if model.config.tie_word_embeddings:
        model.transformer.wte.weight = model.lm_head.weight
    checkpoint.state_dict = {}
    return model.eval()


def empty_gpt(config: GPTConfig) -> GPT:
    """A model whose tensors have shapes, but no memory. It takes no time and no random numbers."""
    with torch.device("meta"), SkipInit():
        return GPT(config)


class SkipInit(TorchFunctionMode):
    """Skips torch's init functions, because a checkpoint has all weights.

    On the meta device, the first call of one would make torch import modules, which takes a second.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.__name__ in INIT_FUNCTIONS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def require_same_tensors(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raises ValueError if tensors are missing, unexpected or misshapen. It names the first three of each kind."""
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "misshapen": [f"{name} {tuple(found[name].shape)} instead of {tuple(expected[name].shape)}"
                      for name in expected if name in found and found[name].shape != expected[name].shape],
    }
    parts = [f"{kind}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
             for kind, names in problems.items() if names]
    if parts:
        raise ValueError(f"the tensors do not fit the model; {'; '.join(parts)}")
