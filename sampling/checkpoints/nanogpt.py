"""Loads the ckpt.pt that nanoGPT's train.py wrote."""
from pathlib import Path

from sampling.checkpoints.checkpoint import Checkpoint, named_errors
from sampling.checkpoints.init_draws import count_init_draws
from sampling.checkpoints.state_dict import (
    EMBEDDING,
    HEAD,
    StateDict,
    brief_repr,
    crc32_of,
    normalize_state_dict,
    require_tensors,
    vocab_size_of,
)
from sampling.checkpoints.torch_files import read_torch_file

PROJECT = Path(__file__).resolve().parents[2]
WRAPPER_PREFIXES = "_orig_mod.", "module.", "_orig_mod." # of torch.compile and DDP, in either order


def load_checkpoint(out_dir: str | Path, with_crc32: bool = False) -> Checkpoint:
    """Load the ckpt.pt in out_dir, or out_dir itself if it is such a file.

    Raises FileNotFoundError if there is none; OSError if it cannot be opened; ValueError if it is damaged, is not
    a checkpoint, or holds more than data.
    """
    path = find_checkpoint(out_dir)
    with named_errors(path):
        content, checksums = read_torch_file(path)
        require_entries(content, path)
        config = content.get("config") # train.py's settings
        state_dict = unwrap(require_tensors(content["model"], path))
        model_args = complete_model_args(content["model_args"], state_dict)
        model_args, state_dict = normalize_state_dict(model_args, state_dict, path, checksums)
        return Checkpoint(
            path=str(path), model_args=model_args, state_dict=state_dict, vocab_size=vocab_size_of(state_dict),
            folder=path.parent, dataset=config.get("dataset") if isinstance(config, dict) else None,
            crc32=crc32_of(state_dict) if with_crc32 else None, num_init_draws=count_init_draws(state_dict))


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
    if (Path(out_dir) / "config.json").is_file():
        raise FileNotFoundError(f"{out_dir} holds a Hugging Face model, but no ckpt.pt; pass --init_from={out_dir}")
    nearby = checkpoints_near(out_dir)
    hint = f"; nearby there is one in {', '.join(nearby)}" if nearby else ""
    raise FileNotFoundError(f"there is no checkpoint at {path}{hint}; pass --out_dir=FOLDER, or for GPT-2 "
                            "--init_from=gpt2")


def checkpoints_near(out_dir: str | Path) -> list[str]:
    """Up to five folders with a ckpt.pt: in or beside out_dir, in the working directory, or in this project."""
    folders = PROJECT, Path(), Path(out_dir).parent, Path(out_dir)
    found = {path.resolve(): str(path.parent) for folder in folders for path in folder.glob("*/ckpt.pt")}
    return sorted(found.values())[:5]


def require_entries(content, path: Path) -> None:
    """Raise ValueError unless a file holds model and model_args, the latter a dict of numbers and text."""
    if not isinstance(content, dict) or not {"model", "model_args"} <= content.keys():
        found = ", ".join(map(brief_repr, list(content)[:5])) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path} is not a nanoGPT checkpoint: it must hold model and model_args, "
                         f"but holds {found:.200}")
    model_args = content["model_args"]
    if not isinstance(model_args, dict):
        raise ValueError(f"model_args in {path} must be a dict, got {type(model_args).__name__}")
    for name, value in model_args.items():
        if not (isinstance(name, str) and isinstance(value, str | int | float | None)):
            raise ValueError(f"model_args in {path} must hold numbers and text, got {brief_repr(name)}: "
                             f"{brief_repr(value)}")


def unwrap(state_dict: StateDict) -> StateDict:
    """Remove the prefixes of wrappers from the names. Adds the head if it is missing: it is tied to the embedding."""
    for prefix in WRAPPER_PREFIXES:
        state_dict = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items()}
    if HEAD not in state_dict and EMBEDDING in state_dict:
        state_dict[HEAD] = state_dict[EMBEDDING]
    return state_dict


def complete_model_args(model_args: dict, state_dict: StateDict) -> dict:
    """model_args without None values, and with bias, which older checkpoints lack."""
    bias = {"bias": "transformer.ln_f.bias" in state_dict}
    return bias | {name: value for name, value in model_args.items() if value is not None}
