"""Loads GPT-2 in Hugging Face's format: from the hub, from the hub's cache, or from a local folder."""
import json
import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from sampling.checkpoints import checkpoint as files
from sampling.checkpoints.checkpoint import Checkpoint, Convert, IncompleteFileError, require
from sampling.checkpoints.other_programs import identify_state_dict, refuse_other_programs
from sampling.checkpoints.state_dict import EMBEDDING, HEAD, read_model, require_tensors
from sampling.checkpoints.torch_file import StoredTensor, TensorFile, as_damage, raw_tensor_file, read_torch_file
from sampling.messages import Log, warn

SAFETENSORS = ["config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
TOKENIZERS = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json",
              "special_tokens_map.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"]
PICKLES = ["pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json"]
MAX_HEADER_BYTES = 2**23 # of a safetensors file: parsing it takes many times its size in memory
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
          "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
# activation_function in config.json -> approximate in F.gelu
GELU = {"gelu": "none", "gelu_python": "none", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}
GPT2_FIELDS = [("n_layer", "n_layer", 12), ("n_head", "n_head", 12), ("n_embd", "n_embd", 768),
               ("vocab_size", "vocab_size", 50257), ("n_inner", "n_inner", None), ("block_size", "n_positions", 1024),
               ("layer_norm_epsilon", "layer_norm_epsilon", 1e-5)] # GPTConfig's, config.json's, GPT2Config's default
CONV1D_WEIGHTS = "c_attn.weight", "c_proj.weight", "c_fc.weight"


def load_gpt2(name_or_folder: str, convert: Convert | None = None, with_crc32: bool = False,
              log: Log = warn) -> Checkpoint:
    """Load GPT-2 by its Hugging Face id ("gpt2", "gpt2-xl", "distilgpt2", ...) or from a local folder.

    Reads config.json and the weights, in one file or in shards. Uses pytorch_model.bin only if there are no
    safetensors. The other arguments are those of nanogpt.load_checkpoint.
    Raises ValueError or OSError if these files are not available, are damaged or hold another model.
    """
    with files.named_errors(name_or_folder):
        folder = find_folder(name_or_folder)
        checkpoint = files.read_complete(lambda: read_folder(name_or_folder, folder, convert, with_crc32), log)
    log(checkpoint.describe())
    return checkpoint


