"""Stand-ins for CUDA graphs on a machine without a GPU, and the mark of tests that need one."""
from itertools import count

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sampling.backends import cuda_graphs

NEEDS_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
ON_GPU = pytest.param("cuda", marks=NEEDS_GPU) # a device, for parametrize


class Recording(TorchFunctionMode):
    """Stands in for a CUDA graph on a CPU: replay runs the operations of a step again, on the same tensors."""

    def __init__(self, step, stream, pool):
        super().__init__()
        self.stream, self.pool, self.calls = stream, pool, [] # (operation, its arguments, its result)
        with self:
            self.logits = step()
        self.logits.fill_(torch.nan) # a capture computes nothing

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        """Run the operations again."""
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            if isinstance(result, Tensor) and again.data_ptr() != result.data_ptr(): # neither a view nor in place
                result.copy_(again)


def record_graphs(monkeypatch):
    """Let CUDA graphs work on a CPU, as Recordings. Returns the list of all Recordings."""
    recordings, numbers = [], count()

    def capture(step, stream, pool, device):
        recordings.append(Recording(step, stream, pool))
        return recordings[-1], recordings[-1].logits
    monkeypatch.setattr(cuda_graphs, "capture_graph", capture)
    for name in "Stream", "graph_pool_handle", "synchronize":
        monkeypatch.setattr(torch.cuda, name, lambda *_: next(numbers))
    return recordings
