"""Recognises the checkpoints of other programs, and says what to do with each."""
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from sampling.checkpoints.errors import ForbiddenName, OtherProgram
from sampling.checkpoints.hf_files import read_json, read_safetensors
from sampling.checkpoints.state_dict import EMBEDDING, HEAD

SAVE_MODEL = 'torch.save({"model": model.state_dict(), "config": vars(model.config)}, "ckpt.pt")'
LLM_C_MAGIC = {20240326, 20240327, 20240328, 20240520, 20240527} # its models, states, tokenizer and data
LIGHTNING_KEY = "pytorch-lightning_version"
EARLY_MINGPT = re.compile(r"(tok_emb|pos_emb|blocks\.\d+\.attn\.(key|query|value))(\.weight)?")
NANOCHAT = re.compile(r"transformer\.h\.\d+\.attn\.c_[qkv]\.weight")
FIRST_QKV = "transformer.h.0.attn.c_attn.weight" # of nanoGPT, build-nanogpt, minGPT and Hugging Face


def refuse_other_files(path: Path) -> None:
    """Raise OtherProgram if a file is a safetensors file, or one of llm.c's. Neither is torch.save's."""
    with open(path, "rb") as f:
        start = f.read(9)
    if int.from_bytes(start[:4], "little") in LLM_C_MAGIC:
        raise OtherProgram(
            f"{path} is a file of llm.c; export the model with llm.c's own script, "
            "'python dev/eval/export_hf.py --input MODEL.bin --output DIR', then pass --init_from=DIR")
    header_fits = int.from_bytes(start[:8], "little") < path.stat().st_size
    if path.suffix == ".safetensors" or (header_fits and start[8:] == b"{"):
        refuse_safetensors(path)


def refuse_safetensors(path: Path) -> NoReturn:
    """Raise OtherProgram for a safetensors file: a Hugging Face model is loaded by its folder, others lack sizes.

    Raises ValueError if the file is damaged.
    """
    refuse_part_of_model(path)
    refuse_bare_state_dict(path, read_safetensors(path), "safetensors.torch.load_file")


def refuse_part_of_model(path: Path) -> None:
    """Raise OtherProgram if a file lies in the folder of a Hugging Face model."""
    if has_model_type(path.parent):
        raise OtherProgram(f"{path} belongs to a Hugging Face model; pass --init_from={path.parent}")


def refuse_safetensors_in(folder: Path) -> None:
    """Raise OtherProgram if a folder, which holds no checkpoint that can be loaded, holds safetensors."""
    for path in sorted(folder.glob("*.safetensors")):
        if path.is_file():
            refuse_safetensors(path)


def has_model_type(folder: Path) -> bool:
    """Whether a folder has a config.json that names an architecture, as every Hugging Face model does."""
    path = folder / "config.json"
    try:
        return path.is_file() and "model_type" in read_json(path)
    except (OSError, ValueError):
        return False


def explain_forbidden_name(path: Path, pickled: bytes, error: ForbiddenName) -> None:
    """Raise OtherProgram if the pickle that names something forbidden is a whole module, or Lightning's."""
    if LIGHTNING_KEY.encode() in pickled:
        refuse_lightning(path)
    if b"_parameters" in pickled and b"_modules" in pickled:
        raise OtherProgram(f"cannot read {path}: {error}. It holds a whole pickled module; if it is your own, load it "
                           f"where its class is defined, and save its tensors and sizes: {SAVE_MODEL}")


def refuse_other_contents(path: Path, content: object) -> None:
    """Raise OtherProgram if what a file holds is Lightning's, or tensors by name without anything else."""
    if not isinstance(content, dict):
        return
    if LIGHTNING_KEY in content:
        refuse_lightning(path)
    if content and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()):
        refuse_bare_state_dict(path, content, "torch.load")


def refuse_lightning(path: Path) -> NoReturn:
    """Raise OtherProgram for a checkpoint of Lightning, whose tensors have the names of its own module."""
    raise OtherProgram(f"{path} is a checkpoint of Lightning; load it in the program that trained it, and save the "
                       f"GPT inside of it: {SAVE_MODEL}")


