"""Fixtures for the tests of generation."""
import pytest
import torch

from engines import PARAMS
from models import save_meta
from sampling.backends.cpu import lm_head
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.backends.eager import EagerGPT
from sampling.backends.prepare import packed_or_eager
from sampling.generation.engine import Engine
from sampling.generation.flush_schedule import MAX_FLUSH_INTERVAL
from sampling.inputs.char_tokenizer import CharTokenizer
from sampling.params import ModelOptions


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A tokenizer with one token per character."""
    save_meta(path := tmp_path_factory.mktemp("vocabulary") / "meta.pkl")
    return CharTokenizer(path)


class GPULikeEngine(Engine):
    """Copies tokens to the host as rarely as on a GPU."""

    @property
    def max_flush_interval(self):
        return MAX_FLUSH_INTERVAL


@pytest.fixture
def make_engine(request, monkeypatch):
    """make_engine(model, tokenizer, params, **settings) -> an Engine with the backend that the fixture's parameter names.

    "eager" (the default) is EagerGPT, "packed" is PackedGPT, and "shortlist" is a PackedGPT that uses shortlists. "direct" is
    CUDAGraphGPT on a CPU without graphs, and "graphs" is CUDAGraphGPT with recorded graphs.
    """
    backend = getattr(request, "param", "eager")
    if backend == "graphs":
        request.getfixturevalue("recordings")
    if backend == "shortlist":
        for name in "MIN_PARAMS", "MIN_WIDTH", "MAX_SHORTLIST_FRACTION":
            monkeypatch.setattr(lm_head, name, 1)

    def make(model, tokenizer, params=PARAMS, **settings):
        settings = {"log": lambda message: None, **settings}
        if backend in ("direct", "graphs"):
            return GPULikeEngine(CUDAGraphGPT(model), tokenizer, params, **settings)
        if backend == "eager":
            return Engine(EagerGPT(model), tokenizer, params, **settings)
        packed = packed_or_eager(model, torch.device("cpu"), torch.float32, ModelOptions())
        return Engine(packed, tokenizer, params, **settings)
    return make
