"""What concerns the whole process: its place among those of torchrun, its threads, the cores and
memory it may use.
"""
import ctypes
import errno
import importlib
import logging
import math
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING: # it takes a second
    import torch

logger = logging.getLogger(__name__)
# What numba, its compiler, its threads and the kernels take of the addresses of a process.
NUMBA_BYTES = 512 * 2**20
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
OUT_OF_MEMORY = re.compile(
    "MemoryError|out of memory|allocate memory|not enough memory|could not create a primitive"
    "|failed to map segment" # of a library
    # cuBLAS reports the latter if there is no memory for its workspace.
    "|ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED")
# Those of Ctrl-C, of kill, and of a terminal or a connection that closes: Windows has no SIGHUP.
END_SIGNALS = signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)
owns_process = False # whether no other code runs in this process; sample.py says so
first_pid = 0 # of the process that loaded the first model


def torchrun_number(name: str, default: int) -> int:
    """A number of torchrun's environment; the default if torchrun did not start this process."""
    return int(os.environ[name]) if torchrun_started_this() else default


def torchrun_started_this() -> bool:
    """Whether this process is one of torchrun's.

    Its TORCHELASTIC_RUN_ID shows that (a cluster, too, may set a RANK), unless it is inherited: a
    training that torchrun started may call sample.py.
    """
    pid = os.getppid()
    is_named = "TORCHELASTIC_RUN_ID" in os.environ
    with suppress(OSError, IndexError): # not Linux
        while is_named and b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes():
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            # It was itself started by such a training.
            if b"torchrun" in command or b"torch.distributed" in command:
                break
            # A shell started it.
            is_named = not os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
            # The parent has them.
            pid = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1]
    return is_named


def rank() -> int:
    return torchrun_number("RANK", 0)


def world_size() -> int:
    return torchrun_number("WORLD_SIZE", 1)


def expand_home(path: str | None) -> str | None:
    """A path with the home folder for a leading ~, unless a file is called so.

    In --out_dir=~/x, no shell does it.
    """
    return os.path.expanduser(path) if path and not os.path.lexists(path) else path


@contextmanager
def import_from(*folders: str, name: str = "") -> Iterator[dict[str, ModuleType]]:
    """Put folders first on sys.path inside this block.

    No module of this package, nor one of this name, hides theirs. At its end, the modules from
    there leave sys.modules, where they would hide others later. The dict gets them.
    """
    found: dict[str, ModuleType] = {}
    taken = {name}
    if any(glob(f"{folder}/{__package__}*") for folder in folders):
        taken.add(__package__)
    hidden = {key: sys.modules.pop(key) for key in [*sys.modules] if key.partition(".")[0] in taken}
    before = {*sys.modules}
    saved = sys.path[:], sys.dont_write_bytecode
    sys.path[:0] = folders
    sys.dont_write_bytecode = True # saved code would hide a second change within a second
    importlib.invalidate_caches()
    try:
        yield found
    finally:
        for key in sys.modules.keys() - before:
            package = sys.modules[key.partition(".")[0]]
            files = getattr(package, "__path__", None) or [str(getattr(package, "__file__", ""))]
            # An environment in the folder lies deeper.
            if {*folders} & {*map(os.path.dirname, files)}:
                found[key] = sys.modules[key]
        for key in found:
            del sys.modules[key]
        sys.modules.update(hidden)
        # Not earlier: the __path__ of a folder without __init__.py follows.
        sys.path[:], sys.dont_write_bytecode = saved


@contextmanager
def system_interrupts() -> Iterator[None]:
    """Let the system end the script's own process at one of END_SIGNALS inside this block.

    Python calls a handler only between two operations, and a stranger's file can ask for one that
    takes minutes. Process 1, the first one of a container, keeps Python's handlers: for it, the
    system ignores these signals.
    """
    ours = {} # the other handlers are the system's
    if owns_process and os.getpid() != 1:
        for number in END_SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                ours[number] = handler
    try:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def first_sentence(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0][:200]


def shorten_spinning() -> None:
    """Make OpenMP's threads sleep soon while they wait for each other.

    Call this before torch is imported: later, it only changes the kernels' threads, and a warning
    says so if other programs use the cores.

    By default they spin for up to 20 ms, on cores that others may need. On two cores of an Intel
    Xeon, GPT-2 in int8 generates 101 tokens/s if they spin for a tenth of a millisecond, and 72 if
    they sleep at once; if another program uses one core, 43 and 62. The user's own settings are
    kept.
    """
    if os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        return
    is_busy = cores_are_busy()
    os.environ["GOMP_SPINCOUNT"] = "0" if is_busy else "3000"
    if is_busy and "torch" in sys.modules:
        logger.warning("other programs use the cores, and torch was imported before sampling, so "
                       "its threads spin while they wait, which is many times slower: call "
                       "torch.set_num_threads(1), or start the program with GOMP_SPINCOUNT=3000")


