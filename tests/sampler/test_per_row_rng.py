"""PerRowRNG gives each row of a batch the random numbers of its own position in nanoGPT's stream."""
import pytest
import torch

from sampling.sampler import per_row_rng
from sampling.sampler.per_row_rng import PerRowRNG
from sampling.sampler.sample_fn import Logits
from sampling.sampler.sample_token import TokenSampler, exponential_noise, sample_token

exponential_is_from_bits = per_row_rng.exponential_is_from_bits


def sample(values, temperature=1.0, top_k=None, noise=exponential_noise):
    """sample_token without previous tokens."""
    return sample_token(Logits(values), None, temperature, top_k, noise=noise)


@pytest.mark.parametrize("vocab_size, top_k", [(2, None), (65, 200), (1000, None), (1000, 30)])
@pytest.mark.parametrize("known_cpu", [True, False], ids=["random_", "exponential_"])
def test_rows_sample_the_same_tokens_as_consecutive_samples(vocab_size, top_k, known_cpu, monkeypatch):
    monkeypatch.setattr(per_row_rng, "exponential_is_from_bits", lambda: known_cpu and exponential_is_from_bits())
    steps, samples = 30, 5
    logits = torch.randn(samples, steps, vocab_size, generator=torch.Generator().manual_seed(2)).mul(3)
    torch.manual_seed(11)
    torch.empty(123).uniform_() # the draws of the model's initialisation
    expected = torch.cat([sample(logits[i, j, None], 0.8, top_k) for i in range(samples) for j in range(steps)])
    rng = PerRowRNG(11, num_init_draws=123, draws_per_sample=steps, vocab_size=vocab_size)
    states = [rng.state_for_sample(index) for index in range(samples)]
    for rows in [0, 1, 2], [0, 1], [4, 2, 3], [3]:
        rng.set_rows([states[row] for row in rows])
        found = torch.cat([sample(logits[rows, i], 0.8, top_k, rng) for i in range(steps)], dim=1)
        assert torch.equal(found, expected.view(samples, steps)[rows])


def test_the_next_call_returns_the_prefetched_numbers():
    rng, shape = PerRowRNG(7, draws_per_sample=3, vocab_size=50), (1, 50)
    state = rng.state_for_sample(0)
    rng.set_rows([state])
    expected = [rng(shape, None, "cpu").tolist() for _ in range(2)]
    rng.set_rows([state])
    rng.prefetch()
    assert [rng(shape, None, "cpu").tolist() for _ in range(2)] == expected
    rng.prefetch()
    rng.set_rows([state])
    assert rng(shape, None, "cpu").tolist() == expected[0], "a new batch discards prefetched numbers"


@pytest.mark.parametrize("known_cpu", [True, False], ids=["random_", "exponential_"])
def test_peeking_draws_each_number_once_and_does_not_change_the_next_calls(known_cpu, monkeypatch):
    monkeypatch.setattr(per_row_rng, "exponential_is_from_bits", lambda: known_cpu and exponential_is_from_bits())
    rng, shape, draws = PerRowRNG(7, draws_per_sample=8, vocab_size=50), (1, 50), []
    state = rng.state_for_sample(0)
    rng.set_rows([state])
    expected = [rng(shape, None, "cpu").tolist() for _ in range(8)]
    rng.set_rows([state])
    draw = rng.draw
    monkeypatch.setattr(rng, "draw", lambda numbers: draws.append(1) or draw(numbers))

    def peek(ahead):
        return rng.peek(ahead, shape, None, "cpu").tolist()
    assert [peek(2), peek(0), peek(1)] == [expected[i] for i in (2, 0, 1)]
    assert rng(shape, None, "cpu").tolist() == expected[0]
    assert [peek(i) for i in range(4)] == expected[1:5]
    rng.prefetch()
    assert [peek(i) for i in range(4)] == expected[1:5], "prefetch changes nothing"
    assert [rng(shape, None, "cpu").tolist() for _ in range(7)] == expected[1:] and len(draws) == 8
    peek(3)
    rng.set_rows([state])
    assert rng(shape, None, "cpu").tolist() == expected[0], "a new batch discards these numbers"


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.5, "top_k": 9}, {"repetition_penalty": 1.5}], ids=str)
def test_a_proposal_is_the_token_that_a_later_call_samples(settings):
    rng = PerRowRNG(7, draws_per_sample=9, vocab_size=50)
    rng.set_rows([rng.state_for_sample(0)])
    sampler, ids = TokenSampler(**settings, noise=rng), torch.tensor([[3, 4]])
    logits = torch.randn(9, 1, 50, generator=torch.Generator().manual_seed(2)).mul(3).unbind()
    proposed = [int(sampler.propose(Logits(row), ids, ahead)) for ahead, row in enumerate(logits)]
    assert [int(sampler(Logits(row), ids)) for row in logits] == proposed


