"""Chooses the backend for a checkpoint, and prepares it."""
import time
from collections.abc import Callable
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
MIN_EAGER_SECONDS = 1.0 # a shorter run uses no compiled kernels: loading them takes half a second
# A step of one row with EagerBackend on a CPU, in seconds: for each layer, and for each weight.
SECONDS_PER_LAYER, SECONDS_PER_WEIGHT = 2e-4, 4e-10
SECONDS_PER_WINDOW_PRODUCT = 2e-10 # per position and weight, if a step computes a full window (measured with ten rows)


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
    use_kernels = wants_kernels(config, device, dtype, options, num_steps)
    if use_kernels:
        try:
            require_numba()
        except ValueError as error:
            if dtype == torch.int8:
                raise
            use_kernels = False
            log(f"{error}; continuing without the kernels, which is slower")
    if use_kernels:
        from sampling.backends.cpu import CPUBackend
        backend = CPUBackend(config, checkpoint.state_dict, dtype == torch.int8, log)
        checkpoint.state_dict = {}
    else:
        gpt = cast_linears(build_gpt(checkpoint), dtype).to(device)
        if options.exact:
            backend = ExactBackend(gpt)
        elif device.type == "cuda":
            from sampling.backends.cuda import CUDABackend
            backend = CUDABackend(gpt, options.compile, options.cuda_graphs, log)
        else:
            backend = EagerBackend(gpt, options.compile)
    if device.type == "cpu":
        disable_malloc_trim() # not earlier, or memory that was freed during loading would stay as holes in the heap
    return backend


def weight_converter(dtype: torch.dtype) -> Callable[[Tensor], Any] | None:
    """What to do with each weight as soon as it is read from a file: round it to int8, or nothing."""
    if dtype != torch.int8:
        return None
    require_numba()
    from sampling.backends.cpu import quantize
    return quantize


def wants_kernels(config: GPTConfig, device: torch.device, dtype: torch.dtype, options: ModelOptions,
                  num_steps: int | None) -> bool:
    """Whether a run should use CPUBackend's kernels: on a CPU in float32 and int8, unless it is too short for them."""
    if dtype == torch.int8:
        return True
    if device.type != "cpu" or dtype != torch.float32 or options.compile or options.exact:
        return False
    return num_steps is None or estimate_eager_seconds(config, num_steps) >= MIN_EAGER_SECONDS


def require_numba() -> None:
    """Raise ValueError if numba cannot be imported, as with a Python or a processor that it does not support."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        raise ValueError(f"the compiled kernels for CPUs, and dtype=int8, need numba ({error}): pip install "
                         "numba") from None


def estimate_eager_seconds(config: GPTConfig, num_steps: int) -> float:
    """About how long EagerBackend takes for these steps on a CPU. Past block_size, each step is a whole window."""
    num_weights, num_windows = num_step_weights(config), max(0, num_steps - config.block_size)
    step = config.n_layer * SECONDS_PER_LAYER + num_weights * SECONDS_PER_WEIGHT
    return num_steps * step + num_windows * config.block_size * num_weights * SECONDS_PER_WINDOW_PRODUCT


def cast_linears(model: GPT, dtype: torch.dtype) -> GPT:
    """Cast the Linears once: autocast would do it at every step. The embeddings keep their dtype. Returns model."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.dtype != dtype: # a new Parameter would untie a float32 head
            for name, value in module.named_parameters():
                setattr(module, name, nn.Parameter(value.to(dtype), requires_grad=False))
    return model


def compile_steps(backend: Backend, num_rows: int, log: Log) -> None:
    """Compile a prefill and a decode step of num_rows, by running them. Raises ValueError if torch.compile does not
    work here, but errors that mean out of memory unchanged.
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
