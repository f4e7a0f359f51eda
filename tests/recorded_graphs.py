"""Stand-ins for CUDA graphs on a machine without a GPU."""
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sampling.backends.cuda.graphed_steps import GraphedSteps


class Recording(TorchDispatchMode):
    """Stands in for a CUDA graph on a CPU: a capture undoes its writes at the end, and replay runs its operators again on the same tensors."""

    def __init__(self):
        super().__init__()
        self.calls = [] # (operator, its arguments, its results)
        self.before = [] # (tensor that an operator wrote to, copy of its old values)
        self.own = set() # addresses of the tensors that were created during the capture

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = args[0] if func._schema.is_mutable else None
        if written is not None and written.untyped_storage().data_ptr() not in self.own:
            self.before.append((written, written.clone()))
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if written is None and isinstance(tensor, torch.Tensor) and not func.is_view:
                self.own.add(tensor.untyped_storage().data_ptr())
        self.calls.append((func, args, kwargs, result))
        return result

    def __exit__(self, *error):
        super().__exit__(*error)
        for tensor, old_values in reversed(self.before):
            tensor.copy_(old_values)

    def replay(self):
        """Run the captured operators again."""
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for tensor, value in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(tensor, torch.Tensor) and not func.is_view and not func._schema.is_mutable:
                    tensor.copy_(value)


def record_graphs(monkeypatch):
    """Let CUDAGraphGPT run on a CPU, with Recordings instead of CUDA graphs. Return the list that collects them."""
    recordings = []

    def capture(recording, pool, stream):
        recordings.append(recording)
        return recording
    monkeypatch.setattr(GraphedSteps, "can_capture", True)
    for name, value in dict(current_stream="stream", set_stream=None, synchronize=None, graph_pool_handle=(0, 1), Stream="capture stream").items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return recordings


class FailingCaptures:
    """A torch.cuda.graph that fails when it begins, when a step runs, or when it ends. As in torch, its stream then stays current.

    number: the only capture that fails; the others are Recordings. None: no step can be captured.
    """

    def __init__(self, monkeypatch, fails_at="end", number=None):
        self.fails_at, self.number, self.num_captures = fails_at, number, 0
        self.current, self.closed = "stream", [] # the current stream, and the calls that closed a pool
        monkeypatch.setattr(torch.cuda, "graph", self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        for name in "_cuda_endAllocateToPool", "_cuda_releasePool":
            monkeypatch.setattr(torch._C, name, lambda device, pool, name=name: self.closed.append((name, pool)), raising=False)

    def __call__(self, recording, pool, stream):
        self.recording, self.stream, self.num_captures = recording, stream, self.num_captures + 1
        self.fails = self.number in (None, self.num_captures)
        return self

    def __enter__(self):
        self.current = self.stream
        if not self.fails:
            self.recording.__enter__()
        elif self.fails_at == "begin":
            raise RuntimeError("no graphs here\nCUDA kernel errors might be reported later")

    def __exit__(self, *error):
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture" if self.fails_at == "step" else "no graphs here\nmore lines")
        self.recording.__exit__(*error)
        self.current = "stream"
