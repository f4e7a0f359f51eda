"""Runs the kernels of the CPU backend: compiles them once on a machine, and chooses the number of threads."""
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Lock, local
from typing import Any

import numba
import numpy as np
import torch

from sampling.backends import cpu_kernels as kernels
from sampling.messages import Log

WORK_PER_THREAD = 32_000 # multiply-adds: a thread that has fewer takes longer to start than it saves

compile_lock, compiled, this_thread = Lock(), set(), local()
run_lock = nullcontext() # a Lock if numba's threads cannot serve two Python threads at once


def run(kernel: Callable[..., Any], work: int, *arguments: Any) -> Any:
    """Call a kernel with as many threads as its multiply-adds are worth, and at most as many as torch uses."""
    most = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    num_threads = min(most, 1 + work // WORK_PER_THREAD)
    if getattr(this_thread, "num_threads", None) != num_threads: # numba keeps the number for each Python thread
        numba.set_num_threads(num_threads)
        this_thread.num_threads = num_threads
    with run_lock:
        return kernel(*arguments)


def compile_kernels(dtypes: tuple[str, ...], log: Log) -> None:
    """Load the kernels for weights of these dtypes ("float32", "int8") from numba's cache, or compile them, which takes
    some seconds. Then log says so.
    """
    global run_lock
    with compile_lock:
        x, cache, none = np.zeros((1, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32), np.empty((1, 0), np.float32)
        calls = {kernels.layer_norm: (x, x[0], x[0], 1e-5), kernels.attention: (x.repeat(3, axis=1), cache, cache, 0)}
        for dtype in dtypes:
            calls[kernels.linear[dtype]] = x, x.astype(dtype), x[0], x[0], 0, none
        start, is_new, num_threads = time.perf_counter(), False, torch.get_num_threads()
        for kernel, arguments in calls.items():
            if kernel in compiled:
                continue
            try:
                kernel(*arguments)
            except BaseException as error:
                # numba's cache cannot be read or written, or Ctrl-C may have left an index that names a file of an
                # older version. So remove the index of this kernel's files.
                if kernel.stats.cache_path:
                    for path in Path(kernel.stats.cache_path).glob(f"*.{kernel.py_func.__qualname__}-*.nbi"):
                        path.unlink(missing_ok=True)
                if not isinstance(error, Exception):
                    raise
                kernel(*arguments)
            compiled.add(kernel)
            if not is_new and sum(kernel.stats.cache_misses.values()):
                is_new = True
                log("compiling kernels for this processor, once ...")
        if is_new:
            log(f"compiled in {time.perf_counter() - start:.1f} s")
        torch.set_num_threads(num_threads) # where both share an OpenMP, torch has as many threads as numba now
        if numba.threading_layer() == "workqueue": # it aborts the process if two threads are inside at once
            run_lock = Lock()
