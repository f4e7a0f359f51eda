"""Fixtures for the tests of generation."""
import pytest

from engines import BACKENDS, NEEDS_GPU, record_graphs
from models import CHARS
from sampling.backends import cuda
from sampling.inputs.char_tokenizer import CharTokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """A tokenizer with one token per character."""
    return CharTokenizer("meta.pkl", {"stoi": {char: i for i, char in enumerate(CHARS)}})


@pytest.fixture(params=[pytest.param(name, marks=NEEDS_GPU if name == "cuda" else []) for name in BACKENDS])
def make_backend(request, monkeypatch):
    """make_backend(gpt): each kind of backend. Graphs attend to 4, 8, 12 or 16 positions."""
    monkeypatch.setattr(cuda, "BUCKET", 4)
    if request.param == "recorded graphs":
        record_graphs(monkeypatch)
    return BACKENDS[request.param]
