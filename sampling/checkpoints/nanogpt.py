"""Loads the ckpt.pt that nanoGPT's train.py wrote, and the model_*.pt of build-nanogpt, the GPT-2 lesson."""
from pathlib import Path

from sampling.checkpoints.checkpoint import Checkpoint, named_errors
from sampling.checkpoints.entries import model_entries
from sampling.checkpoints.init_draws import count_init_draws
from sampling.checkpoints.nearby import checkpoints_near, latest_numbered, numbered_near
from sampling.checkpoints.other_programs import has_model_type, refuse_other_files, refuse_safetensors_in
from sampling.checkpoints.state_dict import (
    EMBEDDING,
    HEAD,
    StateDict,
    crc32_of,
    normalize_state_dict,
    vocab_size_of,
)
from sampling.checkpoints.torch_files import read_torch_file

WRAPPER_PREFIXES = "_orig_mod.", "module.", "_orig_mod." # of torch.compile and DDP, in either order


def load_checkpoint(out_dir: str | Path, with_crc32: bool = False) -> Checkpoint:
    """Load the ckpt.pt in out_dir, or out_dir itself if it is a file of nanoGPT or build-nanogpt.

    Raises FileNotFoundError if there is none; OSError if it cannot be opened; ValueError if it is damaged, is not
    a checkpoint, or holds more than data.
    """
    path = find_checkpoint(out_dir)
    with named_errors(path):
        refuse_other_files(path)
        content, checksums = read_torch_file(path)
        state_dict, model_args = model_entries(content, path)
        config = content.get("config") # train.py's settings, or the sizes of a model of build-nanogpt
        state_dict = unwrap(state_dict)
        model_args = complete_model_args(model_args, state_dict)
        model_args, state_dict = normalize_state_dict(model_args, state_dict, path, checksums)
        return Checkpoint(
            path=str(path), model_args=model_args, state_dict=state_dict, vocab_size=vocab_size_of(state_dict),
            folder=path.parent, dataset=config.get("dataset") if isinstance(config, dict) else None,
            crc32=crc32_of(state_dict) if with_crc32 else None,
            # For build-nanogpt too, what nanoGPT's GPT would draw. The lesson itself seeds after it builds the model.
            num_init_draws=count_init_draws(state_dict))


def find_checkpoint(out_dir: str | Path) -> Path:
    """The path of ckpt.pt in out_dir, or out_dir if it is a file.

    Raises FileNotFoundError, which names nearby checkpoints, if there is none; ValueError if torch cannot open it.
    """
    path = Path(out_dir)
    if path.is_dir():
        path /= "ckpt.pt"
    if path.is_file():
        if any("\ud800" <= char <= "\udfff" for char in str(path)):
            raise ValueError(f"torch cannot open {path}, because this path is not UTF-8; rename its folder")
        return path
    require_no_others(Path(out_dir))
    nearby, numbered = checkpoints_near(out_dir), numbered_near(out_dir)
    hint = f"; nearby there is one in {', '.join(nearby)}" if nearby else ""
    hint += f"; for the one in {numbered.parent} pass --out_dir={numbered}" if numbered else ""
    raise FileNotFoundError(f"there is no checkpoint at {path}{hint}; pass --out_dir=FOLDER, or for GPT-2 "
                            "--init_from=gpt2")


def require_no_others(folder: Path) -> None:
    """Raise FileNotFoundError or ValueError if a folder without ckpt.pt holds a model under another name."""
    if has_model_type(folder):
        raise FileNotFoundError(f"{folder} holds a Hugging Face model, but no ckpt.pt; pass --init_from={folder}")
    if numbered := latest_numbered(folder):
        raise FileNotFoundError(f"{folder} holds {numbered.name}, but no ckpt.pt; pass --out_dir={numbered}")
    refuse_safetensors_in(folder)


def unwrap(state_dict: StateDict) -> StateDict:
    """Remove the prefixes of wrappers from the names. Adds a missing head or embedding: the two are then tied."""
    for prefix in WRAPPER_PREFIXES:
        state_dict = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items()}
    if HEAD not in state_dict and EMBEDDING in state_dict:
        state_dict[HEAD] = state_dict[EMBEDDING]
    if EMBEDDING not in state_dict and HEAD in state_dict: # safetensors keep the first name
        state_dict[EMBEDDING] = state_dict[HEAD]
    return state_dict


def complete_model_args(model_args: dict, state_dict: StateDict) -> dict:
    """model_args without None values, and with bias, which older checkpoints lack."""
    bias = {"bias": "transformer.ln_f.bias" in state_dict}
    return bias | {name: value for name, value in model_args.items() if value is not None}
