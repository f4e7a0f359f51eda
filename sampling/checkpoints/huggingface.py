"""Loads GPT-2 in Hugging Face's format: from the hub, from its cache, or from a local folder."""
import logging
import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

import torch

from sampling.checkpoints.checkpoint import (
    Checkpoint,
    Model,
    nanogpt_names,
    read_model,
    share_head,
    tensors_by_name,
)
from sampling.checkpoints.finding import (
    HUGGINGFACE_NAMES,
    WEIGHTS,
    advice,
    has_weights,
    huggingface_config,
    huggingface_folder,
    is_hub_id,
    missing_weights,
    newest_first,
)
from sampling.checkpoints.saves import read_complete
from sampling.checkpoints.tensor_files import read_tensor_file
from sampling.checkpoints.untrusted_files import is_inside, read_json, require
from sampling.model import GPTConfig
from sampling.values import first_sentence

logger = logging.getLogger(__name__)
FILES = [WEIGHTS[0], "*.index.json", "*config.json", "*token*.json", "vocab.*", "merges.txt",
         "*.model"]
# What sampling does not need: other heads, and the attention to an encoder, which a decoder alone
# does not use.
UNNEEDED = re.compile(r"(?!transformer\.|lm_head\.)|.*\.(crossattention|ln_cross_attn)\.")
# Conv1D has the transposed weight of a Linear.
TRANSPOSED = "c_attn.weight", "c_proj.weight", "c_fc.weight"
# activation_function in config.json -> approximate in F.gelu
GELU = {
    "gelu": "none", "gelu_python": "none", "gelu_new": "tanh", "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh", "gelu_python_tanh": "tanh", "gelu_accurate": "tanh",
}
# What GPTConfig takes from config.json. If a field is missing there, its default in GPTConfig is
# that of transformers, but for vocab_size.
MODEL_FIELDS = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "n_inner",
                "layer_norm_epsilon")
