"""Recognises the checkpoints of other programs, and says what to do with each."""
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from sampling.checkpoints.errors import ForbiddenNameError, OtherProgramError
from sampling.checkpoints.hf_files import read_json, read_safetensors
from sampling.checkpoints.state_dict import EMBEDDING, HEAD, plain_name

SAVE_MODEL = 'torch.save({"model": model.state_dict(), "config": vars(model.config)}, "ckpt.pt")'
LLM_C_MAGIC = {20240326, 20240327, 20240328, 20240520, 20240527} # in its files of models, states, tokenizers and data
LIGHTNING_KEY = "pytorch-lightning_version"
EARLY_MINGPT = re.compile(r"(tok_emb|pos_emb|blocks\.\d+\.attn\.(key|query|value))(\.weight)?")
NANOCHAT = re.compile(r"transformer\.h\.\d+\.attn\.c_[qkv]\.weight")
FIRST_QKV = "transformer.h.0.attn.c_attn.weight" # in nanoGPT, build-nanogpt, minGPT and Hugging Face
SHORT_QKV = FIRST_QKV.removeprefix("transformer.") # if only the model's transformer was saved


def reject_other_files(path: Path) -> None:
    """Raises OtherProgramError for a safetensors file or a file of llm.c. torch.save writes neither."""
    with open(path, "rb") as f:
        start = f.read(9)
    if int.from_bytes(start[:4], "little") in LLM_C_MAGIC:
        raise OtherProgramError(
            f"{path} is a file of llm.c; export the model with llm.c's own script, "
            "'python dev/eval/export_hf.py --input MODEL.bin --output DIR', then pass --init_from=DIR")
    header_fits = int.from_bytes(start[:8], "little") < path.stat().st_size
    if path.suffix == ".safetensors" or (header_fits and start[8:] == b"{"):
        reject_safetensors(path)


def reject_safetensors(path: Path) -> NoReturn:
    """Raises OtherProgramError for a safetensors file, which does not hold the sizes of its model.

    For a file of a Hugging Face model, the message names the folder to load. Raises ValueError if the file is damaged.
    """
    reject_part_of_model(path)
    reject_bare_state_dict(path, read_safetensors(path), "safetensors.torch.load_file")


def reject_part_of_model(path: Path) -> None:
    """Raises OtherProgramError if the file is in the folder of a Hugging Face model."""
    if has_model_type(path.parent):
        raise OtherProgramError(f"{path} belongs to a Hugging Face model; pass --init_from={path.parent}")


def reject_safetensors_in(folder: Path) -> None:
    """Raises OtherProgramError if a folder without a loadable checkpoint has a safetensors file."""
    for path in sorted(folder.glob("*.safetensors")):
        if path.is_file():
            reject_safetensors(path)


def has_model_type(folder: Path) -> bool:
    """Whether a folder has a config.json that names an architecture, as every Hugging Face model does."""
    path = folder / "config.json"
    try:
        return path.is_file() and "model_type" in read_json(path)
    except (OSError, ValueError):
        return False


def reject_forbidden_name(path: Path, pickled: bytes, error: ForbiddenNameError) -> None:
    """Raises OtherProgramError if the pickle with the forbidden name is a Lightning checkpoint or a whole module."""
    if LIGHTNING_KEY.encode() in pickled:
        reject_lightning(path)
    if b"_parameters" in pickled and b"_modules" in pickled:
        raise OtherProgramError(
            f"cannot read {path}: {error}. It holds a whole pickled module; if you trust the file, load it in a "
            f"program that defines its class, and save only its tensors and sizes: {SAVE_MODEL}")


def reject_other_contents(path: Path, content: object) -> None:
    """Raises OtherProgramError if the content is a Lightning checkpoint, or only a state_dict."""
    if not isinstance(content, dict):
        return
    if LIGHTNING_KEY in content:
        reject_lightning(path)
    if content and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()):
        reject_bare_state_dict(path, content, "torch.load")


def reject_lightning(path: Path) -> NoReturn:
    """Raises OtherProgramError for a Lightning checkpoint. Its tensor names are those of the LightningModule."""
    raise OtherProgramError(f"{path} is a Lightning checkpoint; load it with the program that trained it, and save the "
                            f"GPT that it contains: {SAVE_MODEL}")


