"""Shares a run among the processes that torchrun started, on one machine or on several.

Rank 0 reads the prompts, sends every rank its share of the requests, and shows and saves the samples that come back,
in order. Each sample has its own offset in the random stream, so the samples are the same as with one process.
"""
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from sampling.generation.batching import next_batch, partition
from sampling.params import Sample, SampleRequest

if TYPE_CHECKING: # the import would load torch
    from sampling.generation.engine import Engine

T = TypeVar("T")

RESUME = "with out_file, the same command resumes the run"
PROCESS_LOST = f"another process of this run has ended; {RESUME}"
TERMINATED = f"torchrun ended this run, as it does when one of its processes fails; {RESUME}"


class Workers:
    """The processes of this run, as torchrun's environment variables describe them. Usually there is only one."""

    def __init__(self):
        environment = os.environ if "TORCHELASTIC_RUN_ID" in os.environ else {}
        self.rank, self.world_size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
        self.local_world_size = int(environment.get("LOCAL_WORLD_SIZE", 1)) # processes on this machine
        self.local_rank = int(environment.get("LOCAL_RANK", 0)) if self.world_size > 1 else None
        self.is_main = self.rank == 0

    def connect(self) -> "Workers":
        """Connect to the other processes. Returns self."""
        if self.world_size > 1:
            import torch.distributed as dist
            with stdout_to_stderr():
                dist.init_process_group("gloo", timeout=timedelta(days=7)) # a lost process is an error at once anyway
            if self.is_main: # torchrun sends SIGTERM when another process has failed
                signal.signal(signal.SIGTERM, end_on_sigterm)
        return self

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """If any process fails inside this block, all stop and rank 0 raises the error, as ValueError."""
        if self.world_size == 1:
            yield
            return
        error = None
        try:
            yield
        except (ValueError, OSError, MemoryError, RuntimeError) as e:
            error = f"{e}" or "out of memory"
        import torch.distributed as dist
        errors = [None] * self.world_size
        with lost_process_is_error():
            dist.all_gather_object(errors, error)
        self.raise_first(errors)

    def raise_first(self, errors: list[str | None]) -> None:
        """End all processes if one of them has an error. errors: that of each rank."""
        import torch.distributed as dist
        for rank, error in enumerate(errors):
            if error is not None:
                if not self.is_main: # wait until rank 0 has shown the error: torchrun kills rank 0 when another ends
                    with suppress(RuntimeError):
                        dist.barrier()
                    os._exit(1)
                raise ValueError(f"process {rank}: {error}" if rank else error)

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist
        values = [value]
        with lost_process_is_error():
            dist.broadcast_object_list(values)
        return values[0]

    def scatter(self, shares: list[T] | None) -> T:
        """Return this rank's item of rank 0's list."""
        import torch.distributed as dist
        mine = [None]
        with lost_process_is_error():
            dist.scatter_object_list(mine, shares)
        return mine[0]

    def gather(self, mine: T) -> list[T] | None:
        """Return the list of every rank's object on rank 0; None elsewhere."""
        import torch.distributed as dist
        gathered = [None] * self.world_size if self.is_main else None
        with lost_process_is_error():
            dist.gather_object(mine, gathered)
        return gathered

    def imap(self, engine: "Engine", requests: Iterable[SampleRequest]) -> Iterator[Sample]:
        """Generate all requests. Rank 0 yields the samples in order; other ranks yield nothing."""
        if self.world_size == 1:
            yield from engine.generate(requests)
            return
        requests = iter(requests)
        while True:
            shares = None
            if self.is_main:
                batch = next_batch(requests, self.world_size * engine.batch_size)
                shares = partition(batch, self.world_size) if batch else [None] * self.world_size
            share = self.scatter(shares)
            if share is None: # no requests are left
                return
            samples = []
            with self.fail_together():
                for sample in engine.generate(share):
                    if self.is_main:
                        yield sample
                    elif sample.finish_reason:
                        samples.append(sample)
            for part in self.gather(samples) or []: # None on the other ranks
                for sample in part:
                    engine.on_tokens(sample.num_tokens)
                    yield sample


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error: with some versions of torch, Gloo prints a greeting."""
    try:
        saved = os.dup(1)
    except OSError: # it is closed
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


@contextmanager
def lost_process_is_error() -> Iterator[None]:
    """Raise ValueError with one line if another process has ended: torch's own message is long."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(PROCESS_LOST) from error


def end_on_sigterm(*_) -> None:
    """A signal handler that ends the process. Python's streams may be in use, so this does not write to them."""
    os.write(2, f"error: {TERMINATED}\n".encode())
    os._exit(143)
