"""Loads the ckpt.pt that nanoGPT's train.py wrote, and the model_*.pt of build-nanogpt, the GPT-2 lesson."""
from pathlib import Path

from sampling.checkpoints.checkpoint import Checkpoint, named_errors
from sampling.checkpoints.entries import model_entries
from sampling.checkpoints.init_draws import count_init_draws
from sampling.checkpoints.nearby import checkpoints_near, latest_numbered_checkpoint, numbered_checkpoint_near
from sampling.checkpoints.other_programs import has_model_type, reject_other_files, reject_safetensors_in
from sampling.checkpoints.state_dict import (
    EMBEDDING,
    HEAD,
    StateDict,
    normalize_state_dict,
    plain_name,
    vocab_size_of,
)
from sampling.checkpoints.torch_files import read_torch_file


def load_checkpoint(out_dir: str | Path, copy_weights: bool = True) -> Checkpoint:
    """Load the ckpt.pt in out_dir, or out_dir itself if it is a file of nanoGPT or build-nanogpt.

    copy_weights: see copy_tensors.
    Raises FileNotFoundError if there is none; OSError if it cannot be opened; ValueError if it is damaged, is not
    a checkpoint, or holds anything but data.
    """
    path = find_checkpoint(out_dir)
    with named_errors(path):
        reject_other_files(path)
        content, checksums = read_torch_file(path)
        state_dict, model_args = model_entries(content, path)
        config = content.get("config") # nanoGPT: the settings of train.py; build-nanogpt: the model's sizes
        state_dict = unwrap(state_dict)
        model_args = complete_model_args(model_args, state_dict)
        model_args, state_dict = normalize_state_dict(model_args, state_dict, path, checksums, copy_weights)
        return Checkpoint(
            path=str(path), model_args=model_args, state_dict=state_dict, vocab_size=vocab_size_of(state_dict),
            folder=path.parent, dataset=config.get("dataset") if isinstance(config, dict) else None,
            # nanoGPT sets the seed before it builds the model. build-nanogpt does so after, but gets nanoGPT's samples.
            num_init_draws=count_init_draws(state_dict))


def find_checkpoint(out_dir: str | Path) -> Path:
    """The path of ckpt.pt in out_dir, or out_dir if it is a file.

    Raises FileNotFoundError if there is none; the message names nearby checkpoints. Raises ValueError if torch cannot
    open the path.
    """
    path = Path(out_dir)
    if path.is_dir():
        path /= "ckpt.pt"
    if path.is_file():
        if any("\ud800" <= char <= "\udfff" for char in str(path)):
            raise ValueError(f"torch cannot open {path}, because this path is not valid UTF-8; rename the folder")
        return path
    reject_other_models(Path(out_dir))
    nearby, numbered = checkpoints_near(out_dir), numbered_checkpoint_near(out_dir)
    hint = f"; checkpoints nearby: {', '.join(nearby)}" if nearby else ""
    hint += f"; for {numbered.name} in {numbered.parent} pass --out_dir={numbered}" if numbered else ""
    raise FileNotFoundError(f"there is no checkpoint at {path}{hint}; pass --out_dir=FOLDER, or "
                            "--init_from=gpt2 for GPT-2")


def reject_other_models(folder: Path) -> None:
    """Raises FileNotFoundError or ValueError if a folder without ckpt.pt holds a model under another name."""
    if has_model_type(folder):
        raise FileNotFoundError(f"{folder} holds a Hugging Face model, but no ckpt.pt; pass --init_from={folder}")
    if numbered := latest_numbered_checkpoint(folder):
        raise FileNotFoundError(f"{folder} holds {numbered.name}, but no ckpt.pt; pass --out_dir={numbered}")
    reject_safetensors_in(folder)


def unwrap(state_dict: StateDict) -> StateDict:
    """Remove the prefixes of wrappers from the names. If head or embedding is missing, they are tied: add it."""
    state_dict = {plain_name(name): tensor for name, tensor in state_dict.items()}
    if HEAD not in state_dict and EMBEDDING in state_dict:
        state_dict[HEAD] = state_dict[EMBEDDING]
    if EMBEDDING not in state_dict and HEAD in state_dict: # safetensors may keep the head alone
        state_dict[EMBEDDING] = state_dict[HEAD]
    return state_dict


def complete_model_args(model_args: dict, state_dict: StateDict) -> dict:
    """model_args without None values. Older checkpoints have no bias there: the tensors show it."""
    bias = {"bias": "transformer.ln_f.bias" in state_dict}
    return bias | {name: value for name, value in model_args.items() if value is not None}
