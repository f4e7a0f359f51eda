"""Loads the ckpt.pt that nanoGPT's train.py wrote, the files of its forks, and the model_*.pt of build-nanogpt."""
import logging
import math
import os
import re
import zlib
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from sampling.checkpoints import finding
from sampling.checkpoints.build import (
    EMBEDDING,
    HEAD,
    Checkpoint,
    checksum_line,
    count_init_draws,
    read_model,
    require_size,
    require_tensors,
    tensors_by_name,
)
from sampling.checkpoints.huggingface import load_huggingface
from sampling.checkpoints.model_source import CONSENT, NANOGPT, ModelSource, find_source, require_unedited
from sampling.checkpoints.own_model import load_own_model
from sampling.checkpoints.pickles import Note, StoredTensor, describe, fields_of, unwrap
from sampling.checkpoints.tensor_files import TensorFile, read_tensor_file
from sampling.checkpoints.untrusted_files import RejectedFileError, read_complete, require
from sampling.model import GPTConfig

logger = logging.getLogger(__name__)
SIZES = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd"} # all fields of build-nanogpt's GPTConfig
KNOWN_FIELDS = GPTConfig.__dataclass_fields__.keys()
# Fields of forks that may be on and change nothing when a trained model samples.
HARMLESS_FIELD = re.compile(r"(use_)?flash(_attn|_attention)?|device|dtype|compile|label_smoothing|init_std|"
                            r"initializer_range|gradient_checkpointing|\w*(dropout|pdrop|drop_prob)\w*")


def load_nanogpt(out_dir: str | Path, dtype: torch.dtype = torch.float32, model_file: str | None = None,
                 runs_itself: bool = False) -> Checkpoint:
    """Load the ckpt.pt in out_dir, or out_dir itself if it is a file of nanoGPT or build-nanogpt.

    dtype: torch.int8 quantizes the weights while they are read; with any other, all is float32. model_file: the
    model.py whose GPT it is, which is run (runs_itself: see load_own_model); NANOGPT: nanoGPT's own; None: also, but a
    model.py near the checkpoint must agree. Raises OSError if the file cannot be opened, ValueError if it is damaged or
    holds no GPT.
    """
    path = finding.checkpoint_path(out_dir)
    if finding.huggingface_folder(path) != path: # a weight file of GPT-2
        return load_huggingface(os.fspath(path), dtype)
    if not os.path.isfile(path) or finding.describe_other(path):
        is_folder = ", which is a folder" * os.path.isdir(path)
        raise FileNotFoundError(f"there is no checkpoint at {path}{is_folder}; {finding.advice(Path(out_dir))}")
    if model_file in (None, NANOGPT):
        require_unedited()
        source = ModelSource(Path(NANOGPT), []) if model_file else find_source(path)
        fields = read_complete([path], partial(read_gpt, source=source, dtype=dtype))
        if source.drops_while_sampling and fields["config"].dropout:
            source.reject(["dropout while it samples"])
    else:
        args, tensors, fields = read_complete([path], read_own)
        fields |= load_own_model(Path(os.path.abspath(model_file)), args, tensors, runs_itself)
        fields["crc32"] = f"{zlib.crc32(fields['crc32'].encode(), fields.pop('source_crc32')):08x}"
    checkpoint = Checkpoint(path=str(path), folder=path.parent, **fields)
    if checkpoint.own_model and dtype == torch.int8:
        raise ValueError("dtype=int8 needs a model that computes what GPT-2 does, and that of "
                         f"{model_file} does not: leave out dtype")
    logger.info(checkpoint.describe())
    return checkpoint


def read_gpt(file: BinaryIO, source: ModelSource, dtype: torch.dtype) -> dict:
    """The fields of a Checkpoint from an open file of nanoGPT's own GPT, with the GELU of this source."""
    tensor_file = read_tensor_file(file)
    tensors, args_key, args = find_entries(tensor_file.content, Path(file.name).parent)
    try:
        model_args = gpt_args(args_key, args, source)
        stored = tensors_by_name(tensors, tensor_file)
        if tied := stored.get(HEAD, stored.get(EMBEDDING)): # a tied weight may have one of its names
            stored = {HEAD: tied, EMBEDDING: tied} | stored
        model_args = {"bias": "transformer.ln_f.bias" in stored} | model_args # older checkpoints have no bias there
        model = read_model(model_args, stored, dtype)
    except RejectedFileError as error:
        raise RejectedFileError(f"{error}; {CONSENT}") from None
    # nanoGPT sets the seed before it builds the model. build-nanogpt does so after, but gets nanoGPT's samples.
    num_init_draws = count_init_draws({name: tensor for name, (_, tensor) in stored.items()})
    return {**read_facts(tensor_file), **model, "num_init_draws": num_init_draws}


def read_own(file: BinaryIO) -> tuple[dict, dict[str, Tensor], dict]:
    """For a model of the user's own: its fields, its tensors, and the fields of a Checkpoint that the file has."""
    tensor_file = read_tensor_file(file)
    tensors, _, args = find_entries(tensor_file.content, Path(file.name).parent)
    fields, stored = fields_of(args), require_tensors(tensors)
    require_size(tensor_file, list(stored.values()))
    read = {name: tensor_file.read(tensor) for name, tensor in stored.items()}
    lines = [f"{fields}\n", *(checksum_line(name, tensor_file, tensor) for name, tensor in stored.items())]
    return fields, read, {**read_facts(tensor_file), "crc32": "".join(lines)}


def read_facts(file: TensorFile) -> dict:
    """What a ckpt.pt says of its training: fields of a Checkpoint."""
    finding.LOADED[Path(file.file.name)] = finding.file_state(file.file.fileno())
    return {"raw_config": fields_of(file.content.get("config")) or {}, # nanoGPT: settings; build-nanogpt: sizes
            "iter_num": read_number(file, "iter_num", "step"),
            "val_loss": read_number(file, "best_val_loss", "val_loss")}


def find_entries(content: object, folder: Path) -> tuple[object, str, object]:
    """The entry with the tensors, and the key and content of that with the fields of GPTConfig. nanoGPT saves the
    entries model and model_args; build-nanogpt saves model and config.
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
    missing = ", ".join(sorted(SIZES - (fields or {}).keys()))
    lacking = f"{missing} in model_args or config" if model_key else "model"
    require(is_complete or not finding.has_weights(folder),
            f"it belongs to a Hugging Face model; pass --init_from={folder}")
    require(is_complete,
            f"it is not a checkpoint of nanoGPT or build-nanogpt: it lacks {lacking}, and holds {found:.40}; "
            "docs/usage.md says how to save it with its sizes, and how to load one of Hugging Face")
    require(fields is not None, f"its {args_key} must be a dict or an object with fields, got {describe(args)}")
    return entries[model_key], args_key, args


def gpt_args(args_key: str, args: object, source: ModelSource) -> dict:
    """The fields of GPTConfig. Raises ValueError if a field may change what the model computes."""
    fields = fields_of(args)
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
    gelu = "tanh" if is_gpt_config and known == SIZES else source.gelu
    return {"gelu": gelu} | {name: fields[name] for name in known if fields[name] is not None}


def read_number(file: TensorFile, *names: str) -> float | None:
    """The first of these entries, if it is a finite number or a tensor of one; else None."""
    value = next((file.content[name] for name in names if name in file.content), None)
    if isinstance(value, StoredTensor) and math.prod(value.shape) == 1:
        value = file.read(value).item()
    return value if type(value) in (int, float) and abs(value) < 1e15 else None # false for NaN
