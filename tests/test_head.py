"""A head that is read in half its bytes leaves none of the k largest logits out."""
import head
import onednn
import pytest
import torch
from head import Head, Sketch
from packed import pack

from conftest import make_gpt, plain_generate

pytestmark = pytest.mark.skipif(not onednn.available(torch.bfloat16), reason="this torch has not the operators")

V, E = 5000, 256


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    monkeypatch.setattr(head, "LARGE", 1)
    monkeypatch.setattr(head, "WIDE", 1)


def numbers(*shape, seed=0):
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def misled(by):
    """What is rounded as far as can be, and so that the likeliest seem to be the least likely."""
    u, even = 2**-8, torch.arange(E) % 2 == 0 # 1 and 1 + 2 * u are next to each other in bfloat16
    down, up = 1 + 0.99 * u, 1 + 1.01 * u
    if by == "weights":
        x, best, others = torch.where(even, 1.0, -1.0), torch.where(even, down, up), torch.where(even, up, down)
    else:
        x, best, others = torch.where(even, down, up), torch.where(even, 1.0, -1.0), torch.where(even, -1.0, 1.0)
    x[0], best[0], others[0] = 1, 0.25, 0 # all else comes to about 0, but once it is rounded to -0.75 and 0.75
    weight = others.repeat(V, 1)
    weight[::20] = weight[1::20] = best
    weight[1::2] *= -1 # the mean is 0
    return x[None], weight


