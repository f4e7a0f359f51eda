"""Checkpoint: a model as data. Reads the tensors of one, checks that they fit the model, and builds
a GPT of it.
"""
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sampling.checkpoints.pickles import StoredTensor, describe, unwrap
from sampling.checkpoints.tensor_files import TensorFile
from sampling.checkpoints.untrusted_files import require
from sampling.model import GPT, GPTConfig
from sampling.sampler.row_streams import count_init_draws

StoredTensors = dict[str, StoredTensor] # by name
HEAD = "lm_head.weight"
EMBEDDING = "transformer.wte.weight"
POSITIONS = "transformer.wpe.weight"
# Older checkpoints hold the causal mask. The model needs none.
MASK_BUFFER = re.compile(r"\.attn\.(masked_)?bias$")
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
TRANSFORMER_PARTS = {"wte", "wpe", "h", "ln_f"}
GPT_PARTS = TRANSFORMER_PARTS | {"transformer", "lm_head"}
MAX_LAYERS = 2**12 # far more than any model has; building a layer takes a millisecond


@dataclass
class Checkpoint:
    """The content of a ckpt.pt, or of the files of a Hugging Face model: data only.

    Nothing in a file was run.
    """
    # The file, or the folder or Hugging Face id as it was given; for messages and JSONL.
    path: str
    config: GPTConfig
    # By nanoGPT's names: tensors in float32, or QuantizedWeights where int8 was asked for.
    state_dict: dict
    folder: Path # the folder of the file or the model; it may hold the tokenizer
    crc32: str = "" # a checksum of the tensors, 8 hexadecimal digits
    is_huggingface: bool = False # otherwise it is a ckpt.pt
    # How many 32-bit random numbers nanoGPT draws, after it sets the seed, to initialise such a
    # model. build-nanogpt sets the seed later, but gets nanoGPT's samples.
    num_init_draws: int = 0
    iter_num: int | None = None # how many steps the model was trained
    val_loss: float | None = None
    # The settings of train.py, or config.json: plain data of any type.
    raw_config: dict = field(default_factory=dict)
    file_state: tuple | None = None # the state of the ckpt.pt when it was read
    # An OwnModel, which runs itself: of it, config has only the sizes.
    own_model: Any = None

    def describe(self) -> str:
        facts = []
        if self.iter_num is not None:
            facts.append(f"iteration {self.iter_num}")
        if self.val_loss is not None:
            facts.append(f"validation loss {self.val_loss:.4f}")
        return f"{self.path}: {', '.join(facts) or 'loaded'}"


class Model(NamedTuple):
    """The tensors of a model, and what they are for: fields of a Checkpoint."""
    config: GPTConfig
    state_dict: dict
    crc32: str
    num_init_draws: int
    own_model: Any = None


# ---- tensors by name

def without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def nanogpt_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by nanoGPT's names, without the parts that torch.compile, DDP, FSDP or a class around
    the GPT adds.
    """
    renamed = {}
    for name, tensor in tensors.items():
        parts = without_wrappers(name).split(".")
        if not GPT_PARTS.isdisjoint(parts):
            while parts[0] not in GPT_PARTS:
                parts.pop(0)
        if parts[0] in TRANSFORMER_PARTS:
            parts.insert(0, "transformer")
        new = ".".join(parts)
        require(new not in renamed, f"two of its tensors are called {new!r:.60} without wrappers, "
                f"such as {name!r:.60}")
        renamed[new] = tensor
    return renamed


def tensors_by_name(tensors: object, file: TensorFile) -> StoredTensors:
    """The tensors of a file by nanoGPT's names, without mask buffers."""
    named = nanogpt_names(require_tensors(tensors, file))
    return {name: tensor for name, tensor in named.items() if not MASK_BUFFER.search(name)}


def share_head(stored: StoredTensors) -> StoredTensors:
    """Give a tied head both of its names: a file may have one of them."""
    tied = stored.get(HEAD, stored.get(EMBEDDING))
    return {HEAD: tied, EMBEDDING: tied} | stored if tied else stored


def require_tensors(tensors: object, file: TensorFile) -> StoredTensors:
    """The tensors, which now know their file. Raises ValueError unless this is a mapping of names
    to tensors, which lie in the file and are not more than it has.

    Views made by expand, or records that overlap, can claim far more bytes. A tied head claims
    twice. Masks, which layers may share, do not count.
    """
    named = unwrap(tensors)
    reason = ("it must hold tensors by name (the state_dict() of a module, the full_tensor() "
              "of a DTensor, nothing quantized), but holds ")
    require(isinstance(named, dict) and named, reason + describe(tensors or None))
    claimed = 0
    for name, tensor in named.items():
        is_tensor = isinstance(name, str) and isinstance(tensor, StoredTensor)
        require(is_tensor, f"{reason}{describe(name)}: {describe(tensor)}")
        file.check(tensor)
        if not MASK_BUFFER.search(name):
            claimed += tensor.nbytes
    require(claimed <= 2 * file.size,
            f"it has {file.size} bytes, but claims tensors of {claimed} bytes")
    return {name: tensor._replace(file=file) for name, tensor in named.items()}


# ---- reading

