"""Converts Hugging Face's GPT-2 to nanoGPT's settings and tensors."""
from pathlib import Path

import torch

from sampling.checkpoints.state_dict import HEAD, StateDict

# activation_function in config.json -> approximate in F.gelu
GELU = {"gelu": "none", "gelu_python": "none", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}
GPT2_SIZES = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_inner": None} # defaults of GPT2Config
CONV1D_WEIGHTS = "c_attn.weight", "c_proj.weight", "c_fc.weight"


def gpt2_model_args(config: dict, folder: Path) -> dict:
    """The fields of GPTConfig, from config.json. Raises ValueError if the architecture is not GPT-2's."""
    if config.get("model_type") != "gpt2":
        raise ValueError(f"{folder} has model_type {config.get('model_type')!r:.60}; only gpt2 is supported")
    activation = config.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in GELU:
        raise ValueError(f"{folder} has activation_function {activation!r:.60}; supported are {', '.join(GELU)}")
    return {
        **{name: config.get(name, default) for name, default in GPT2_SIZES.items()},
        "block_size": config.get("n_positions", 1024),
        "layer_norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "gelu": GELU[activation],
        "bias": True,
    }


def rename_hf_keys(state_dict: StateDict) -> StateDict:
    """Convert to nanoGPT's names and layouts. Hugging Face's Conv1D stores the weight of a Linear transposed."""
    renamed = {}
    for name, tensor in state_dict.items():
        name = name if name == HEAD else "transformer." + name.removeprefix("transformer.")
        is_conv1d = name.endswith(CONV1D_WEIGHTS) and tensor.dim() == 2
        renamed[name] = tensor.t() if is_conv1d else tensor
    return renamed


def rescale_queries(config: dict, model_args: dict, state_dict: StateDict) -> None:
    """Fold the attention scales of config.json into the query weights. model.GPT only has the scale 1/sqrt(D)."""
    by_width, by_layer = config.get("scale_attn_weights", True), config.get("scale_attn_by_inverse_layer_idx", False)
    if by_width and not by_layer:
        return
    for i in range(model_args["n_layer"]):
        scale = 1 / (i + 1) if by_layer else 1.0
        if not by_width:
            scale *= (model_args["n_embd"] / model_args["n_head"]) ** 0.5
        for name in "weight", "bias":
            key = f"transformer.h.{i}.attn.c_attn.{name}"
            state_dict[key] = tensor = state_dict[key].to(torch.float32, copy=True) # it may be mapped from the file
            tensor[:len(tensor) // 3] *= scale
