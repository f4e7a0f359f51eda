"""A run shared by several processes, as torchrun starts them: on the GPUs of one machine or of many.

Process 0 reads the prompts, hands every process its share, and shows and saves what comes back, in order. Each
sample has its place in the random stream, so the text is that of one process.
"""
import os
import signal
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import islice

from console import rank_and_size

LOST = "another process of this run has ended; with out_file, the same command takes it up again"
TOLD = "this run was told to end, as when a process of it has failed; with out_file, the same command takes it up again"


class Team:
    """The processes of this run, as torchrun's environment says; mostly there is one."""

    def __init__(self):
        self.rank, self.size = rank_and_size()
        self.process = int(os.environ.get("LOCAL_RANK", 0)) if self.size > 1 else None # its number on this machine
        self.beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if self.size > 1 else 1 # how many that has
        self.first = self.rank == 0

    def join(self):
        """Find the others."""
        if self.size > 1:
            import torch.distributed as dist
            with stdout_to_stderr():
                dist.init_process_group("gloo", timeout=timedelta(days=7)) # a process that is lost is noticed at once
            if self.first:
                signal.signal(signal.SIGTERM, lambda *_: end(143)) # torchrun's, when another has failed
        return self

    @contextmanager
    def together(self):
        """A part of the run that all come through, or none: process 0 raises ValueError for any other's."""
        error = None
        try:
            yield
        except (ValueError, OSError, MemoryError, RuntimeError) as e:
            if self.size == 1:
                raise
            error = e
        if self.size > 1:
            self.agree(self.gather(None if error is None else f"{error}" or "out of memory"))

    def agree(self, errors):
        """Go on if none of the processes' errors is one; errors as gather gives them."""
        import torch.distributed as dist
        verdict = [errors]
        with told_if_lost():
            dist.broadcast_object_list(verdict)
        for rank, error in enumerate(verdict[0]):
            if error is not None:
                if not self.first: # process 0 says why, and until it has, torchrun must not find that one has failed
                    with suppress(RuntimeError):
                        dist.barrier()
                    os._exit(1)
                raise ValueError(f"process {rank}: {error}" if rank else error)

    def gather(self, mine):
        """Every process's object, at process 0; None elsewhere."""
        import torch.distributed as dist
        found = [None] * self.size if self.first else None
        with told_if_lost():
            dist.gather_object(mine, found)
        return found

    def batch_sizes(self, total, at_once):
        """The sizes of the batches that this process will draw, as share_out gives them; total None: not known."""
        if total is None:
            return {at_once}
        rest = total % (self.size * at_once)
        last = rest * (self.rank + 1) // self.size - rest * self.rank // self.size
        return {size for size in (at_once if total > rest else 0, last) if size}

    def told(self, said):
        """What process 0 says, everywhere."""
        return said if self.size == 1 else self.hand_out([said] * self.size if self.first else None)

    def hand_out(self, shares):
        """This process's part of what process 0 hands out."""
        import torch.distributed as dist
        mine = [None]
        with told_if_lost():
            dist.scatter_object_list(mine, shares)
        return mine[0]

    def share_out(self, samples, drawer):
        """The next samples in as many parts as there are processes, in order; None for each when there are no more."""
        chunk = list(islice(samples, self.size * drawer.at_once))
        while chunk and all(sample.kept for sample in chunk):
            chunk = list(islice(samples, self.size * drawer.at_once))
        ends = [len(chunk) * (rank + 1) // self.size for rank in range(self.size)]
        return [chunk[begin:end] if chunk else None for begin, end in zip([0, *ends], ends, strict=False)]

    def draw(self, samples, drawer):
        """As Drawer.draw of all samples, at process 0; elsewhere it draws its share and yields nothing."""
        if self.size == 1:
            yield from drawer.draw(samples)
            return
        samples = iter(samples)
        while True:
            shares = self.share_out(samples, drawer) if self.first else None
            mine = self.hand_out(shares)
            if mine is None:
                break
            with self.together():
                for sample in drawer.draw(mine):
                    if self.first:
                        yield sample
            for rank, share in enumerate(self.gather(mine) or []):
                if rank > 0:
                    new = [sample for sample in share if not sample.kept]
                    drawer.tick(sum(len(sample.new) for sample in new))
                    yield from new


@contextmanager
def stdout_to_stderr():
    """Standard output is for samples, and Gloo greets there in some versions of torch."""
    try:
        kept = os.dup(1)
    except OSError: # it is closed
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def told_if_lost():
    """Turn what a lost process does to the others into one line."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(LOST) from error


def end(status):
    """Leave at once, with a line that says why."""
    os.write(2, f"error: {TOLD}\n".encode())
    os._exit(status)
