"""Where weights come from: a ckpt.pt of nanoGPT's, or GPT-2 from Hugging Face.

Both give model_args (GPTConfig's fields) and a state_dict of float32 tensors under nanoGPT's names.
Files are data here: whatever they name, none of it runs.
"""
import os
import re
import zlib
from pathlib import Path

import torch

from files import first_line, length_and_checksum, let_go, pages_of, read_json, read_pickle, read_safetensors
from guard import MOST_BYTES, MOST_STEPS

HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"
MASKS = re.compile(r"\.attn\.(masked_)?bias$") # buffers of older models; the network needs none
LAYERS = 2**12 # more than anybody trained
GELU = {"gelu": "none", "gelu_python": "none", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}


def find_checkpoint(out_dir):
    """The path of ckpt.pt in out_dir, or out_dir where it is a file; FileNotFoundError names what lies nearby."""
    path = Path(out_dir)
    if path.is_dir():
        path /= "ckpt.pt"
    if path.is_file():
        if any("\ud800" <= char <= "\udfff" for char in str(path)):
            raise ValueError(f"torch cannot read {path}, since its path is not UTF-8: rename its folder")
        return path
    around = Path(out_dir), Path(out_dir).parent, Path()
    nearby = sorted({str(found.parent) for folder in around for found in folder.glob("*/ckpt.pt")})
    if (Path(out_dir) / "config.json").is_file():
        raise FileNotFoundError(f"{out_dir} holds a Hugging Face model and no ckpt.pt; pass --init_from={out_dir}")
    known = f"; nearby there is one in {', '.join(nearby[:5])}" if nearby else ""
    demo = Path(__file__).resolve().parent / "out-shakespeare-char"
    raise FileNotFoundError(f"there is no checkpoint at {path}{known}; pass --out_dir=FOLDER, for the demo "
                            f"--out_dir={demo}, or for GPT-2 --init_from=gpt2")


def load_checkpoint(path):
    """A ckpt.pt of nanoGPT's -> (model_args, state_dict, config), config being train.py's settings.

    ValueError where the file is damaged, no such checkpoint, or more than data; OSError where it cannot
    be opened.
    """
    checkpoint, sums = read_pickle(path)
    if not isinstance(checkpoint, dict) or not {"model", "model_args"} <= checkpoint.keys():
        held = f"a {type(checkpoint).__name__}"
        if isinstance(checkpoint, dict):
            held = ", ".join(map(shown, list(checkpoint)[:5]))
        raise ValueError(f"{path} is no checkpoint of nanoGPT's: it must hold model and model_args, "
                         f"and holds {held:.200}")
    state_dict, model_args, config = checkpoint["model"], checkpoint["model_args"], checkpoint.get("config")
    if not isinstance(model_args, dict):
        raise ValueError(f"{path} holds model_args that are no dict but a {type(model_args).__name__}")
    for name, value in model_args.items():
        if not (isinstance(name, str) and isinstance(value, str | int | float | None)):
            raise ValueError(f"{path} holds model_args with {shown(name)}: {shown(value)}, no number or text")
    require_tensors(state_dict, path)
    for prefix in "_orig_mod.", "module.", "_orig_mod.": # of torch.compile and DDP, in either order
        state_dict = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items()}
    if HEAD not in state_dict and EMBEDDING in state_dict:
        state_dict[HEAD] = state_dict[EMBEDDING]
    found = {"bias": "transformer.ln_f.bias" in state_dict} # what older checkpoints do not say
    model_args = found | {key: value for key, value in model_args.items() if value is not None}
    return *fitted(model_args, state_dict, path, sums), config if isinstance(config, dict) else {}


