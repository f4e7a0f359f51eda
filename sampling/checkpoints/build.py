"""Checkpoint: a model as data. Reads the tensors of one, checks that they fit the model, and builds a GPT of it."""
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sampling.checkpoints.pickles import StoredTensor, describe, unwrap
from sampling.checkpoints.tensor_files import TensorFile
from sampling.checkpoints.untrusted_files import require
from sampling.model import GPT, GPTConfig

StoredTensors = dict[str, tuple[TensorFile, StoredTensor]] # by nanoGPT's names

HEAD, EMBEDDING, POSITIONS = "lm_head.weight", "transformer.wte.weight", "transformer.wpe.weight"
MASK_BUFFER = re.compile(r"\.attn\.(masked_)?bias$") # older checkpoints hold the causal mask; the model needs none
# What sampling does not need: other heads, and the attention to an encoder, which a decoder alone does not use
UNNEEDED = re.compile(r"(?!transformer\.|lm_head\.)|.*\.(crossattention|ln_cross_attn)\.")
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
TRANSFORMER_PARTS = {"wte", "wpe", "h", "ln_f"}
GPT_PARTS = TRANSFORMER_PARTS | {"transformer", "lm_head"}
MAX_LAYERS = 2**12 # far more than any model has; building a layer takes a millisecond
VECTOR_SIZE = 16 # normal_ uses another algorithm for smaller tensors


@dataclass
class Checkpoint:
    """The content of a ckpt.pt, or of the files of a Hugging Face model: data only. Nothing in a file was run."""
    path: str # the file, or the folder or Hugging Face id as it was given; for messages and JSONL
    config: GPTConfig
    state_dict: dict # by nanoGPT's names: tensors in float32, or QuantizedWeights where int8 was asked for
    folder: Path # of the file or the model; it may hold the tokenizer
    crc32: str = "" # a checksum of the tensors, 8 hexadecimal digits
    is_huggingface: bool = False # otherwise it is a ckpt.pt
    num_init_draws: int = 0 # how many 32-bit random numbers nanoGPT draws to initialise such a model
    iter_num: int | None = None # how many steps the model was trained
    val_loss: float | None = None
    raw_config: dict = field(default_factory=dict) # the settings of train.py, or config.json: plain data of any type
    own_model: Any = None # an OwnModel, which runs itself: of it, config has only the sizes

    def describe(self) -> str:
        iteration = "" if self.iter_num is None else f"iteration {self.iter_num}"
        loss = "" if self.val_loss is None else f"validation loss {self.val_loss:.4f}"
        return f"{self.path}: {', '.join(filter(None, [iteration, loss])) or 'loaded'}"


def without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def nanogpt_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by nanoGPT's names, without the parts that torch.compile, DDP, FSDP or a class around the GPT adds."""
    renamed = {}
    for name, tensor in tensors.items():
        parts = without_wrappers(name).split(".")
        parts = parts[next((i for i, part in enumerate(parts) if part in GPT_PARTS), 0):]
        new = ".".join(["transformer", *parts] if parts and parts[0] in TRANSFORMER_PARTS else parts)
        require(new not in renamed, f"two of its tensors are called {new!r:.60} without wrappers, such as {name!r:.60}")
        renamed[new] = tensor
    return renamed


def tensors_by_name(tensors: object, file: TensorFile, unneeded: list[str] | None = None) -> StoredTensors:
    """The tensors of a file by nanoGPT's names, without mask buffers. Raises ValueError unless they lie in the file.

    unneeded: a list that gets the names of tensors that sampling does not need; without it, they are the model's.
    """
    stored = {}
    for name, tensor in nanogpt_names(require_tensors(tensors)).items():
        if unneeded is not None and UNNEEDED.match(name):
            unneeded.append(name)
        elif not MASK_BUFFER.search(name):
            require(tensor.dtype.is_floating_point,
                    f"it holds {name!r:.60} as {tensor.dtype}: only dense floating point is allowed, not quantized")
            stored[name] = file, tensor
    require_size(file, [tensor for _, tensor in stored.values()])
    return stored


def require_tensors(tensors: object) -> dict[str, StoredTensor]:
    named, reason = unwrap(tensors), "it must hold tensors by name, but holds "
    require(isinstance(named, dict) and named, reason + describe(tensors or None))
    for name, tensor in named.items():
        is_tensor = isinstance(name, str) and isinstance(tensor, StoredTensor)
        require(is_tensor, f"{reason}{describe(name)}: {describe(tensor)}")
    return named


def require_size(file: TensorFile, tensors: list[StoredTensor]) -> None:
    """Views made by expand, or records that overlap, can claim far more bytes than the file has. A tied head claims
    twice.
    """
    for tensor in tensors:
        file.check(tensor)
    claimed = sum(tensor.nbytes for tensor in tensors)
    require(claimed <= 2 * file.size, f"it has {file.size} bytes, but claims tensors of {claimed} bytes")


def read_model(model_args: dict, stored: StoredTensors, dtype: torch.dtype) -> dict:
    """Read the tensors. Returns the fields config, state_dict and crc32 of a Checkpoint.

    dtype: with torch.int8, the weights of Linears and the token embedding are quantized as soon as they are read, so
    that one such weight is in memory in float32 at a time; all else is float32. A tied head is the embedding's object.
    """
    def read(name: str) -> Tensor:
        file, tensor = stored[name]
        tensor = file.read(tensor).float().contiguous() # mostly copies nothing
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

    require_fit(model_args, {name: tensor for name, (_, tensor) in stored.items()})
    is_tied = stored[HEAD] == stored[EMBEDDING] or torch.equal(read(HEAD), read(EMBEDDING))
    state_dict, lines = {}, [f"{GPTConfig(**model_args)}\n"]
    for name, (file, tensor) in sorted(stored.items()): # so the head is before the embedding
        is_quantized = dtype == torch.int8 and len(tensor.shape) == 2 and name != POSITIONS
        state_dict[name] = (state_dict[HEAD] if name == EMBEDDING and is_tied else
                            quantize(read(name)) if is_quantized else read(name))
        lines.append(checksum_line(name, file, tensor))
    return {"config": GPTConfig(**model_args | {"tie_word_embeddings": is_tied}), "state_dict": state_dict,
            "crc32": f"{zlib.crc32(''.join(lines).encode()):08x}"}


