"""The GPT of the user's own model.py. Unlike all else in this folder, this runs a file: the one that model_file names.

If the model computes what GPT-2 does, the backends of this project run its weights. Otherwise, it runs itself.
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
from sampling.model import GPTConfig
from sampling.process import import_from, is_out_of_memory
from sampling.sampler.mt19937 import advance_mt19937

logger = logging.getLogger(__name__)
TOLERANCE = 1e-4 # of logits that two programs compute for one model, in standard deviations of these logits
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
        self.couples_rows = False # whether a row's logits depend on the other rows, as with an expert's capacity

    @torch.no_grad()
    def __call__(self, ids: Tensor, **targets: Tensor) -> Tensor:
        """Token ids (B, T) -> logits (B, 1 or T, V): of all positions with targets, otherwise perhaps of the last one.
        forward may return them in an object, or first in a tuple. Raises ValueError if it fails, or returns others.
        """
        with running(self.path, "forward"):
            output = self.forward(ids, **targets)
        output = output[0] if isinstance(output, tuple | list) else output
        logits = getattr(output, "logits", output)
        shape = list(getattr(logits, "shape", ()))
        B, T = ids.shape
        if len(shape) != 3 or shape[:2] not in [[B, T], [B, T if targets else 1]]:
            raise ValueError(f"{self.path}: forward returns {shape or type(logits).__name__} for token ids {[B, T]}"
                             f"{' and targets' * bool(targets)}; it must return logits: batch, positions, vocabulary")
        return logits


def load_own_model(path: Path, model_args: dict, tensors: dict[str, Tensor], runs_itself: bool) -> dict[str, Any]:
    """Import a model.py, and build its GPT from the fields and the tensors of a checkpoint, as nanoGPT does.

    runs_itself: also if it computes what GPT-2 does. Returns the fields config, state_dict, num_init_draws and
    own_model of a Checkpoint, and source_crc32, a checksum of the file and its neighbours. Raises ValueError, which
    names the file and its line.
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
                raise ValueError(f"{path} has no class {needed}, but {', '.join(classes) or 'none'}: write "
                                 f"'{needed} = ...' in it")
        torch.default_generator.manual_seed(0)
        start = torch.get_rng_state()
        with running(path, f"GPTConfig with the fields of the checkpoint ({', '.join(model_args)})"):
            config = module.GPTConfig(**model_args)
        with running(path, "GPT"):
            gpt = module.GPT(config)
        num_draws = count_draws(start, tensors)
        load_tensors(path, gpt, tensors)
        fields = examine(OwnModel(path, gpt.eval()), getattr(gpt, "config", config), runs_itself)
    if num_draws is None:
        logger.warning(f"{path} sets the seed itself, so the samples are not those of nanoGPT's sample.py")
    files = sorted(filter(None, {getattr(module, "__file__", None) for module in modules.values()}))
    source = b"".join(Path(file).read_bytes() for file in files)
    return {**fields, "num_init_draws": num_draws or 0, "source_crc32": zlib.crc32(source)}


# ---- the file

@contextmanager
def importing(path: Path, name: str) -> Iterator[dict[str, ModuleType]]:
    """In this block, a model.py finds its neighbours, but not those of the one before. The dict gets the modules of its
    folder. They stay in sys.modules, where pickles look for them, if no other module has the place.
    """
    root = path.parents[name.count(".")]
    with import_lock:
        for key in imported:
            sys.modules.pop(key, None)
        with import_from(str(path.parent), str(root), name=name.partition(".")[0]) as modules:
            yield modules
        imported.clear()
        imported.update(modules.keys() - sys.modules.keys())
        sys.modules.update({key: modules[key] for key in imported})


def import_file(path: Path, name: str) -> ModuleType:
    """Import a model.py, or the package in a folder, under the name by which train.py imports it."""
    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
    file = str(path / "__init__.py" if path.is_dir() else path)
    loader = SourceFileLoader(name, file)
    folders = [str(path)] if path.is_dir() else None
    spec = spec_from_file_location(name, file, loader=loader, submodule_search_locations=folders)
    sys.modules[name] = module_from_spec(spec)
    loader.exec_module(sys.modules[name])
    return sys.modules[name]


def module_name(path: Path) -> str:
    """Such as model; or gpt.model, if the file has relative imports and lies in the folder gpt."""
    dots = [] if path.is_dir() else re.findall(rb"^\s*from\s+(\.+)", path.read_bytes(), re.MULTILINE)
    level = max(map(len, dots), default=0)
    return ".".join([*path.parts[-1 - level:-1], path.stem])