def read_folder(name: str, folder: Path, convert: Convert | None, with_crc32: bool) -> Checkpoint:
    """Read the files of a model once."""
    config = files.read_json(folder / "config.json")
    if "model_type" not in config:
        refuse_safetensors(*sorted(folder.glob("*.safetensors")))
    model_args, stored = gpt2_model_args(config, folder), {}
    with ExitStack() as stack:
        for path in weight_files(folder):
            file = stack.enter_context(files.open_unchanged(path))
            tensor_file = read_safetensors(file) if is_safetensors(path, file) else read_torch_file(file)
            stored |= require_tensors(tensor_file.content, tensor_file, path)
        if message := identify_state_dict(path, {key: tensor for key, (_, tensor) in stored.items()}, is_hf=True):
            raise ValueError(message)
        if config.get("tie_word_embeddings", True) and EMBEDDING in stored:
            stored[HEAD] = stored[EMBEDDING]

        def adjust(key: str, tensor: Tensor) -> Tensor:
            """Conv1D stores a Linear's weight transposed. GPT's attention scale is 1/sqrt(D): fold in other ones."""
            tensor = tensor.t() if key.endswith(CONV1D_WEIGHTS) and tensor.dim() == 2 else tensor
            if ".attn.c_attn." in key:
                layer, by_layer = int(key.split(".")[2]), config.get("scale_attn_by_inverse_layer_idx", False)
                scale = 1 / (layer + 1) if by_layer else 1.0
                if not config.get("scale_attn_weights", True):
                    scale *= (model_args["n_embd"] / model_args["n_head"]) ** 0.5
                if scale != 1:
                    tensor = tensor.float().clone()
                    tensor[:len(tensor) // 3] *= scale # the queries
            return tensor
        return Checkpoint(path=name, folder=folder, is_huggingface=True, meta=config,
                          **read_model(model_args, stored, folder, convert, with_crc32, adjust))


def gpt2_model_args(config: dict, folder: Path) -> dict:
    """The fields of GPTConfig, from config.json. Raises ValueError if the architecture is not GPT-2's."""
    if config.get("model_type") != "gpt2":
        raise ValueError(f"{folder} has model_type {config.get('model_type')!r:.60}; only gpt2 is supported")
    activation = config.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in GELU:
        raise ValueError(f"{folder} has activation_function {activation!r:.60}; supported are {', '.join(GELU)}")
    return {**{name: config.get(key, default) for name, key, default in GPT2_FIELDS}, "gelu": GELU[activation],
            "bias": True}


# ---- files

def find_folder(name_or_folder: str) -> Path:
    """The folder with the files of the model. Raises ValueError if there is no such folder."""
    if name_or_folder.endswith(".safetensors"):
        refuse_safetensors(Path(name_or_folder))
    if os.path.isfile(name_or_folder) or os.path.isfile(os.path.join(name_or_folder, "ckpt.pt")):
        raise ValueError(f"{name_or_folder} is not the folder of a Hugging Face model")
    folder = Path(name_or_folder) if os.path.isdir(name_or_folder) else download(name_or_folder)
    if not (folder / "config.json").is_file():
        refuse_safetensors(*sorted(folder.glob("*.safetensors")))
        if snapshots := files.snapshots_in(folder):
            raise ValueError(f"{folder} has neither config.json nor ckpt.pt, but {snapshots[0].name}: give its path, "
                             f"--out_dir={snapshots[0]}")
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
    except errors.GatedRepoError:
        raise ValueError(f"access to {name!r} is on request: ask for it at https://huggingface.co/{name}, then set "
                         "HF_TOKEN, or run 'hf auth login'") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(f"there is no folder {name!r} here, and the Hugging Face hub has no such model, or you have "
                         "no access to it (set HF_TOKEN, or run 'hf auth login')") from None
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as e:
        raise ValueError(f"could not get {name!r}: there is no such folder here, it is not in Hugging Face's cache, "
                         f"and the hub did not answer ({files.first_sentence(e)}); set HF_ENDPOINT for a mirror, or on "
                         f"a machine that reaches the hub, run 'hf download {name} --local-dir DIR', then give DIR "
                         "instead of the name") from None


def weight_files(folder: Path) -> list[Path]:
    """The weight files: one file, or the shards that an index names. Prefers safetensors.

    Raises ValueError if there are none, or if a shard is not in the folder: an index from a stranger must not name
    other files on this machine.
    """
    for name in "model.safetensors", "pytorch_model.bin":
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            break
    else:
        raise ValueError(f"{folder} has neither model.safetensors nor pytorch_model.bin, and no index of either")
    weight_map = files.read_json(index).get("weight_map")
    shards = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not shards:
        raise ValueError(f"weight_map in {index} must name files in its own folder, but names none")
    for shard in shards:
        is_plain = isinstance(shard, str) and shard == Path(shard).name[:250]
        if not (is_plain and (folder / shard).is_file()):
            raise ValueError(f"weight_map in {index} must name files in its own folder, but {shard!r:.100} is not one: "
                             "download the model again")
    return [folder / shard for shard in sorted(set(shards))]


def is_safetensors(path: Path, file: BinaryIO) -> bool:
    """Whether an open file is of safetensors: by its name, or as it begins with the length of a header and a header."""
    file.seek(0)
    start = file.read(9)
    file.seek(0)
    header_fits = int.from_bytes(start[:8], "little") < os.fstat(file.fileno()).st_size
    return path.suffix == ".safetensors" or (header_fits and start[8:] == b"{")


@as_damage()
def read_safetensors(file: BinaryIO) -> TensorFile:
    """The tensors of an open safetensors file, which is the length of its header, the header in JSON, and the bytes.

    It has no checksums. Raises RejectedFileError if the file is cut or its header is not consistent.
    """
    file_size, header_bytes = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    require(header_bytes <= MAX_HEADER_BYTES,
            f"it claims a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} are allowed")
    header, start = json.loads(file.read(header_bytes)), 8 + header_bytes
    header.pop("__metadata__", None)
    content, places = {}, {}
    for key, entry in header.items():
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        strides = tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))
        content[key] = StoredTensor(key, DTYPES[entry["dtype"]], tuple(shape), strides, 0)
        places[key] = start + begin, end - begin
        require(0 <= begin <= end and content[key].nbytes == end - begin, "one of its tensors does not fit its place")
    if start + max((entry["data_offsets"][1] for entry in header.values()), default=0) != file_size:
        raise IncompleteFileError("it is cut short, or longer than its header says")
    return raw_tensor_file(file, content, places)


def refuse_safetensors(*paths: Path) -> None:
    """Raises ValueError, which says what to do, for the first of these files: none is of a Hugging Face model."""
    for path in filter(Path.is_file, paths):
        with files.open_unchanged(path) as file:
            refuse_other_programs(path, content=read_safetensors(file).content)
        raise ValueError(f"{path} holds no tensors")
