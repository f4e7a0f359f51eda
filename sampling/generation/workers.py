"""Shares a run among the processes that torchrun started, on one machine or on several.

Rank 0 reads the prompts, sends every rank its share of the samples, and shows and saves the samples that come back,
in order. Each sample has its own offset in the random stream, so the samples are the same as with one process.
"""
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sampling.params import Sample

if TYPE_CHECKING: # the import would load torch
    from sampling.generation.engine import Engine


class Workers:
    """The processes of this run, as torchrun's environment variables describe them. Usually there is only one."""

    def __init__(self):
        environment = os.environ if "TORCHELASTIC_RUN_ID" in os.environ else {}
        self.rank, self.world_size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
        self.local_world_size = int(environment.get("LOCAL_WORLD_SIZE", 1)) # processes on this machine
        self.local_rank = int(environment.get("LOCAL_RANK", 0)) if self.world_size > 1 else None
        self.is_main = self.rank == 0

    def connect(self, is_attended: bool) -> None:
        """Connect to the other processes. Raises ValueError if there are any, and the run is interactive or watches."""
        if self.world_size == 1:
            return
        if is_attended:
            raise ValueError("interactive=True and watch=True need a single process: run it without torchrun")
        import torch.distributed as dist
        stdout = os.dup(1)
        os.dup2(2, 1) # with some versions of torch, Gloo prints a greeting
        # The timeout is long, because a lost process raises an error at once, whatever the timeout.
        dist.init_process_group("gloo", timeout=timedelta(days=7))
        os.dup2(stdout, 1)
        os.close(stdout)

    def all_gather(self, value: Any) -> list:
        """The values that all processes call this with, by rank. Raises ValueError if a process has ended."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist
        values = [None] * self.world_size
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error: # torch's own message is long
            raise ValueError("another process of this run has ended; with out_file, the same command resumes the "
                             "run") from error
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.all_gather(value)[0]

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """If any process fails inside this block, all stop and rank 0 raises the error, as ValueError."""
        if self.world_size == 1:
            yield
            return
        mine = None
        try:
            yield
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            mine = f"{error}" or "out of memory"
        errors = {rank: error for rank, error in enumerate(self.all_gather(mine)) if error is not None}
        if errors and not self.is_main: # wait until rank 0 has shown it: torchrun kills rank 0 when another ends
            with suppress(ValueError):
                self.all_gather(None)
            os._exit(1)
        if errors:
            rank, error = min(errors.items())
            raise ValueError(f"process {rank}: {error}" if rank else error)

    def generate(self, engine: "Engine", samples: Iterable[Sample]) -> Iterator[Sample]:
        """Generate all samples. Rank 0 yields them in order; other ranks yield nothing."""
        if self.world_size == 1:
            yield from engine.generate(samples)
            return
        from sampling.generation.engine import next_batch
        samples = iter(samples)
        while batch := self.broadcast(next_batch(samples, self.world_size * engine.batch_size)):
            start, end = (len(batch) * rank // self.world_size for rank in (self.rank, self.rank + 1))
            finished = []
            with self.fail_together():
                for sample in engine.generate(batch[start:end]):
                    if self.is_main:
                        yield sample
                    elif sample.finish_reason:
                        finished.append(sample)
            for part in self.all_gather(finished):
                for sample in part if self.is_main else []:
                    engine.on_tokens(sample.num_tokens)
                    yield sample