def reject_other_tensors(path: Path, names: Collection[str]) -> None:
    """Raises OtherProgramError if the tensors have the names of nanochat or of an early minGPT."""
    plain = [plain_name(name) for name in names]
    if any(NANOCHAT.fullmatch(name) for name in plain):
        raise OtherProgramError(f"{path} holds a nanochat model, whose architecture is not GPT-2's; sample from it "
                                "with nanochat itself: 'python -m scripts.chat_cli'")
    if any(EARLY_MINGPT.fullmatch(name) for name in plain):
        raise OtherProgramError(f"{path} holds a model of an early minGPT, whose attention layers have other tensors "
                                "than nanoGPT's; sample from it with minGPT itself: mingpt.utils.sample")


def reject_bare_state_dict(path: Path, tensors: Mapping[str, Tensor], loader: str) -> NoReturn:
    """Raises OtherProgramError for a file that holds only a state_dict. The message says how to save it with its sizes.

    loader: the name of the function that reads such a file.
    """
    reject_other_tensors(path, tensors)
    plain = {plain_name(name): tensor for name, tensor in tensors.items()}
    first = plain.get(FIRST_QKV, plain.get(SHORT_QKV))
    if first is None:
        some = ", ".join(repr(name[:60]) for name in list(plain)[:3])
        raise OtherProgramError(f"{path} holds only tensors, named {some}; the tensor names of a nanoGPT model begin "
                                "with transformer.wte and transformer.h")
    if first.dim() == 2 and first.shape[0] < first.shape[1]: # Conv1D: (E, 3E)
        reject_part_of_model(path)
        raise OtherProgramError(f"{path} holds the tensors of a Hugging Face GPT-2, but its folder has no config.json; "
                                "save the model with model.save_pretrained(DIR), then pass --init_from=DIR")
    raise OtherProgramError(f"{path} holds only a state_dict, and n_head cannot be inferred from its tensors; "
                            f"{saving_advice(path, tensors, loader)}")


def reject_nanogpt_layout(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises OtherProgramError if a Hugging Face model has nanoGPT's tensors. Their matrices are not transposed."""
    first = tensors.get(FIRST_QKV, tensors.get(SHORT_QKV))
    if first is not None and first.dim() == 2 and first.shape[0] > first.shape[1]:
        loader = "safetensors.torch.load_file" if path.suffix == ".safetensors" else "torch.load"
        raise OtherProgramError(f"{path} holds nanoGPT's tensors, which are not transposed like Hugging Face's; "
                                f"{saving_advice(path, tensors, loader)}")


def saving_advice(path: Path, tensors: Mapping[str, Tensor], loader: str) -> str:
    """A command that saves the tensors with the model's sizes. It has "?" for each size that the tensors do not show.

    If the names lack "transformer.", the command adds it. build-nanogpt and minGPT use the tanh form of GELU. A config
    with only these five sizes selects that form.
    """
    load, plain = f"{loader}({os.fspath(path)!r})", {plain_name(name): tensor for name, tensor in tensors.items()}
    if FIRST_QKV not in plain:
        plain = {name if name == HEAD else f"transformer.{name}": tensor for name, tensor in plain.items()}
        wrapped = next(name for name in tensors if plain_name(name) == SHORT_QKV)
        short = "name" if wrapped == SHORT_QKV else f'name.removeprefix("{wrapped.removesuffix(SHORT_QKV)}")'
        load = (f'{{name if name.endswith("{HEAD}") else "transformer." + {short}: tensor '
                f"for name, tensor in {load}.items()}}")
    sizes = ", ".join(f"{name}={size}" for name, size in sizes_of(plain).items())
    return (f'save it with its sizes: torch.save({{"model": {load}, "model_args": '
            f'dict({sizes})}}, "ckpt.pt"), with "config" instead of "model_args" for a model of build-nanogpt or '
            "minGPT; replace each ? by the model's own number; then pass --out_dir=ckpt.pt")


def sizes_of(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """The sizes that tensors with nanoGPT's names show; "?" for a size that they do not show."""
    def shape(name: str, axis: int) -> object:
        """The size of a matrix along an axis; "?" if there is no such matrix."""
        tensor = tensors.get(name)
        return tensor.shape[axis] if tensor is not None and tensor.dim() == 2 else "?"

    layers = {name.split(".")[2] for name in tensors if name.startswith("transformer.h.")}
    embedding = EMBEDDING if EMBEDDING in tensors else HEAD # safetensors stores a tied tensor under one of its names
    return {"block_size": shape("transformer.wpe.weight", 0), "vocab_size": shape(embedding, 0),
            "n_layer": len(layers) or "?", "n_head": "?", "n_embd": shape("transformer.wpe.weight", 1)}
