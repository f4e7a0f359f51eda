"""Chooses the backend for a GPT, and prepares both."""
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from model import GPT
from sampling.backends.backend import Backend
from sampling.backends.memory import disable_malloc_trim
from sampling.log import Log, warn
from sampling.out_of_memory import is_out_of_memory
from sampling.params import ModelOptions, SamplingParams

DEFAULT_OPTIONS = ModelOptions()


def prepare_backend(gpt: GPT, device: torch.device, dtype: torch.dtype, options: ModelOptions = DEFAULT_OPTIONS,
                    log: Log = warn) -> Backend:
    """The fastest backend for this device. It changes gpt and may remove its layers, so do not use gpt afterwards.

    dtype may be torch.int8 on a CPU, without compile and exact. log gets a message if CUDA graphs do not work here.
    Raises ValueError if exact is True and this device has no exact backend, or if int8 is not possible here.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device) # otherwise graphs, and memory for libraries, would be on GPU 0
    if dtype != torch.int8: # PackedGPT rounds the weights itself
        cast_linears(gpt, dtype).to(device)
    backend = choose_backend(device, dtype, options, log)(gpt)
    if device.type == "cpu":
        disable_malloc_trim() # not earlier, or memory that was freed during loading would stay as holes in the heap
    return backend


def choose_backend(device: torch.device, dtype: torch.dtype, options: ModelOptions,
                   log: Log) -> Callable[[GPT], Backend]:
    """The function that makes the backend of a GPT."""
    if options.exact:
        from sampling.backends.exact import ExactBackend
        return ExactBackend
    if device.type == "cuda":
        from sampling.backends.cuda import CUDABackend
        return partial(CUDABackend, compile=options.compile, cuda_graphs=options.cuda_graphs, log=log)
    if device.type == "cpu" and not options.compile: # Inductor cannot optimise packed weights
        from sampling.backends.cpu.packed_gpt import PackedGPT
        from sampling.backends.cpu.packed_linear import is_supported
        if dtype == torch.int8 or is_supported(dtype):
            return partial(PackedGPT, pack_eagerly=options.pack_eagerly, use_int8=dtype == torch.int8)
    from sampling.backends.eager import EagerBackend
    return partial(EagerBackend, compile=options.compile)


def cast_linears(model: GPT, dtype: torch.dtype) -> GPT:
    """Cast the Linears once: autocast would do it at every step. The embeddings keep their dtype. Returns model."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.dtype != dtype: # a new Parameter would untie a float32 head
            for name, value in module.named_parameters():
                setattr(module, name, nn.Parameter(value.to(dtype), requires_grad=False))
    return model


def warm_up_compile(backend: Backend, prompt_length: int | None, batch_sizes: Iterable[int], params: SamplingParams,
                    log: Log) -> None:
    """Compile the steps of generation for these batch sizes. prompt_length is None if unknown.

    Raises ValueError if torch.compile does not work here. Errors that mean out of memory are raised unchanged.
    """
    log("compiling ...")
    start = time.perf_counter()
    try:
        for batch_size in batch_sizes:
            run_each_step(backend, batch_size, prompt_length or 1, params)
    except Exception as e: # a missing compiler or driver shows in many ways
        if is_out_of_memory(e):
            raise
        raise ValueError(f"compile=True does not work here ({type(e).__name__}: {e!s:.300}): leave it out") from None
    log(f"compiled in {time.perf_counter() - start:.1f} s")


def run_each_step(backend: Backend, batch_size: int, prompt_length: int, params: SamplingParams) -> None:
    """Run each kind of step that the engine would run with these arguments, on tokens that mean nothing."""
    block_size = backend.config.block_size
    prompt_length, length = min(prompt_length, block_size), prompt_length + params.max_new_tokens
    ids = torch.zeros(batch_size, block_size, dtype=torch.long, device=backend.device)
    cache = backend.new_cache(batch_size, min(length, block_size))
    backend.logits(ids[:1, :prompt_length], cache)
    first = prompt_length
    if length > block_size and params.context_shift: # then the cache also has fewer positions
        first = min(first, block_size - block_size // 2)
    # The first two steps, the one that fills the cache, and those that begin a bucket on CUDA.
    positions = {first, first + 1, prompt_length, min(length, block_size) - 1, *range(0, block_size, 128)}
    for position in sorted(positions & set(range(first, min(length, block_size)))):
        cache.seq_len = position
        backend.logits(ids[:, :1], cache)
    if length > block_size:
        if params.context_shift:
            cache.seq_len = 0
            backend.logits(ids[:, block_size // 2:], cache)
        else:
            backend.logits(ids, None)
