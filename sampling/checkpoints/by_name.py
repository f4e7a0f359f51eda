"""Loads a checkpoint, or the GPT of one, by name."""
import os

from model import GPT
from sampling.checkpoints.build import build_gpt
from sampling.checkpoints.checkpoint import Checkpoint, Convert
from sampling.checkpoints.huggingface import load_gpt2
from sampling.checkpoints.nanogpt import load_checkpoint
from sampling.messages import Log, warn


def load_pretrained(init_from: str, convert: Convert | None = None, with_crc32: bool = False,
                    log: Log = warn) -> Checkpoint:
    """load_gpt2, but a file or folder of nanoGPT raises ValueError, which says how to load it."""
    if is_checkpoint(init_from) and not init_from.endswith(".safetensors"):
        raise ValueError(f"{init_from} is not the folder of a Hugging Face model; for a ckpt.pt pass "
                         f"--out_dir={init_from}")
    return load_gpt2(init_from, convert, with_crc32, log)


def load_by_name(name: str | os.PathLike, convert: Convert | None = None, with_crc32: bool = False,
                 log: Log = warn) -> Checkpoint:
    """load_checkpoint if there is a ckpt.pt at this path or in this folder, otherwise load_gpt2."""
    load = load_checkpoint if is_checkpoint(os.fspath(name)) else load_gpt2
    return load(os.fspath(name), convert, with_crc32, log)


def load_gpt(name_or_folder: str, override_args: dict | None = None) -> GPT:
    """GPT-2 by its Hugging Face id ("gpt2", "gpt2-xl", "distilgpt2", ...) or from a local folder.

    override_args replaces GPTConfig fields that no tensor depends on, such as dropout.
    Raises ValueError or OSError if the files are not available or do not hold a GPT-2.
    """
    checkpoint = load_gpt2(name_or_folder)
    checkpoint.model_args |= override_args or {}
    return build_gpt(checkpoint)


def is_checkpoint(path: str) -> bool:
    """Whether path is a file, or a folder with a ckpt.pt."""
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, "ckpt.pt"))
