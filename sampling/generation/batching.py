"""Which samples are generated together."""
import math
from collections.abc import Iterator, Sequence
from itertools import islice

from sampling.params import Sample, SampleRequest


def next_batch(requests: Iterator[SampleRequest], size: int) -> list[SampleRequest]:
    """The next size requests, or fewer at the end. Batches of which all samples are already saved are skipped.

    A saved sample in any other batch is generated once more with its batch, so that the others get the same logits as
    before, to the last bit.
    """
    while (batch := list(islice(requests, size))) and all(request.already_saved for request in batch):
        pass
    return batch


def partition(items: Sequence, num_parts: int) -> list[Sequence]:
    """The items in num_parts consecutive parts whose sizes differ by one at most."""
    ends = [len(items) * (i + 1) // num_parts for i in range(num_parts)]
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def visible_prompt(sample: Sample, block_size: int) -> list[int]:
    """The token ids of the prompt that the model can see."""
    return sample.request.prompt_ids[-block_size:]


def group_by_length(samples: list[Sample], block_size: int, max_new_tokens: int) -> list[list[Sample]]:
    """Groups of samples whose prompts differ in length by at most max_new_tokens.

    The rows of a batch decode in lockstep from the end of the shortest prompt, so a longer prompt takes extra steps.
    """
    groups, shortest = [], -math.inf
    for sample in sorted(samples, key=lambda sample: len(visible_prompt(sample, block_size))):
        length = len(visible_prompt(sample, block_size))
        if length > shortest + max_new_tokens:
            groups.append([])
            shortest = length
        groups[-1].append(sample)
    return sorted(groups, key=lambda group: min(sample.index for sample in group))
