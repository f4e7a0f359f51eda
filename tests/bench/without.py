"""Runs sample.py with one optimisation switched off, to measure what it gains.

    python tests/bench/without.py OPTIMISATION [SETTING ...]
"""
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(PROJECT))


def loops():
    """The plain GPT runs, by torch's operators. Only for float32."""
    from sampling.backends import prepare
    prepare.has_loops = lambda *_: False


def plain_short_runs():
    """Every run loads the loops, however short it is."""
    from sampling.backends import prepare
    prepare.MIN_PLAIN_SECONDS = 0


def shortlist():
    """The head computes all logits in float32."""
    from sampling.backends.cpu import Shortlist
    Shortlist.MIN_WEIGHTS = float("inf")


def random_bits():
    """All exponential numbers of a step are computed, not only those of the tokens that may be chosen."""
    import torch

    from sampling.sampler.row_streams import RowStreams
    draw = RowStreams.draw

    def draw_exponentials(self, numbers):
        return draw(self, torch.empty(numbers.shape))
    RowStreams.draw = draw_exponentials


def skip_init():
    """The model is initialised, on the meta device, before it gets its weights."""
    from sampling.checkpoints import build
    build.SkipInit = nullcontext


def jump_ahead():
    """The random stream is advanced number by number."""
    from sampling.sampler import mt19937
    mt19937.JUMP_THRESHOLD = float("inf")


def disable_malloc_trim():
    """Freed memory returns to the system."""
    from sampling.backends import prepare
    prepare.disable_malloc_trim = lambda: None


def shorten_spinning():
    """OpenMP's threads spin for the default time."""
    from sampling.backends import process
    process.shorten_spinning = lambda: None


OPTIMISATIONS = {function.__name__: function for function in (
    loops, plain_short_runs, shortlist, random_bits, skip_init, jump_ahead, disable_malloc_trim, shorten_spinning)}

if __name__ == "__main__":
    _, optimisation, *sys.argv[1:] = sys.argv
    if optimisation != "shorten_spinning": # the others import torch, and spinning must be set before that
        from sampling.backends import process
        process.shorten_spinning()
    OPTIMISATIONS[optimisation]()
    runpy.run_path(str(PROJECT / "sample.py"), run_name="__main__")
