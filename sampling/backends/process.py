"""Settings of the whole process that make it faster.

shorten_spinning and pause_garbage_collection must run before torch is imported.
"""
import gc
import os


def shorten_spinning() -> None:
    """Make OpenMP's threads sleep after waiting for less than a millisecond. Keeps the user's own settings.

    By default they spin for up to 20 ms. If another program uses one of the cores, the spinning threads occupy the
    others, while the thread that they wait for has no core. Such a run takes 4 to 6 times longer.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = "10000"


def pause_garbage_collection() -> None:
    """Stop looking for garbage: while torch is imported and the model is loaded there is none, and it takes 0.15 s."""
    gc.disable()


def resume_garbage_collection() -> None:
    """Look for garbage again, but never among what was loaded."""
    gc.freeze()
    gc.enable()
