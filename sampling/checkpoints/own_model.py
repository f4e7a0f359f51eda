"""The GPT of the user's own model.py. Unlike all else in this folder, this runs a file: the one
that model_file names.

If the model computes what GPT-2 does, the backends of this project run its weights. Otherwise, it
runs itself.
"""
import importlib
import logging
import math
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sampling.checkpoints import build
from sampling.checkpoints.build import EMBEDDING, HEAD, MASK_BUFFER, Checkpoint
from sampling.checkpoints.model_source import is_edited, read_source
from sampling.model import GPT, GPTConfig
from sampling.process import import_from, is_out_of_memory
from sampling.sampler.mt19937 import advance_mt19937

logger = logging.getLogger(__name__)
# Of logits that two programs compute for one model, in standard deviations of these logits.
TOLERANCE = 1e-4
MAX_DRAWS = 16 # for each weight, to initialise a model
# A file may replace what is in torch. Then this project's GPT, too, computes something else.
MODULES = {module: {**vars(module)} for module in (F, nn)}
import_lock = RLock() # sys.path and sys.modules belong to the whole process
imported: set[str] = set() # the modules of the latest model_file


class OwnModel:
    """A model of the user's own class GPT, in eval mode. path: of its file, for messages."""

    def __init__(self, path: Path, gpt: nn.Module):
        self.path = path
        self.gpt = gpt
        self.forward: Callable[..., Any] = gpt # or what torch.compile makes of it
        # Whether a row's logits depend on the other rows, as with an expert's capacity.
        self.couples_rows = False

    @torch.no_grad()
    def __call__(self, ids: Tensor, **targets: Tensor) -> Tensor:
        """Token ids (B, T) -> logits (B, 1 or T, V): of all positions with targets, otherwise
        perhaps of the last one.

        forward may return them in an object, or first in a tuple. Raises ValueError if it fails, or
        returns others.
        """
        with running(self.path, "forward"):
            output = self.forward(ids, **targets)
        if isinstance(output, tuple | list):
            output = output[0]
        logits = getattr(output, "logits", output)
        shape = list(getattr(logits, "shape", ()))
        B, T = ids.shape
        wanted = [[B, T]] if targets else [[B, T], [B, 1]]
        if len(shape) != 3 or shape[:2] not in wanted:
            given = f"{[B, T]} and targets" if targets else [B, T]
            raise ValueError(f"{self.path}: forward returns {shape or type(logits).__name__} for "
                             f"token ids {given}; it must return logits: batch, positions, "
                             "vocabulary")
        return logits


