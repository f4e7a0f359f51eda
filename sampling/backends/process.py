"""Settings of the whole process that make it faster. The standard library only: they come before torch is imported."""
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


def shorten_spinning() -> None:
    """Have OpenMP's threads go to sleep after waiting for less than a millisecond. What the user has set stays.

    By default they spin for up to 20 ms. If another program wants one of the cores, the spinning threads keep theirs
    while the thread that they wait for has none: such a run takes 4 to 6 times longer.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = "10000"


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """While everything is loaded there is no garbage, but looking for it takes 0.15 s. What was loaded is never
    looked at again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