CASES = {
    "random": lambda: (numbers(1, E), numbers(V, E, seed=1) * 0.02),
    "far from zero": lambda: (numbers(1, E) + 3, numbers(V, E, seed=1) - 5),
    "a few large dimensions": lambda: (numbers(1, E) * 50**(torch.arange(E) % 48 == 0), numbers(V, E, seed=1)),
    "large": lambda: (numbers(1, E) * 1e6, numbers(V, E, seed=1) * 1e4),
    "small": lambda: (numbers(1, E) * 1e-6, numbers(V, E, seed=1) * 1e-4),
    "twins": lambda: (numbers(1, E), numbers(V // 50, E, seed=1).repeat(50, 1)),
    "tiny": lambda: (numbers(1, E), numbers(V, E, seed=1) * 1e-38),
    "tiny and huge": lambda: [part * scale for part, scale in zip(misled("weights"), (2.0**56, 2.0**-70), strict=True)],
    "huge and tiny": lambda: [part * scale for part, scale in zip(misled("the state"), (2.0**-70, 2.0**56), strict=True)],
    "weights that mislead": lambda: misled("weights"),
    "a state that misleads": lambda: misled("the state"),
}


@pytest.mark.parametrize("k", [1, 7, 200])
@pytest.mark.parametrize("case", CASES)
def test_what_is_left_holds_the_largest_and_their_ties(case, k):
    x, weight = CASES[case]()
    exact = (x.double() @ weight.double().T)[0]
    sketch = Sketch(weight)
    logits, error = sketch(x)
    ids = sketch.largest(x, k)[1]
    assert (logits[0] - exact).abs().max() <= error
    assert set((exact >= exact.topk(k).values[-1]).nonzero().flatten().tolist()) <= set(ids.tolist())
    if case in ("random", "far from zero", "large", "small"):
        assert len(ids) < 4 * k + 30, "or nothing would be won"


@pytest.mark.parametrize("by", ["weights", "the state"])
def test_the_error_is_said_to_be_hardly_larger_than_it_can_be(by):
    x, weight = misled(by)
    logits, error = Sketch(weight)(x)
    assert error < 1.1 * (logits[0] - x.double()[0] @ weight.double().T).abs().max()


@pytest.mark.parametrize("how", [dict(top_k=5), dict(top_k=40, temperature=0.7), dict(top_k=100), dict(), dict(temperature=0.1, top_k=1)], ids=str)
@pytest.mark.parametrize("length", [1, 10, 16]) # its block_size is 16
def test_the_same_tokens(length, how):
    plain, packed = make_gpt(vocab_size=1000), pack(make_gpt(vocab_size=1000))
    idx = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    expected = plain_generate(plain, idx, 30, **how)
    torch.manual_seed(3)
    assert torch.equal(packed.generate(idx, 30, **how), expected)
    assert (packed.lm_head.k is not None) == (how.get("top_k", 1000) * head.SHARE <= 1000), "what is tested"


@pytest.mark.parametrize("how", [dict(temperature=0), dict(top_p=0.5), dict(min_p=0.1), dict(repetition_penalty=1.3), dict(repetition_penalty=0.5), dict(temperature=1e-30)], ids=str)
def test_the_same_tokens_whatever_else_counts(how):
    plain, packed = make_gpt(vocab_size=1000), pack(make_gpt(vocab_size=1000))
    torch.manual_seed(3)
    expected = plain.generate(torch.ones(1, 4, dtype=torch.long), 30, top_k=20, **how)
    torch.manual_seed(3)
    assert torch.equal(packed.generate(torch.ones(1, 4, dtype=torch.long), 30, top_k=20, **how), expected)
    assert (packed.lm_head.k is not None) == ("repetition_penalty" not in how), "what is tested"


@pytest.mark.parametrize("x, weight", [
    (numbers(1, E), numbers(2, E).repeat(V // 2, 1)),
    (numbers(1, E), numbers(V, E).masked_fill(torch.arange(V)[:, None] == 7, torch.nan)),
    (numbers(1, E), numbers(V, E).masked_fill(torch.arange(V)[:, None] == 7, torch.inf)),
    (numbers(1, E) * 1e30, numbers(V, E) * 1e20),
    (numbers(2, E), numbers(V, E)),
], ids=["many twins", "nan", "infinite", "overflowing", "two rows"])
def test_where_little_would_be_left_out_the_whole_head_is_read(x, weight):
    made = Head(weight, kept=True)
    for _ in range(2):
        logits, *among = made(x, 20)
        assert not among
        finite = (x @ weight.T).isfinite() # of what is not, the order of the sums says what it is
        assert torch.equal(logits.isfinite(), finite)
        torch.testing.assert_close(logits[finite], (x @ weight.T)[finite], rtol=1e-4, atol=1e-4)
    assert made.whole.rows == len(x)


@pytest.mark.parametrize("among", [30, 31, 33, 40, 47, 100])
@pytest.mark.parametrize("width", [256, 300, 768])
def test_what_ties_still_ties(width, among):
    x, weight = numbers(1, width), numbers(2, width, seed=1).repeat(V, 1)
    for seed in range(20):
        ids = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:among].sort().values
        logits = head.products(x, weight, ids)[0]
        assert len(logits[ids % 2 == 0].unique()) == 1
        torch.testing.assert_close(logits, weight[ids] @ x[0])


@pytest.mark.parametrize("failing, times", [("1", 16), ("10", 61), ("100", 600), ("0", 600)])
def test_what_fails_too_often_is_given_up(failing, times, monkeypatch):
    made, looks = Head(numbers(V, E), kept=True), []

    def look(x, k):
        looks.append(failing[len(looks) % len(failing)])
        return numbers(1, V), torch.arange(V if looks[-1] == "1" else k)
    made.sketch.largest = look
    for _ in range(601):
        made(numbers(1, E), 20)
    assert len(looks) == times
    assert ("sketch" in vars(made)) == (times == 600), "its memory"
    made.sketch.largest = look
    made(numbers(1, E), 30)
    assert len(looks) == times + 1, "for another k it may do"


def test_batches_of_rows_do_not_make_a_sketch():
    packed = pack(make_gpt(vocab_size=1000))
    for _ in range(2):
        packed.generate(torch.ones(3, 4, dtype=torch.long), 5, top_k=20)
    assert "sketch" not in vars(packed.lm_head)


@pytest.mark.parametrize("k", [-1, 0])
def test_what_is_no_number_of_logits(k):
    made = Head(numbers(V, E), kept=True)
    for _ in range(3):
        made(numbers(1, E), k)


def test_nothing_is_packed_for_the_first_token():
    made, x = Head(numbers(V, E), kept=True), numbers(1, E)
    first, = made(x, 20)
    assert not made.whole.weight.is_mkldnn and "sketch" not in vars(made)
    second, among = made(x, 20)
    torch.testing.assert_close(first[:, among], second[:, among])


@pytest.mark.parametrize("weight, kept", [(numbers(V, E), False), (numbers(V, E).bfloat16(), True)], ids=["alone", "bfloat16"])
def test_of_a_head_of_another_kind_all_is_read(weight, kept):
    made = Head(weight, kept)
    assert made.rows is None, "memory that packing has to give back"
    for _ in range(3):
        assert len(made(numbers(1, E), 20)) == 1


def test_all_of_a_small_head_is_read(monkeypatch):
    monkeypatch.setattr(head, "LARGE", V * E + 1)
    assert not Head(numbers(V, E), kept=True).most


def test_without_the_operator_all_is_read(monkeypatch):
    monkeypatch.setattr(head, "available", lambda dtype: False)
    assert not Head(numbers(V, E), kept=True).most
