"""The tensors of a GPT: their names, how they are read, and what depends on their shapes."""
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from sampling.checkpoints.build import require_fit
from sampling.checkpoints.checkpoint import Convert
from sampling.checkpoints.torch_file import StoredTensor, TensorFile

StoredTensors = dict[str, tuple[TensorFile, StoredTensor]] # by nanoGPT's names

HEAD, EMBEDDING, POSITIONS = "lm_head.weight", "transformer.wte.weight", "transformer.wpe.weight"
MASK_BUFFER = re.compile(r"\.attn\.(masked_)?bias$") # older checkpoints hold the causal mask; the model needs none
MAX_LAYERS = 2**12 # far more than any model has; building a layer takes a millisecond
VECTOR_SIZE = 16 # normal_ uses another algorithm for smaller tensors


def plain_name(name: str) -> str:
    """nanoGPT's name of a tensor: without the prefixes of torch.compile and DDP, which may be in either order, and with
    the prefix that is missing where only the model's transformer was saved.
    """
    name = name.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("_orig_mod.")
    return f"transformer.{name}" if name.split(".")[0] in ("wte", "wpe", "h", "ln_f") else name


def require_tensors(tensors: object, file: TensorFile, path: Path) -> StoredTensors:
    """The tensors of a file by nanoGPT's names, without mask buffers.

    Raises ValueError unless they are floating point tensors by name, which lie in the file. Views made by expand, or
    one record under many names, can claim far more bytes than the file has. Twice its bytes are allowed, because a tied
    head is stored once and named twice.
    """
    if not isinstance(tensors, dict) or not tensors:
        raise ValueError(f"{path} must hold tensors by name, but holds {repr_or_type(tensors or None)}")
    stored, claimed = {}, 0
    for name, tensor in tensors.items():
        if not (isinstance(name, str) and isinstance(tensor, StoredTensor)):
            raise ValueError(f"{path} must hold tensors by name, but holds "
                             f"{repr_or_type(name)}: {type(tensor).__name__}")
        if MASK_BUFFER.search(name):
            continue
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{path} holds {name!r:.60} as {tensor.dtype}: only dense floating point is allowed")
        file.check(tensor)
        claimed += tensor.nbytes
        stored[plain_name(name)] = file, tensor
    size = os.path.getsize(path)
    if claimed > 2 * size:
        raise ValueError(f"{path} has {size} bytes, but claims tensors of {claimed} bytes")
    return stored


def read_model(model_args: dict, stored: StoredTensors, source: Path, convert: Convert | None, with_crc32: bool,
               adjust: Callable[[str, Tensor], Tensor] | None = None) -> dict:
    """Read the tensors in float32. Returns the fields model_args, state_dict, vocab_size and crc32 of a Checkpoint.

    convert: called with each weight of a Linear and of the token embedding as soon as it is read; its result is in the
    state_dict instead, so that one such weight is in memory at a time. adjust: called before, with name and tensor.
    The head is tied if it and the embedding hold the same numbers, even as two tensors or in two precisions. Then one
    object is in the state_dict under both names. The checksum is a CRC-32 over the tensors in the order of their names,
    a tied head once. Raises ValueError unless model_args and the tensors fit; RejectedFileError as TensorFile.read.
    """
    def read(name: str) -> Tensor:
        file, tensor = stored[name]
        tensor = file.read(tensor)
        tensor = (adjust(name, tensor) if adjust else tensor).float().contiguous() # mostly copies nothing
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

    num_layers = len({name.split(".")[2] for name in stored if name.startswith("transformer.h.")})
    if num_layers > MAX_LAYERS:
        raise ValueError(f"{source} holds tensors of {num_layers} layers; at most {MAX_LAYERS} are allowed")
    if model_args.get("n_layer") != num_layers: # a model of 10**9 layers would never be built
        raise ValueError(f"{source} says n_layer={model_args.get('n_layer')!r:.40} "
                         f"but holds tensors of {num_layers} layers")
    if missing := [name for name in (EMBEDDING, HEAD) if name not in stored]:
        raise ValueError(f"{source} holds no GPT; missing: {', '.join(missing)}")
    state_dict, crc, is_tied = {}, 0, stored[HEAD] == stored[EMBEDDING]
    for name in sorted(stored): # so the head is before the embedding
        if name == EMBEDDING and is_tied:
            continue
        tensor = read(name)
        if name == EMBEDDING and stored[HEAD][1].shape == tensor.shape:
            is_tied = torch.equal(tensor, state_dict[HEAD] if convert is None else read(HEAD))
            if is_tied:
                continue
        if with_crc32:
            crc = zlib.crc32(tensor.view(-1).numpy(), crc)
        is_weight = tensor.dim() == 2 and name != POSITIONS
        state_dict[name] = convert(tensor) if convert and is_weight else tensor
    if is_tied:
        state_dict[EMBEDDING] = state_dict[HEAD]
    shape = stored[EMBEDDING][1].shape
    model_args, state_dict = {**model_args, "tie_word_embeddings": is_tied}, {name: state_dict[name] for name in stored}
    require_fit(model_args, state_dict)
    return {"model_args": model_args, "state_dict": state_dict, "vocab_size": shape[0] if len(shape) == 2 else 0,
            "crc32": f"{crc:08x}" if with_crc32 else None}


def count_init_draws(state_dict: Mapping[str, Tensor | StoredTensor]) -> int:
    """How many 32-bit random numbers nanoGPT's GPT(config) draws on the CPU for a model with these tensors.

    nanoGPT sets the seed and builds the model, which draws initial weights. Then it loads the checkpoint and samples.
    PyTorch first initialises every Linear (weight and bias, uniform_) and Embedding (normal_). nanoGPT then
    initialises the weights of both with normal_, and every c_proj.weight once more. state_dict has nanoGPT's names, and
    only its shapes matter. It has a tied lm_head under both names, and both count.
    """
    sizes = {name: math.prod(tensor.shape) for name, tensor in state_dict.items()}
    draws = few = 0
    for name, tensor in state_dict.items():
        if not (name.endswith(".weight") and len(tensor.shape) == 2):
            continue
        is_embedding = name.endswith(("wte.weight", "wpe.weight"))
        if not is_embedding:
            draws += sizes[name] + sizes.get(name.removesuffix("weight") + "bias", 0)
        num_normal = 2 if is_embedding or name.endswith("c_proj.weight") else 1
        if sizes[name] < VECTOR_SIZE:
            few += num_normal * sizes[name]
        else: # one draw for each entry, and 16 more to redo a partial last vector
            draws += num_normal * (sizes[name] + (VECTOR_SIZE if sizes[name] % VECTOR_SIZE else 0))
    # For small tensors, normal_ makes two numbers from four draws, and keeps the second number for its next call.
    return draws + 4 * -(-few // 2)


def repr_or_type(value: object) -> str:
    """A text or number for a message; for other values only the type, as nested values could print forever."""
    is_short = isinstance(value, str | int | float | None)
    return f"{value!r:.60}" if is_short else type(value).__name__.removeprefix("Stored") # a StoredTensor is a Tensor
