"""Measures free memory, and tunes the C library's allocator."""
import ctypes
import sys
from contextlib import suppress

import torch

from sampling.backends.backend import Backend

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4 # mallopt's parameters, as glibc's malloc.h numbers them


def max_batch_size(backend: Backend, length: int, num_processes: int = 1) -> int:
    """How many samples of length tokens to generate at once: as many as half of the free memory holds, at most
    backend.max_rows.

    num_processes is the number of processes that share the machine's memory. GPU memory is not divided: if processes
    share a GPU and it runs out of memory, the engine halves its batches.
    """
    if backend.device.type == "cuda":
        free = torch.cuda.mem_get_info(backend.device)[0]
    else:
        import psutil
        free = psutil.virtual_memory().available // num_processes
    return max(1, min(backend.max_rows, free // 2 // backend.bytes_per_row(length)))


def peak_memory(device: torch.device) -> int | None:
    """The peak memory of this process in bytes: of the GPU if device is one, otherwise RAM. None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError: # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def disable_malloc_trim() -> None:
    """Make the C library keep freed memory instead of returning it to the system. Has an effect only with glibc.

    Every step allocates and frees the same megabytes. If the memory were returned, each page would cost a page fault at
    the next step. docs/benchmarks.md has the gain.
    """
    with suppress(AttributeError, OSError, TypeError): # another system, or another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, -1) # the largest threshold: the heap never shrinks
        libc.mallopt(M_MMAP_MAX, 0) # all allocations are on the heap


def return_freed_memory() -> None:
    """Return freed memory to the GPU and the system.

    After disable_malloc_trim, the C library does not do so by itself.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
