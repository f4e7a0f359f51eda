"""How several processes share a run. script/test_distributed.py tests real processes."""
import os

import pytest

from sampling.generation.workers import Workers, stdout_to_stderr

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


def test_output_of_gloo_goes_to_stderr(capfd):
    with stdout_to_stderr():
        os.write(1, b"a greeting")
    os.write(1, b"a sample")
    assert capfd.readouterr() == ("a sample", "a greeting")
