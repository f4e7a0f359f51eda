"""Runs the blocks of a PackedGPT for one token, without Python between the operators.

One token needs 20 to 50 operators a block, and Python takes about 2 us for each: a quarter of a small model's time. So
torch.jit.trace records the operators of one block, and torch's own interpreter runs them in a loop over all blocks.
They are the same operators, so the results are the same to the last bit.

torch.jit is deprecated, but nothing replaces it here: torch.compile needs a C++ compiler, takes a minute, and changes
the last bits. If torch.jit is missing or fails, Python runs every step.
"""
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sampling.backends.cpu.packed_block import PackedBlock
from sampling.backends.cpu.packed_cache import PackedCache
from sampling.backends.cpu.trace_loop import layout_of, tensors_of, trace_loop

# A step is traced after this many steps have run in Python, and for this long in total.
MIN_STEPS = 3 # the third may pack layers
MIN_SECONDS = 0.3 # tracing takes 0.05 s, and saves 5 to 25 % of a step

LOCK = threading.Lock() # for tracing: catch_warnings changes the whole process, and other threads may trace too


class TracedBlocks(NamedTuple):
    """Successive blocks that have the same operators."""
    loop: Callable[..., Tensor] # see trace_loop
    tensors: list[list[Tensor]] # those of each block
    keys: Tensor # (blocks, B, H, capacity, D)
    values: Tensor


class DecodeStep:
    """All blocks of a PackedGPT, for one more token of each row."""

    def __init__(self, blocks: list[PackedBlock]):
        self.blocks = blocks
        self.seconds: defaultdict[int, list[float]] = defaultdict(list) # of the first steps, by number of rows
        self.loops: dict[tuple, Callable[..., Tensor]] = {} # by number of rows and layout_of
        # The number of rows and the blocks of each cache.
        self.traced: WeakKeyDictionary[PackedCache, tuple[int, list[TracedBlocks]]] = WeakKeyDictionary()
        self.is_traceable = True

    def __call__(self, x: Tensor, cache: PackedCache) -> Tensor:
        """(B, E) -> (B, E): the residual stream. Appends keys and values to the cache."""
        position = cache.seq_len
        cache.seq_len += 1
        rows, traced = self.traced.get(cache, (0, []))
        if rows == len(x):
            return run_traced(traced, x, position)
        start = time.perf_counter()
        y = self.run_in_python(x, cache, position)
        seconds = self.seconds[len(x)]
        if len(seconds) < MIN_STEPS or sum(seconds) < MIN_SECONDS:
            seconds.append(time.perf_counter() - start)
        elif self.is_traceable:
            with LOCK:
                self.trace(x, cache, position, expected=y)
            if not self.is_traceable: # a wrong trace may have stored wrong keys and values
                self.run_in_python(x, cache, position)
        return y

    def run_in_python(self, x: Tensor, cache: PackedCache, position: int) -> Tensor:
        """Run all blocks: (B, E) -> (B, E)."""
        for block, keys, values in zip(self.blocks, cache.keys, cache.values, strict=True):
            x = block.decode_step(x, keys, values, position)
        return x

    def forget(self, cache: PackedCache) -> None:
        """Run the next step of this cache in Python, because its layers may have been packed since they were traced."""
        self.traced.pop(cache, None)

    def trace(self, x: Tensor, cache: PackedCache, position: int, expected: Tensor) -> None:
        """Trace the blocks for this cache. A new loop runs this step again; if the result differs, tracing ends."""
        traced, start, num_loops = [], 0, len(self.loops)
        try:
            for layout, group in groupby(map(tensors_of, self.blocks), key=layout_of):
                tensors, key = list(group), (len(x), layout)
                keys, values = (layers[start:start + len(tensors)] for layers in (cache.keys, cache.values))
                if key not in self.loops:
                    inputs = tensors[0], x, keys[0], values[0], torch.tensor(position)
                    self.loops[key] = trace_loop(self.blocks[start], inputs)
                traced.append(TracedBlocks(self.loops[key], tensors, keys, values))
                start += len(tensors)
            self.is_traceable = len(self.loops) == num_loops or torch.equal(run_traced(traced, x, position), expected)
        except (AttributeError, OSError, RuntimeError): # no torch.jit, no source code, an operator it does not support
            self.is_traceable = False
        if self.is_traceable:
            self.traced[cache] = len(x), traced


def run_traced(traced: list[TracedBlocks], x: Tensor, position: int) -> Tensor:
    """Run all blocks: (B, E) -> (B, E)."""
    index = torch.tensor(position)
    with torch.jit.optimized_execution(False): # optimizing would take as long again, and gain nothing
        for loop, tensors, keys, values in traced:
            x = loop(tensors, x, keys, values, index)
    return x
