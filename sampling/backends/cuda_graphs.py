"""Captures steps as CUDA graphs, and checks on the user's own GPU that they compute what the plain model computes.

If a check fails, or graphs do not work, the run continues without them, which is slower, and a line tells the user.
"""
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sampling.messages import Log, is_out_of_memory

# The largest logits_error that rounding explains; a wrong key, mask or position gives more.
TOLERANCE_FLOAT32, TOLERANCE_HALF = 0.005, 0.05


@dataclass
class SelfCheck:
    """What this GPU may use, as far as the checks have shown.

    use_graphs: run steps as CUDA graphs. use_steps: run static steps; otherwise the plain model, which graphs cannot
    hold.
    """
    log: Log
    use_graphs: bool = True
    use_steps: bool = True
    checked: set[Hashable] = field(default_factory=set) # shapes of logits, and keys of steps

    def agree(self, found: Tensor, expected: Tensor) -> bool:
        """Whether the logits (B, V) of a step agree with those of the plain model. If not, use no steps any more."""
        error, limit = logits_error(found, expected), tolerance(expected) # (B,) each
        if (error <= limit).all() or not expected.isfinite().all(): # logits that are not finite get their own error
            return True
        worst = (error - limit).argmax()
        error, limit = error[worst].item(), limit[worst].item()
        self.use_graphs = self.use_steps = False
        self.log(f"the fast path for GPUs computes other logits than the plain model here (a difference of {error:.3g} "
                 f"standard deviations; {limit:.3g} is allowed): continuing with the plain model, which is slower")
        return False

    def graphs_failed(self, error: Exception, device: torch.device) -> None:
        """Continue without CUDA graphs after this error. Raises ValueError if the GPU cannot be used any more."""
        while error.__context__ is not None: # the first error says more than those that it caused
            error = error.__context__
        first_line = str(error).partition("\n")[0]
        reason = f"{type(error).__name__}: {first_line:.200}"
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            raise ValueError("a CUDA graph failed, and the GPU accepts nothing more from this process: run it again "
                             f"with --cuda_graphs=False ({reason})") from None
        self.use_graphs = False
        self.log(f"CUDA graphs do not work here ({reason}): continuing without them, which is slower")


class GraphSet:
    """The CUDA graphs of steps that read and write the same tensors, one for each key.

    A graph reads and writes the memory that it was captured with, so these tensors must stay in place.
    """

    def __init__(self, checks: SelfCheck, device: torch.device):
        self.checks, self.device = checks, device
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {} # with the logits that they write
        self.stream = self.pool = None # of the captures. The graphs share the pool: they never run at the same time

    def run(self, key: Hashable, step: Callable[[], Tensor], plain: Callable[[], Tensor]) -> Tensor:
        """The logits (B, V) of a step: from its graph, which is captured at the first call with this key.

        plain computes the same with the plain model, and may be called instead of step or after it. Raises what means
        out of memory; the next call captures again.
        """
        if key in self.graphs and self.checks.use_graphs:
            graph, logits = self.graphs[key]
            graph.replay()
            return logits
        self.graphs.pop(key, None)
        if not self.checks.use_steps:
            return plain()
        logits = self.capture(key, step) if self.checks.use_graphs else step()
        shape = *logits.shape, key
        if shape not in self.checks.checked or key in self.graphs: # each graph is new, and is checked
            self.checks.checked.add(shape)
            expected = plain()
            if not self.checks.agree(logits, expected):
                return expected
        return logits

    def capture(self, key: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """Capture the step, and run it once: from its graph, or directly if graphs do not work."""
        try:
            if self.stream is None:
                self.stream, self.pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
            self.graphs[key] = graph, logits = capture_graph(step, self.stream, self.pool, self.device)
            graph.replay()
            torch.cuda.synchronize(self.device) # raises the errors of the replay
            return logits
        except Exception as error: # a driver, an operator or too little memory: each has its own
            self.graphs.pop(key, None)
            if is_out_of_memory(error):
                raise
            self.checks.graphs_failed(error, self.device)
        return step()


def capture_graph(step: Callable[[], Tensor], stream: torch.cuda.Stream, pool: tuple[int, int],
                  device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a step as a CUDA graph with this memory pool. Returns the graph, and the tensor that it writes.

    The step first runs directly on the same stream, which creates what must not be created during a capture: cuBLAS
    keeps a workspace for each stream. stream and pool belong to one GraphSet, so that nothing dangles when it is gone.
    """
    graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        with torch.cuda.device(device):
            stream.wait_stream(caller)
            with torch.cuda.stream(stream):
                step()
            caller.wait_stream(stream)
            # thread_local: what another thread allocates meanwhile does not end the capture.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                logits = step()
    except BaseException: # after a failed capture, torch.cuda.graph leaves its own stream current
        torch.cuda.set_stream(caller)
        raise
    return graph, logits


def logits_error(found: Tensor, expected: Tensor) -> Tensor:
    """The difference of each row of logits (B, V): (B,). It is the root mean square, without the mean, relative to the
    standard deviation of expected.

    The mean is left out because a constant added to all logits does not change their probabilities.
    """
    difference = (found.float() - expected.float()).std(dim=-1, correction=0)
    return difference / expected.float().std(dim=-1, correction=0).clamp(min=1e-30)


def tolerance(expected: Tensor) -> Tensor:
    """The largest logits_error that rounding explains, for each row: (B,).

    GPT-2's logits lie around -60 to -115, where neighbouring bfloat16 numbers are 0.5 apart: half of that is added, in
    standard deviations.
    """
    base = TOLERANCE_FLOAT32 if expected.dtype == torch.float32 else TOLERANCE_HALF
    logits = expected.float()
    rounding = torch.finfo(expected.dtype).eps / 2 * logits.mean(dim=-1).abs()
    return base + rounding / logits.std(dim=-1, correction=0).clamp(min=1e-30)
