"""Decides which samples are generated together."""
import math
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from sampling.params import Sample, SampleRequest


def next_batch(requests: Iterator[SampleRequest], size: int) -> list[SampleRequest]:
    """Return the next size requests, or fewer at the end. Skips batches in which all samples are already saved.

    In any other batch, the saved samples are generated again. Then the other samples get the same logits as in the
    first run, to the last bit.
    """
    while True:
        batch = list(islice(requests, size))
        if not batch or not all(request.already_saved for request in batch):
            return batch


def partition(items: Sequence, num_parts: int) -> list[Sequence]:
    """Split the items into num_parts consecutive parts, whose sizes differ by at most one."""
    bounds = [len(items) * i // num_parts for i in range(num_parts + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]


def visible_prompt(sample: Sample, block_size: int) -> list[int]:
    """The token ids of the prompt that the model can see."""
    return sample.request.prompt_ids[-block_size:]


def group_by_length(samples: list[Sample], block_size: int, max_new_tokens: int) -> list[list[Sample]]:
    """Group samples whose prompts differ in length by at most max_new_tokens.

    The rows of a batch decode in lockstep from the end of the shortest prompt, so a longer prompt needs extra steps.
    """
    groups, shortest = [], -math.inf
    for sample in sorted(samples, key=lambda sample: len(visible_prompt(sample, block_size))):
        length = len(visible_prompt(sample, block_size))
        if length > shortest + max_new_tokens:
            groups.append([])
            shortest = length
        groups[-1].append(sample)
    return sorted(groups, key=lambda group: min(sample.index for sample in group))