def load_own_model(path: Path, model_args: dict, tensors: dict[str, Tensor],
                   runs_itself: bool) -> dict[str, Any]:
    """Import a model.py, and build its GPT from the fields and the tensors of a checkpoint, as
    nanoGPT does.

    runs_itself: also if it computes what GPT-2 does. Returns the fields config, state_dict,
    num_init_draws and own_model of a Checkpoint, and source_crc32, a checksum of the file and its
    neighbours. Raises ValueError, which names the file and its line.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no model_file {path}")
    name = module_name(path)
    with importing(path, name) as modules, torch.random.fork_rng(devices=[]):
        with running(path, "import"):
            module = import_file(path, name)
        for needed in "GPT", "GPTConfig":
            if not hasattr(module, needed):
                classes = [key for key, value in vars(module).items() if isinstance(value, type)]
                raise ValueError(f"{path} has no class {needed}, but "
                                 f"{', '.join(classes) or 'none'}: write '{needed} = ...' in it")
        names = ", ".join(model_args)
        torch.default_generator.manual_seed(0)
        with running(path, f"GPTConfig with the fields of the checkpoint ({names})"):
            config = module.GPTConfig(**model_args)
        with running(path, "GPT"):
            gpt = module.GPT(config)
        num_draws = count_draws(tensors)
        load_tensors(path, gpt, tensors)
        model = OwnModel(path, gpt.eval())
        fields = examine(model, getattr(gpt, "config", config), runs_itself)
    if num_draws is None:
        logger.warning(f"{path} sets the seed itself, so the samples are not those of nanoGPT's "
                       "sample.py")
    files = {getattr(module, "__file__", None) for module in modules.values()} - {None}
    source = b"".join(Path(file).read_bytes() for file in sorted(files))
    return fields | {"num_init_draws": num_draws or 0, "source_crc32": zlib.crc32(source)}


# ---- the file

@contextmanager
def importing(path: Path, name: str) -> Iterator[dict[str, ModuleType]]:
    """In this block, a model.py finds its neighbours, but not those of the one before.

    The dict gets the modules of its folder. They stay in sys.modules, where pickles look for them,
    if no other module has the place.
    """
    root = path.parents[name.count(".")]
    with import_lock:
        for key in imported:
            sys.modules.pop(key, None)
        with import_from(str(root), str(path.parent), name=name.partition(".")[0]) as modules:
            yield modules
        imported.clear()
        imported.update(modules.keys() - sys.modules.keys())
        sys.modules.update({key: modules[key] for key in imported})


def import_file(path: Path, name: str) -> ModuleType:
    """Import a model.py, or the package in a folder, under this name."""
    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
    file = str(path / "__init__.py" if path.is_dir() else path)
    spec = spec_from_file_location(name, file, loader=SourceFileLoader(name, file))
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def module_name(path: Path) -> str:
    """The name by which train.py imports it, such as model; or gpt.model, if the file has relative
    imports and lies in the folder gpt.
    """
    level = 0
    if path.is_file():
        dots = re.findall(rb"^\s*from\s+(\.+)", path.read_bytes(), re.MULTILINE)
        level = max(map(len, dots), default=0)
    return ".".join([*path.parts[-1 - level:-1], path.stem])


@contextmanager
def running(path: Path, what: str) -> Iterator[None]:
    """Run the user's code in this block.

    What it prints goes to standard error. An exception becomes a ValueError that names the file and
    its line.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        where = path
        frames = traceback.extract_tb(error.__traceback__)
        places = [(frame.filename, frame.lineno) for frame in frames]
        if isinstance(error, SyntaxError):
            places.append((error.filename or "", error.lineno))
        for file, line in places:
            if Path(file).is_relative_to(path):
                where = f"{path}, line {line}"
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: {what}: {type(error).__name__}: {reason:.300}") from None


# ---- the model

def count_draws(tensors: dict[str, Tensor]) -> int | None:
    """How many 32-bit numbers torch's CPU generator has drawn since it got the seed 0; None if it
    got another one. Tries the number of nanoGPT's own model first.
    """
    wanted = torch.empty(8, dtype=torch.int32).random_()
    usual = build.count_init_draws(tensors)
    generator = torch.Generator().manual_seed(0)
    advance_mt19937(generator, usual)
    if torch.equal(wanted, torch.empty_like(wanted).random_(generator=generator)):
        return usual
    generator.manual_seed(0)
    chunk = torch.empty(2**16, dtype=torch.int32)
    numbers = wanted[:0]
    most = MAX_DRAWS * sum(tensor.numel() for tensor in tensors.values()) + 2**20
    for end in range(len(chunk), most, len(chunk)):
        numbers = torch.cat([numbers[-7:], chunk.random_(generator=generator)])
        for i in (numbers[:-7] == wanted[0]).nonzero().flatten().tolist():
            if torch.equal(numbers[i:i + 8], wanted):
                return end - len(numbers) + i
    return None


