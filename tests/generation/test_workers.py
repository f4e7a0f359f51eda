"""How several processes share a run. script/test_distributed.py tests real processes."""
import os

import pytest

from sampling.generation.batching import next_batch, partition
from sampling.generation.workers import Workers, stdout_to_stderr
from sampling.params import Prompt, SampleRequest

TORCHRUN = dict(TORCHELASTIC_RUN_ID="none", RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")


@pytest.fixture
def environment(monkeypatch):
    """environment(**variables) sets the variables of a process started by torchrun, and removes all others."""
    def change(**variables):
        for name in TORCHRUN:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    return change


def test_rank_and_world_size_come_from_torchrun(environment):
    environment(**TORCHRUN)
    workers = Workers()
    assert (workers.rank, workers.world_size, workers.local_rank, workers.local_world_size) == (5, 8, 1, 4)
    assert not workers.is_main


@pytest.mark.parametrize("variables", [{}, dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="3")], ids=["none", "a-cluster's"])
def test_without_torchrun_there_is_one_process(environment, variables):
    environment(**variables)
    workers = Workers().connect()
    assert (workers.rank, workers.world_size, workers.local_rank, workers.local_world_size) == (0, 1, None, 1)
    assert workers.is_main and workers.broadcast("value") == "value"


def test_a_single_process_raises_its_own_error(environment):
    environment()
    with pytest.raises(FileNotFoundError, match="no such"), Workers().fail_together():
        raise FileNotFoundError("no such")


@pytest.mark.parametrize("world_size, batch_size", [(1, 1), (1, 4), (2, 3), (3, 2), (4, 5)])
def test_batch_sizes_are_known_before_the_run(world_size, batch_size):
    for num_samples in [None, *range(1, 50)]:
        workers, found = Workers(), [set() for _ in range(world_size)]
        workers.world_size = world_size
        num_requests = 100 * world_size * batch_size if num_samples is None else num_samples
        requests = (SampleRequest(i, Prompt("a"), [1]) for i in range(num_requests))
        while batch := next_batch(requests, world_size * batch_size):
            for sizes, share in zip(found, partition(batch, world_size), strict=True):
                sizes |= {len(share)} - {0}
        for workers.rank in range(world_size):
            assert workers.batch_sizes(num_samples, batch_size) == found[workers.rank]


def test_output_of_gloo_goes_to_stderr(capfd):
    with stdout_to_stderr():
        os.write(1, b"a greeting")
    os.write(1, b"a sample")
    assert capfd.readouterr() == ("a sample", "a greeting")
