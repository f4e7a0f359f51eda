"""Shares a run among the processes that torchrun started, on one machine or on several.

Rank 0 makes the samples, hands out a share of them at a time, and gathers them again, in order.
Each sample has its own place in the random stream, so the samples are the same as with one process.
"""
import logging
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from sampling.process import rank, system_interrupts, world_size
from sampling.samples import Sample, Updates

if TYPE_CHECKING: # the import would load torch
    from sampling.text_generator import TextGenerator

logger = logging.getLogger(__name__)


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