def load_huggingface(model):
    """GPT-2 by Hugging Face id, or from a local folder -> (model_args, state_dict).

    Reads config.json and safetensors, else pytorch_model.bin; either may lie in shards. ValueError where
    these cannot be had or hold no GPT-2.
    """
    if os.path.isfile(model) or os.path.isfile(os.path.join(model, "ckpt.pt")):
        raise ValueError(f"{model} is no folder of a Hugging Face model; for a ckpt.pt pass --out_dir={model}")
    folder = Path(model) if os.path.isdir(model) else download(model)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json, so no Hugging Face model")
    config = read_json(folder / "config.json")
    model_args = gpt2_args(config, folder)
    state_dict, sums = {}, []
    paths = weight_files(folder)
    for path in paths: # all together take no longer than one may
        tensors, more = (read_safetensors(path, MOST_BYTES // len(paths)) if path.suffix == ".safetensors" else
                         read_pickle(path, MOST_STEPS // len(paths)))
        state_dict |= require_tensors(tensors, path)
        sums.append(more)
    state_dict = nanogpt_names(state_dict)
    if config.get("tie_word_embeddings", True) and EMBEDDING in state_dict:
        state_dict[HEAD] = state_dict[EMBEDDING]
    model_args, state_dict = fitted(model_args, state_dict, folder, set().union(*sums) if all(sums) else set())
    rescale_queries(config, model_args, state_dict)
    return model_args, state_dict


def fitted(model_args, state_dict, source, sums):
    """Drop mask buffers, find out whether the head is tied, and copy the rest in float32.

    Copied, because a training run may overwrite a file that is only mapped. Layers are counted before
    anybody builds as many as model_args claims. ValueError where a tensor's numbers have none of the checksums.
    """
    state_dict = {name: tensor for name, tensor in state_dict.items() if not MASKS.search(name)}
    layers = len({name.split(".")[2] for name in state_dict if name.startswith("transformer.h.")})
    if layers > LAYERS:
        raise ValueError(f"{source} holds tensors of {layers} layers; at most {LAYERS} are read")
    if model_args.get("n_layer") != layers:
        raise ValueError(f"{source} says n_layer={model_args.get('n_layer')!r:.40} "
                         f"and holds tensors of {layers} layers")
    head, embedding = state_dict.get(HEAD), state_dict.get(EMBEDDING)
    tied = head is embedding
    if head is not None and embedding is not None and head.shape == embedding.shape:
        tied = torch.equal(head.float(), embedding.float())
    if tied:
        state_dict.pop(EMBEDDING, None)
    mapped, copies, seen = pages_of(state_dict.values()), {}, set()
    for name, tensor in state_dict.items():
        copies[name] = copy = tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        stored = tensor.untyped_storage()
        if sums and stored.data_ptr() not in seen:
            seen.add(stored.data_ptr())
            whole = tensor.dtype == copy.dtype and tensor.is_contiguous() and stored.nbytes() == copy.nbytes
            # Of a whole storage the copy is looked at: it is what is used, and quicker to read.
            if length_and_checksum(copy.untyped_storage() if whole else stored) not in sums:
                raise ValueError(f"{source} is damaged: the numbers of {name!r:.60} do not match their checksum")
        let_go(mapped)
    if tied and head is not None:
        copies[EMBEDDING] = copies[HEAD]
    return {**model_args, "tied": tied}, copies


def require_tensors(state_dict, source):
    """The state_dict itself; ValueError where it is anything but dense tensors of numbers by name.

    Nor may they claim more than twice the file's size, as expand's views or one storage under many names can: each
    name is copied. Twice, since a tied head is stored once and named twice.
    """
    if not isinstance(state_dict, dict) or not state_dict:
        held = "none" if state_dict == {} else shown(state_dict)
        raise ValueError(f"{source} must hold tensors by name, and holds {held}")
    for name, tensor in state_dict.items():
        if not (isinstance(name, str) and isinstance(tensor, torch.Tensor)):
            raise ValueError(f"{source} must hold tensors by name, and holds {shown(name)}: {type(tensor).__name__}")
        dense = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
        if not dense or not (tensor.is_floating_point() or MASKS.search(name)):
            raise ValueError(f"{source} holds {name!r:.60} as {tensor.dtype}, {tensor.layout}, {tensor.device}: "
                             "only dense floating point is read")
    storages = [tensor.untyped_storage() for tensor in state_dict.values()]
    stored = {storage.data_ptr(): storage.nbytes() for storage in storages}
    claimed = max(sum(tensor.nbytes for tensor in state_dict.values()), sum(stored.values()))
    if claimed > 2 * os.path.getsize(source):
        raise ValueError(f"{source} has {os.path.getsize(source)} bytes and claims tensors of {claimed}")
    return state_dict


def shown(value):
    """A value for a message: what it holds, if it is text or a number, else what it is."""
    return f"{value!r:.60}" if isinstance(value, str | int | float | None) else type(value).__name__


# ---- Hugging Face's GPT-2

def download(model):
    """A folder with the model's files, from the Hugging Face hub or from its cache on this machine."""
    from huggingface_hub import errors, snapshot_download
    safetensors = ["config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
    pickles = ["pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json"]
    try:
        folder = Path(snapshot_download(model, allow_patterns=safetensors))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(model, allow_patterns=pickles))
        return folder
    except errors.HFValidationError:
        raise ValueError(f"init_from={model!r:.100} is neither 'resume', nor a folder here, nor a Hugging Face id "
                         "such as gpt2 or user/model") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(f"the Hugging Face hub knows no model {model!r}, or does not show it to you (set HF_TOKEN, "
                         "or run 'hf auth login'); nor is there such a folder here") from None
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as e:
        raise ValueError(f"could not get {model!r}: no such folder here, not in Hugging Face's cache, and the hub did "
                         f"not answer ({first_line(e)}); where it does, run 'hf download {model} --local-dir DIR', "
                         "then pass --init_from=DIR") from None


def weight_files(folder):
    """The files that hold the weights: safetensors before pytorch_model.bin, one or the shards its index names."""
    for name in "model.safetensors", "pytorch_model.bin":
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = read_json(index).get("weight_map")
            names = shards.values() if isinstance(shards, dict) else [None]
            for name in names:
                if not (isinstance(name, str) and name == Path(name).name[:250] and (folder / name).is_file()):
                    raise ValueError(f"{index} must name files of its own folder in weight_map; {name!r:.100} is none")
            return [folder / name for name in sorted(set(names))]
    raise ValueError(f"{folder} holds neither model.safetensors nor pytorch_model.bin, nor the index of either")


def gpt2_args(config, source):
    """config.json -> GPTConfig's fields; ValueError where it is not GPT-2's architecture."""
    if config.get("model_type") != "gpt2":
        raise ValueError(f"{source} is of model_type {config.get('model_type')!r:.60}; only gpt2 is read")
    activation = config.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in GELU:
        raise ValueError(f"{source} uses activation_function {activation!r:.60}; known are {', '.join(GELU)}")
    sizes = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_inner": None} # GPT2Config's defaults
    return {
        **{name: config.get(name, default) for name, default in sizes.items()},
        "block_size": config.get("n_positions", 1024),
        "layer_norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "gelu": GELU[activation],
        "bias": True,
    }


def nanogpt_names(state_dict):
    """Hugging Face's names and layouts as nanoGPT's: its Conv1D holds a Linear's weights transposed."""
    named = {}
    for name, tensor in state_dict.items():
        name = name if name == HEAD else "transformer." + name.removeprefix("transformer.")
        conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        named[name] = tensor.t() if conv1d and tensor.dim() == 2 else tensor
    return named


def rescale_queries(config, model_args, state_dict):
    """Fold config.json's other scalings of attention into the queries, where the network has only 1/sqrt(D)."""
    by_width, by_layer = config.get("scale_attn_weights", True), config.get("scale_attn_by_inverse_layer_idx", False)
    if by_width and not by_layer:
        return
    for i in range(model_args["n_layer"]):
        scale = 1 / (i + 1) if by_layer else 1.0
        if not by_width:
            scale *= (model_args["n_embd"] / model_args["n_head"]) ** 0.5
        for name in "weight", "bias":
            tensor = state_dict[f"transformer.h.{i}.attn.c_attn.{name}"]
            tensor[:len(tensor) // 3] *= scale


def checksum(tensors):
    """Eight hexadecimal digits that tell these tensors from others."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.detach().flatten().view(torch.uint8).numpy(), found)
    return f"{found:08x}"