def cores_are_busy() -> bool:
    """Whether other programs use at least half of the cores now. False if that is unknown."""
    num_running = []
    try:
        for _ in range(5):
            time.sleep(0.002)
            # Such as "0.20 0.18 0.12 1/80 11206": 1 of 80 threads runs.
            loadavg = Path("/proc/loadavg").read_text()
            num_running.append(int(loadavg.split()[3].split("/")[0]))
    except (OSError, ValueError, IndexError): # not Linux
        return False
    # This thread is not counted. The lowest number counts, because some threads run only for an
    # instant.
    num_others = min(num_running) - 1
    return num_others >= (os.cpu_count() or 1) / 2


def check_fork() -> None:
    """Raises RuntimeError in a fork of a process that called this: torch would hang there."""
    global first_pid
    first_pid = first_pid or os.getpid()
    if first_pid != os.getpid():
        raise RuntimeError("this process is a fork of one that loaded a model, and the model's "
                           "threads do not survive a fork: load it after the fork (gunicorn: "
                           "without --preload), or start the process with "
                           'multiprocessing.get_context("spawn")')


def cpu_limits() -> Iterator[int]:
    """The cores of which each control group (version 2), such as a container, has the time."""
    with suppress(OSError): # not Linux
        own = OWN_CGROUPS.read_text().partition("0::")[2] # such as "0::/docker/1f"
        group = CGROUPS / own.strip("/\n")
        for folder in group, *group.parents:
            with suppress(OSError): # inside a container, only the folder of its root may be there
                quota, period = (folder / "cpu.max").read_text().split()
                if quota != "max":
                    yield math.ceil(int(quota) / int(period))


def limit_threads() -> None:
    """Let torch, and so the kernels, use no more threads than a container has the time of, unless
    the user chose.
    """
    import torch
    if "OMP_NUM_THREADS" not in os.environ:
        # torch has counted the cores.
        torch.set_num_threads(min([torch.get_num_threads(), *cpu_limits()]))


def has_numba(is_required: bool) -> bool:
    """Whether numba works here. If not, a warning says so, or an error if it is required."""
    remedy = "pip install --force-reinstall numba, or unset NUMBA_* variables"
    # numba reads this file when it is imported and when it compiles. It may come with a stranger's
    # model, and can name a folder of pickles that numba then loads.
    if os.path.isfile(".numba_config.yaml"):
        reason = "which would apply the .numba_config.yaml of this folder"
        remedy = "remove that file, or start in another folder"
    elif "numba" not in sys.modules and free_addresses() < NUMBA_BYTES:
        # It could fail half-way, and keep the memory.
        reason = f"which takes {NUMBA_BYTES >> 20} MB, and less is left below the limit of memory"
        remedy = "raise the limit, which ulimit -v shows in KiB"
    else:
        reason = numba_failure()
    if not reason:
        return True
    message = f"the compiled kernels for CPUs, and dtype=int8, need numba ({reason}): {remedy}"
    if is_required:
        raise ValueError(message)
    logger.warning(f"{message}; continuing without the kernels, which is slower")
    return False


def free_addresses() -> float:
    """How many bytes this process may still map, below a limit such as that of ulimit -v."""
    with suppress(ImportError, OSError): # not Linux
        import resource
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        if limit != resource.RLIM_INFINITY:
            return limit - num_pages * resource.getpagesize()
    return math.inf


def numba_failure() -> str:
    """Why numba does not work; empty if it does."""
    import torch
    num_threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            # numba's warning about a variable has a traceback of its own.
            warnings.simplefilter("error", RuntimeWarning)
            import numba
        # Starts its threads, which fails without the layer that NUMBA_THREADING_LAYER names.
        numba.get_num_threads()
        torch.set_num_threads(num_threads) # where both share an OpenMP, numba has changed it
        return "NUMBA_DISABLE_JIT is set" if numba.config.DISABLE_JIT else ""
    except Exception as error: # it, or what it needs, is missing or broken, or a variable is wrong
        return f"{type(error).__name__}: {first_sentence(error)}"


def peak_memory(device: "torch.device") -> int | None:
    """The peak memory of this process in bytes: of the GPU if device is one, otherwise RAM.

    None if unknown.
    """
    if device.type == "cuda":
        import torch
        return torch.cuda.max_memory_allocated(device)
    with suppress(ImportError): # Windows
        import resource
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, means out of memory.

    torch and oneDNN have several messages for it. Those of other types may quote a file, which
    could say anything.
    """
    if error is None:
        return False
    has_type = isinstance(error, MemoryError | RuntimeError | ImportError)
    if isinstance(error, OSError):
        has_type = error.errno == errno.ENOMEM
    text = traceback.format_exception_only(error)[-1] # unlike str, it never raises
    is_named = OUT_OF_MEMORY.search(text) is not None
    return (has_type and is_named) or is_out_of_memory(error.__context__)


def return_freed_memory() -> None:
    """Return freed memory: the C library keeps what lies below memory in use."""
    import torch
    if torch.cuda.is_initialized():
        # torch 2.10 to 2.12, once the capture of a CUDA graph has failed.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
