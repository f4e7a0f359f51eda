"""The backends that the tests of generation compare with the plain model."""
import pytest

from engines import BACKENDS, NEEDS_GPU, record_graphs
from sampling.backends import cuda


@pytest.fixture(params=[name for name in BACKENDS if name not in ("eager", "cuda")] + [
    pytest.param("cuda", marks=NEEDS_GPU)])
def make_backend(request, monkeypatch):
    """make_backend(gpt): each kind of backend; the noting one is eager, too.

    Graphs attend to 4, 8, 12 or 16 positions.
    """
    monkeypatch.setattr(cuda, "BUCKET", 4)
    if request.param == "recorded graphs":
        record_graphs(monkeypatch)
    return BACKENDS[request.param]
