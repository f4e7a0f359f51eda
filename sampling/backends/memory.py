"""How much memory there is, how much a sample takes, and how the C library keeps it."""
import ctypes
import sys
from contextlib import suppress

import torch

from model import GPTConfig
from sampling.backends.backend import Backend

# Larger batches gain nothing: on a GPU the random numbers of each row take a kernel of their own.
MAX_ROWS_CPU, MAX_ROWS_CUDA = 64, 128
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4 # mallopt's parameters, as glibc's malloc.h numbers them


def max_batch_size(backend: Backend, length: int, num_processes: int = 1) -> int:
    """How many samples of length tokens to generate at once: as many as half of the free memory holds, up to a limit.

    num_processes is how many processes share the machine's memory. Each is assumed to have a GPU of its own.
    """
    if backend.device.type == "cuda":
        free, max_rows = torch.cuda.mem_get_info(backend.device)[0], MAX_ROWS_CUDA
    else:
        import psutil
        free, max_rows = psutil.virtual_memory().available // num_processes, MAX_ROWS_CPU
    return max(1, min(max_rows, free // 2 // backend.bytes_per_sample(length)))


def estimate_bytes_per_sample(config: GPTConfig, cache_bytes_per_token: int, length: int) -> int:
    """About how many bytes one more row of length tokens takes: its cache, its window if that moves, its logits."""
    num_tokens = min(length, config.block_size)
    window_bytes_per_token = 10 * 4 * config.n_embd if length > config.block_size else 0
    return num_tokens * (cache_bytes_per_token + window_bytes_per_token) + 40 * config.vocab_size


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that this process has held so far: on the GPU if device is one, else in RAM. None: unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError: # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def disable_malloc_trim() -> None:
    """Have the C library keep freed memory instead of returning it to the system. Does something with glibc only.

    Every step allocates and frees the same megabytes. Returned memory comes back page by page, with a page fault
    each: that took a third of the time of a small model past its block_size.
    """
    with suppress(AttributeError, OSError, TypeError): # another system, or another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, -1) # the largest threshold: the heap never shrinks
        libc.mallopt(M_MMAP_MAX, 0) # all allocations are on the heap


def release_memory() -> None:
    """Return what disable_malloc_trim kept to the system."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
