"""The next token, and the random stream that it is drawn from."""
import pytest
import torch
from conftest import make_gpt

import sampler
from model import GPT, GPTConfig
from sampler import RowDraws, initialisation_numbers, multinomial, next_token, skip_numbers

FIVE = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0]])


def spy(probs):
    """A draw that shows the probabilities it got."""
    spy.probs = probs
    return multinomial(probs)


def test_probabilities_are_the_softmax_of_logits_over_temperature():
    next_token(FIVE, temperature=0.5, draw=spy)
    assert torch.allclose(spy.probs, (FIVE / 0.5).softmax(-1))


@pytest.mark.parametrize("top_k, kept", [(1, [1, 3]), (2, [1, 3]), (3, [1, 2, 3]), (5, [0, 1, 2, 3, 4]), (99, [0, 1, 2, 3, 4])])
def test_top_k_keeps_the_likeliest_and_all_that_tie_with_the_last(top_k, kept):
    next_token(FIVE, top_k=top_k, draw=spy)
    assert spy.probs[0].nonzero().flatten().tolist() == kept


def test_temperature_0_takes_the_likeliest_and_draws_nothing():
    before = torch.get_rng_state()
    assert next_token(torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]]), temperature=0).tolist() == [[1], [0]]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 1e-300])
def test_a_tiny_temperature_is_the_limit_and_not_an_overflow(temperature):
    assert next_token(torch.tensor([[1.0, 900.0, -3.0]]), temperature=temperature).item() == 1


def test_logits_stay_as_they_are():
    logits = FIVE.clone()
    next_token(logits, temperature=0.7, top_k=2)
    assert torch.equal(logits, FIVE)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_stop_the_run(bad, temperature):
    with pytest.raises(ValueError, match="NaN or infinite"):
        next_token(torch.tensor([[1.0, 2.0], [0.0, bad]]), temperature=temperature)


@pytest.mark.parametrize("width", [2, 65, 1000])
@pytest.mark.parametrize("known_cpu", [True, False], ids=["uniforms", "exponential_"])
def test_rows_draw_what_multinomial_draws_one_after_another(width, known_cpu, monkeypatch):
    monkeypatch.setattr(sampler, "exponentials_are_uniforms", lambda: known_cpu and exponentials_are_uniforms())
    steps, samples = 30, 5
    probs = torch.rand(samples, steps, width, generator=torch.Generator().manual_seed(2)).pow(8)
    probs[probs < 0.01] = 0 # as top-k leaves them
    probs[:, :, 0] += 1e-3
    probs /= probs.sum(-1, keepdim=True)
    torch.manual_seed(11)
    torch.empty(123).uniform_()
    expected = torch.stack([torch.stack([torch.multinomial(p, 1) for p in row]) for row in probs])[..., 0]
    draws = RowDraws(11, initialisation=123, steps=steps, width=width)
    drawn = []
    for batch in probs.split(3):
        draws.next_rows(len(batch))
        drawn.append(torch.cat([draws(batch[:, i]) for i in range(steps)], dim=1))
    assert torch.equal(torch.cat(drawn), expected)


exponentials_are_uniforms = sampler.exponentials_are_uniforms


@pytest.mark.parametrize("before", [0, 1, 623, 624, 625, 1000])
@pytest.mark.parametrize("count", [0, 1, 622, 623, 624, 625, 5000])
def test_numbers_are_skipped_as_if_drawn(before, count):
    drawn, skipped = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for generator in drawn, skipped:
        torch.empty(before).uniform_(generator=generator)
    torch.empty(count).uniform_(generator=drawn)
    skip_numbers(skipped, count)
    assert torch.equal(drawn.get_state(), skipped.get_state())


@pytest.mark.parametrize("shape", [
    dict(), dict(bias=False), dict(n_embd=7, n_head=1, vocab_size=33, block_size=10), dict(n_layer=1, vocab_size=50304),
    dict(n_embd=768, n_head=12, n_layer=2, block_size=1024, vocab_size=1000),
], ids=str)
def test_initialisation_is_counted_without_making_it(shape):
    model = make_gpt(**shape)
    torch.manual_seed(5)
    GPT(GPTConfig(**vars(model.config)))
    built = torch.get_rng_state()
    generator = torch.Generator().manual_seed(5)
    skip_numbers(generator, initialisation_numbers(model))
    assert torch.equal(generator.get_state(), built)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_rows_draw_what_multinomial_draws_on_cuda():
    probs = torch.rand(3, 20, 50304, device="cuda").softmax(-1)
    torch.manual_seed(11)
    expected = torch.stack([torch.cat([torch.multinomial(p, 1) for p in row]) for row in probs])
    draws = RowDraws(11, "cuda", initialisation=123, steps=20, width=50304).next_rows(3)
    assert torch.equal(torch.cat([draws(probs[:, i]) for i in range(20)], dim=1), expected)
