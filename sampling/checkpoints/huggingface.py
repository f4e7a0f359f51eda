"""Loads GPT-2 in Hugging Face's format: from the hub, from the hub's cache, or from a local folder."""
import os
from pathlib import Path

from sampling.checkpoints.checkpoint import Checkpoint, named_errors
from sampling.checkpoints.errors import first_sentence
from sampling.checkpoints.hf_conversion import gpt2_model_args, rename_hf_keys, rescale_queries
from sampling.checkpoints.hf_files import MAX_HEADER_BYTES, read_json, read_safetensors
from sampling.checkpoints.other_programs import reject_nanogpt_layout, reject_safetensors, reject_safetensors_in
from sampling.checkpoints.pickle_scanner import MAX_PICKLE_STEPS
from sampling.checkpoints.state_dict import (
    EMBEDDING,
    HEAD,
    StateDict,
    normalize_state_dict,
    require_tensors,
    vocab_size_of,
)
from sampling.checkpoints.torch_files import read_torch_file
from sampling.checkpoints.zip_scanner import Checksums

SAFETENSORS = ["config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
TOKENIZERS = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json",
              "special_tokens_map.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"]
PICKLES = ["pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json"]


def load_gpt2(name_or_folder: str, copy_weights: bool = True) -> Checkpoint:
    """Load GPT-2 by its Hugging Face id ("gpt2", "gpt2-xl", "distilgpt2", ...) or from a local folder.

    Reads config.json and the weights, in one file or in shards. Uses pytorch_model.bin only if there are no
    safetensors. copy_weights: see copy_tensors.
    Raises ValueError or OSError if these files are not available, are damaged or hold another model.
    """
    with named_errors(name_or_folder):
        folder = find_folder(name_or_folder)
        config = read_json(folder / "config.json")
        if "model_type" not in config:
            reject_safetensors_in(folder)
        model_args = gpt2_model_args(config, folder)
        paths = weight_files(folder)
        state_dict, checksums = read_weights(paths)
        reject_nanogpt_layout(paths[0], state_dict)
        state_dict = rename_hf_keys(state_dict)
        if config.get("tie_word_embeddings", True) and EMBEDDING in state_dict:
            state_dict[HEAD] = state_dict[EMBEDDING]
        model_args, state_dict = normalize_state_dict(model_args, state_dict, folder, checksums, copy_weights)
        rescale_queries(config, model_args, state_dict)
        return Checkpoint(path=name_or_folder, model_args=model_args, state_dict=state_dict,
                          vocab_size=vocab_size_of(state_dict), folder=folder, is_huggingface=True)


def find_folder(name_or_folder: str) -> Path:
    """The folder with the files of the model. Raises ValueError if there is no such folder."""
    if name_or_folder.endswith(".safetensors") and os.path.isfile(name_or_folder):
        reject_safetensors(Path(name_or_folder))
    if os.path.isfile(name_or_folder) or os.path.isfile(os.path.join(name_or_folder, "ckpt.pt")):
        raise ValueError(f"{name_or_folder} is not the folder of a Hugging Face model")
    folder = Path(name_or_folder) if os.path.isdir(name_or_folder) else download(name_or_folder)
    if not (folder / "config.json").is_file():
        reject_safetensors_in(folder)
        raise ValueError(f"{folder} is not the folder of a Hugging Face model: it has no config.json")
    return folder


def download(name: str) -> Path:
    """Download a model, unless it is in the hub's cache, and return its folder. Raises ValueError if that fails."""
    from huggingface_hub import errors, snapshot_download
    try:
        folder = Path(snapshot_download(name, allow_patterns=SAFETENSORS + TOKENIZERS))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=PICKLES))
        return folder
    except errors.HFValidationError:
        raise ValueError(f"{name!r:.100} is neither a folder here nor a Hugging Face id such as gpt2 or "
                         "user/model") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(f"there is no folder {name!r} here, and the Hugging Face hub has no such model, or you have "
                         "no access to it (set HF_TOKEN, or run 'hf auth login')") from None
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as e:
        raise ValueError(f"could not get {name!r}: there is no such folder here, it is not in Hugging Face's cache, "
                         f"and the hub did not answer ({first_sentence(e)}); on a machine that reaches the hub, run "
                         f"'hf download {name} --local-dir DIR', then give DIR instead of the name") from None


def read_weights(paths: list[Path]) -> tuple[StateDict, Checksums]:
    """The tensors of all weight files. Also the checksums of their records, if every file has checksums.

    All files share one limit on the cost of reading, so a thousand shards cost no more than one file.
    """
    state_dict, checksums = {}, []
    for path in paths:
        if path.suffix == ".safetensors": # this format has no checksums
            tensors, own_checksums = read_safetensors(path, MAX_HEADER_BYTES // len(paths)), set()
        else:
            tensors, own_checksums = read_torch_file(path, MAX_PICKLE_STEPS // len(paths))
        state_dict |= require_tensors(tensors, path)
        checksums.append(own_checksums)
    return state_dict, set().union(*checksums) if all(checksums) else set()


def weight_files(folder: Path) -> list[Path]:
    """The weight files: one file, or the shards that an index names. Prefers safetensors.

    Raises ValueError if there are none.
    """
    for name in "model.safetensors", "pytorch_model.bin":
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return shard_files(index)
    raise ValueError(f"{folder} has neither model.safetensors nor pytorch_model.bin, and no index of either")


def shard_files(index: Path) -> list[Path]:
    """The shards that an index names. Raises ValueError if one is not a file in the folder of the index.

    An index from a stranger must not name other files on this machine.
    """
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names:
        raise ValueError(f"weight_map in {index} must name files in its own folder, but names none")
    for name in names:
        is_plain = isinstance(name, str) and name == Path(name).name[:250]
        if not (is_plain and (index.parent / name).is_file()):
            raise ValueError(f"weight_map in {index} must name files in its own folder, but {name!r:.100} is not one: "
                             "download the model again")
    return [index.parent / name for name in sorted(set(names))]
