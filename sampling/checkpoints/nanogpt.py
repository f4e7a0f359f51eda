"""Loads the ckpt.pt that nanoGPT's train.py wrote, the files of its forks, and the model_*.pt of
build-nanogpt.
"""
import logging
import math
import os
import re
from pathlib import Path
from shlex import quote
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from sampling.checkpoints import finding
from sampling.checkpoints.checkpoint import (
    EMBEDDING,
    HEAD,
    Checkpoint,
    Model,
    checksum,
    read_model,
    require_tensors,
    share_head,
    tensors_by_name,
)
from sampling.checkpoints.model_source import NANOGPT, ModelSource, read_source
from sampling.checkpoints.own_model import load_own_model
from sampling.checkpoints.pickles import StoredTensor, describe, fields_of
from sampling.checkpoints.saves import file_state, read_complete
from sampling.checkpoints.tensor_files import TensorFile, read_tensor_file
from sampling.checkpoints.untrusted_files import RejectedFileError, require
from sampling.model import GPTConfig

logger = logging.getLogger(__name__)
UNEDITED = ModelSource(Path(NANOGPT), []) # nanoGPT's newest
# All fields of build-nanogpt's GPTConfig.
SIZES = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd"}
# Fields of forks that may be on and change nothing when a trained model samples.
HARMLESS_FIELD = re.compile(
    r"(use_)?flash(_attn|_attention)?|device|dtype|compile|label_smoothing|init_std"
    r"|initializer_range|\w*checkpointing|\w*(dropout|pdrop|drop_prob)\w*")
# Names of what nanoGPT's model has: such a field, if it is off, says that a model lacks it. But
# not if the name is that of an addition, such as qk_norm.
PART_OF_NANOGPT = re.compile(
    r"(?i)(?!.*(rms|qk|rope|rotary|alibi|xpos|relative|parallel|post|cross|window|cap|bias$))"
    r".*(gelu|activ|linearity|caus|mask|regressive|unidirect|decoder|resid|skip|norm|pos|wpe|wte"
    r"|lm_?head|tying|sharing|share_emb|scal(e|ing)|att|softmax|mlp|ffn|feed_?forward"
    r"|(?<![a-z])(act|ff|ln|pe|tie|tied)(?![a-z]))")


def load_nanogpt(out_dir: str | Path, dtype: torch.dtype = torch.float32,
                 model_file: str | None = None) -> Checkpoint:
    """Load the ckpt.pt in out_dir, or out_dir itself if it is a file of nanoGPT or build-nanogpt.

    dtype: torch.int8 quantizes the weights while they are read; with any other, all is float32.
    model_file: the model.py whose GPT it is, which is run; NANOGPT: nanoGPT's own; None: also, but
    a model.py near the checkpoint must agree.
    Raises OSError if the file cannot be opened, ValueError if it is damaged or holds no GPT.
    """
    path = finding.checkpoint_path(out_dir)
    if not os.path.isfile(path) or finding.describe_other([path]):
        is_folder = ", which is a folder" if os.path.isdir(path) else ""
        raise FileNotFoundError(f"there is no checkpoint at {path}{is_folder}; "
                                f"{finding.advice(Path(out_dir))}")
    if model_file == NANOGPT and os.path.lexists(NANOGPT):
        raise ValueError(f"model_file={NANOGPT} is nanoGPT's own model.py, but here is a file or "
                         f"folder of that name: for that, pass model_file=./{NANOGPT}; for "
                         "nanoGPT's own, start in another folder")
    if model_file in (None, NANOGPT):
        source = UNEDITED if model_file else find_source(path)
        model, training = read_complete(
            [path], lambda file: read_gpt(file, source.gelu, dtype))
        if source.drops_while_sampling and model.config.dropout:
            source.reject(["dropout while it samples"])
    else:
        model_args, tensors, crc, training = read_complete([path], read_own)
        model_path = Path(os.path.abspath(model_file))
        if model_path.is_dir() and not (model_path / "__init__.py").exists(): # no package
            model_path /= "model.py"
        model = load_own_model(model_path, model_args, tensors, crc)
    checkpoint = Checkpoint(
        path=str(path), folder=path.parent, config=model.config, state_dict=model.state_dict,
        crc32=model.crc32, num_init_draws=model.num_init_draws, own_model=model.own_model,
        raw_config=training.raw_config, iter_num=training.iter_num, val_loss=training.val_loss,
        file_state=training.file_state)
    logger.info(checkpoint.describe())
    return checkpoint


def find_source(checkpoint: Path) -> ModelSource:
    """The model.py that belongs to a ckpt.pt; nanoGPT's newest, if none lies near it. Raises
    ValueError if it is edited.
    """
    sources = []
    for folder, files in finding.code_folders(checkpoint).items():
        sources += [read_source(file, folder) for file in files]
    for source in sources:
        source.reject(source.differences)
    source, *_ = [*sources, UNEDITED]
    source.warn_of_generate()
    if source.gelu == "tanh":
        logger.info(f"{source.path} is nanoGPT's from before June 2023: using its GELU, the tanh "
                    "form")
    return source


class Training(NamedTuple):
    """What a ckpt.pt says of its training: fields of a Checkpoint."""
    raw_config: dict # nanoGPT: settings; build-nanogpt: sizes
    iter_num: float | None
    val_loss: float | None
    file_state: tuple | None