@pytest.mark.parametrize("temperature, prefetches", [(1.0, True), (0, False)])
def test_a_token_sampler_prefetches_only_if_it_needs_random_numbers(temperature, prefetches):
    rng = PerRowRNG(7, draws_per_sample=3, vocab_size=50)
    rng.set_rows([rng.state_for_sample(0)])
    TokenSampler(temperature, noise=rng).prefetch()
    assert rng.is_prefetched == prefetches


def test_dropping_and_restarting_rows_does_not_change_other_rows():
    logits = torch.randn(10, 3, 40, generator=torch.Generator().manual_seed(2))
    rng = PerRowRNG(11, draws_per_sample=10, vocab_size=40)
    states = [rng.state_for_sample(index) for index in (0, 2, 5)] # samples between them may be skipped
    alone = []
    for row, state in enumerate(states):
        rng.set_rows([state])
        alone.append(torch.cat([sample(step[row, None], noise=rng) for step in logits]))
    rng.set_rows(states)
    first = torch.cat([sample(step, noise=rng) for step in logits[:4]], dim=1)
    assert torch.equal(first, torch.cat([tokens[:4] for tokens in alone], dim=1).T)
    rng.select_rows([0, 2])
    rng.restart(1)
    logits = torch.stack([logits[4:, 0], logits[:6, 2]], dim=1)
    rest = torch.cat([sample(step, noise=rng) for step in logits], dim=1)
    assert torch.equal(rest, torch.stack([alone[0][4:, 0], alone[2][:6, 0]]))


@pytest.mark.parametrize("known_cpu", [True, False], ids=["random_", "exponential_"])
def test_states_of_samples_may_be_asked_for_in_any_order(known_cpu, monkeypatch):
    monkeypatch.setattr(per_row_rng, "exponential_is_from_bits", lambda: known_cpu and exponential_is_from_bits())
    rng = PerRowRNG(7, num_init_draws=99, draws_per_sample=3, vocab_size=50)
    expected = [rng.state_for_sample(index).tolist() for index in (0, 1, 4)]
    assert [rng.state_for_sample(index).tolist() for index in (4, 1, 0)] == expected[::-1]


def test_a_batch_of_the_same_size_reuses_memory():
    """CUDA graphs may refer to it."""
    rng = PerRowRNG(7, draws_per_sample=3, vocab_size=50)
    states = [rng.state_for_sample(index) for index in range(4)]
    rng.set_rows(states[:2])
    numbers, generators = rng.numbers, rng.generators
    rng.set_rows(states[2:])
    assert rng.numbers is numbers and rng.generators is generators


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("top_k", [None, 200])
def test_rows_on_cuda_sample_the_same_tokens_as_multinomial(top_k):
    scaled = torch.randn(3, 20, 50304, device="cuda").mul(3)
    masked = scaled if top_k is None else scaled.masked_fill(scaled < scaled.topk(top_k).values[..., -1:], -torch.inf)
    torch.manual_seed(11)
    expected = torch.stack([torch.cat([torch.multinomial(p, 1) for p in row]) for row in masked.softmax(-1)])
    rng = PerRowRNG(11, "cuda", num_init_draws=123, draws_per_sample=20, vocab_size=50304)
    rng.set_rows([rng.state_for_sample(index) for index in range(3)])
    assert torch.equal(torch.cat([sample(scaled[:, i], 1.0, top_k, rng) for i in range(20)], dim=1), expected)


@pytest.mark.parametrize("temperature, repeats", [(1.0, True), (0, False)])
def test_noise_can_be_repeated(temperature, repeats):
    rng, shape = PerRowRNG(7, draws_per_sample=3, vocab_size=50), (1, 50)
    rng.set_rows([rng.state_for_sample(0)])
    first = rng(shape, None, "cpu").tolist()
    TokenSampler(temperature, noise=rng).repeat_noise()
    assert (rng(shape, None, "cpu").tolist() == first) == repeats