def read_model(model_args: dict, stored: StoredTensors, dtype: torch.dtype) -> Model:
    """Read the tensors.

    model_args: fields of GPTConfig. If they lack bias, the tensors show whether there are biases.
    dtype: with torch.int8, the weights of Linears and the token embedding are quantized as soon as
    they are read, so that one such weight is in memory in float32 at a time; all else is float32.
    A head that equals the embedding is tied to it: both are one object.
    """
    def read(name: str) -> Tensor:
        tensor = stored[name].file.read(stored[name])
        tensor = tensor.float().contiguous() # mostly copies nothing
        is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if is_whole else tensor.clone()

    for name, tensor in stored.items():
        require(tensor.dtype.is_floating_point, f"it holds {name!r:.60} as {tensor.dtype}: only "
                "dense floating point is allowed, not quantized")
    config = GPTConfig(**{"bias": "transformer.ln_f.bias" in stored} | model_args)
    require_fit(config, stored)
    is_tied = stored[HEAD] == stored[EMBEDDING] or torch.equal(read(HEAD), read(EMBEDDING))
    stored = dict(sorted(stored.items())) # so the head is before the embedding
    state_dict = {}
    for name, tensor in stored.items():
        if is_tied and name == EMBEDDING:
            state_dict[name] = state_dict[HEAD]
        elif dtype == torch.int8 and len(tensor.shape) == 2 and name != POSITIONS:
            state_dict[name] = quantize(read(name))
        else:
            state_dict[name] = read(name)
    return Model(replace(config, tie_word_embeddings=is_tied), state_dict,
                 f"{checksum(config, stored):08x}", count_init_draws(state_dict))


def checksum(config: object, stored: StoredTensors) -> int:
    """A checksum of a model whose tensors were read."""
    lines = [f"{config}\n"]
    for name, tensor in stored.items():
        lines.append(f"{name} {tensor[1:5]} {tensor.file.records[tensor.key].crc32}\n")
    return zlib.crc32("".join(lines).encode())


def require_fit(config: GPTConfig, tensors: StoredTensors) -> None:
    """Raises RejectedFileError unless there is such a model, and these are its tensors."""
    for name, kind in GPTConfig.__annotations__.items():
        value = getattr(config, name)
        if kind is int or (name == "n_inner" and value is not None):
            least = 0 if name == "n_layer" else 1
            require(type(value) is int and least <= value < 2**31,
                    f"{name} must be a whole number, at least {least} and below 2**31; "
                    f"got {value!r:.100}")
        if kind is float:
            # nanoGPT takes dropout=False, but its epsilon is no field.
            kinds = (int, float, bool) if name == "dropout" else (int, float)
            require(type(value) in kinds and 0 <= value <= 1,
                    f"{name} must be a number between 0 and 1; got {value!r:.100}")
    require(config.n_embd % config.n_head == 0,
            f"n_head must divide n_embd; got {config.n_head} and {config.n_embd}")
    require(config.gelu in ("none", "tanh"),
            f"gelu must be 'none' or 'tanh'; got {config.gelu!r:.100}")
    num_layers = len({name.split(".")[2] for name in tensors if name.startswith("transformer.h.")})
    # A model of 10**9 layers would never be built.
    require(config.n_layer == num_layers <= MAX_LAYERS,
            f"it says n_layer={config.n_layer} but holds tensors of {num_layers} layers; at most "
            f"{MAX_LAYERS} may be")
    misfits = describe_misfits(tensors, empty_gpt(config).state_dict())
    inner = f"with n_inner={config.n_inner}, the width of its MLP, " if config.n_inner else ""
    require(not misfits, f"the tensors do not fit the model {inner}{misfits}")


def describe_misfits(found: Mapping[str, StoredTensor | Tensor],
                     model: Mapping[str, Tensor]) -> str:
    """Which tensors have other names or shapes than those of a model, for a message; '' if none."""
    problems = []
    for name in {**model, **found}:
        shape = tuple(found[name].shape) if name in found else "nothing"
        wanted = tuple(model[name].shape) if name in model else "nothing"
        if shape != wanted:
            problems.append(f"{name}: {shape} instead of {wanted}")
    return f"({len(problems)} differ): {'; '.join(problems[:5])}" if problems else ""


# ---- int8

class QuantizedWeight(NamedTuple):
    """A weight (O, I) as whole numbers in int8, and the scale (O,) that each row is multiplied by.
    """
    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


def quantize(weight: Tensor) -> QuantizedWeight:
    """Round a weight (O, I) to int8, with one scale for each row."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), dtype=torch.float32)
    size = max(1, 2**18 // weight.size(1)) # rows at a time: their copies need little memory
    for start in range(0, len(weight), size):
        rows = weight[start:start + size].float()
        # A row of zeros must not be divided by 0.
        scale = rows.abs().amax(dim=1) / 127 + 2.0**-100
        scales[start:start + size] = scale
        values[start:start + size] = (rows / scale[:, None]).round_()
    return QuantizedWeight(values, scales)


# ---- the model

def build_gpt(checkpoint: Checkpoint) -> GPT:
    """A model in eval mode. It takes the tensors away: the Checkpoint has none afterwards."""
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
    """Skips torch's init functions: on the meta device, their first call imports modules, which
    takes a second.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("kaiming_uniform_", "uniform_", "normal_", "fill_", "zero_"):
            return None
        return func(*args, **kwargs or {})
