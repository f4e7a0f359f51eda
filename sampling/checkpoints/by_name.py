"""Loads a checkpoint by name."""
import os
from pathlib import Path

from sampling.checkpoints.checkpoint import Checkpoint
from sampling.checkpoints.huggingface import load_gpt2
from sampling.checkpoints.nanogpt import load_checkpoint
from sampling.checkpoints.nearby import latest_numbered_checkpoint


def load_pretrained(init_from: str, copy_weights: bool = True) -> Checkpoint:
    """Load GPT-2, by Hugging Face id or folder.

    copy_weights: see copy_tensors. Raises ValueError with advice if init_from is a file or folder of nanoGPT.
    """
    reason = f"{init_from} is not the folder of a Hugging Face model"
    if is_checkpoint(init_from) and not init_from.endswith(".safetensors"):
        raise ValueError(f"{reason}; for a ckpt.pt pass --out_dir={init_from}")
    if numbered := numbered_checkpoint_in(init_from):
        raise ValueError(f"{reason}: it has no config.json; for {numbered.name} pass --out_dir={numbered}")
    return load_gpt2(init_from, copy_weights)


def load_by_name(name: str | os.PathLike, copy_weights: bool = True) -> Checkpoint:
    """Load the ckpt.pt at this path or in this folder; otherwise GPT-2, by Hugging Face id or folder.

    copy_weights: see copy_tensors.
    """
    name = os.fspath(name)
    if is_checkpoint(name):
        return load_checkpoint(name, copy_weights=copy_weights)
    if numbered := numbered_checkpoint_in(name):
        raise ValueError(f"{name} has neither ckpt.pt nor config.json; for {numbered.name} give its path, {numbered}")
    return load_gpt2(name, copy_weights=copy_weights)


def is_checkpoint(path: str) -> bool:
    """Whether path is a file, or a folder with a ckpt.pt."""
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, "ckpt.pt"))


def numbered_checkpoint_in(folder: str) -> Path | None:
    """The model_*.pt or ckpt_*.pt in a folder that has no config.json; None if there is none."""
    is_candidate = os.path.isdir(folder) and not os.path.isfile(os.path.join(folder, "config.json"))
    return latest_numbered_checkpoint(Path(folder)) if is_candidate else None
