"""Captures a CUDA graph. If that fails, torch can be used as before."""
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TypeVar

import torch

Result = TypeVar("Result")


def capture_graph(step: Callable[[], Result], pool: tuple[int, int],
                  device: torch.device) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture a step as a CUDA graph with this memory pool. Returns the graph, and what step returned.

    If the capture fails, this raises the error, but first undoes what torch.cuda.graph leaves behind: its own stream
    stays current, the pool stays open, and the default generator refuses to draw.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, pool=pool, stream=capture_stream(device)):
            result = step()
    except BaseException: # Ctrl-C too
        torch.cuda.set_stream(stream)
        with suppress(Exception): # torch raises RuntimeError if the pool is closed already
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        with suppress(Exception): # the error of the capture matters more
            generator = torch.cuda.default_generators[device.index]
            generator.graphsafe_set_state(generator.clone_state()) # a copy is not in the middle of a capture
        raise
    return graph, result


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on this GPU. That of torch.cuda.graph is on the first GPU that it was used on."""
    return torch.cuda.Stream(device)
