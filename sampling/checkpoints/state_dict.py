"""Checks the tensors of a checkpoint, normalises them, and copies them out of the file."""
import os
import re
import zlib
from pathlib import Path

import torch
from torch import Tensor

from sampling.checkpoints.mapped_memory import pages_of, release_pages
from sampling.checkpoints.zip_scanner import Checksums

StateDict = dict[str, Tensor]

HEAD, EMBEDDING, POSITIONS = "lm_head.weight", "transformer.wte.weight", "transformer.wpe.weight"
MASK_BUFFER = re.compile(r"\.attn\.(masked_)?bias$") # older checkpoints hold the causal mask; the model needs none
ROWS_AT_ONCE = 2**12 # of a tensor whose checksum is computed
MAX_LAYERS = 2**12 # far more than any model has; building a layer takes a millisecond


def require_tensors(state_dict: object, source: Path) -> StateDict:
    """Return state_dict. Raises ValueError unless it holds dense floating point tensors by name, of a credible size."""
    if not isinstance(state_dict, dict) or not state_dict:
        found = "none" if state_dict == {} else repr_or_type(state_dict)
        raise ValueError(f"{source} must hold tensors by name, but holds {found}")
    for name, tensor in state_dict.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            raise ValueError(f"{source} must hold tensors by name, but holds "
                             f"{repr_or_type(name)}: {type(tensor).__name__}")
        is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
        if not is_dense or not (tensor.is_floating_point() or MASK_BUFFER.search(name)):
            raise ValueError(f"{source} holds {name!r:.60} as {tensor.dtype}, {tensor.layout}, {tensor.device}: "
                             "only dense floating point is allowed")
    require_claim_fits(state_dict, source)
    return state_dict


def require_claim_fits(state_dict: StateDict, source: Path) -> None:
    """Raise ValueError if the tensors claim more than twice the bytes of the file.

    Views made by expand, or one storage under many names, can claim far more bytes than the file has, and every tensor
    is copied. Twice the bytes are allowed, because a tied head is stored once and named twice.
    """
    storages = [tensor.untyped_storage() for tensor in state_dict.values()]
    stored = {storage.data_ptr(): storage.nbytes() for storage in storages}
    claimed = max(sum(tensor.nbytes for tensor in state_dict.values()), sum(stored.values()))
    if claimed > 2 * os.path.getsize(source):
        raise ValueError(f"{source} has {os.path.getsize(source)} bytes, but claims tensors of {claimed} bytes")


def normalize_state_dict(model_args: dict, state_dict: StateDict, source: Path, checksums: Checksums,
                         copy_weights: bool = True) -> tuple[dict, StateDict]:
    """Drop mask buffers, find out whether the head is tied, and copy the tensors as copy_tensors does.

    Returns model_args with tie_word_embeddings, and the copies; a tied head is one tensor under two names. Raises
    ValueError if the number of layers is wrong, or a tensor's bytes match none of the checksums.
    """
    state_dict = {name: tensor for name, tensor in state_dict.items() if not MASK_BUFFER.search(name)}
    require_num_layers(model_args, state_dict, source)
    is_tied = has_tied_head(state_dict)
    if is_tied:
        state_dict.pop(EMBEDDING, None)
    copies = copy_tensors(state_dict, source, checksums, copy_weights)
    if is_tied and HEAD in copies:
        copies[EMBEDDING] = copies[HEAD]
    return {**model_args, "tie_word_embeddings": is_tied}, copies


def require_num_layers(model_args: dict, state_dict: StateDict, source: Path) -> None:
    """Raise ValueError unless n_layer is the number of layers with tensors: building 10**9 layers would never end."""
    num_layers = len({name.split(".")[2] for name in state_dict if name.startswith("transformer.h.")})
    if num_layers > MAX_LAYERS:
        raise ValueError(f"{source} holds tensors of {num_layers} layers; at most {MAX_LAYERS} are allowed")
    if model_args.get("n_layer") != num_layers:
        raise ValueError(f"{source} says n_layer={model_args.get('n_layer')!r:.40} "
                         f"but holds tensors of {num_layers} layers")


def has_tied_head(state_dict: StateDict) -> bool:
    """Whether head and embedding hold the same numbers, even as two tensors or in two precisions."""
    head, embedding = state_dict.get(HEAD), state_dict.get(EMBEDDING)
    if head is not None and embedding is not None and head.shape == embedding.shape:
        return torch.equal(head.float(), embedding.float())
    return head is embedding # both may be missing


def copy_tensors(state_dict: StateDict, source: Path, checksums: Checksums, copy_weights: bool = True) -> StateDict:
    """Copy the tensors in float32, and compare each storage with the checksums, if there are any.

    The tensors are copied because a training run may overwrite a mapped file. The file's pages are released after
    each tensor, so that the model is in memory once, not twice. copy_weights=False keeps the weights of Linears and of
    the token embedding as they are, possibly mapped, for a backend that converts them before anything else happens.
    """
    pages, copies, checked = pages_of(state_dict.values()), {}, set()
    for name, tensor in state_dict.items():
        copies[name] = tensor
        if copy_weights or tensor.dim() != 2 or name == POSITIONS:
            copies[name] = tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        storage = tensor.untyped_storage()
        if checksums and storage.data_ptr() not in checked:
            checked.add(storage.data_ptr())
            if length_and_crc32(tensor, copies[name]) not in checksums:
                raise ValueError(f"{source} is damaged: the numbers of {name!r:.60} do not match their checksum")
        release_pages(pages)
    return copies


def length_and_crc32(tensor: Tensor, copy: Tensor) -> tuple[int, int]:
    """The number of bytes of a tensor's whole storage, and their CRC-32, as in the file's record.

    If the copy has the same bytes, computes its CRC-32: the copy is what the model uses, and is in memory already.
    """
    storage = tensor.untyped_storage()
    if tensor.dtype == copy.dtype and tensor.is_contiguous() and storage.nbytes() == copy.nbytes:
        storage = copy.untyped_storage()
    return storage.nbytes(), zlib.crc32(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())


def crc32_of(state_dict: StateDict) -> str:
    """A checksum of the weights in float32, as eight hexadecimal digits. A tied head counts once."""
    crc, pages = 0, pages_of(state_dict.values())
    for name, tensor in sorted(state_dict.items()):
        if name != EMBEDDING or tensor is not state_dict.get(HEAD):
            for part in tensor.split(ROWS_AT_ONCE): # a mapped tensor is never all in memory
                crc = zlib.crc32(part.float().flatten().view(torch.uint8).numpy(), crc)
                release_pages(pages)
    return f"{crc:08x}"


def vocab_size_of(state_dict: StateDict) -> int:
    """The rows of the token embedding; 0 if it is missing or not a matrix."""
    embedding = state_dict.get(EMBEDDING)
    return embedding.shape[0] if embedding is not None and embedding.dim() == 2 else 0


def plain_name(name: str) -> str:
    """The name of a tensor without the prefixes of torch.compile and DDP, which may be in either order."""
    return name.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("_orig_mod.")


def repr_or_type(value: object) -> str:
    """A text or number for a message; for other values only the type, as nested values could print forever."""
    return f"{value!r:.60}" if isinstance(value, str | int | float | None) else type(value).__name__
