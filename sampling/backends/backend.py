"""Backend: a GPT that was prepared for a device. It computes logits, and nothing else. And the two
plain backends: EagerBackend, for where there is no faster one, and OwnBackend, for a model that
runs itself.
"""
import ctypes
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sampling.checkpoints.own_model import OwnModel
from sampling.model import GPT, GPTConfig, KVCache
from sampling.process import is_out_of_memory

logger = logging.getLogger(__name__)
MIN_ONEDNN_WORK = 2**24 # multiplications; below it, a call costs more than it saves


def has_fast_onednn() -> bool:
    """Whether torch's oneDNN multiplies faster than its MKL.

    On an AMD Zen 5 with AVX-512, it is two to four times as fast; on an Intel Xeon, it takes 1.2
    times as long. torch calls the operator private, and may rename it. torch 2.10 knows no name of
    the processor.
    """
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    is_intels = "Intel" in capabilities.get("cpu_name", "")
    return has_avx512 and not is_intels and hasattr(torch.ops.mkldnn, "_linear_pointwise")


uses_onednn = has_fast_onednn()
# It keeps a plan of about a megabyte for each number of rows, of which a run may have hundreds.
if uses_onednn:
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


class Backend:
    """A GPT prepared for one kind of device.

    Each subclass defines logits, new_cache if it has a cache, and what differs by device.

    All backends compute the same logits, up to rounding.
    """
    config: GPTConfig
    device: torch.device
    dtype: torch.dtype # of its Linears
    num_params = 0 # prepare_backend counts them
    has_kernels = False # whether numba is loaded, so that the sampler uses its kernels too
    has_cache = True # whether new_cache returns one
    max_rows = 64 # how many samples to generate at once, at most, unless the user asks for more
    max_batch_bytes = 2**31 # what these samples may take, unless it is a single one
    # In a batch that is past block_size: with more tokens, its steps are not more efficient.
    max_window_tokens = math.inf
    full_vocabulary = False # whether top_k masks all logits, as in nanoGPT: see Sampler
    # Steps between two copies of tokens to the host, where text streams or may end early.
    min_flush_steps = 1
    cache_itemsize = 4 # bytes of a number in the cache

    def new_cache(self, num_rows: int, capacity: int) -> KVCache | None:
        """An empty KVCache, or the like, with room for capacity positions in each row; None if each
        step reads all tokens anew. The caller owns it, and may set its seq_len back, which undoes
        the latest tokens.
        """

    def release(self, cache: KVCache) -> None:
        """Take back a cache that the caller needs no more."""

    def free_buffers(self) -> None:
        """Free what is kept for a next batch. The caller has released its cache."""

    def logits(self, ids: Tensor, cache: KVCache | None, num_positions: int = 1) -> Tensor:
        """Run the model on ids (B, T), which follow the tokens in the cache, inside inference().

        Returns the logits of the last num_positions positions of each row: (B * num_positions, V).
        The next call may overwrite them. If ids has one row and the cache is empty, all rows of the
        cache get it: one prefill for equal prompts.
        """

    @contextmanager
    def inference(self) -> Iterator[None]:
        """The context of each step: without gradients, and under autocast for half precision.

        Outside of the caller's inference mode, because its tensors could not be changed elsewhere.
        """
        # Operators that name no device use the CPU, not the caller's default device.
        has_device = torch.get_default_device().type != "cpu"
        default_device = torch.device("cpu") if has_device else nullcontext()
        is_half = self.dtype in (torch.bfloat16, torch.float16)
        dtype = self.dtype if is_half else None
        autocast = torch.autocast(self.device.type, dtype, enabled=is_half)
        with torch.inference_mode(False), torch.no_grad(), default_device, autocast:
            yield

    def draft_for(self, num_tokens: int) -> "Backend | None":
        """What proposes so many tokens of a single sample, on a cache of this backend; None if that
        does not pay.
        """

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def describe(self) -> str:
        return f"{self.num_params / 1e6:.2f}M parameters on {self.device} in {self.dtype_name}"

    def should_drop(self, num_rows: int, num_unfinished: int) -> bool:
        """Whether the finished rows of a batch should leave it."""
        return num_unfinished < num_rows

    def bytes_per_row(self, length: int) -> int:
        """About how many bytes one more row of length tokens takes: cache, logits and, past
        block_size, the window.
        """
        config = self.config
        num_tokens = min(length, config.block_size)
        # The keys and values of a token.
        cache_bytes = 2 * config.n_layer * config.n_embd * self.cache_itemsize
        # About ten activations of a token.
        window_bytes = 10 * 4 * config.n_embd if length > config.block_size else 0
        logits_bytes = 40 * config.vocab_size # also what sampling makes of them
        return num_tokens * (cache_bytes + window_bytes) + logits_bytes


