"""How samples are grouped into batches."""
import pytest

from sampling.generation.batching import group_by_length, next_batch, partition, visible_prompt
from sampling.params import Prompt, Sample, SampleRequest


def request(index, prompt_length=1, already_saved=False):
    return SampleRequest(index, Prompt("a" * prompt_length), list(range(prompt_length)), already_saved)


def test_fully_saved_batches_are_skipped_and_other_batches_stay_complete():
    requests = iter([request(i, already_saved=i in (0, 1, 2, 4, 6, 7, 8)) for i in range(10)])
    batches = [[item.index for item in next_batch(requests, 3)] for _ in range(4)]
    assert batches == [[3, 4, 5], [9], [], []]


@pytest.mark.parametrize("length, expected", [(3, [0, 1, 2]), (4, [0, 1, 2, 3]), (6, [2, 3, 4, 5])])
def test_the_visible_prompt_is_its_last_block_size_tokens(length, expected):
    assert visible_prompt(Sample(request(0, length)), block_size=4) == expected


@pytest.mark.parametrize("lengths, block_size, max_new_tokens, expected", [
    ([5, 5, 5], 99, 10, [[0, 1, 2]]),
    ([1, 30, 11, 40, 12], 99, 10, [[0, 2], [1, 3], [4]]), # 12 is too far from 1, and 30 from 12
    ([30, 1, 2], 99, 10, [[0], [1, 2]]), # in the order of their first samples
    ([30, 1, 2], 8, 10, [[0, 1, 2]]), # the model sees 8 tokens of the first
    ([1, 2], 99, 0, [[0], [1]]),
], ids=str)
def test_prompt_lengths_in_a_group_differ_by_at_most_max_new_tokens(lengths, block_size, max_new_tokens, expected):
    samples = [Sample(request(i, length)) for i, length in enumerate(lengths)]
    groups = group_by_length(samples, block_size, max_new_tokens)
    assert [sorted(sample.index for sample in group) for group in groups] == expected


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_partition_keeps_all_items_in_order_in_parts_of_nearly_equal_size(num_parts):
    for num_items in range(20):
        parts = partition(list(range(num_items)), num_parts)
        assert [item for part in parts for item in part] == list(range(num_items)) and len(parts) == num_parts
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
