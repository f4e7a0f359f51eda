"""Compiles plain loops with numba, for this processor and for several threads, and runs them.

A kernel is a function that parallel has compiled.
"""
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import RLock, local
from types import FunctionType
from typing import Any

import numba
import torch
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba import config, njit

logger = logging.getLogger(__name__)
Kernel = Callable[..., Any]
OPTIONS = dict(nogil=True, error_model="numpy")
# Multiply-adds: a thread that has fewer takes longer to start than it saves.
WORK_PER_THREAD = 32_000

# One of numba's threading layers serves one thread at a time. A signal handler, which Python calls
# between two kernels, may run kernels in the thread that has the lock.
run_lock = RLock()
this_thread = local()

# For Intel's processors, LLVM uses half of the AVX-512 registers by default, although all of them
# are faster here.
with suppress(RuntimeError): # the features of this processor are unknown
    if config.CPU_FEATURES is None and (features := get_host_cpu_features()).get("avx512f"):
        config.CPU_FEATURES = f"{features.flatten()},-prefer-256-bit"


def parallel(function: FunctionType, variant: str = "", **options: Any) -> Kernel:
    """Compile a function whose pranges run on several threads, and keep the machine code in numba's
    cache.

    numba numbers the cache files of a function, and two processes that compile it at once, for
    other types or on other processors, could take the same number. So each variant and each
    processor has a function of its own.
    """
    function = FunctionType(function.__code__, function.__globals__)
    function.__qualname__ = f"{function.__name__}_{variant}_{get_host_cpu_name()}"
    with suppress(RuntimeError): # neither this folder nor the user's cache is writable
        cached = njit(cache=True, parallel=True, **OPTIONS, **options)(function)
        # A user without a home has a cache in ./~.
        if config.CACHE_DIR or os.path.isabs(cached.stats.cache_path):
            return cached
    return njit(parallel=True, **OPTIONS, **options)(function)


def load(calls: dict[Kernel, tuple]) -> None:
    """Load kernels from numba's cache, or compile and save them, for the types of these arguments,
    with which they are called. If that fails, as with a damaged file or a full disk, remove the
    indexes of the cache and try once more.
    """
    with run_lock:
        num_threads = torch.get_num_threads()
        for kernel, arguments in calls.items():
            if kernel.signatures: # this process has it already
                continue
            try:
                kernel(*arguments)
            except Exception:
                for path in Path(kernel.stats.cache_path or "/nowhere").glob("*.nbi"):
                    path.unlink(missing_ok=True)
                kernel(*arguments)
            if sum(kernel.stats.cache_misses.values()):
                announce()
        # Where both share an OpenMP, torch has as many threads as numba now.
        torch.set_num_threads(num_threads)


@cache
def announce() -> None:
    """Say once that kernels are compiled."""
    logger.info("compiling kernels for this processor, once, which takes some seconds ...")


def run(kernel: Kernel, work: int, *arguments: Any) -> Any:
    """Call a kernel with the threads that its multiply-adds are worth, of those torch uses."""
    num_threads = min(torch.get_num_threads(), config.NUMBA_NUM_THREADS,
                      1 + work // WORK_PER_THREAD)
    # numba keeps the number for each Python thread.
    if getattr(this_thread, "num_threads", None) != num_threads:
        numba.set_num_threads(num_threads)
        this_thread.num_threads = num_threads
    with run_lock:
        return kernel(*arguments)