def load_tensors(path: Path, gpt: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load the tensors of a checkpoint.

    Masks, which older checkpoints hold, may be missing or more than needed.
    """
    own = gpt.state_dict()
    named = {name: tensor for name, tensor in own.items() if MASK_BUFFER.search(name)}
    for name, tensor in tensors.items():
        if name not in own:
            name = build.without_wrappers(name)
        if name in own or not MASK_BUFFER.search(name):
            named[name] = tensor
    try:
        with running(path, "load_state_dict"):
            gpt.load_state_dict(named)
    except ValueError:
        misfits = build.describe_misfits(named, own)
        if not misfits:
            raise
        raise ValueError(f"{path}: the tensors of the checkpoint do not fit its GPT "
                         f"{misfits}") from None


def examine(model: OwnModel, config: Any, runs_itself: bool) -> dict[str, Any]:
    """Run a model on a few windows: does it return logits, and does this project's GPT compute the
    same? Returns the fields config, state_dict and own_model of a Checkpoint.
    """
    sizes = {}
    for name in "block_size", "vocab_size", "n_layer", "n_head", "n_embd":
        size = getattr(config, name, None)
        if type(size) is int and size > 0:
            sizes[name] = size
    if "block_size" not in sizes:
        raise ValueError(f"{model.path}: its GPTConfig needs block_size, how many tokens a window "
                         "has")
    shape = 8, sizes["block_size"]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(sizes.get("vocab_size", 1), shape, generator=generator)
    start = torch.get_rng_state()
    model(ids[:1, :1])
    alone = torch.cat([model(row)[:, -1] for row in ids[:, :8].split(1)])
    if not alone.amax(dim=-1).isfinite().all(): # -inf masks a token
        raise ValueError(f"{model.path}: forward returns logits that are NaN or infinite")
    if not distance(model(ids[:, :8])[:, -1], alone) <= TOLERANCE:
        model.couples_rows = True
        logger.info(f"{model.path}: a row's logits depend on the other rows, so each sample is "
                    "computed alone")
    source = read_source(model.path) if model.path.is_file() else None
    if source:
        source.warn_of_generate()
    if not torch.equal(start, torch.get_rng_state()):
        logger.warning(f"{model.path}: forward draws random numbers, so the samples cannot be "
                       "nanoGPT's")
    elif not (runs_itself or is_edited() or is_patched()):
        equal = find_equal(model, sizes, ids[:1])
        if equal:
            logger.info(f"{model.path} computes what GPT-2 does: the kernels of this project run "
                        "it")
            return equal
    logger.info(f"{model.path} runs itself: it computes the whole window for each token, as in "
                "nanoGPT")
    return {"config": GPTConfig(**sizes | {"vocab_size": alone.size(-1)}), "own_model": model,
            "state_dict": dict(model.gpt.named_parameters())}


@torch.no_grad()
def find_equal(model: OwnModel, sizes: dict[str, int], ids: Tensor) -> dict[str, Any] | None:
    """The config and state_dict with which this project's GPT computes the logits of a model after
    1, 8 and all of these ids; None if it does not.
    """
    weights = {name: tensor.float() for name, tensor in model.gpt.state_dict().items()
               if not MASK_BUFFER.search(name)}
    windows = [ids[:, :length] for length in (1, 8, ids.size(1))]
    middle = windows[1]
    try:
        is_tied = torch.equal(weights[HEAD], weights[EMBEDDING])
        config = GPTConfig(**sizes, bias="transformer.ln_f.bias" in weights,
                           n_inner=len(weights["transformer.h.0.mlp.c_fc.weight"]),
                           tie_word_embeddings=is_tied)
        build.require_fit(config, weights)
        expected = model(middle, targets=middle)[:, -1] # a model may differ only here
    except (KeyError, ValueError): # other tensors, or no targets
        return None
    if is_tied:
        weights[EMBEDDING] = weights[HEAD]

    def error(gpt: GPT) -> float:
        return distance(gpt(middle)[0][:, -1], expected)

    gpts = []
    for gelu in "none", "tanh":
        variant = replace(config, gelu=gelu)
        gpts.append(build.build_gpt(Checkpoint("", variant, dict(weights), model.path)))
    gpt = min(gpts, key=error)
    errors = [distance(gpt(window)[0][:, -1], model(window)[:, -1]) for window in windows]
    if all(found <= TOLERANCE for found in [error(gpt), *errors]):
        return {"config": gpt.config, "state_dict": weights}
    return None


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference of logits, in standard deviations of the expected ones; infinite for
    other shapes.
    """
    if found.shape != expected.shape: # a model may cut what pads its vocabulary
        return math.inf
    expected = expected.float()
    # -inf - -inf is NaN.
    difference = (found.float() - expected).abs().masked_fill(found == expected, 0)
    return float(difference.max() / expected[expected.isfinite()].std())


def is_patched() -> bool:
    return not all(names.items() <= vars(module).items() for module, names in MODULES.items())
