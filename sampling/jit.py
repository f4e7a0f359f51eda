"""Compiles plain loops with numba, for this processor and for several threads, and launches them.

A kernel is a function that parallel has compiled.
"""
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
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
from numba.core import event

from sampling.values import first_sentence

logger = logging.getLogger(__name__)
Kernel = Callable[..., Any]
OPTIONS = dict(nogil=True, error_model="numpy")
# Multiply-adds: a thread that has fewer takes longer to start than it saves.
WORK_PER_THREAD = 32_000
SECONDS_PER_KERNEL = 4 # that a core takes to compile one
CACHE_BYTES = 2**22 # more than all kernels take

# One of numba's threading layers serves one thread at a time. A signal handler, which Python calls
# between two kernels, may run kernels in the thread that has the lock.
launch_lock = RLock()
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


class Announcement(event.Listener):
    """Says, when numba begins to compile, how long these kernels take."""
    is_made = False

    def __init__(self, kernels: Collection[Kernel]):
        self.kernels = kernels

    def on_start(self, _: event.Event) -> None:
        if self.is_made: # this is a part of a kernel, or the next one
            return
        self.is_made = True
        seconds = SECONDS_PER_KERNEL * len(self.kernels)
        when = "in the first run only"
        if reason := why_unsaved(self.kernels):
            when = f"in every run, because {reason}: set NUMBA_CACHE_DIR to another folder"
        logger.info(f"compiling kernels for this processor, about {seconds} seconds, {when}")

    def on_end(self, _: event.Event) -> None:
        """Nothing is said when they are compiled."""


def load_kernels(calls: dict[Kernel, tuple], meanwhile: str = "") -> None:
    """Load kernels from numba's cache, or compile and save them, for the types of these arguments,
    with which they are called.

    meanwhile: a statement that a second Python runs while this one compiles, and which loads other
    kernels: numba compiles in a single thread.
    """
    second = None
    with launch_lock:
        missing = {kernel: calls[kernel] for kernel in calls if not kernel.signatures}
        if not missing:
            return
        num_threads = torch.get_num_threads()
        with event.install_listener("numba:compile", Announcement(missing)):
            for kernel, arguments in missing.items():
                load_kernel(kernel, arguments)
                if meanwhile and second is None and kernel.stats.cache_misses:
                    with suppress(OSError): # there may be too many processes
                        second = start_python(meanwhile)
        if second is not None:
            second.wait()
        # Where both share an OpenMP, torch has as many threads as numba now.
        torch.set_num_threads(num_threads)


def load_kernel(kernel: Kernel, arguments: tuple) -> None:
    """Load a kernel. If numba fails to, as with a damaged file, remove the indexes of its cache and
    try once more.
    """
    folder = kernel.stats.cache_path or "/nowhere"
    for is_second_try in False, True:
        try:
            return kernel(*arguments)
        except Exception as error:
            if kernel.signatures: # it is compiled
                warn_unsaved(config.CACHE_DIR or folder, first_sentence(error))
                continue
            if is_second_try:
                raise
            for path in Path(folder).glob("*.nbi"):
                path.unlink(missing_ok=True)


def why_unsaved(kernels: Iterable[Kernel]) -> str:
    """Why these kernels cannot be saved; '' if nothing is known against it."""
    for kernel in kernels:
        folder = kernel.stats.cache_path
        if not folder:
            return "neither the folder of this program nor the user's cache can be written"
        with suppress(OSError): # numba will create it
            if shutil.disk_usage(folder).free < CACHE_BYTES:
                return f"no space is left in {config.CACHE_DIR or folder}"
    return ""


def start_python(statement: str) -> subprocess.Popen:
    """Run a statement in a new Python, which finds the modules of this one. It prints nothing."""
    code = f"import sys; sys.path[:] = {sys.path!r}; {statement}"
    streams = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.DEVNULL)
    return subprocess.Popen([sys.executable, "-I", "-c", code], **streams)


@cache
def warn_unsaved(folder: str, reason: str) -> None:
    """Say once why the kernels cannot be saved."""
    logger.warning(f"the kernels cannot be saved in {folder} ({reason}), so the next run compiles "
                   "them again: free some space, or set NUMBA_CACHE_DIR to another folder")


def launch(kernel: Kernel, work: int, *arguments: Any) -> Any:
    """Call a kernel with the threads that its multiply-adds are worth, of those torch uses."""
    num_threads = min(torch.get_num_threads(), config.NUMBA_NUM_THREADS,
                      1 + work // WORK_PER_THREAD)
    # numba keeps the number for each Python thread.
    if getattr(this_thread, "num_threads", None) != num_threads:
        numba.set_num_threads(num_threads)
        this_thread.num_threads = num_threads
    with launch_lock:
        return kernel(*arguments)
