"""What concerns the whole process: its signals, its threads, forks of it, and lack of memory."""
import errno
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)
# Those of Ctrl-C, of kill, and of a terminal or a connection that closes: Windows has no SIGHUP.
END_SIGNALS = signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)
OUT_OF_MEMORY = re.compile(
    "MemoryError|out of memory|allocate memory|not enough memory|could not create a primitive"
    "|failed to map segment" # of a library
    # cuBLAS reports the latter if there is no memory for its workspace.
    "|ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED")
owns_process = False # whether no other code runs in this process; sample.py says so
first_pid = 0 # of the process that loaded the first model


@contextmanager
def system_interrupts() -> Iterator[None]:
    """Let the system end the script's own process at one of END_SIGNALS inside this block.

    Python calls a handler only between two operations, and a stranger's file can ask for one that
    takes minutes. Process 1, the first one of a container, keeps Python's handlers: for it, the
    system ignores these signals.
    """
    ours = {} # the other handlers are the system's
    try:
        for number in END_SIGNALS if owns_process and os.getpid() != 1 else ():
            if callable(signal.getsignal(number)):
                ours[number] = signal.signal(number, signal.SIG_DFL)
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


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
