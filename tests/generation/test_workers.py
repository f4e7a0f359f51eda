"""How several processes share a run. script/test_distributed.py tests real processes."""
import os

import pytest

from sampling.generation.workers import Workers, stdout_to_stderr

TORCHRUN = dict(TORCHELASTIC_RUN_ID="none", RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")


@pytest.mark.parametrize("variables, expected", [
    (TORCHRUN, (5, 8, 1, 4, False)), ({}, (0, 1, None, 1, True)),
    (dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="3"), (0, 1, None, 1, True)), # a cluster's own
], ids=["torchrun", "none", "a cluster's"])
def test_rank_and_world_size_come_from_torchrun_if_it_started_the_process(variables, expected, monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    workers = Workers()
    assert (workers.rank, workers.world_size, workers.local_rank, workers.local_world_size, workers.is_main) == expected


def test_output_of_gloo_goes_to_stderr(capfd):
    with stdout_to_stderr():
        os.write(1, b"a greeting")
    os.write(1, b"a sample")
    assert capfd.readouterr() == ("a sample", "a greeting")
