"""Captures steps as CUDA graphs, and checks on the user's own GPU that they compute what the plain model computes.

If a check fails, or graphs do not work, the run continues without them, which is slower, and a line tells the user.
"""
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from sampling.messages import Log, is_out_of_memory

TOLERANCE_FLOAT32, TOLERANCE_HALF = 0.005, 0.05 # see compare_logits; a wrong key, mask or position gives more


@dataclass
class SelfCheck:
    """Which fast paths this GPU may use. A failed check turns a path off, and log gets one line.

    use_steps: the steps of CUDABackend; False: the plain model. use_graphs: CUDA graphs of these steps.
    """
    log: Log
    use_graphs: bool = True
    use_steps: bool = True

    def check_logits(self, found: Tensor, expected: Tensor) -> bool:
        """Whether the logits (B, V) of a step agree with those of the plain model. If not, use no steps any more."""
        error, limit = compare_logits(found, expected) # (B,) each
        if (error <= limit).all() or not expected.isfinite().all(): # logits that are not finite get their own error
            return True
        worst = (error - limit).argmax()
        self.use_graphs = self.use_steps = False
        self.log(f"the fast path for GPUs computes other logits than the plain model here (a difference of "
                 f"{error[worst]:.3g} standard deviations; {limit[worst]:.3g} is allowed): continuing with the plain "
                 "model, which is slower")
        return False

    def disable_graphs(self, error: Exception, device: torch.device) -> None:
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
    """The CUDA graphs of steps that read and write the same tensors, which stay in place. Each step has a key."""

    def __init__(self, checks: SelfCheck, device: torch.device):
        self.checks, self.device = checks, device
        # By key: the graph and the logits that it writes; None: the step was checked, and runs without a graph.
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        self.stream = self.pool = None # of the captures. The graphs share the pool: they never run at the same time

    def run(self, key: Hashable, step: Callable[[], Tensor], plain: Callable[[], Tensor]) -> Tensor:
        """The logits (B, V) of a step: from its graph, which is captured and checked at the first call with this key.

        plain computes the same with the plain model. Raises what means out of memory; the next call captures again.
        """
        if not self.checks.use_steps:
            return plain()
        if key in self.graphs:
            if self.graphs[key] is None or not self.checks.use_graphs:
                return step()
            graph, logits = self.graphs[key]
            graph.replay()
            return logits
        graph, logits = self.capture(step) if self.checks.use_graphs else (None, step())
        expected = plain()
        if not self.checks.check_logits(logits, expected):
            return expected
        self.graphs[key] = (graph, logits) if graph else None
        return logits

    def capture(self, step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph | None, Tensor]:
        """Capture the step, and run it once: from its graph, or directly if graphs do not work."""
        try:
            if self.stream is None:
                self.stream, self.pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
            graph, logits = capture_graph(step, self.stream, self.pool, self.device)
            graph.replay()
            torch.cuda.synchronize(self.device) # raises the errors of the replay
            return graph, logits
        except Exception as error: # a driver, an operator or too little memory: each has its own
            if is_out_of_memory(error):
                raise
            self.checks.disable_graphs(error, self.device)
        return None, step()


def capture_graph(step: Callable[[], Tensor], stream: torch.cuda.Stream, pool: tuple[int, int],
                  device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a step as a CUDA graph with this memory pool. Returns the graph, and the tensor that it writes.

    stream and pool belong to one GraphSet: cuBLAS keeps a workspace for each stream, and none dangles when it is gone.
    """
    graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    stream.wait_stream(caller)
    # torch.cuda.graph may leave its own stream current when it fails: the outer block then returns to the caller's.
    with torch.cuda.device(device), torch.cuda.stream(stream):
        step() # creates what must not be created during a capture, such as the workspace of cuBLAS
        # thread_local: what another thread allocates meanwhile does not end the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            logits = step()
    caller.wait_stream(stream)
    return graph, logits


def compare_logits(found: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """The difference of each row of logits (B, V), and the largest that rounding explains: (B,) each, in standard
    deviations of expected.

    The mean of the difference is left out, because a constant added to all logits does not change their probabilities.
    GPT-2's logits lie around -60 to -115, where neighbouring bfloat16 numbers are 0.5 apart: half of that is allowed.
    """
    logits, difference = expected.float(), found.float() - expected.float()
    std = logits.std(dim=-1, correction=0).clamp(min=1e-30)
    rounding = torch.finfo(expected.dtype).eps / 2 * logits.mean(dim=-1).abs()
    base = TOLERANCE_FLOAT32 if expected.dtype == torch.float32 else TOLERANCE_HALF
    return difference.std(dim=-1, correction=0) / std, base + rounding / std
