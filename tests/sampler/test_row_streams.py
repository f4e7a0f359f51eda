"""RowStreams: each row of a batch draws the random numbers of its own place in nanoGPT's stream."""
import pytest
import torch

from sampling.sampler import row_streams
from sampling.sampler.row_streams import RunStream, advance_exponential, draws_like_multinomial, exponentials

STEPS = 8


@pytest.fixture(params=["from bits", "exponential_"])
def each_build(request, monkeypatch):
    """Also run the test as with a build of torch whose exponential_ computes other numbers from the random bits."""
    if request.param == "exponential_":
        monkeypatch.setattr(row_streams, "exponential_is_from_bits", lambda: False)


def draw(streams, num_steps):
    """The exponential numbers (B, num_steps, V) of the next steps."""
    return torch.stack([exponentials(streams.next().clone(), None) for _ in range(num_steps)], dim=1)


def make_run(vocab_size=50):
    return RunStream(11, num_init_draws=123, draws_per_sample=STEPS, vocab_size=vocab_size)


def streams_of(run, samples):
    """The streams of rows that are these samples of the run."""
    return run.rows([run.state_for_sample(index) for index in samples])


@pytest.mark.parametrize("vocab_size", [2, 65, 1000])
def test_rows_draw_what_consecutive_samples_draw(vocab_size, each_build):
    torch.manual_seed(11)
    torch.empty(123).uniform_() # nanoGPT initialises its model
    expected = torch.empty(5, STEPS, vocab_size)
    for numbers in expected.view(-1, vocab_size):
        numbers.exponential_()
    run = make_run(vocab_size)
    for rows in [0, 1, 2], [4], [4, 2, 3], [0]: # in any order, and some of them not at all
        assert torch.equal(draw(streams_of(run, rows), STEPS), expected[rows])


def test_exponentials_of_candidates_are_those_of_their_ids(each_build):
    numbers, ids = streams_of(make_run(), [0, 1]).next(), torch.tensor([[3, 49, 0], [7, 7, 1]])
    assert torch.equal(exponentials(numbers, ids), exponentials(numbers, None).gather(1, ids))


def test_rows_that_leave_or_restart_do_not_change_the_others(each_build):
    run = make_run()
    alone = [draw(streams_of(run, [sample]), STEPS)[0] for sample in (0, 2, 5)]
    streams = streams_of(run, [0, 2, 5])
    draw(streams, 3)
    streams.select_rows([2, 0])
    streams.restart(0) # sample 5
    assert torch.equal(draw(streams, 4), torch.stack([alone[2][:4], alone[0][3:7]]))
    streams.select_rows([1])
    assert torch.equal(draw(streams, 1)[0], alone[0][7:])


def test_peeking_returns_the_numbers_of_later_steps(each_build):
    run = make_run()
    expected, streams = draw(streams_of(run, [1, 2]), STEPS), streams_of(run, [1, 2])

    def peek(ahead):
        return exponentials(streams.peek(ahead), None)
    assert all(torch.equal(peek(ahead), expected[:, ahead]) for ahead in (2, 0, 1, 2))
    assert torch.equal(draw(streams, 1), expected[:, :1])
    assert all(torch.equal(peek(ahead), expected[:, 1 + ahead]) for ahead in range(4))
    assert torch.equal(draw(streams, 7), expected[:, 1:]) and not streams.lookahead


def test_the_numbers_are_those_of_multinomial_and_if_not_it_is_noticed(each_build, monkeypatch):
    assert draws_like_multinomial("cpu", 65) and draws_like_multinomial("cpu", 50304)
    monkeypatch.setattr(row_streams, "advance_exponential", lambda *arguments: advance_exponential(*arguments[:2], 66))
    assert not draws_like_multinomial("cpu", 65)