def refuse_other_tensors(path: Path, names: Collection[str]) -> None:
    """Raise OtherProgram if tensors have the names that nanochat or an early minGPT gives them."""
    plain = [plain_name(name) for name in names]
    if any(NANOCHAT.fullmatch(name) for name in plain):
        raise OtherProgram(f"{path} holds a model of nanochat, which is another architecture than GPT-2's; sample from "
                           "it with nanochat itself: 'python -m scripts.chat_cli'")
    if any(EARLY_MINGPT.fullmatch(name) for name in plain):
        raise OtherProgram(f"{path} holds a model of an early minGPT, whose attention has other tensors than "
                           "nanoGPT's; sample from it with minGPT itself: mingpt.utils.sample")


def refuse_bare_state_dict(path: Path, tensors: Mapping[str, Tensor], loader: str) -> NoReturn:
    """Raise OtherProgram for a file that holds a state_dict and nothing else: how to save it with its sizes.

    loader is the function that reads such a file.
    """
    refuse_other_tensors(path, tensors)
    plain = {plain_name(name): tensor for name, tensor in tensors.items()}
    first = plain.get(FIRST_QKV, plain.get(FIRST_QKV.removeprefix("transformer.")))
    if first is None:
        some = ", ".join(repr(name[:60]) for name in list(plain)[:3])
        raise OtherProgram(f"{path} holds tensors alone, named {some}; the names of a nanoGPT model begin with "
                           "transformer.wte and transformer.h")
    if first.dim() == 2 and first.shape[0] < first.shape[1]: # Conv1D: (E, 3E)
        refuse_part_of_model(path)
        raise OtherProgram(f"{path} holds the tensors of a Hugging Face GPT-2, but there is no config.json; save "
                           "the model with model.save_pretrained(DIR), then pass --init_from=DIR")
    raise OtherProgram(f"{path} holds a state_dict alone, and n_head cannot be told from it; "
                       f"{how_to_save(path, plain, loader)}")


def refuse_nanogpt_layout(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise OtherProgram if the tensors of a Hugging Face model are nanoGPT's, whose Linears are not transposed."""
    first = tensors.get(FIRST_QKV, tensors.get(FIRST_QKV.removeprefix("transformer.")))
    if first is not None and first.dim() == 2 and first.shape[0] > first.shape[1]:
        loader = "safetensors.torch.load_file" if path.suffix == ".safetensors" else "torch.load"
        raise OtherProgram(f"{path} holds tensors of nanoGPT, which are not transposed as Hugging Face's are; "
                           f"{how_to_save(path, tensors, loader)}")


def plain_name(name: str) -> str:
    """The name of a tensor without what torch.compile and DDP put before it."""
    return name.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("_orig_mod.")


def how_to_save(path: Path, tensors: Mapping[str, Tensor], loader: str) -> str:
    """Advice to save tensors with the sizes that they show, and with places for the others.

    Five sizes under config are what build-nanogpt saves, whose GELU is the tanh form, as minGPT's is.
    """
    sizes = ", ".join(f"{name}={size}" for name, size in sizes_of(tensors).items())
    return (f'save it with its sizes: torch.save({{"model": {loader}({os.fspath(path)!r}), "model_args": '
            f'dict({sizes})}}, "ckpt.pt"), with "config" in place of "model_args" for a model of build-nanogpt or '
            "minGPT; then pass --out_dir=ckpt.pt")


def sizes_of(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """The sizes that tensors of nanoGPT's names show; those that they do not show are "?"."""
    def shape(name: str, axis: int) -> object:
        """The size of a matrix along an axis; "?" if there is no such matrix."""
        tensor = tensors.get(name)
        return tensor.shape[axis] if tensor is not None and tensor.dim() == 2 else "?"

    layers = {name.split(".")[2] for name in tensors if name.startswith("transformer.h.")}
    embedding = EMBEDDING if EMBEDDING in tensors else HEAD # safetensors may hold a tied one under either name
    return {"block_size": shape("transformer.wpe.weight", 0), "vocab_size": shape(embedding, 0),
            "n_layer": len(layers) or "?", "n_head": "?", "n_embd": shape("transformer.wpe.weight", 1)}
