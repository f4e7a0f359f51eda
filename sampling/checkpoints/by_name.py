"""Finds out what kind of model a name means."""
import os

from sampling.checkpoints.checkpoint import Checkpoint
from sampling.checkpoints.huggingface import load_gpt2
from sampling.checkpoints.nanogpt import load_checkpoint


def load_by_name(name: str, copy_weights: bool = True) -> Checkpoint:
    """Load the ckpt.pt at this path or in this folder; otherwise GPT-2, by Hugging Face id or folder.

    copy_weights: see copy_tensors.
    """
    if os.path.isfile(name) or os.path.isfile(os.path.join(name, "ckpt.pt")):
        return load_checkpoint(name, copy_weights=copy_weights)
    return load_gpt2(name, copy_weights=copy_weights)
