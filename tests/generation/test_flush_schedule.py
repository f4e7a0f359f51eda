"""How often tokens are copied from a GPU to the host."""
import time

import pytest

from sampling.generation.flush_schedule import FlushSchedule


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves: clock[0] is the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize("milliseconds, expected", [(0, 16), (0.3, 16), (1.9, 15), (4, 7), (29, 1), (500, 1)])
def test_while_streaming_tokens_are_copied_every_30_ms_or_16_steps(milliseconds, expected, clock):
    schedule = FlushSchedule(16, stream=True)
    assert schedule.num_steps == 1, "the first token is shown at once"
    for _ in range(3):
        num_steps = schedule.num_steps
        clock[0] += num_steps * milliseconds / 1000
        schedule.record_flush(num_steps)
        assert schedule.num_steps == expected


def test_the_schedule_follows_steps_that_become_slower(clock):
    """As past block_size, where each step reads the whole window."""
    schedule = FlushSchedule(16, stream=True)
    found = []
    for milliseconds in 50, 1, 9, 9, 2.9:
        num_steps = schedule.num_steps
        clock[0] += num_steps * milliseconds / 1000
        schedule.record_flush(num_steps)
        found.append(schedule.num_steps)
    assert found == [1, 16, 3, 3, 10]


@pytest.mark.parametrize("max_steps, stream", [(16, False), (1, True), (1, False)])
def test_otherwise_the_number_of_steps_is_fixed(max_steps, stream, clock):
    schedule = FlushSchedule(max_steps, stream)
    for milliseconds in 0, 500, 0.1:
        clock[0] += milliseconds / 1000
        schedule.record_flush(max_steps)
        assert schedule.num_steps == max_steps
