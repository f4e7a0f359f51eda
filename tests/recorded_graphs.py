"""Stand-ins for CUDA graphs on a machine without a GPU, and the mark of tests that need one."""
from itertools import count
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sampling.backends import cuda

NEEDS_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
ON_GPU = pytest.param("cuda", marks=NEEDS_GPU) # a device, for parametrize


class Recording(TorchFunctionMode):
    """Stands in for a CUDA graph, and for the block that captures it: replay runs the operations of the block again, on
    the same tensors.
    """

    def __init__(self):
        super().__init__()
        self.calls = [] # (operation, its arguments, its result)

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.logits = self.calls[-1][-1].fill_(torch.nan) # a capture computes nothing

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


def record_graphs(monkeypatch, fails_at=None, error=None):
    """Let CUDA graphs work on a CPU, as Recordings, but let capture fails_at raise error. Returns all Recordings."""
    recordings, pools = [], count()

    def graph(recording, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local", "another thread's allocations would end the capture"
        assert cuda.capture_lock.locked(), "torch allows one capture at a time in a process"
        recording.pool, recording.stream = pool, stream
        recordings.append(recording)
        if len(recordings) == fails_at:
            raise error
        return recording
    for name, replacement in {"CUDAGraph": Recording, "graph": graph, "graph_pool_handle": lambda: next(pools)}.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    for name in "Stream", "current_stream", "device", "stream", "synchronize":
        monkeypatch.setattr(torch.cuda, name, MagicMock(side_effect=lambda *_: MagicMock()))
    return recordings
