"""Loads the ckpt.pt that nanoGPT's train.py wrote, the files of its forks, and the model_*.pt of build-nanogpt."""
import logging
import math
import os
import re
from pathlib import Path
from typing import BinaryIO

import torch

from sampling.checkpoints import finding
from sampling.checkpoints.build import EMBEDDING, HEAD, Checkpoint, count_init_draws, read_model, tensors_by_name
from sampling.checkpoints.huggingface import load_huggingface
from sampling.checkpoints.pickles import Note, StoredTensor, describe, fields_of, unwrap
from sampling.checkpoints.tensor_files import TensorFile, read_tensor_file
from sampling.checkpoints.untrusted_files import read_complete, require
from sampling.model import GPTConfig

logger = logging.getLogger(__name__)
SAVE_WITH_SIZES = ( # with only these five sizes, "config" selects the tanh form of GELU
    'torch.save({"model": state_dict, "model_args": dict(block_size=?, vocab_size=?, n_layer=?, n_head=?, n_embd=?)}, '
    '"ckpt.pt"), with "config" instead of "model_args" for a model of build-nanogpt or minGPT')
SIZES = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd"} # all fields of build-nanogpt's GPTConfig
KNOWN_FIELDS = GPTConfig.__dataclass_fields__.keys()
# Fields of forks that may be on and change nothing when a trained model samples.
HARMLESS_FIELD = re.compile(r"(use_)?flash(_attn|_attention)?|device|dtype|compile|label_smoothing|init_std|"
                            r"initializer_range|gradient_checkpointing|\w*(dropout|pdrop|drop_prob)\w*")


def load_nanogpt(out_dir: str | Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Load the ckpt.pt in out_dir, or out_dir itself if it is a file of nanoGPT or build-nanogpt.

    dtype: torch.int8 quantizes the weights while they are read; with any other, all is float32. Raises OSError if the
    file cannot be opened, ValueError if it is damaged or holds no GPT.
    """
    def read(file: BinaryIO) -> dict:
        tensor_file = read_tensor_file(file)
        tensors, model_args = model_entries(tensor_file.content, Path(file.name).parent)
        stored = tensors_by_name(tensors, tensor_file)
        if tied := stored.get(HEAD, stored.get(EMBEDDING)): # a tied weight may have one of its names
            stored = {HEAD: tied, EMBEDDING: tied} | stored
        model_args = {"bias": "transformer.ln_f.bias" in stored} | model_args # older checkpoints have no bias there
        finding.LOADED[path] = finding.file_state(file.fileno())
        return dict(
            raw_config=fields_of(tensor_file.content.get("config")) or {}, # nanoGPT: settings; build-nanogpt: sizes
            iter_num=read_number(tensor_file, "iter_num", "step"),
            val_loss=read_number(tensor_file, "best_val_loss", "val_loss"),
            # nanoGPT sets the seed before it builds the model. build-nanogpt does so after, but gets nanoGPT's samples.
            num_init_draws=count_init_draws({name: tensor for name, (_, tensor) in stored.items()}),
            **read_model(model_args, stored, dtype))

    path = finding.checkpoint_path(out_dir)
    if finding.huggingface_folder(path) != path: # a weight file of GPT-2
        return load_huggingface(os.fspath(path), dtype)
    if not os.path.isfile(path) or finding.describe_other(path):
        is_folder = ", which is a folder" * os.path.isdir(path)
        raise FileNotFoundError(f"there is no checkpoint at {path}{is_folder}; {finding.advice(Path(out_dir))}")
    checkpoint = Checkpoint(path=str(path), folder=path.parent, **read_complete([path], read))
    logger.info(checkpoint.describe())
    return checkpoint


def model_entries(content: object, folder: Path) -> tuple[object, dict]:
    """The entry with the tensors, and the fields of GPTConfig. nanoGPT saves the entries model and model_args;
    build-nanogpt saves model and config. Raises ValueError if a field may change what the model computes.
    """
    entries = content if isinstance(content, dict) else {}
    model_key = next((key for key in ("model", "model_state_dict") if key in entries), None)
    args_key = "model_args" if "model_args" in entries else "config"
    args = entries.get(args_key)
    fields = fields_of(args)
    # Without model_args, config may hold train.py's settings.
    has_sizes = args_key == "model_args" or (fields or {}).keys() >= SIZES
    found = ", ".join(map(describe, list(entries)[:5])) or describe(content)
    require(not (isinstance(args, Note) and args.name.startswith("omegaconf.")), f"its {args_key} is an object of "
            f"OmegaConf; save a dict in its place, which OmegaConf.to_container(checkpoint[{args_key!r}]) returns")
    is_complete = model_key and has_sizes
    require(is_complete or not finding.has_weights(folder),
            f"it belongs to a Hugging Face model; pass --init_from={folder}")
    require(is_complete,
            "it is not a checkpoint of nanoGPT or build-nanogpt: it must hold model and model_args, or model and "
            f"config, but holds {found:.200}; if Hugging Face wrote it, name it pytorch_model.bin, copy its "
            f"config.json beside it, and pass --init_from={folder}; otherwise save it with its sizes, and pass "
            f"--out_dir=ckpt.pt: {SAVE_WITH_SIZES}")
    require(fields is not None, f"its {args_key} must be a dict or an object with fields, got {describe(args)}")
    missing = ", ".join(sorted(SIZES - fields.keys()))
    require(isinstance(unwrap(args), dict) or not missing, # a dict may lack fields that have defaults
            f"its {args_key} is an object of {describe(args)} without the fields {missing}")
    known = fields.keys() & KNOWN_FIELDS
    for name in known:
        is_plain = isinstance(fields[name], str | int | float | None)
        require(is_plain, f"its {args_key} must hold numbers and text, got {name}: {describe(fields[name])}")
    others = [name[:100] if isinstance(name, str) else describe(name) for name in fields.keys() - known if fields[name]]
    active = sorted(name for name in others if not HARMLESS_FIELD.fullmatch(name))
    require(not active,
            f"its {args_key} has fields that a GPT does not have: {', '.join(active):.200}; if the model is a GPT all "
            f"the same, save only the fields {', '.join(sorted(known))}")
    # build-nanogpt trains with the tanh form of GELU. nanoGPT uses the exact form, and also has dropout and bias.
    is_gpt_config = args_key == "config" or (isinstance(args, Note) and args.name.rpartition(".")[2] == "GPTConfig")
    gelu = {"gelu": "tanh"} if is_gpt_config and known == SIZES else {}
    return entries[model_key], gelu | {name: fields[name] for name in known if fields[name] is not None}


def read_number(file: TensorFile, *names: str) -> float | None:
    """The first of these entries, if it is a finite number or a tensor of one; else None."""
    value = next((file.content[name] for name in names if name in file.content), None)
    if isinstance(value, StoredTensor) and math.prod(value.shape) == 1:
        value = file.read(value).item()
    return value if type(value) in (int, float) and abs(value) < 1e15 else None # false for NaN