@contextmanager
def running(path: Path, what: str) -> Iterator[None]:
    """Run the user's code in this block. What it prints goes to standard error. An exception becomes a ValueError that
    names the file and its line.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        places.append((getattr(error, "filename", None), getattr(error, "lineno", None))) # of a SyntaxError
        lines = [f", line {line}" for file, line in places if line and Path(file or "").is_relative_to(path)]
        raise ValueError(f"{path}{''.join(lines[-1:])}: {what}: {type(error).__name__}: "
                         f"{' '.join(str(error).split()):.300}") from None


# ---- the model

def count_draws(start: Tensor, tensors: dict[str, Tensor]) -> int | None:
    """How many 32-bit numbers torch's CPU generator has drawn since a state; None if it got another seed. Tries the
    number of nanoGPT's own model first.
    """
    wanted = torch.empty(8, dtype=torch.int32).random_()
    usual = build.count_init_draws(tensors)
    generator = torch.Generator().set_state(start)
    advance_mt19937(generator, usual)
    if torch.equal(wanted, torch.empty_like(wanted).random_(generator=generator)):
        return usual
    generator.set_state(start)
    numbers = chunk = torch.empty(2**16, dtype=torch.int32).random_(generator=generator)
    most = MAX_DRAWS * sum(tensor.numel() for tensor in tensors.values()) + 2**20
    for end in range(len(chunk), most, len(chunk)):
        for i in (numbers[:-7] == wanted[0]).nonzero().flatten().tolist():
            if torch.equal(numbers[i:i + 8], wanted):
                return end - len(numbers) + i
        numbers = torch.cat([numbers[-7:], chunk.random_(generator=generator)])
    return None


def load_tensors(path: Path, gpt: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load the tensors of a checkpoint. Masks, which older checkpoints hold, may be missing or more than needed."""
    own = gpt.state_dict()
    named = {name if name in own else build.without_wrappers(name): tensor for name, tensor in tensors.items()}
    masks = {name: tensor for name, tensor in own.items() if MASK_BUFFER.search(name)}
    named = masks | {name: tensor for name, tensor in named.items() if name in own or not MASK_BUFFER.search(name)}
    try:
        with running(path, "load_state_dict"):
            gpt.load_state_dict(named)
    except ValueError:
        misfits = build.describe_misfits(named, own)
        if misfits:
            raise ValueError(f"{path}: the tensors of the checkpoint do not fit its GPT {misfits}") from None
        raise


def examine(model: OwnModel, config: Any, runs_itself: bool) -> dict[str, Any]:
    """Run a model on a few windows: does it return logits, and does this project's GPT compute the same? Returns the
    fields config, state_dict and own_model of a Checkpoint.
    """
    names = "block_size", "vocab_size", "n_layer", "n_head", "n_embd"
    sizes = {name: size for name in names if type(size := getattr(config, name, None)) is int and size > 0}
    if "block_size" not in sizes:
        raise ValueError(f"{model.path}: its GPTConfig needs block_size, how many tokens a window has")
    generator = torch.Generator().manual_seed(0)
    windows = [torch.randint(sizes.get("vocab_size", 1), (1, min(length, sizes["block_size"])), generator=generator)
               for length in (1, 8, sizes["block_size"])]
    start = torch.get_rng_state()
    logits = torch.cat([model(ids)[:, -1] for ids in windows[:2]])
    if not logits.amax(dim=-1).isfinite().all(): # -inf masks a token
        raise ValueError(f"{model.path}: forward returns logits that are NaN or infinite")
    together = torch.randint(sizes.get("vocab_size", 1), (8, windows[1].size(1)), generator=generator)
    alone = torch.cat([model(row)[:, -1] for row in together.split(1)])
    if not distance(model(together)[:, -1], alone) <= TOLERANCE:
        model.couples_rows = True
        logger.info(f"{model.path}: a row's logits depend on the other rows, so each sample is computed alone")
    source = read_source(model.path) if model.path.is_file() else None
    if source:
        source.warn_of_generate()
    is_random = not torch.equal(start, torch.get_rng_state())
    if is_random:
        logger.warning(f"{model.path}: forward draws random numbers, so the samples cannot be nanoGPT's")
    elif not (runs_itself or is_edited() or is_patched()) and (equal := find_equal(model, sizes, windows)):
        logger.info(f"{model.path} computes what GPT-2 does: the kernels of this project run it")
        return equal
    logger.info(f"{model.path} runs itself: it computes the whole window for each token, as in nanoGPT")
    return {"config": GPTConfig(**sizes | {"vocab_size": logits.size(-1)}), "own_model": model,
            "state_dict": dict(model.gpt.named_parameters())}


@torch.no_grad()
def find_equal(model: OwnModel, sizes: dict[str, int], windows: list[Tensor]) -> dict[str, Any] | None:
    """The config and state_dict with which this project's GPT computes the logits of a model; None if it does not."""
    weights = {name: tensor.float() for name, tensor in model.gpt.state_dict().items() if not MASK_BUFFER.search(name)}
    try:
        is_tied = torch.equal(weights[HEAD], weights[EMBEDDING])
        fields = {**sizes, "bias": "transformer.ln_f.bias" in weights, "tie_word_embeddings": is_tied,
                  "n_inner": len(weights["transformer.h.0.mlp.c_fc.weight"])}
        build.require_fit(fields, weights)
        middle = windows[1]
        loss_logits = model(middle, targets=middle)[:, -1] # a model may differ only here
    except (KeyError, ValueError): # other tensors, or no targets
        return None
    if is_tied:
        weights[EMBEDDING] = weights[HEAD]

    configs = [GPTConfig(**fields, gelu=gelu) for gelu in ("none", "tanh")]
    gpts = [build.build_gpt(Checkpoint("", config, dict(weights), model.path)) for config in configs]

    gpt = min(gpts, key=lambda gpt: distance(gpt(middle)[0][:, -1], loss_logits))
    is_equal = (distance(gpt(middle)[0][:, -1], loss_logits) <= TOLERANCE
                and all(distance(gpt(ids)[0][:, -1], model(ids)[:, -1]) <= TOLERANCE for ids in windows))
    return {"config": gpt.config, "state_dict": weights} if is_equal else None


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference of logits, in standard deviations of the expected ones; infinite for other shapes."""
    found, expected = found.float(), expected.float()
    if found.shape != expected.shape: # a model may cut what pads its vocabulary
        return math.inf
    difference = (found - expected).abs().masked_fill(found == expected, 0) # -inf - -inf is NaN
    return float(difference.max() / expected[expected.isfinite()].std())


def is_patched() -> bool:
    return any(getattr(module, name, None) is not value
               for module, names in MODULES.items() for name, value in names.items())
