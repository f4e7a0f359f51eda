"""The next token, and the random stream that it is drawn from."""
import pytest
import torch

import sampler
from conftest import make_gpt
from model import GPT, GPTConfig
from sampler import RowDraws, enough, initialisation_numbers, next_token, skip_numbers

FIVE = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0]])


def frequencies(logits, **settings):
    """How often each token comes in 4096 draws."""
    torch.manual_seed(1)
    tokens = next_token(logits.expand(4096, -1), **settings)
    return tokens.flatten().bincount(minlength=logits.size(1)) / 4096


def test_probabilities_are_the_softmax_of_logits_over_temperature():
    assert torch.allclose(frequencies(FIVE, temperature=2.0), (FIVE / 2).softmax(-1), atol=0.03)


@pytest.mark.parametrize("top_k, kept", [(1, [1, 3]), (2, [1, 3]), (3, [1, 2, 3]), (5, [0, 1, 2, 3, 4]), (99, [0, 1, 2, 3, 4]),
                                         (None, [0, 1, 2, 3, 4]), (0, [0, 1, 2, 3, 4])])
def test_top_k_keeps_the_likeliest_and_all_that_tie_with_the_last(top_k, kept):
    found = frequencies(FIVE, top_k=top_k)
    assert found.nonzero().flatten().tolist() == kept
    masked = torch.full_like(FIVE, -torch.inf)
    masked[:, kept] = FIVE[:, kept]
    assert torch.allclose(found, masked.softmax(-1), atol=0.03)


@pytest.mark.parametrize("top_k", [None, 3, 40, 999, 1000])
@pytest.mark.parametrize("ties", ["few", "hundreds"])
def test_a_token_is_what_multinomial_draws_from_the_masked_probabilities(ties, top_k):
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(4)).mul(3).bfloat16()
    logits = logits if ties == "few" else logits.clamp(max=1)
    scaled = logits.float() / 0.8
    if top_k:
        scaled[scaled < scaled.topk(top_k).values[:, -1:]] = -torch.inf
    for seed in range(20):
        torch.manual_seed(seed)
        expected = torch.multinomial(scaled.softmax(-1), 1)
        torch.manual_seed(seed)
        assert torch.equal(next_token(logits, 0.8, top_k), expected)


def test_temperature_0_takes_the_likeliest_and_draws_nothing():
    before = torch.get_rng_state()
    assert next_token(torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]]), temperature=0).tolist() == [[1], [0]]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 1e-300])
def test_a_tiny_temperature_is_the_limit_and_not_an_overflow(temperature):
    assert next_token(torch.tensor([[1.0, 900.0, -3.0]]), temperature=temperature).item() == 1


def test_a_row_too_cold_for_float32_leaves_others_alone():
    """Found at random: together the two rows span more than float32 does, each alone does not."""
    rows, draw = torch.tensor([[-2.25, 1e-40, 0.0], [0.0, 0.0, 1.25]]), torch.tensor([[3.5, 1.23, 0.6]])
    together = next_token(rows, 1e-38, draw=lambda shape, ids, device: draw.expand(shape))
    alone = [next_token(row[None], 1e-38, draw=lambda shape, ids, device: draw) for row in rows]
    assert torch.equal(together, torch.cat(alone)) and together.tolist() == [[2], [2]]


def test_logits_stay_as_they_are():
    logits = FIVE.clone()
    next_token(logits, temperature=0.7, top_k=2)
    assert torch.equal(logits, FIVE)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_stop_the_run(bad, temperature):
    with pytest.raises(ValueError, match="NaN or infinite"):
        next_token(torch.tensor([[1.0, 2.0], [0.0, bad]]), temperature=temperature)


@pytest.mark.parametrize("width, top_k", [(2, None), (65, 200), (1000, None), (1000, 30)])
@pytest.mark.parametrize("known_cpu", [True, False], ids=["uniforms", "exponential_"])
def test_rows_draw_what_is_drawn_one_after_another(width, top_k, known_cpu, monkeypatch):
    monkeypatch.setattr(sampler, "exponentials_are_uniforms", lambda: known_cpu and exponentials_are_uniforms())
    steps, samples = 30, 5
    logits = torch.randn(samples, steps, width, generator=torch.Generator().manual_seed(2)).mul(3)
    torch.manual_seed(11)
    torch.empty(123).uniform_()
    expected = torch.cat([next_token(logits[i, j, None], 0.8, top_k) for i in range(samples) for j in range(steps)])
    draws = RowDraws(11, initialisation=123, steps=steps, width=width)
    places = [draws.place_of(sample) for sample in range(samples)]
    for rows in [0, 1, 2], [0, 1], [4, 2, 3], [3]:
        draws.for_rows([places[row] for row in rows])
        found = torch.cat([next_token(logits[rows, i], 0.8, top_k, draws) for i in range(steps)], dim=1)
        assert torch.equal(found, expected.view(samples, steps)[rows])


def test_what_is_drawn_ahead_is_what_the_next_call_gives():
    draws, shape = RowDraws(7, steps=3, width=50), (1, 50)
    place = draws.place_of(0)
    draws.for_rows([place])
    expected = [draws(shape, None, "cpu").tolist() for _ in range(2)]
    draws.for_rows([place]).ahead()
    assert [draws(shape, None, "cpu").tolist() for _ in range(2)] == expected
    draws.ahead()
    assert draws.for_rows([place])(shape, None, "cpu").tolist() == expected[0], "another batch begins"


