"""Runs sample.py with one optimisation switched off, to measure what it gains.

    python tests/bench/without.py OPTIMISATION [SETTING ...]
"""
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(PROJECT))


def packing():
    """Every Linear uses its plain weight."""
    from sampling.backends.cpu.packed_linear import PackedLinear
    PackedLinear.pack = lambda self: None


def embedding_bags():
    """On AMD processors, oneDNN multiplies single rows."""
    from sampling.backends.cpu import bag_linear, lm_head, packed_linear
    for module in bag_linear, lm_head, packed_linear:
        module.bags_are_faster = lambda: False


def tracing():
    """Python runs every operator of a step."""
    from sampling.backends.cpu import traced_blocks
    traced_blocks.MIN_SECONDS = float("inf")


def shortlist():
    """The head computes all logits in float32."""
    from sampling.backends.cpu import lm_head
    lm_head.MIN_PARAMS = float("inf")


def interleaving():
    """In 8 bits, each thread reads the weights of a product from one place of memory to the next."""
    from sampling.backends.cpu import int8_matmul
    int8_matmul.NUM_STREAMS = 1


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
    packing, embedding_bags, tracing, shortlist, interleaving, skip_init, jump_ahead, disable_malloc_trim,
    shorten_spinning)}

if __name__ == "__main__":
    _, optimisation, *sys.argv[1:] = sys.argv
    if optimisation != "shorten_spinning": # the others import torch, and spinning must be set before that
        from sampling.backends import process
        process.shorten_spinning()
    OPTIMISATIONS[optimisation]()
    runpy.run_path(str(PROJECT / "sample.py"), run_name="__main__")
