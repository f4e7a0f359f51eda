"""The LM head's shortlist, from a bfloat16 copy of its weight, contains the k largest logits."""
import pytest
import torch

from cases import cases
from models import make_gpt
from oracles import reference_generate
from processors import simulate_processor
from sampling.backends.cpu import lm_head
from sampling.backends.cpu.embedding_bag import has_fbgemm
from sampling.backends.cpu.lm_head import Bfloat16Approximation, ShortlistLMHead, exact_logits
from sampling.backends.cpu.packed_gpt import PackedGPT
from sampling.backends.cpu.packed_linear import is_supported
from streams import decode, normal

pytestmark = pytest.mark.usefixtures("all_threads")

V, E = 5000, 256


@pytest.fixture(autouse=True, params=["Intel", "AMD"])
def products(request, monkeypatch):
    """The approximation uses the products of this processor."""
    simulate_processor(monkeypatch, request.param)
    if request.param == "Intel" and not is_supported(torch.bfloat16):
        pytest.skip("this torch lacks the operators")
    if request.param == "AMD" and not has_fbgemm():
        pytest.skip("this torch lacks FBGEMM")


@pytest.fixture(autouse=True)
def small_heads_count_as_large(monkeypatch):
    monkeypatch.setattr(lm_head, "MIN_PARAMS", 1)
    monkeypatch.setattr(lm_head, "MIN_WIDTH", 1)


def misleading(part):
    """x (1, E) and weight (V, E). This part of them has the worst possible rounding: the largest logits appear to be the smallest."""
    u, is_even = 2**-8, torch.arange(E) % 2 == 0 # 1 and 1 + 2 * u are neighbours in bfloat16
    down, up = 1 + 0.99 * u, 1 + 1.01 * u
    if part == "weight":
        x, best, others = torch.where(is_even, 1.0, -1.0), torch.where(is_even, down, up), torch.where(is_even, up, down)
    else:
        x, best, others = torch.where(is_even, down, up), torch.where(is_even, 1.0, -1.0), torch.where(is_even, -1.0, 1.0)
    x[0], best[0], others[0] = 1, 0.25, 0 # the other products sum to about 0, but after rounding to -0.75 and 0.75
    weight = others.repeat(V, 1)
    weight[::20] = weight[1::20] = best
    weight[1::2] *= -1 # the mean is 0
    return x[None], weight


def scaled(x, weight, x_scale, weight_scale):
    return x * x_scale, weight * weight_scale


