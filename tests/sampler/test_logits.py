"""Penalties and filters of logits."""
import pytest
import torch

from sampling.sampler import logits as filters


def kept_ids(filtered):
    """The ids in the first row that a filter has not set to -inf."""
    return filtered[0].isfinite().nonzero().flatten().tolist()


def test_repetition_penalty_lowers_positive_and_negative_logits_of_previous_tokens():
    logits, ids = torch.tensor([[2.0, -2.0, 2.0, -2.0]]), torch.tensor([[0, 1, 1]])
    assert filters.apply_repetition_penalty(logits, ids, 2.0).tolist() == [[1.0, -4.0, 2.0, -2.0]]


def test_repetition_penalty_applies_to_each_row_separately():
    logits, ids = torch.full((2, 2), 3.0), torch.tensor([[0], [1]])
    assert filters.apply_repetition_penalty(logits, ids, 3.0).tolist() == [[1.0, 3.0], [3.0, 1.0]]


# The probabilities are 0.5, 0.3, 0.15 and 0.05.
FOUR = torch.tensor([[0.3, 0.5, 0.05, 0.15]]).log()


@pytest.mark.parametrize("top_p, expected", [(0.4, [1]), (0.6, [0, 1]), (0.79, [0, 1]), (0.81, [0, 1, 3]), (0.96, [0, 1, 2, 3]),
                                             (1, [0, 1, 2, 3]), (None, [0, 1, 2, 3]), (1e-9, [1])])
def test_top_p_keeps_the_fewest_tokens_whose_probabilities_reach_top_p(top_p, expected):
    assert kept_ids(filters.apply_top_p(FOUR, top_p)) == expected


@pytest.mark.parametrize("min_p, expected", [(None, [0, 1, 2, 3]), (0, [0, 1, 2, 3]), (0.09, [0, 1, 2, 3]), (0.2, [0, 1, 3]),
                                             (0.5, [0, 1]), (0.7, [1]), (1, [1])])
def test_min_p_is_relative_to_the_largest_probability(min_p, expected):
    assert kept_ids(filters.apply_min_p(FOUR, min_p)) == expected


@pytest.mark.parametrize("num_values", [3, 50, 1000], ids=lambda n: f"{n}-different-values")
@pytest.mark.parametrize("k", [1, 5, 200, 999])
def test_top_k_with_ties_keeps_what_top_k_keeps(k, num_values):
    logits = torch.randint(num_values, (8, 1000), generator=torch.Generator().manual_seed(1)).float()
    values, ids = filters.top_k_with_ties(logits, k)
    assert torch.equal(torch.full_like(logits, -torch.inf).scatter(1, ids, values), filters.apply_top_k(logits, k))


def test_top_k_does_not_rely_on_an_order_that_it_does_not_ask_for(monkeypatch):
    """On a CPU, topk(sorted=False) still puts the k-th largest last."""
    topk = torch.Tensor.topk

    def reversed_unless_sorted(logits, k, sorted=True):
        found = topk(logits, k)
        return found if sorted else torch.return_types.topk([tensor.flip(-1) for tensor in found])
    monkeypatch.setattr(torch.Tensor, "topk", reversed_unless_sorted)
    assert kept_ids(filters.apply_top_k(FOUR, 2)) == [0, 1]


def test_overflow_at_a_low_temperature_gives_the_limit_and_does_not_change_other_rows():
    logits = torch.tensor([[1.0, 9.0, 9.0], [1e-40, 0.0, 0.0]])
    cold, plain = filters.apply_temperature(logits, 1e-39)
    assert cold.tolist() == [-torch.inf, 0, 0]
    assert torch.equal(plain, logits[1] / 1e-39)


def test_a_temperature_may_be_a_large_int():
    assert filters.apply_temperature(FOUR, 10**300).tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_require_finite_explains_what_may_be_wrong(bad):
    filters.require_finite(FOUR)
    with pytest.raises(ValueError, match=r"NaN or infinite: .*checkpoint.*try dtype=bfloat16 or float32"):
        filters.require_finite(torch.tensor([[1.0, bad]]))
