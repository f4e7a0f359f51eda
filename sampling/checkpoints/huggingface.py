"""Loads GPT-2 in Hugging Face's format: from the hub, from the hub's cache, or from a local folder."""
import logging
import os
from pathlib import Path
from typing import BinaryIO

import torch

from sampling.checkpoints.build import EMBEDDING, HEAD, Checkpoint, QuantizedWeight, read_model, tensors_by_name
from sampling.checkpoints.finding import huggingface_config
from sampling.checkpoints.tensor_files import read_tensor_file
from sampling.checkpoints.untrusted_files import first_sentence, read_complete
from sampling.model import GPTConfig

logger = logging.getLogger(__name__)
FILES = ["model.safetensors", "model-*.safetensors", "*.json", "*.txt", "*.model"]
# activation_function in config.json -> approximate in F.gelu
GELU = {"gelu": "none", "gelu_python": "none", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}
DEFAULTS = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_inner": None, "n_positions": 1024,
            "layer_norm_epsilon": 1e-5} # of fields that config.json may lack, as in transformers


def load_huggingface(name_or_folder: str, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Load GPT-2 by its Hugging Face id ("gpt2", "gpt2-xl", "distilgpt2", ...) or from a local folder.

    dtype and errors: as in nanogpt.load_nanogpt.
    """
    folder, config = find_model(name_or_folder)
    model_args, paths = gpt2_model_args(config, folder), weight_files(folder)

    def read(*weights: BinaryIO) -> dict:
        stored = {}
        for file in weights:
            tensor_file = read_tensor_file(file)
            stored |= tensors_by_name(tensor_file.content, tensor_file)
        for name, (file, tensor) in stored.items():
            if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")): # Conv1D has a Linear's transposed
                stored[name] = file, tensor._replace(shape=tensor.shape[::-1], strides=tensor.strides[::-1])
        if config.get("tie_word_embeddings", True) and EMBEDDING in stored:
            stored.setdefault(HEAD, stored[EMBEDDING]) # a head in the file may differ: it is used, as in transformers
        fields = read_model(model_args, stored, dtype)
        scale_queries(fields["state_dict"], config, fields["config"])
        return fields

    checkpoint = Checkpoint(path=name_or_folder, folder=folder, is_huggingface=True, raw_config=config,
                            **read_complete(paths, read))
    logger.info(checkpoint.describe())
    return checkpoint


def scale_queries(state_dict: dict, config: dict, sizes: GPTConfig) -> None:
    """If config.json sets another attention scale than 1/sqrt(D), multiply the query weights by the ratio."""
    factor = 1.0 if config.get("scale_attn_weights", True) else (sizes.n_embd / sizes.n_head) ** 0.5
    for name, tensor in state_dict.items():
        if ".attn.c_attn." in name: # (3E, E) or (3E,): a row of the weight has one scale in int8
            divisor = int(name.split(".")[2]) + 1 if config.get("scale_attn_by_inverse_layer_idx") else 1
            rows = tensor.scales if isinstance(tensor, QuantizedWeight) else tensor
            rows[:sizes.n_embd] *= factor / divisor


def gpt2_model_args(config: dict, folder: Path) -> dict:
    """The fields of GPTConfig, from config.json. Raises ValueError if the architecture is not GPT-2's."""
    if config.get("model_type", "gpt2") != "gpt2":
        raise ValueError(f"{folder} has model_type {config['model_type']!r:.60}; only gpt2 is supported")
    activation = config.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in GELU:
        raise ValueError(f"{folder} has activation_function {activation!r:.60}; supported are {', '.join(GELU)}")
    fields = DEFAULTS | {name: config[name] for name in DEFAULTS.keys() & config.keys()}
    return {"block_size": fields.pop("n_positions"), "gelu": GELU[activation], "bias": True} | fields


# ---- files

def find_model(name_or_folder: str) -> tuple[Path, dict]:
    """The folder with the files of the model, and its config.json."""
    folder = Path(name_or_folder) if os.path.exists(name_or_folder) else download(name_or_folder)
    if config := huggingface_config(folder):
        return folder, config
    raise ValueError(f"{name_or_folder} is here, but is not the folder of a Hugging Face model; for a ckpt.pt pass "
                     f"--out_dir={name_or_folder}; for the hub's model of this name, run the command in another folder")


def download(name: str) -> Path:
    """Download a model, unless it is in the hub's cache, and return its folder. Raises ValueError if that fails."""
    from huggingface_hub import snapshot_download
    try:
        folder = Path(snapshot_download(name, allow_patterns=FILES))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=["pytorch_model.bin", "pytorch_model-*.bin"]))
        return folder
    except (OSError, ValueError) as error: # all errors of the hub are of these types
        raise ValueError(f"{name!r:.100} is no folder here, and did not come from the Hugging Face hub "
                         f"({first_sentence(error)}); a private model needs HF_TOKEN; where the hub cannot be reached, "
                         f"run 'hf download {name:.100} --local-dir DIR' elsewhere, and give a copy of DIR") from None


def weight_files(folder: Path) -> list[Path]:
    """The weight files: one file, or all its shards. Prefers safetensors to pytorch_model.bin."""
    for pattern in "model.safetensors", "model-*-of-*.safetensors", "pytorch_model.bin", "pytorch_model-*-of-*.bin":
        if paths := sorted(filter(Path.is_file, folder.glob(pattern))):
            return paths
    raise ValueError(f"{folder} has neither model.safetensors nor pytorch_model.bin, nor the shards of either")