# The fields of generation_config.json that change the text, each with the value that does not: with
# a setting of ours, and without.
SETTINGS = {"temperature": 1, "top_k": 50, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
WITHOUT_SETTING = {
    "num_beams": 1, "typical_p": 1, "no_repeat_ngram_size": 0, "min_length": 0,
    "min_new_tokens": 0, "bad_words_ids": [], "suppress_tokens": [],
}


def load_huggingface(name_or_folder: str, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Load GPT-2 by its Hugging Face id ("gpt2", "distilgpt2", ...) or from a local folder.

    dtype and errors: as in nanogpt.load_nanogpt. A warning names what the files hold, but the model
    does not use.
    """
    folder, config = find_model(name_or_folder)
    model_args = gpt2_model_args(config, folder)
    paths, shard_of = weight_files(folder)
    unneeded = set()

    def read(*weights: BinaryIO) -> Model:
        stored = {}
        places = nanogpt_names(shard_of)
        for path, file in zip(paths, weights, strict=True):
            tensor_file = read_tensor_file(file)
            for name, tensor in tensors_by_name(tensor_file.content, tensor_file).items():
                if UNNEEDED.match(name):
                    unneeded.add(re.sub(r"^transformer\.(h\.\d+\.)?", "", name))
                    continue
                if name.endswith(TRANSPOSED):
                    tensor = tensor._replace(shape=tensor.shape[::-1], strides=tensor.strides[::-1])
                if places.get(name, path) == path:
                    stored[name] = tensor
        # A head that differs is used all the same, as in transformers.
        if config.get("tie_word_embeddings", True):
            stored = share_head(stored)
        model = read_model(model_args, stored, dtype)
        scale_queries(model.state_dict, config, model.config)
        return model

    model = read_complete(paths, read)
    # transformers sets the seed when the model is built: no random numbers come before the samples.
    checkpoint = Checkpoint(path=name_or_folder, folder=folder, config=model.config,
                            state_dict=model.state_dict, crc32=model.crc32, raw_config=config,
                            is_huggingface=True)
    logger.info(checkpoint.describe())
    if unneeded:
        names = ", ".join(sorted(unneeded)) # a stranger's
        logger.warning(f"{folder}: tensors that sampling does not need: {names!r:.500}")
    warn_about_generation_config(folder, config)
    return checkpoint


def warn_about_generation_config(folder: Path, config: dict) -> None:
    """Name the settings that the model's authors sample with.

    None is applied: the defaults are nanoGPT's.
    """
    path = folder / "generation_config.json"
    fields = config # it had these fields in older versions
    if path.is_file():
        fields = config | read_json(path)
    asked = []
    for name, usual in (SETTINGS | WITHOUT_SETTING).items():
        if fields.get(name) not in (None, usual):
            setting = f"{name}={fields[name]!r:.40}"
            asked.append(setting if name in SETTINGS else f"{setting} (no setting of ours)")
    if asked:
        logger.warning(f"{folder}: its authors sample with {', '.join(asked)}; nothing of "
                       "this is applied by itself")


def scale_queries(state_dict: dict, config: dict, sizes: GPTConfig) -> None:
    """Scale the query weights if config.json sets another attention scale than 1/sqrt(D)."""
    factor = 1.0
    if not config.get("scale_attn_weights", True):
        factor = (sizes.n_embd / sizes.n_head) ** 0.5
    for name, tensor in state_dict.items():
        if ".attn.c_attn." in name: # (3E, E) or (3E,): a row of the weight has one scale in int8
            divisor = 1
            if config.get("scale_attn_by_inverse_layer_idx"):
                divisor = int(name.split(".")[2]) + 1
            rows = getattr(tensor, "scales", tensor) # of a QuantizedWeight
            rows[:sizes.n_embd] *= factor / divisor


def gpt2_model_args(config: dict, folder: Path) -> dict:
    """The fields of GPTConfig, from config.json.

    Raises ValueError if the architecture is not GPT-2's.
    """
    model_type = config.get("model_type", "gpt2")
    if model_type != "gpt2":
        raise ValueError(f"{folder} has model_type {model_type!r:.60}; only gpt2 is supported")
    if "quantization_config" in config:
        raise ValueError(f"{folder} holds quantized weights: pass init_from=NAME of the model that "
                         "they were made from")
    activation = config.get("activation_function", "gelu_new")
    if activation not in list(GELU): # it may be of any type
        raise ValueError(f"{folder} has activation_function {activation!r:.60}; supported are "
                         f"{', '.join(GELU)}")
    fields = {"vocab_size": 50257, "gelu": GELU[activation]}
    for name in MODEL_FIELDS:
        for key in name, HUGGINGFACE_NAMES.get(name): # the latter counts
            if key in config:
                fields[name] = config[key]
    return {"block_size": fields.pop("n_positions", 1024)} | fields


# ---- files

def find_model(name_or_folder: str) -> tuple[Path, dict]:
    """The folder with the files of the model, and its config.json."""
    path = Path(name_or_folder)
    of_hub = ""
    if is_hub_id(name_or_folder):
        of_hub = "; for the hub's model of this name, run the command in another folder"
    if os.path.lexists(path): # also a link that leads nowhere
        folder = huggingface_folder(path)
    elif of_hub and may_be_on_hub(name_or_folder):
        folder = download(name_or_folder)
    else:
        raise FileNotFoundError(f"there is no model at {path}; {advice(path)}{of_hub}")
    config = huggingface_config(folder)
    if config:
        return folder, config
    raise ValueError(f"{path} is no Hugging Face model; {advice(path)}{of_hub}")


def may_be_on_hub(name: str) -> bool:
    """Whether an id means a model of the hub.

    One in a folder that is here, or like that of a model here, means no model of a stranger.
    """
    if re.fullmatch(r"([\w-]+/)?(distil)?gpt2(-\w+)?", name):
        return True
    models = map(str, newest_first(Path().glob("*")))
    return not (os.path.isdir(name.split("/")[0]) or get_close_matches(name, models, 1))


def download(name: str) -> Path:
    """Download a model, unless it is in the hub's cache, and return its folder.

    If that fails, a model of OpenAI may be in the cache all the same: another program has left some
    of its files there, under either of its names. Raises ValueError if it is not.
    """
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    try:
        folder = Path(snapshot_download(name, allow_patterns=FILES, ignore_patterns="*/*"))
        if not (folder / WEIGHTS[0]).is_file():
            shard_of = read_index(folder, WEIGHTS[0]) or read_index(folder, WEIGHTS[1])
            patterns = [*shard_of.values()] or WEIGHTS[1:]
            snapshot_download(name, allow_patterns=patterns) # to the same folder
        if has_weights(folder):
            return folder
        reason = missing_weights(folder) or f"the cache lacks {WEIGHTS[0]} and {WEIGHTS[1]}"
    except (OSError, ValueError) as error: # all errors of the hub are of these types
        reason = first_sentence(error)
    model = name.removeprefix("openai-community/")
    if re.fullmatch("gpt2(-medium|-large|-xl)?", model): # the tokenizer may not be there
        for other_name in model, f"openai-community/{model}":
            config = try_to_load_from_cache(other_name, "config.json")
            if isinstance(config, str):
                folder = Path(config).parent
                if has_weights(folder):
                    return folder
                reason = missing_weights(folder) or reason
    raise ValueError(
        f"{name!r:.100} is no folder here, and did not come from the Hugging Face hub ({reason}); "
        "a private model needs HF_TOKEN; without the hub (HF_HUB_OFFLINE=1 leaves it out), run "
        f"'hf download {name:.100} --local-dir DIR' elsewhere, and give a copy of DIR")


def weight_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The weight files, in transformers' order, and which of them has which tensor, where an index
    says so.
    """
    for weights in WEIGHTS:
        if (folder / weights).is_file():
            return [folder / weights], {}
        shard_of = read_index(folder, weights)
        if shard_of:
            places = {tensor: folder / name for tensor, name in shard_of.items()}
            paths = sorted({*places.values()})
            missing = ", ".join(path.name for path in paths if not path.is_file())
            if missing:
                reason = missing_weights(folder) or "copy that there"
                raise ValueError(f"{folder} lacks {missing!r:.300}, which {weights}.index.json "
                                 f"names; {reason}")
            return paths, places
    raise ValueError(f"{folder} has neither model.safetensors nor pytorch_model.bin, nor an index "
                     f"of the shards of either; {advice(folder)}")


def read_index(folder: Path, weights: str) -> dict[str, str]:
    """The file of each tensor, by the index of these weights; empty if there is none."""
    path = folder / f"{weights}.index.json"
    if not path.is_file():
        return {}
    shard_of = read_json(path).get("weight_map")
    is_map = isinstance(shard_of, dict) and all(map(is_inside, shard_of.values()))
    require(is_map, f"cannot read {path}: its weight_map must give the names of files in its "
            "folder")
    return shard_of
