"""Fixtures for the tests of the backends."""
import pytest
import torch

from processors import simulate_processor
from recorded_graphs import record_graphs


@pytest.fixture
def processor(request, monkeypatch):
    """Simulate this processor, see simulate_processor. The default is "Intel". Layers are packed at their first use."""
    from sampling.backends.cpu import packed_linear
    name = getattr(request, "param", "Intel")
    simulate_processor(monkeypatch, name)
    for thresholds in "INTEL", "AMD", "OTHERS":
        monkeypatch.setattr(packed_linear, thresholds, getattr(packed_linear, thresholds)._replace(min_rows_once=1))
    return name


@pytest.fixture
def recordings(monkeypatch):
    """Let CUDA graphs work on a CPU, as Recordings, if checks.use_graphs is set. Returns the list of Recordings."""
    return record_graphs(monkeypatch)


@pytest.fixture
def compile_settings():
    """Restore the settings of torch.compile that a backend changes. monkeypatch would delete them instead."""
    with torch._dynamo.config.patch(recompile_limit=8), torch._inductor.config.patch(freezing=False):
        yield


@pytest.fixture
def fresh_check():
    """Let onednn_limits check the operators again, in this test and after it."""
    from sampling.backends.cpu.int8_matmul import onednn_limits
    onednn_limits.cache_clear()
    yield
    onednn_limits.cache_clear()