def test_rows_leave_and_start_again_without_the_others_noticing():
    logits = torch.randn(10, 3, 40, generator=torch.Generator().manual_seed(2))
    draws = RowDraws(11, steps=10, width=40)
    places = [draws.place_of(sample) for sample in (0, 2, 5)] # and a draw between may be skipped
    alone = [torch.cat([next_token(step[row, None], draw=draws.for_rows([place]) if i == 0 else draws) for i, step in enumerate(logits)])
             for row, place in enumerate(places)]
    draws.for_rows(places)
    found = [next_token(step, draw=draws) for step in logits[:4]]
    draws.keep([0, 2])
    draws.restart(1)
    assert torch.equal(torch.cat(found, dim=1), torch.cat([tokens[:4] for tokens in alone], dim=1).T)
    rest = torch.cat([next_token(step, draw=draws) for step in torch.stack([logits[4:, 0], logits[:6, 2]], dim=1)], dim=1)
    assert torch.equal(rest, torch.stack([alone[0][4:, 0], alone[2][:6, 0]]))


exponentials_are_uniforms = sampler.exponentials_are_uniforms


@pytest.mark.parametrize("before", [0, 1, 623, 624, 625, 1000])
@pytest.mark.parametrize("count", [0, 1, 622, 623, 624, 625, 5000, 624 * 50, 123456])
@pytest.mark.parametrize("far", [sampler.FAR, 2000], ids=["run", "jump"])
def test_numbers_are_skipped_as_if_drawn(before, count, far, monkeypatch):
    monkeypatch.setattr(sampler, "FAR", far)
    drawn, skipped = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for generator in drawn, skipped:
        torch.empty(before).uniform_(generator=generator)
    torch.empty(count).uniform_(generator=drawn)
    skip_numbers(skipped, count)
    assert torch.equal(drawn.get_state(), skipped.get_state())


@pytest.mark.parametrize("shape", [
    dict(), dict(bias=False), dict(n_embd=7, n_head=1, vocab_size=33, block_size=10), dict(n_layer=1, vocab_size=50304),
    dict(n_embd=3, n_head=3, block_size=3, vocab_size=17), dict(n_embd=4, vocab_size=3), dict(n_embd=4, block_size=2),
    dict(n_embd=1, n_head=1, block_size=5, vocab_size=7), # an odd number of weights
    dict(n_embd=768, n_head=12, n_layer=2, block_size=1024, vocab_size=1000),
], ids=str)
def test_initialisation_is_counted_without_making_it(shape):
    model = make_gpt(**shape)
    torch.manual_seed(5)
    GPT(GPTConfig(**vars(model.config)))
    generator = torch.Generator().manual_seed(5)
    skip_numbers(generator, initialisation_numbers(model))
    assert torch.equal(torch.empty(700).exponential_(generator=generator), torch.empty(700).exponential_())


def test_a_jump_lands_where_a_run_does():
    run, jumped = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for _ in range(4):
        skip_numbers(run, sampler.FAR - 1)
    skip_numbers(jumped, 4 * (sampler.FAR - 1))
    assert torch.equal(run.get_state(), jumped.get_state())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("top_k", [None, 200])
def test_rows_draw_on_cuda_what_multinomial_draws(top_k):
    scaled = torch.randn(3, 20, 50304, device="cuda").mul(3)
    masked = scaled if top_k is None else scaled.masked_fill(scaled < scaled.topk(top_k).values[..., -1:], -torch.inf)
    torch.manual_seed(11)
    expected = torch.stack([torch.cat([torch.multinomial(p, 1) for p in row]) for row in masked.softmax(-1)])
    draws = RowDraws(11, "cuda", initialisation=123, steps=20, width=50304)
    draws.for_rows([draws.place_of(sample) for sample in range(3)])
    assert torch.equal(torch.cat([next_token(scaled[:, i], 1.0, top_k, draws) for i in range(20)], dim=1), expected)


@pytest.mark.parametrize("how", [dict(top_k=20), dict(top_k=1), dict(top_k=20, top_p=0.7), dict(top_k=20, min_p=0.2), dict(top_k=20, temperature=0),
                                 dict(temperature=0), dict(top_k=20, temperature=1e-40), dict(top_k=20, temperature=3.0)], ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_the_largest_logits_are_enough(how, ties):
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(4)).mul(3)
    logits = logits.round() if ties else logits
    kth = logits.topk(enough(**how)).values[:, -1:]
    among = (logits >= kth).any(dim=0).nonzero().flatten()

    def tokens(logits, **more):
        torch.manual_seed(1)
        return next_token(logits, **how, **more)
    for _ in range(10):
        expected = tokens(logits)
        assert torch.equal(tokens(logits, among=among), expected)
        assert torch.equal(tokens(torch.where(logits < kth, logits - torch.rand_like(logits), logits)), expected)


@pytest.mark.parametrize("how", [dict(), dict(top_k=None), dict(top_k=0), dict(top_p=0.5), dict(top_k=20, repetition_penalty=1.1),
                                 dict(temperature=0, repetition_penalty=0.9)], ids=str)
def test_all_logits_count(how):
    assert not enough(**how)
