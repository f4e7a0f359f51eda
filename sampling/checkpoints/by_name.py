"""Loads the checkpoint that settings or a name mean."""
import os

from sampling.checkpoints.checkpoint import Checkpoint
from sampling.checkpoints.huggingface import load_gpt2
from sampling.checkpoints.nanogpt import load_checkpoint


def load_from_settings(init_from: str, out_dir: str, with_crc32: bool = False, copy_weights: bool = True) -> Checkpoint:
    """Load the checkpoint in out_dir if init_from is "resume"; otherwise GPT-2, by Hugging Face id or folder.

    with_crc32: whether the Checkpoint needs its crc32. copy_weights: see copy_tensors.
    """
    if init_from == "resume":
        return load_checkpoint(out_dir, with_crc32, copy_weights)
    return load_gpt2(init_from, with_crc32, copy_weights)


def load_by_name(name: str, copy_weights: bool = True) -> Checkpoint:
    """Load the ckpt.pt at this path or in this folder; otherwise GPT-2, by Hugging Face id or folder.

    copy_weights: see copy_tensors.
    """
    if os.path.isfile(name) or os.path.isfile(os.path.join(name, "ckpt.pt")):
        return load_checkpoint(name, copy_weights=copy_weights)
    return load_gpt2(name, copy_weights=copy_weights)
