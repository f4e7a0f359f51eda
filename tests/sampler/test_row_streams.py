"""The random numbers: each row of a batch draws the random numbers of its own place in nanoGPT's stream."""
import pytest
import torch

from recorded_graphs import NEEDS_GPU
from sampling.sampler import mt19937, row_streams
from sampling.sampler.mt19937 import advance_mt19937
from sampling.sampler.row_streams import RowStreams, RunStream, exponentials

STEPS = 8


@pytest.fixture(params=["from bits", "exponential_"])
def each_build(request, monkeypatch):
    """Also run the test as with a build of torch whose exponential_ computes other numbers from the random bits."""
    if request.param == "exponential_":
        monkeypatch.setattr(row_streams, "exponential_is_from_bits", lambda: False)


def draw(streams, num_steps):
    """The exponential numbers (B, num_steps, V) of the next steps."""
    return torch.stack([exponentials(streams.next().clone()) for _ in range(num_steps)], dim=1)


def make_run(vocab_size=50):
    return RunStream(11, num_init_draws=123, draws_per_sample=STEPS, vocab_size=vocab_size)


@pytest.mark.parametrize("vocab_size", [2, 65, 1000])
def test_rows_draw_what_consecutive_samples_draw(vocab_size, each_build):
    torch.manual_seed(11)
    torch.empty(123).uniform_() # nanoGPT initialises its model
    expected = torch.empty(5, STEPS, vocab_size)
    for numbers in expected.view(-1, vocab_size):
        numbers.exponential_()
    run = make_run(vocab_size)
    for rows in [0, 1, 2], [4], [4, 2, 3], [0]: # in any order, and some of them not at all
        assert torch.equal(draw(RowStreams(run, rows), STEPS), expected[rows])


def test_rows_that_leave_or_begin_later_do_not_change_the_others(each_build):
    alone = [draw(RowStreams(make_run(), [sample]), STEPS)[0] for sample in (0, 2, 5)]
    streams = RowStreams(make_run(), [0, 2, 5], [2, 0, 3])
    assert torch.equal(draw(streams, 3)[0, 2:], alone[0][:1])
    streams.select_rows([2, 0])
    assert torch.equal(draw(streams, 4), torch.stack([alone[2][:4], alone[0][1:5]]))
    streams.select_rows([1])
    assert torch.equal(draw(streams, 1)[0], alone[0][5:6])


def test_a_copy_draws_the_numbers_of_later_steps_and_leaves_its_original_as_it_is(each_build):
    expected, streams = draw(RowStreams(make_run(), [1, 2]), STEPS), RowStreams(make_run(), [1, 2])
    for step in range(0, STEPS, 2):
        assert torch.equal(draw(streams.copy(), STEPS - step), expected[:, step:])
        assert torch.equal(draw(streams, 2), expected[:, step:step + 2])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("vocab_size", [65, 50304])
def test_the_numbers_of_two_samples_are_those_of_two_calls_of_multinomial(each_build, device, vocab_size):
    run, probs = RunStream(1, device, 0, 1, vocab_size), torch.linspace(1, 2, vocab_size, device=device)
    found = (probs / exponentials(RowStreams(run, [0, 1]).next())).argmax(dim=-1)
    generator = torch.Generator(device).manual_seed(1)
    assert found.tolist() == [int(torch.multinomial(probs, 1, generator=generator)) for _ in range(2)]


@pytest.mark.parametrize("before", [0, 1, 623, 624])
@pytest.mark.parametrize("count", [0, 1, 624, 5000, 1234567])
@pytest.mark.parametrize("threshold", [mt19937.JUMP_THRESHOLD, 2000], ids=["walk", "jump"])
def test_advancing_equals_drawing(before, count, threshold, monkeypatch):
    monkeypatch.setattr(mt19937, "JUMP_THRESHOLD", threshold)
    drawn, advanced = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for generator in drawn, advanced:
        torch.empty(before).uniform_(generator=generator)
    torch.empty(count).uniform_(generator=drawn)
    advance_mt19937(advanced, count)
    assert torch.equal(drawn.get_state(), advanced.get_state())
