"""Chooses the backend for a GPT, and prepares both."""
import time
from collections.abc import Iterable

import torch
from torch import nn

from model import GPT
from sampling.backends.backend import Backend
from sampling.backends.memory import disable_malloc_trim
from sampling.log import Log, warn
from sampling.out_of_memory import is_out_of_memory
from sampling.params import ModelOptions, SamplingParams

DEFAULT_OPTIONS = ModelOptions()


def prepare_model(gpt: GPT, device: torch.device, dtype: torch.dtype, options: ModelOptions = DEFAULT_OPTIONS,
                  log: Log = warn) -> Backend:
    """The fastest backend for this device. It changes gpt and may remove its layers, so do not use gpt afterwards.

    dtype may be torch.int8 on a CPU, without compile and exact. Without exact, the result is a RollbackBackend, which
    speculative decoding needs. log gets a message if CUDA graphs do not work here.
    Raises ValueError if exact is True and this device has no exact backend, or if int8 is not possible here.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device) # otherwise graphs, and memory for libraries, would be on GPU 0
    if dtype != torch.int8: # PackedGPT rounds the weights itself
        cast_linears(gpt, dtype).to(device)
    if options.exact:
        backend = prepare_exact(gpt, device, options.cuda_graphs, log)
    elif device.type == "cuda":
        backend = prepare_cuda(gpt, options, log)
    else:
        backend = packed_or_eager(gpt, device, dtype, options)
    if device.type == "cpu":
        disable_malloc_trim() # not earlier, or memory that was freed during loading would stay as holes in the heap
    return backend


def prepare_exact(gpt: GPT, device: torch.device, cuda_graphs: bool, log: Log) -> Backend:
    """ExactGPT, with the settings of torch that nanoGPT uses. Raises ValueError except on CUDA and a CPU."""
    from sampling.backends.exact import ExactGPT
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high") # TF32
        torch.backends.cuda.enable_cudnn_sdp(True) # the default, which the normal backend changes
    elif device.type != "cpu": # the random numbers would be the CPU's
        raise ValueError(f"exact=True needs CUDA or a CPU; got device={device.type}")
    return ExactGPT(gpt, cuda_graphs, log)


def prepare_cuda(gpt: GPT, options: ModelOptions, log: Log) -> Backend:
    """CUDAGraphGPT, with the settings of torch that it needs."""
    from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
    from sampling.backends.cuda.padded_head import PaddedHead, needs_padding
    # No TF32: it selects kernels by shape, so that another batch size could change a token in float32.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_cudnn_sdp(False) # cuDNN needs a new plan for every shape, and so for every length
    if needs_padding(gpt.lm_head):
        gpt.lm_head = PaddedHead(gpt.lm_head)
    return CUDAGraphGPT(gpt, options.compile, options.cuda_graphs, log)


def packed_or_eager(gpt: GPT, device: torch.device, dtype: torch.dtype, options: ModelOptions) -> Backend:
    """PackedGPT if this machine has its operators. EagerGPT with compile: Inductor cannot optimise packed weights."""
    if device.type == "cpu" and not options.compile:
        from sampling.backends.cpu.packed_gpt import PackedGPT
        from sampling.backends.cpu.packed_linear import is_supported
        if dtype == torch.int8 or is_supported(dtype):
            return PackedGPT(gpt, options.pack_eagerly, use_int8=dtype == torch.int8)
    from sampling.backends.eager import EagerGPT
    return EagerGPT(gpt, options.compile)


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
    prompt_length = min(prompt_length or 1, backend.config.block_size)
    try:
        for batch_size in batch_sizes:
            idx = torch.zeros(batch_size, prompt_length, dtype=torch.long, device=backend.device)
            backend.warm_up_compile(idx, params.max_new_tokens, params.context_shift)
    except Exception as e: # a missing compiler or driver shows in many ways
        if is_out_of_memory(e):
            raise
        raise ValueError(f"compile=True does not work here ({type(e).__name__}: {e!s:.300}): leave it out") from None
    log(f"compiled in {time.perf_counter() - start:.1f} s")
