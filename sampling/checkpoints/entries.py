"""Finds the state_dict and the configuration in a checkpoint of nanoGPT or of build-nanogpt, the GPT-2 lesson."""
from pathlib import Path

from sampling.checkpoints.config_record import ConfigRecord
from sampling.checkpoints.other_programs import SAVE_MODEL, reject_other_contents, reject_other_tensors
from sampling.checkpoints.state_dict import StateDict, repr_or_type, require_tensors

MODEL_KEYS = "model", "model_state_dict"
BUILD_NANOGPT_FIELDS = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd"} # of its GPTConfig
OPTIONAL_FIELDS = {"dropout", "bias", "gelu", "n_inner", "layer_norm_epsilon", "tie_word_embeddings"}


def model_entries(content: object, path: Path) -> tuple[StateDict, dict]:
    """The tensors of the model by their names in the file, and the fields of its GPTConfig.

    nanoGPT saves the entries model and model_args; build-nanogpt saves model and config. Raises ValueError if the file
    holds neither pair, or if an entry has the wrong type.
    """
    reject_other_contents(path, content)
    entries = content if isinstance(content, dict) else {}
    model_key = next((key for key in MODEL_KEYS if key in entries), None)
    has_config = has_build_nanogpt_fields(entries.get("config"))
    args_key = "model_args" if "model_args" in entries else "config" if has_config else None
    if model_key is None or args_key is None:
        found = ", ".join(map(repr_or_type, list(entries)[:5])) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path} is not a checkpoint of nanoGPT or build-nanogpt: it must hold model and model_args, "
                         f"or model and config, but holds {found:.200}; save both: {SAVE_MODEL}")
    model_args = config_fields(entries[args_key], args_key, path)
    state_dict = require_tensors(entries[model_key], path)
    reject_other_tensors(path, state_dict)
    return state_dict, model_args


def has_build_nanogpt_fields(config: object) -> bool:
    """Whether config has the fields of build-nanogpt's GPTConfig. In nanoGPT's files, it has train.py's settings."""
    fields = config.fields if isinstance(config, ConfigRecord) else config
    return isinstance(fields, dict) and fields.keys() >= BUILD_NANOGPT_FIELDS


def config_fields(value: object, key: str, path: Path) -> dict:
    """model_args or config as a dict. Raises ValueError unless it is a dict of numbers, text and None."""
    fields = value.fields if isinstance(value, ConfigRecord) else value
    if not isinstance(fields, dict):
        raise ValueError(f"{key} in {path} must be a dict, got {type(fields).__name__}")
    for name, field in fields.items():
        if not (isinstance(name, str) and isinstance(field, str | int | float | None)):
            raise ValueError(f"{key} in {path} must hold numbers and text, "
                             f"got {repr_or_type(name)}: {repr_or_type(field)}")
    if key == "config":
        require_gpt_fields(fields, path)
    # build-nanogpt trains with the tanh form of GELU. nanoGPT uses the exact form, and also has dropout and bias.
    is_build_nanogpt = fields.keys() == BUILD_NANOGPT_FIELDS and (key == "config" or isinstance(value, ConfigRecord))
    return {"gelu": "tanh", **fields} if is_build_nanogpt else fields


def require_gpt_fields(config: dict, path: Path) -> None:
    """Raises ValueError if config has fields that a GPT does not have. Other architectures also have GPT's fields."""
    known = sorted(config.keys() & (BUILD_NANOGPT_FIELDS | OPTIONAL_FIELDS))
    unknown = sorted(config.keys() - set(known))
    if unknown:
        raise ValueError(f"config in {path} has fields that a GPT does not have: {', '.join(unknown):.200}; if the "
                         "model is a GPT, save only a GPT's fields: "
                         'torch.save({"model": model.state_dict(), "config": '
                         f'{{name: getattr(model.config, name) for name in {known}}}}}, "ckpt.pt")')
