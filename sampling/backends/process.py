"""Settings of the whole process that make it faster.

shorten_spinning and pause_garbage_collection must run before torch is imported.
"""
import gc
import os
import time
from pathlib import Path


def shorten_spinning() -> None:
    """Make OpenMP's threads sleep soon while they wait for each other. Keeps the user's own settings.

    By default they spin for up to 20 ms. If another program uses one of the cores, the spinning threads occupy the
    others, while the thread that they wait for has no core. On two cores of an Intel Emerald Rapids, such a run takes
    twice as long as with threads that sleep at once. While the cores are free, sleeping at once makes a run about a
    fifth slower, because waking a thread takes time. So the threads spin then, but for less than a millisecond.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = "0" if cores_are_busy() else "10000"


def cores_are_busy() -> bool:
    """Whether other programs use at least half of the cores now. False if that is unknown. Takes 10 ms."""
    num_running = []
    try:
        for _ in range(5):
            time.sleep(0.002)
            loadavg = Path("/proc/loadavg").read_text() # such as "0.20 0.18 0.12 1/80 11206": 1 of 80 threads runs
            num_running.append(int(loadavg.split()[3].split("/")[0]))
    except (OSError, ValueError, IndexError): # not Linux
        return False
    num_others = min(num_running) - 1 # without this thread; the lowest, because some threads run only for an instant
    return num_others >= (os.cpu_count() or 1) / 2


def pause_garbage_collection() -> None:
    """Disable Python's garbage collector: it takes 0.15 s while torch and the model are loaded, and frees nothing."""
    gc.disable()


def resume_garbage_collection() -> None:
    """Enable the garbage collector again, if it was paused. It skips all objects that exist now (gc.freeze)."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