def read_gpt(file: BinaryIO, gelu: str, dtype: torch.dtype) -> tuple[Model, Training]:
    """A model of nanoGPT's own GPT, whose model.py has this form of GELU."""
    tensor_file = read_tensor_file(file)
    tensors, args_key, args = find_entries(tensor_file)
    missing = ", ".join(sorted(SIZES.difference(fields_of(args))))
    require(not missing, f"its {args_key}, of the type {describe(args)}, lacks {missing}; "
            "docs/usage.md says how to save it with its sizes")
    stored = share_head(tensors_by_name(tensors, tensor_file))
    try:
        model_args = gpt_args(args_key, args, gelu)
        model = read_model(model_args, stored, dtype)
        is_tied = model.config.tie_word_embeddings
        if model_args.get("tie_word_embeddings", True) and not is_tied:
            # nanoGPT's load_state_dict copies both into one tensor, the head last.
            logger.warning(f"{file.name}: its lm_head.weight and transformer.wte.weight differ; "
                           "the first one counts for both, as in nanoGPT; if its model does not "
                           "tie them, pass model_file=PATH of its model.py, which is run")
            stored[EMBEDDING] = stored[HEAD]
            model = read_model(model_args, stored, dtype)
    except RejectedFileError as error:
        raise RejectedFileError(f"{error}; if the code of its model was edited, pass "
                                "model_file=PATH of that model.py, which is run") from None
    return model, read_training(tensor_file)


def read_own(file: BinaryIO) -> tuple[dict, dict[str, Tensor], int, Training]:
    """For a model of the user's own: its fields, its tensors, and a checksum of both."""
    tensor_file = read_tensor_file(file)
    tensors, _, args = find_entries(tensor_file)
    model_args = fields_of(args)
    stored = require_tensors(tensors, tensor_file)
    read = {name: tensor_file.read(tensor) for name, tensor in stored.items()}
    return model_args, read, checksum(model_args, stored), read_training(tensor_file)


def read_training(file: TensorFile) -> Training:
    return Training(fields_of(file.content.get("config")) or {},
                    read_number(file, "iter_num", "step"),
                    read_number(file, "best_val_loss", "val_loss"),
                    file_state(file.file.fileno()))


def find_entries(file: TensorFile) -> tuple[object, str, object]:
    """The entry with the tensors, and the key and content of that with the fields of GPTConfig.

    nanoGPT saves the entries model and model_args; build-nanogpt saves model and config.
    """
    entries = file.content if isinstance(file.content, dict) else {}
    model_keys = "model", "model_state_dict", "state_dict"
    model_key = next((key for key in model_keys if key in entries), "")
    args_key = "model_args" if "model_args" in entries else "config"
    args = entries.get(args_key)
    fields = fields_of(args)
    require(not describe(args).startswith("omegaconf."),
            f"its {args_key} is an object of OmegaConf; save a dict in its place, which "
            f"OmegaConf.to_container(checkpoint[{args_key!r}]) returns")
    missing = SIZES.difference(fields or {})
    lacking = ""
    if not model_key:
        lacking = "model"
    elif args_key == "config" and missing: # without model_args, it may hold train.py's settings
        lacking = f"{', '.join(sorted(missing))} in model_args or config"
    folder = Path(file.file.name).parent
    require(not (lacking and finding.has_weights(folder)),
            f"it belongs to a Hugging Face model; pass init_from={quote(str(folder))}")
    found = ", ".join(map(describe, list(entries)[:5])) or describe(file.content)
    require(not lacking,
            f"it is not a checkpoint of nanoGPT or build-nanogpt: it lacks {lacking}, and holds "
            f"{found:.40}; docs/usage.md says how to save it with its sizes, and how to load one "
            "of Hugging Face")
    require(fields is not None,
            f"its {args_key} must be a dict or an object with fields, got {describe(args)}")
    return entries[model_key], args_key, args


def gpt_args(args_key: str, args: object, gelu: str) -> dict:
    """The fields of GPTConfig. Raises ValueError if a field may change what the model computes."""
    fields = fields_of(args)
    known = {}
    foreign = []
    for name, value in fields.items():
        text = name[:100] if isinstance(name, str) else describe(name)
        if name in GPTConfig.__annotations__:
            require(isinstance(value, str | int | float | None),
                    f"its {args_key} must hold numbers and text, got {name}: {describe(value)}")
            known[name] = value
        elif (value or PART_OF_NANOGPT.match(text)) and not HARMLESS_FIELD.fullmatch(text):
            foreign.append(f"{text}={describe(value)}")
    require(not foreign,
            f"its {args_key} has fields that may make it another model than nanoGPT's: "
            f"{', '.join(sorted(foreign)):.200}; if the model is a GPT all the same, save only the "
            f"fields {', '.join(sorted(known))}")
    # build-nanogpt trains with the tanh form of GELU. nanoGPT uses the exact form, and also has
    # dropout and bias.
    is_gpt_config = describe(args).endswith(".GPTConfig")
    if known.keys() == SIZES and (is_gpt_config or args_key == "config"):
        gelu = "tanh"
    # None means the default, but for the activation: then there may be none.
    given = {name: v for name, v in known.items() if v is not None or name == "gelu"}
    return {"gelu": gelu} | given


def read_number(file: TensorFile, *names: str) -> float | None:
    """The first of these entries, if it is a finite number or a tensor of one; else None."""
    value = next((file.content[name] for name in names if name in file.content), None)
    if isinstance(value, StoredTensor) and math.prod(value.shape) == 1:
        value = file.read(value).item()
    is_finite = type(value) in (int, float) and abs(value) < 1e15 # false for NaN
    return value if is_finite else None