def return_freed_memory() -> None:
    """Return freed memory: the C library keeps what lies below memory in use."""
    if torch.cuda.is_initialized():
        # torch 2.10 to 2.12, once the capture of a CUDA graph has failed.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def many_rows_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear for many rows (..., I), on a CPU; quicker in float32."""
    is_float32 = input.dtype == weight.dtype == torch.float32
    if uses_onednn and is_float32 and input.numel() * len(weight) >= MIN_ONEDNN_WORK:
        return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return F.linear(input, weight, bias)


class ManyRows(TorchFunctionMode):
    """Lets the Linears of any model compute with many_rows_linear."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (many_rows_linear if func is F.linear else func)(*args, **kwargs or {})


def compiled(model: GPT) -> Callable[..., Any]:
    """The model as a function that torch.compile compiles when it is called first.

    A call raises ValueError if torch.compile does not work here, but errors that mean out of memory
    unchanged.
    """
    logger.info("the model is compiled at its first tokens, which takes about a minute")
    torch.compiler.config.recompile_limit = 32 # prefill, steps and windows, each by batch size
    forward = torch.compile(model, dynamic=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception as error: # a missing compiler or driver shows in many ways
            if is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {error!s:.300}"
            raise ValueError(f"compile=True does not work here ({reason}): leave it out") from None
    return call


class EagerBackend(Backend):
    """Runs GPT.forward. With compile, torch.compile compiles it."""

    def __init__(self, model: GPT, compile: bool = False):
        weight = model.lm_head.weight
        self.model = model
        self.config = model.config
        self.device = weight.device
        self.dtype = weight.dtype
        self.cache_itemsize = weight.itemsize
        self.forward = compiled(model) if compile else model

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        return self.model.new_cache(num_rows, capacity)

    def logits(self, ids: Tensor, cache: KVCache | None, num_positions: int = 1) -> Tensor:
        # torch.compile compiles again for other strides.
        ids = ids.clone(memory_format=torch.contiguous_format)
        # (B, n, V) -> (B * n, V)
        return self.forward(ids, cache=cache, num_positions=num_positions)[0].flatten(0, 1)


class OwnBackend(Backend):
    """Runs a model of the user's own class GPT as nanoGPT does: each step computes the whole
    window, because only the model knows what could be cached.

    A single row gets nanoGPT's logits bit for bit, on the same device, with the same torch, in any
    dtype: each operation has nanoGPT's shape. On CUDA, torch's matmul precision and attention
    kernels become nanoGPT's, for the whole process. config: the sizes of the model.
    """
    has_cache = False
    full_vocabulary = True
    max_rows = 16 # more are not faster

    def __init__(self, model: OwnModel, config: GPTConfig, device: torch.device, dtype: torch.dtype,
                 compile: bool):
        self.model = model
        self.config = config
        self.device = device
        self.dtype = dtype
        # With more, a CPU's caches lose activations.
        self.max_forward_tokens = 1024 if device.type == "cpu" else 2**20
        if model.needs_single_rows:
            self.max_rows = self.max_forward_tokens = 1
        model.gpt.to(device)
        if compile:
            model.gpt = compiled(model.gpt)
        self.uses_onednn = uses_onednn and device.type == "cpu" and not compile
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high") # TF32
            torch.backends.cuda.enable_cudnn_sdp(True) # the default, which CUDABackend changes
            # As CUDABackend.
            self.min_flush_steps = 4
            self.max_batch_bytes = 2**33

    def logits(self, ids: Tensor, cache: None, num_positions: int = 1) -> Tensor:
        """As sample.py computes the last position, or as train.py computes several, for scores."""
        if num_positions > 1:
            return self.model(ids, targets=ids)[:, -num_positions:].flatten(0, 1)
        rows = max(1, self.max_forward_tokens // ids.size(1))
        # A single row keeps nanoGPT's own operators.
        with ManyRows() if self.uses_onednn and len(ids) > 1 else nullcontext():
            return torch.cat([self.model(part)[:, -1] for part in ids.split(rows)])
