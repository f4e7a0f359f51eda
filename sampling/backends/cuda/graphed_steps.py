"""Runs steps as CUDA graphs, and checks each graph when it is captured."""
import torch
from torch import Tensor

from sampling.backends.cuda.graph_capture import capture_graph
from sampling.backends.cuda.self_check import Key, SelfCheck


class GraphedSteps:
    """Steps that read and write the same tensors. Each key has its own graph. Subclasses say what a step is.

    The tensors stay in place: a graph reads and writes the memory that it was captured with.
    """

    def __init__(self, checks: SelfCheck, device: torch.device):
        self.checks, self.device = checks, device
        self.graphs: dict[Key, torch.cuda.CUDAGraph | None] = {} # None: this step ran once, directly
        self.pool: tuple[int, int] | None = None # memory that the graphs share: they never run at the same time

    @property
    def can_capture(self) -> bool:
        """Whether the device has CUDA graphs. On a CPU, where only tests run, every step runs directly."""
        return self.device.type == "cuda"

    def step(self, key: Key) -> tuple[Tensor, ...]:
        """Run the step of this key. Does nothing that synchronises. Returns the logits, and other results if any."""
        raise NotImplementedError

    def run_and_check(self, key: Key) -> None:
        """Run the step of this key directly, and check it if the key is new."""
        raise NotImplementedError

    def save(self) -> list[Tensor]:
        """Copies of the tensors that a step reads and also changes."""
        return []

    def restore(self, saved: list[Tensor]) -> None:
        """Let the next step start where the latest one started. saved: what save returned there."""

    def drop_graphs(self) -> None:
        """Forget all graphs, and the memory that they share."""
        self.graphs, self.pool = {}, None

    def run_or_replay(self, key: Key) -> None:
        """Run the step of this key: the first time directly, the second time captured as a graph, then replayed.

        The first run creates what must not be created during a capture, such as the workspaces of cuBLAS.
        """
        if not self.can_capture or not self.checks.use_graphs or key not in self.graphs:
            self.graphs[key] = None
            self.run_and_check(key)
            return
        with torch.cuda.device(self.device):
            if self.graphs[key] is None:
                self.capture(key)
            else:
                self.graphs[key].replay()

    def capture(self, key: Key) -> None:
        """Capture the step of this key as a graph, replay it, and run the step directly from the same tensors.

        The caller gets the direct results. The graph is kept if its results are equal to them.
        """
        saved, graph, replayed = self.save(), None, []
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        try:
            graph, results = capture_graph(lambda: self.step(key), self.pool, self.device)
            results[0].fill_(torch.nan) # so that the replay must write all logits
            graph.replay()
            replayed = [result.nan_to_num() for result in results] # copies, in which NaN is equal to NaN
            torch.cuda.synchronize(self.device) # raises the errors of the replay
        except Exception as error: # a driver, an operator or too little memory: each has its own
            self.checks.graphs_failed(error, self.device)
        self.restore(saved)
        results = self.step(key)
        if not self.checks.use_graphs:
            self.drop_graphs()
        elif all(torch.equal(*pair) for pair in zip(replayed, (r.nan_to_num() for r in results), strict=True)):
            self.graphs[key] = graph
        else:
            self.drop_graphs()
            self.checks.disable_graphs("a replayed step computed other logits than the step itself")
