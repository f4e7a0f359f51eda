"""Fixtures for the tests of the backends."""
import pytest
import torch

from recorded_graphs import record_graphs


@pytest.fixture
def recordings(monkeypatch):
    """Let CUDA graphs work on a CPU, as Recordings, if checks.use_graphs is set. Returns the list of Recordings."""
    return record_graphs(monkeypatch)


@pytest.fixture
def compile_settings():
    """Restore the settings of torch.compile that a backend changes. monkeypatch would delete them instead."""
    with torch._dynamo.config.patch(recompile_limit=8), torch._inductor.config.patch(freezing=False):
        yield
