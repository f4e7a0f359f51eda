"""The processes that torchrun started, on one machine or on several: which one this is, and how
they share a run.

Rank 0 makes the samples, hands out a share of them at a time, and gathers them again, in order.
Each sample has its own place in the random stream, so the samples are the same as with one
process.
"""
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sampling.process import system_interrupts
from sampling.samples import Sample, Updates

if TYPE_CHECKING: # the import would load torch
    from sampling.text_generator import TextGenerator

logger = logging.getLogger(__name__)


def rank() -> int:
    return torchrun_number("RANK", 0)


def world_size() -> int:
    return torchrun_number("WORLD_SIZE", 1)


def torchrun_number(name: str, default: int) -> int:
    """A number of torchrun's environment; the default if torchrun did not start this process."""
    return int(os.environ[name]) if torchrun_started_this() else default


def torchrun_started_this() -> bool:
    """Whether this process is one of torchrun's.

    Its TORCHELASTIC_RUN_ID shows that (a cluster, too, may set a RANK), unless it is inherited: a
    training that torchrun started may call sample.py.
    """
    pid = os.getppid()
    is_named = "TORCHELASTIC_RUN_ID" in os.environ
    with suppress(OSError, IndexError): # not Linux
        while is_named and b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes():
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            # torchrun itself, whose own environment may name a run, starts this process.
            if b"torchrun" in command or b"torch.distributed" in command:
                break
            # A training that torchrun started is a Python, but a shell in between is none.
            is_named = not os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
            # The next one to look at is the parent of that process.
            pid = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1]
    return is_named


# ---- sharing a run

def run_on_all(gpt: "TextGenerator", samples: Iterator[Sample], **options: Any) -> Updates:
    """Rank 0: what gpt.run yields, with the help of the other processes. options: those of gpt.run.
    """
    num_processes = world_size()
    if num_processes == 1:
        yield from gpt.run(samples, **options)
        return
    share_size = options["batch_size"] or gpt.backend.max_rows
    while batch := list(islice(samples, num_processes * share_size)):
        bounds = [len(batch) * rank // num_processes for rank in range(num_processes + 1)]
        shares = [batch[start:end] for start, end in pairwise(bounds)]
        exchange("broadcast_object_list", [(shares, options)])
        yield from gpt.run(shares[0], **options)
        results = [None] * num_processes
        exchange("gather_object", None, results)
        for share, finished in zip(shares[1:], results[1:], strict=True):
            new = [sample for sample in share if not sample.already_saved]
            for sample, (copy, pieces) in zip(new, finished, strict=True):
                vars(sample).update(vars(copy))
                yield sample, pieces
    exchange("broadcast_object_list", [None])


def serve(load: Callable[[], "TextGenerator"]) -> bool:
    """Meet the other processes, if torchrun started several.

    Return False on rank 0. On the others, load the model, generate the shares that rank 0 hands
    out, and return True when there are no more.
    """
    if world_size() > 1:
        import torch.distributed as dist
        stdout = os.dup(1)
        os.dup2(2, 1) # with some versions of torch, Gloo prints a greeting
        logger.info("waiting for the other processes that torchrun has started")
        # The timeout is long, because a lost process raises an error at once, whatever the timeout.
        with system_interrupts(): # if they never come
            dist.init_process_group("gloo", timeout=timedelta(days=7))
        os.dup2(stdout, 1)
        os.close(stdout)
    if not rank():
        return False
    gpt = load()
    while True:
        exchange("broadcast_object_list", received := [None])
        if received[0] is None:
            return True
        shares, options = received[0]
        finished = []
        text = []
        for sample, pieces in gpt.run(shares[rank()], **options):
            text += pieces
            if sample.finish_reason:
                finished.append((sample, text))
                text = []
        exchange("gather_object", finished)


def exchange(name: str, *objects: Any) -> None:
    """Call a collective function of torch.distributed.

    Raises ValueError if another process has ended.
    """
    import torch.distributed as dist
    try:
        getattr(dist, name)(*objects)
    except RuntimeError as error: # torch's own message is long
        raise ValueError("another process of this run has ended; with out_file, the same command "
                         "resumes the run") from error