CASES = {
    "random": lambda: (normal(1, E), normal(V, E, seed=1) * 0.02),
    "far from zero": lambda: (normal(1, E) + 3, normal(V, E, seed=1) - 5),
    "a few large dimensions": lambda: (normal(1, E) * 50**(torch.arange(E) % 48 == 0), normal(V, E, seed=1)),
    "large": lambda: (normal(1, E) * 1e6, normal(V, E, seed=1) * 1e4),
    "small": lambda: (normal(1, E) * 1e-6, normal(V, E, seed=1) * 1e-4),
    "equal rows": lambda: (normal(1, E), normal(V // 50, E, seed=1).repeat(50, 1)),
    "tiny": lambda: (normal(1, E), normal(V, E, seed=1) * 1e-38),
    "huge x, tiny weight": lambda: scaled(*misleading("weight"), 2.0**56, 2.0**-70),
    "tiny x, huge weight": lambda: scaled(*misleading("x"), 2.0**-70, 2.0**56),
    "misleading weight": lambda: misleading("weight"),
    "misleading x": lambda: misleading("x"),
}


@pytest.mark.parametrize("case, k", cases(CASES, [1, 7, 200], quick=lambda case, k: k == 7))
def test_the_shortlist_contains_the_largest_logits_and_their_ties(case, k):
    x, weight = CASES[case]()
    exact = (x.double() @ weight.double().T)[0]
    approximation = Bfloat16Approximation(weight)
    logits, error = approximation(x)
    shortlist = approximation.shortlist(x, k)[1]
    assert (logits[0] - exact).abs().max() <= error
    assert set((exact >= exact.topk(k).values[-1]).nonzero().flatten().tolist()) <= set(shortlist.tolist())
    if case in ("random", "far from zero", "large", "small"):
        assert len(shortlist) < 4 * k + 30, "a longer shortlist would save no time"


@pytest.mark.parametrize("part", ["weight", "x"])
def test_the_error_bound_is_tight(part):
    x, weight = misleading(part)
    logits, error = Bfloat16Approximation(weight)(x)
    assert error < 1.1 * (logits[0] - x.double()[0] @ weight.double().T).abs().max()


@pytest.mark.parametrize("settings, length", cases(
    [dict(top_k=5), dict(top_k=40, temperature=0.7), dict(top_k=100), dict(), dict(temperature=0.1, top_k=1)], [1, 10, 16], # block_size is 16
    quick=lambda settings, length: length == 10))
def test_it_samples_the_same_tokens_as_gpt(settings, length):
    plain, packed = make_gpt(vocab_size=1000), PackedGPT(make_gpt(vocab_size=1000))
    idx = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    expected = reference_generate(plain, idx, 30, **settings)[:, length:].tolist()
    assert decode(packed, idx.tolist(), 30, **settings) == expected
    assert (packed.lm_head.k is not None) == (settings.get("top_k", 1000) <= 1000 / 16), "whether shortlists were tried"


@pytest.mark.parametrize("settings", [
    dict(temperature=0), dict(top_p=0.5), dict(min_p=0.1), dict(repetition_penalty=1.3), dict(repetition_penalty=0.5), dict(temperature=1e-30)],
    ids=str)
def test_it_samples_the_same_tokens_as_gpt_with_other_settings(settings):
    plain, packed, idx = make_gpt(vocab_size=1000), PackedGPT(make_gpt(vocab_size=1000)), torch.ones(1, 4, dtype=torch.long)
    torch.manual_seed(3)
    expected = reference_generate(plain, idx, 30, **{"top_k": 20, **settings})[:, 4:].tolist()
    assert decode(packed, idx.tolist(), 30, **{"top_k": 20, **settings}) == expected
    assert (packed.lm_head.k is not None) == ("repetition_penalty" not in settings), "whether shortlists were tried"


@pytest.mark.parametrize("x, weight", [
    (normal(1, E), normal(2, E).repeat(V // 2, 1)),
    (normal(1, E), normal(V, E).masked_fill(torch.arange(V)[:, None] == 7, torch.nan)),
    (normal(1, E), normal(V, E).masked_fill(torch.arange(V)[:, None] == 7, torch.inf)),
    (normal(1, E) * 1e30, normal(V, E) * 1e20),
    (normal(2, E), normal(V, E)),
], ids=["many equal rows", "nan", "infinite", "overflowing", "two rows of x"])
def test_all_logits_are_exact_if_a_shortlist_would_be_too_long(x, weight):
    head, rows = ShortlistLMHead(weight, weight_is_shared=True), []
    head.linear = lambda x, linear=head.linear: rows.append(len(x)) or linear(x)
    for _ in range(2):
        logits = head(x, 20)
        is_finite = (x @ weight.T).isfinite() # the values of the others depend on the order of summation
        assert torch.equal(logits.isfinite(), is_finite)
        torch.testing.assert_close(logits[is_finite], (x @ weight.T)[is_finite], rtol=1e-4, atol=1e-4)
    assert rows == [len(x)] * 2


@pytest.mark.parametrize("num_ids, width", cases([30, 31, 33, 40, 47, 100], [256, 300, 768], quick=lambda num_ids, width: width == 300))
def test_equal_rows_have_equal_logits(num_ids, width):
    x, weight = normal(1, width), normal(2, width, seed=1).repeat(V, 1)
    for seed in range(20):
        ids = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:num_ids].sort().values
        logits = exact_logits(x, weight, ids)[0]
        assert len(logits[ids % 2 == 0].unique()) == 1
        torch.testing.assert_close(logits, weight[ids] @ x[0])


@pytest.mark.parametrize("misses, num_tries", [("1", 16), ("10", 61), ("100", 600), ("0", 600)]) # "10": every other try is a miss
def test_a_shortlist_that_misses_too_often_is_disabled(misses, num_tries):
    head, tries = ShortlistLMHead(normal(V, E), weight_is_shared=True), []

    def shortlist(x, k):
        tries.append(misses[len(tries) % len(misses)])
        return normal(1, V), torch.arange(V if tries[-1] == "1" else k)
    head.approximation = Bfloat16Approximation(head.weight)
    head.approximation.shortlist = shortlist
    for _ in range(601):
        head(normal(1, E), 20)
    assert len(tries) == num_tries
    assert (head.approximation is None) == (num_tries < 600), "a disabled shortlist frees its memory"
    head(normal(1, E), 30)
    assert head.approximation is not None, "another k gets a new budget"


def test_the_first_token_is_computed_without_packing():
    head, x = ShortlistLMHead(normal(V, E), weight_is_shared=True), normal(1, E)
    first = head(x, 20)
    assert first.isfinite().all() and head.approximation is None
    assert not any(getattr(head.linear, name, None) for name in ("packed", "bag_matmul"))
    second = head(x, 20)
    torch.testing.assert_close(first[second > -torch.inf], second[second > -torch.inf])


@pytest.mark.parametrize("weight, is_shared", [(normal(V, E), False), (normal(V, E).bfloat16(), True)], ids=["unshared", "bfloat16"])
def test_unshared_and_bfloat16_heads_have_no_shortlist(weight, is_shared):
    if not is_supported(weight.dtype):
        pytest.skip("this torch lacks the operators")
    head = ShortlistLMHead(weight, weight_is_shared=is_shared)
    assert head.weight is None, "packing must be able to free its memory"
    for _ in range(3):
        assert head(normal(1, E), 20).isfinite().all()


def test_a_small_head_has_no_shortlist(monkeypatch):
    monkeypatch.setattr(lm_head, "MIN_PARAMS", V * E + 1)
    assert not ShortlistLMHead(normal(V, E), weight_is_shared=True).max_shortlist


def test_without_the_operators_there_is_no_shortlist(monkeypatch):
    simulate_processor(monkeypatch, "Intel")
    monkeypatch.setattr(lm_head, "is_supported", lambda dtype: False)
    assert not ShortlistLMHead(normal(V, E), weight_is_shared=True).max_shortlist
