"""Builds a GPT from a Checkpoint."""
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model import GPT, GPTConfig
from sampling.checkpoints.checkpoint import Checkpoint, named_errors
from sampling.checkpoints.huggingface import load_gpt2

INIT_FUNCTIONS = "kaiming_uniform_", "uniform_", "normal_", "fill_", "zero_"


def load_gpt(name_or_folder: str, override_args: dict | None = None) -> GPT:
    """GPT-2 by its Hugging Face id ("gpt2", "gpt2-xl", "distilgpt2", ...) or from a local folder.

    override_args replaces GPTConfig fields that no tensor depends on, such as dropout.
    Raises ValueError or OSError if the files are not available or do not hold a GPT-2.
    """
    checkpoint = load_gpt2(name_or_folder)
    checkpoint.model_args |= override_args or {}
    return build_gpt(checkpoint)


def build_gpt(checkpoint: Checkpoint) -> GPT:
    """A model in eval mode that holds the tensors of a Checkpoint, not copies. Empties the Checkpoint's state_dict.

    Then only the model refers to the tensors, so a backend can free each layer after converting it.
    Raises ValueError, which names the file, if model_args, or the names and shapes of the tensors, do not fit.
    """
    model_args, state_dict = checkpoint.model_args, checkpoint.state_dict
    with named_errors(checkpoint.path):
        if unknown := set(model_args) - set(GPTConfig.__dataclass_fields__):
            raise ValueError(f"model_args has fields that GPT does not have: {', '.join(sorted(map(str, unknown)))}")
        with torch.device("meta"), SkipInit(): # takes no memory, no time and no random numbers
            model = GPT(GPTConfig(**model_args))
        require_same_tensors(model.state_dict(), state_dict)
        model.load_state_dict(state_dict, assign=True)
    if model.config.tie_word_embeddings:
        model.transformer.wte.weight = model.lm_head.weight
    state_dict.clear()
    return model.eval()


class SkipInit(TorchFunctionMode):
    """Skips torch's init functions, because a checkpoint has all weights.

    On the meta device, the first call of one would make torch import modules, which takes a second.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.__name__ in INIT_FUNCTIONS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def require_same_tensors(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
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
