"""Fixtures of the tests of backends."""
import pytest


@pytest.fixture
def processor(request, monkeypatch):
    """The test runs as on this processor, "Intel" (the default) or another, and layers are packed at their first use."""
    from sampling.backends.cpu import packed_linear
    name = getattr(request, "param", "Intel")
    monkeypatch.setattr(packed_linear, "is_intel_cpu", lambda: name == "Intel")
    for thresholds in "INTEL", "OTHERS":
        monkeypatch.setattr(packed_linear, thresholds, getattr(packed_linear, thresholds)._replace(min_rows_once=1))
    return name
