"""Chooses the backend for a checkpoint, and prepares it."""
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from model import GPT, GPTConfig
from sampling.backends.backend import Backend, num_step_weights
from sampling.backends.eager import EagerBackend, ExactBackend
from sampling.backends.process import disable_malloc_trim
from sampling.checkpoints.build import build_gpt
from sampling.checkpoints.checkpoint import Checkpoint
from sampling.messages import Log, is_out_of_memory, warn
from sampling.params import ModelOptions

DEFAULT_OPTIONS = ModelOptions()
MIN_PLAIN_SECONDS = 1.0 # of a run that uses the loops: loading them takes half a second
# A plain step of one row on a CPU, in seconds: for each layer, and for each weight.
SECONDS_PER_LAYER, SECONDS_PER_WEIGHT = 2e-4, 4e-10
SECONDS_PER_WINDOW_PRODUCT = 2e-10 # for each position and weight of a full window of ten rows


def prepare_backend(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype,
                    options: ModelOptions = DEFAULT_OPTIONS, num_steps: int | None = None, log: Log = warn) -> Backend:
    """The fastest backend for a model. Takes the weights out of the checkpoint.

    dtype may be torch.int8 on a CPU, without compile and exact. num_steps: how many steps the run will take; None:
    unknown, or many. log gets messages for the user.
    Raises ValueError if exact is True and this device has no exact backend, or if int8 is not possible here.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device) # otherwise graphs, and memory for libraries, would be on GPU 0
    config = checkpoint.config
    if has_loops(config, device, dtype, options, num_steps, log):
        from sampling.backends.cpu import CPUBackend
        backend = CPUBackend(config, checkpoint.state_dict, dtype == torch.int8, log)
        checkpoint.state_dict = {}
    else:
        gpt = cast_linears(build_gpt(checkpoint), dtype).to(device)
        backend = choose_backend(device, options, log)(gpt)
    if device.type == "cpu":
        disable_malloc_trim() # not earlier, or memory that was freed during loading would stay as holes in the heap
    return backend


def converter(dtype: torch.dtype) -> Callable[[Tensor], Any] | None:
    """What to do with each weight as soon as it is read from a file: round it to int8, or nothing.

    Raises ValueError if dtype is int8, and numba is missing.
    """
    if dtype != torch.int8:
        return None
    require_numba()
    from sampling.backends.cpu import quantize
    return quantize


def has_loops(config: GPTConfig, device: torch.device, dtype: torch.dtype, options: ModelOptions,
              num_steps: int | None, log: Log) -> bool:
    """Whether a run uses the loops of CPUBackend: on a CPU in float32 and int8, unless it is too short to pay for them.

    Without numba, log gets a line, and int8 raises ValueError.
    """
    if dtype == torch.int8:
        require_numba()
        return True
    if device.type != "cpu" or dtype != torch.float32 or options.compile or options.exact:
        return False
    if num_steps is not None and plain_seconds(config, num_steps) < MIN_PLAIN_SECONDS:
        return False
    try:
        require_numba()
        return True
    except ValueError as error:
        log(f"{error}; continuing without the loops, which is slower")
        return False


def require_numba() -> None:
    """Raises ValueError if numba cannot be imported, as with a Python or a processor that it does not support."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        raise ValueError(f"the loops for CPUs, and dtype=int8, need numba ({error}): pip install numba") from None


def plain_seconds(config: GPTConfig, num_steps: int) -> float:
    """About how long EagerBackend takes for these steps on a CPU. Past block_size, each step is a whole window."""
    num_weights, num_windows = num_step_weights(config), max(0, num_steps - config.block_size)
    step = config.n_layer * SECONDS_PER_LAYER + num_weights * SECONDS_PER_WEIGHT
    return num_steps * step + num_windows * config.block_size * num_weights * SECONDS_PER_WINDOW_PRODUCT


def choose_backend(device: torch.device, options: ModelOptions, log: Log) -> Callable[[GPT], Backend]:
    """The function that makes the backend of a GPT."""
    if options.exact:
        return ExactBackend
    if device.type == "cuda":
        from sampling.backends.cuda import CUDABackend
        return partial(CUDABackend, compile=options.compile, cuda_graphs=options.cuda_graphs, log=log)
    return partial(EagerBackend, compile=options.compile)


def cast_linears(model: GPT, dtype: torch.dtype) -> GPT:
    """Cast the Linears once: autocast would do it at every step. The embeddings keep their dtype. Returns model."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.dtype != dtype: # a new Parameter would untie a float32 head
            for name, value in module.named_parameters():
                setattr(module, name, nn.Parameter(value.to(dtype), requires_grad=False))
    return model


def compile_steps(backend: Backend, num_rows: int, log: Log) -> None:
    """Run a prefill and a decode step of num_rows, which compiles them if the backend was made with compile=True.

    Raises ValueError if torch.compile does not work here. Errors that mean out of memory are raised unchanged.
    """
    log("compiling ...")
    start = time.perf_counter()
    ids, cache = torch.zeros(num_rows, 1, dtype=torch.long, device=backend.device), backend.new_cache(num_rows, 2)
    try:
        backend.logits(ids[:1], cache)
        backend.logits(ids, cache)
    except Exception as e: # a missing compiler or driver shows in many ways
        if is_out_of_memory(e):
            raise
        raise ValueError(f"compile=True does not work here ({type(e).__name__}: {e!s:.300}): leave it out") from None
    log(f"compiled in {time.perf_counter() - start:.1f} s")