def checksum_line(name: str, file: TensorFile, tensor: StoredTensor) -> str:
    """What the checksum of a model covers of a tensor that was read."""
    return f"{name} {tensor[1:]} {file.records[tensor.key][2]}\n"


def require_fit(model_args: dict, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises RejectedFileError unless there is such a model, and these are its tensors."""
    config = GPTConfig(**model_args)
    for name, kind in GPTConfig.__annotations__.items():
        value = getattr(config, name)
        if kind is int or (name == "n_inner" and value is not None):
            is_size = type(value) is int and 1 <= value < 2**31
            require(is_size, f"{name} must be a whole number, at least 1 and below 2**31; got {value!r:.100}")
        if kind is float:
            is_share = isinstance(value, int | float) and 0 <= value <= 1
            require(is_share, f"{name} must be a number between 0 and 1; got {value!r:.100}")
    require(config.n_embd % config.n_head == 0, f"n_head must divide n_embd; got {config.n_head} and {config.n_embd}")
    require(config.gelu in ("none", "tanh"), f"gelu must be 'none' or 'tanh'; got {config.gelu!r:.100}")
    num_layers = len({name.split(".")[2] for name in tensors if name.startswith("transformer.h.")})
    require(config.n_layer == num_layers <= MAX_LAYERS, # a model of 10**9 layers would never be built
            f"it says n_layer={config.n_layer} but holds tensors of {num_layers} layers; at most {MAX_LAYERS} may be")
    misfits = describe_misfits(tensors, empty_gpt(config).state_dict())
    require(not misfits, f"the tensors do not fit the model {misfits}")


def describe_misfits(found: Mapping[str, Tensor | StoredTensor], model: Mapping[str, Tensor]) -> str:
    """Which tensors have other names or shapes than those of a model, for a message; '' if none."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.items()}
    given = {name: tuple(tensor.shape) for name, tensor in found.items()}
    problems = [f"{name}: {given.get(name, 'nothing')} instead of {shapes.get(name, 'nothing')}"
                for name in {**shapes, **given} if given.get(name) != shapes.get(name)]
    return f"({len(problems)} differ): {'; '.join(problems[:5])}" if problems else ""


def count_init_draws(tensors: Mapping[str, Tensor | StoredTensor]) -> int:
    """How many 32-bit random numbers nanoGPT's GPT(config) draws on the CPU for a model with these tensors.

    It builds the model after it sets the seed. PyTorch initialises every Linear (weight and bias, uniform_) and
    Embedding (normal_). nanoGPT then initialises the weights of both with normal_, and every c_proj.weight once more.
    """
    draws = num_small = 0
    for name, tensor in tensors.items():
        if name.endswith(".weight") and len(tensor.shape) == 2:
            size, is_embedding = math.prod(tensor.shape), name.endswith(("wte.weight", "wpe.weight"))
            if not is_embedding:
                draws += size + tensor.shape[0] * (name.removesuffix("weight") + "bias" in tensors)
            num_normal = 2 if is_embedding or name.endswith("c_proj.weight") else 1
            if size < VECTOR_SIZE:
                num_small += num_normal * size
            else: # one draw for each entry, and 16 more to redo a partial last vector
                draws += num_normal * (size + (VECTOR_SIZE if size % VECTOR_SIZE else 0))
    # For small tensors, normal_ makes two numbers from four draws, and keeps the second number for its next call.
    return draws + 4 * -(-num_small // 2)


# ---- int8

class QuantizedWeight(NamedTuple):
    """A weight (O, I) as whole numbers in int8, and the scale (O,) that each row is multiplied by."""
    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


def quantize(weight: Tensor) -> QuantizedWeight:
    """Round a weight (O, I) to int8, with one scale for each row."""
    values, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight), dtype=torch.float32)
    size = max(1, 2**18 // weight.size(1)) # rows at a time: their copies need little memory
    for rows, row_values, row_scales in zip(weight.split(size), values.split(size), scales.split(size), strict=True):
        rows = rows.float()
        row_scales.copy_(rows.abs().amax(dim=1) / 127 + 2.0**-100) # a row of zeros must not be divided by 0
        row_values.copy_((rows / row_scales[:, None]).round_())
    return QuantizedWeight(values, scales)


# ---- the model

def build_gpt(checkpoint: Checkpoint) -> GPT:
    """A model in eval mode, which takes the tensors out of the Checkpoint."""
    model = empty_gpt(checkpoint.config)
    model.load_state_dict(checkpoint.state_dict, assign=True)
    if model.config.tie_word_embeddings:
        model.transformer.wte.weight = model.lm_head.weight
    checkpoint.state_dict = {}
    return model.eval()


def empty_gpt(config: GPTConfig) -> GPT:
    """A model whose tensors have shapes, but no memory. It takes no time and no random numbers."""
    with torch.device("meta"), SkipInit():
        return GPT(config)


class SkipInit(TorchFunctionMode):
    """Skips torch's init functions: on the meta device, their first call imports modules, which takes a second."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        is_init = func.__name__ in ("kaiming_uniform_", "uniform_", "normal_", "fill_", "zero_")
        return None if is_init else func(*args, **kwargs or {})
