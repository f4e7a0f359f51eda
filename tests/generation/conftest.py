"""Fixtures of the tests of generation."""
import pytest
import torch

from engines import PARAMS
from models import save_meta
from sampling.backends.cpu import lm_head
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.backends.eager import EagerGPT
from sampling.backends.prepare import packed_or_eager
from sampling.generation.engine import SYNC_INTERVAL, Engine
from sampling.inputs.char_tokenizer import CharTokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """One token a character."""
    save_meta(path := tmp_path_factory.mktemp("vocabulary") / "meta.pkl")
    return CharTokenizer(path)


class EngineOfGPU(Engine):
    """Looks at the tokens as rarely as with a GPU."""

    @property
    def sync_interval(self):
        return 1 if self.stream else SYNC_INTERVAL


@pytest.fixture
def make_engine(request, monkeypatch):
    """make_engine(model, tokenizer, params, **settings): an Engine that runs the model with a backend, EagerGPT by default.

    The parameter "packed" stands for PackedGPT, "shortlist" for a PackedGPT that tries shortlists; "steps" for
    CUDAGraphGPT on a CPU, "graphs" for one whose graphs are recorded.
    """
    backend = getattr(request, "param", "eager")
    if backend == "graphs":
        request.getfixturevalue("recorded")
    if backend == "shortlist":
        for name in "MIN_PARAMS", "MIN_WIDTH", "MAX_SHORTLIST_FRACTION":
            monkeypatch.setattr(lm_head, name, 1)

    def make(model, tokenizer, params=PARAMS, **settings):
        settings = {"log": lambda message: None, **settings}
        if backend in ("steps", "graphs"):
            return EngineOfGPU(CUDAGraphGPT(model), tokenizer, params, **settings)
        if backend == "eager":
            return Engine(EagerGPT(model), tokenizer, params, **settings)
        packed = packed_or_eager(model, torch.device("cpu"), torch.float32, compile=False, pack_eagerly=False)
        return Engine(packed, tokenizer, params, **settings)
    return make
