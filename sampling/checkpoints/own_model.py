"""The GPT of the user's own model.py. Unlike all else in this folder, this runs a file: the one
that model_file names. Its model then computes the logits.
"""
import inspect
import logging
import os
import zlib
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sampling.checkpoints.checkpoint import MASK_BUFFER, Model, describe_misfits, without_wrappers
from sampling.checkpoints.model_source import NANOGPT, read_source
from sampling.model import GPTConfig
from sampling.sampler.mt19937 import advance_mt19937
from sampling.sampler.row_streams import count_init_draws
from sampling.user_code import import_file, importing, module_name, running

logger = logging.getLogger(__name__)
# How far a row's logits may differ alone and beside others, in standard deviations of the logits.
TOLERANCE = 1e-4
PROBE_SEED = 2_943_182_117 # no model sets it itself, so each that sets a seed is noticed
MAX_DRAWS = 16 # for each weight, to initialise a model


@dataclass
class OwnModel:
    """A model of the user's own class GPT, in eval mode."""
    path: Path # of its file, for messages
    gpt: Any # an nn.Module, or what torch.compile makes of it
    # Whether a row's logits depend on the other rows, as with an expert's capacity.
    needs_single_rows: bool = False

    @torch.no_grad()
    def __call__(self, ids: Tensor, **targets: Tensor) -> Tensor:
        """Token ids (B, T) -> logits (B, 1 or T, V): of all positions with targets, otherwise
        perhaps of the last one.

        forward may return them in an object, or first in a tuple. Raises ValueError if it fails, or
        returns others.
        """
        with running(self.path, "forward"):
            output = self.gpt(ids, **targets)
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
                   crc: int) -> Model:
    """Import a model.py, and build its GPT from the fields and the tensors of a checkpoint.

    crc: the checksum of these; that of the Model is also of all source. Raises ValueError with the
    file and its line.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no model_file {path}: give the path of a model.py")
    if not (path.is_file() or path.is_dir()): # reading a device or a pipe may never end
        raise ValueError(f"model_file {path} is a device or a pipe: it must be a model.py, or the "
                         "folder of a package")
    name = module_name(path)
    with importing(path, name) as modules, torch.random.fork_rng(devices=[]):
        with running(path, "import"):
            module = import_file(path, name)
        for needed in "GPT", "GPTConfig":
            if not hasattr(module, needed):
                classes = [key for key, value in vars(module).items() if isinstance(value, type)]
                raise ValueError(f"{path} has no class {needed}, only these classes: "
                                 f"{', '.join(classes) or 'none'}; write '{needed} = ...' in it")
        torch.default_generator.manual_seed(PROBE_SEED)
        with running(path, "GPTConfig with the fields of the checkpoint "
                           f"({', '.join(model_args)})"):
            config = module.GPTConfig(**model_args)
        with running(path, "GPT"):
            gpt = module.GPT(config)
        if not isinstance(gpt, nn.Module):
            raise ValueError(f"{path}: GPT must make a torch.nn.Module; got {type(gpt).__name__}")
        num_draws = count_draws(tensors)
        if num_draws is None:
            logger.warning(f"{path} sets the seed itself, so the samples are not those of "
                           "nanoGPT's sample.py")
        load_tensors(path, gpt, tensors)
        sizes = sizes_of(path, getattr(gpt, "config", config))
        vocab_size, needs_single_rows = try_model(path, gpt.eval(), sizes)
    announce(path, gpt)
    crc = zlib.crc32(source_of(path, modules), crc)
    return Model(GPTConfig(**sizes | {"vocab_size": vocab_size}), dict(gpt.named_parameters()),
                 f"{crc:08x}", num_draws or 0, OwnModel(path, gpt, needs_single_rows))


def source_of(path: Path, modules: dict[str, ModuleType]) -> bytes:
    """The source of a model.py and of its neighbours."""
    files = {path, *(getattr(module, "__file__", None) for module in modules.values())}
    files = sorted(filter(os.path.isfile, {*map(str, files)}))
    return b"".join(Path(file).read_bytes() for file in files)


def announce(path: Path, gpt: nn.Module) -> None:
    """Say that the model runs itself, and what would be faster."""
    advice = f"; if its edits change no logits, pass model_file={NANOGPT}, which is much faster"
    with suppress(TypeError, OSError): # the file of the class is unknown
        source = read_source(Path(inspect.getfile(type(gpt))))
        source.warn_of_generate()
        if not source.differences:
            advice = (", although it computes what nanoGPT's own does: without model_file, this "
                      "project's kernels run it much faster")
    logger.info(f"{path} runs itself, the whole window for each token, as in nanoGPT{advice}")


# ---- the model

def count_draws(tensors: dict[str, Tensor]) -> int | None:
    """How many 32-bit numbers torch's CPU generator has drawn since it got PROBE_SEED; None if it
    got another seed. Tries the number of nanoGPT's own model first.
    """
    wanted = torch.empty(8, dtype=torch.int32).random_()
    usual = count_init_draws(tensors)
    generator = torch.Generator().manual_seed(PROBE_SEED)
    advance_mt19937(generator, usual)
    if torch.equal(wanted, torch.empty_like(wanted).random_(generator=generator)):
        return usual
    generator.manual_seed(PROBE_SEED)
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
            name = without_wrappers(name)
        if name in own or not MASK_BUFFER.search(name):
            named[name] = tensor
    try:
        with running(path, "load_state_dict"):
            gpt.load_state_dict(named)
    except ValueError:
        misfits = describe_misfits(named, own)
        if not misfits:
            raise
        raise ValueError(f"{path}: the tensors of the checkpoint do not fit its GPT "
                         f"{misfits}") from None


def sizes_of(path: Path, config: Any) -> dict[str, int]:
    """The sizes that the config of a model names."""
    sizes = {}
    for name in "block_size", "vocab_size", "n_layer", "n_head", "n_embd":
        size = getattr(config, name, None)
        if type(size) is int and size > 0:
            sizes[name] = size
    if "block_size" not in sizes:
        raise ValueError(f"{path}: its GPTConfig needs block_size, how many tokens a window has")
    return sizes


def try_model(path: Path, gpt: nn.Module, sizes: dict[str, int]) -> tuple[int, bool]:
    """How many logits a model computes, and whether it needs single rows: because its rows, or its
    calls, depend on each other.

    A copy of the model runs, so that what it keeps between calls stays as it is.
    """
    copy = gpt
    with suppress(Exception): # a lock, for example, cannot be copied
        copy = deepcopy(gpt, {id(weight): weight for weight in gpt.parameters()})
    model = OwnModel(path, copy)
    shape = 8, min(8, sizes["block_size"])
    torch.default_generator.manual_seed(PROBE_SEED)
    ids = torch.randint(sizes.get("vocab_size", 1), shape)
    start = torch.get_rng_state()
    alone = torch.cat([model(row)[:, -1] for row in ids.split(1)])
    if not alone.amax(dim=-1).isfinite().all(): # -inf masks a token
        raise ValueError(f"{path}: forward returns logits that are NaN or infinite")
    again = model(ids[:1])[:, -1]
    is_steady = torch.equal(start, torch.get_rng_state()) and are_close(again, alone[:1])
    if not is_steady:
        logger.warning(f"{path}: forward draws random numbers, or depends on earlier calls, so the "
                       "text of its own sample.py cannot be had")
    elif not are_close(model(ids)[:, -1], alone):
        is_steady = False
        logger.info(f"{path}: a row's logits depend on the other rows, so each sample is computed "
                    "alone")
    return alone.size(-1), not is_steady


def are_close(found: Tensor, expected: Tensor) -> bool:
    """Whether logits differ by no more than rounding."""
    expected = expected.float()
    # -inf - -inf is NaN.
    difference = (found.float() - expected).abs().masked_fill(found == expected, 0)
    return bool(difference.max() <= TOLERANCE * expected[expected.isfinite()].std())
