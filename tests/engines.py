"""Backends, a TextGenerator that runs them, and the text that it must generate."""
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from models import CHARS, as_checkpoint, make_gpt
from oracles import reference_generate
from sampling.backends import cuda
from sampling.backends.backend import EagerBackend
from sampling.backends.cpu import CPUBackend
from sampling.backends.cuda import CUDABackend
from sampling.inputs.char_tokenizer import CharTokenizer
from sampling.samples import Prompt, Sample
from sampling.settings import SamplingParams
from sampling.text_generator import TextGenerator, with_settings

LONG_PROMPT = "And then they all went home. "
PROMPTS = ["The ", "Thou", "What is it?", "a" * 15, "b" * 16, LONG_PROMPT, "x", "yes, "]
SETTINGS = [ # of the sampler; what they leave out is off
    dict(temperature=0.8, top_k=20),
    dict(temperature=0),
    dict(temperature=0, repetition_penalty=1.5),
    dict(),
    dict(top_p=0.7),
    dict(min_p=0.2),
    dict(temperature=1.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=0.8),
]
OFF = dict(temperature=1.0, top_k=None)
PARAMS = SamplingParams(max_new_tokens=20, temperature=0.9, top_k=30, seed=3)
TOKENIZER = CharTokenizer("meta.pkl", {"stoi": {char: i for i, char in enumerate(CHARS)}})


class NotingBackend(EagerBackend):
    """Notes the rows of each call, and raises error in the failing ones.

    The next call overwrites the logits.
    """

    def __init__(self, gpt, error=MemoryError, failing=()):
        super().__init__(gpt)
        self.error = error
        self.failing = failing
        self.latest = torch.zeros(0)
        self.num_rows = []

    def logits(self, ids, cache, num_positions=1):
        self.num_rows.append(len(ids))
        self.latest.fill_(torch.nan)
        self.latest = super().logits(ids, cache, num_positions).clone()
        if len(self.num_rows) in self.failing:
            raise self.error
        return self.latest


BACKENDS = {
    "eager": EagerBackend,
    "noting": NotingBackend,
    "cpu": lambda gpt: CPUBackend(gpt.config, gpt.state_dict()),
    "no graphs": lambda gpt: CUDABackend(gpt, cuda_graphs=False),
    "recorded graphs": CUDABackend,
    "cuda": lambda gpt: CUDABackend(gpt.cuda()),
}


def make_generator(backend=None, draft=None, tokenizer=TOKENIZER):
    """A TextGenerator with this backend, or with a plain one of make_gpt()."""
    backend = backend or EagerBackend(make_gpt())
    backend.draft_for = lambda num_tokens: draft
    return TextGenerator(as_checkpoint(make_gpt()), tokenizer, backend)


def make_samples(texts):
    """A sample for each of these prompts, without tokens."""
    return [Sample(i, Prompt(text), TOKENIZER.encode(text)) for i, text in enumerate(texts)]


def run(gpt, samples, params=None, batch_size=None, stream=False, **settings):
    """The finished samples, as gpt.run yields them. The pieces must be the texts."""
    params = with_settings(params, settings)
    shown = defaultdict(str)
    finished = []
    for sample, pieces in gpt.run(samples, params, batch_size, stream):
        shown[sample.index] += "".join(piece.text for piece in pieces)
        if sample.finish_reason:
            assert shown[sample.index] == sample.text
            finished.append(sample)
    return finished


def texts_of(samples):
    return [sample.text for sample in samples]


def expected_ids(prompts, num_tokens=20, seed=3, block_size=16, device="cpu", **settings):
    """The ids with which make_gpt() continues prompts (lists of ids), in one random stream."""
    model = make_gpt(block_size=block_size).to(device)
    torch.manual_seed(seed)
    return [continue_ids(model, ids, num_tokens, **settings) for ids in prompts]


def continue_ids(model, ids, num_tokens, **settings):
    """The plain model's next num_tokens ids, with random numbers of torch's global generator."""
    idx = torch.tensor([ids], device=model.lm_head.weight.device)
    return reference_generate(model, idx, num_tokens, **settings)[0, len(ids):].tolist()


def expected_texts(prompts, num_tokens=PARAMS.max_new_tokens, stops=(), device="cpu"):
    """The texts of the plain model with PARAMS, up to the first stop text."""
    whole = whole_texts(tuple(prompts), num_tokens, device)
    return [truncate_at_stop(text, stops) for text in whole]


@cache
def whole_texts(prompts, num_tokens, device):
    ids = map(TOKENIZER.encode, prompts)
    found = expected_ids(ids, num_tokens, device=device, temperature=0.9, top_k=30)
    return [*map(TOKENIZER.decode, found)]


def truncate_at_stop(text, stops):
    return text[:min([text.index(stop) for stop in stops if stop in text], default=None)]


def without_facts(messages):
    """The messages, without those about every model and every text that goes past the window."""
    facts = "parameters on", "recomputes the whole window"
    return [line for line in messages if not any(fact in line for fact in facts)]


def decode(backend, prompts, num_tokens, seed=3, **settings):
    """The num_tokens ids with which a run continues each of prompts (lists of ids)."""
    samples = [Sample(i, Prompt("a"), ids) for i, ids in enumerate(prompts)]
    params = SamplingParams(num_tokens, seed=seed, **OFF | settings)
    return [sample.token_ids for sample in run(make_generator(backend), samples, params)]


# ---- CUDA graphs on a machine without a GPU, and the mark of tests that need one

NEEDS_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
ON_GPU = pytest.param("cuda", marks=NEEDS_GPU) # a device, for parametrize


class Recording(TorchFunctionMode):
    """Stands in for a CUDA graph and the block that captures it.

    replay runs the operations again in their places.
    """

    def __init__(self):
        super().__init__()
        self.calls = [] # (operation, its arguments, its result)

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.calls[-1][-1].fill_(torch.nan) # a capture computes nothing

    def __torch_function__(self, func, types, args=(), kwargs=None):
        synchronising = "item", "tolist", "cpu", "__bool__", "nonzero"
        assert func.__name__ not in synchronising, "a capture must not synchronise"
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    def replay(self):
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            # otherwise it is a view, or was computed in place
            if isinstance(result, Tensor) and again.data_ptr() != result.data_ptr():
                result.copy_(again)


def record_graphs(monkeypatch, fails_at=None, error=None):
    """Let CUDA graphs work on a CPU, as Recordings, but let capture fails_at raise error.

    Returns all Recordings.
    """
    recordings = []

    def graph(recording, pool, stream, capture_error_mode):
        # With another mode, allocations of another thread would end the capture.
        assert capture_error_mode == "thread_local"
        with ThreadPoolExecutor(1) as other_thread:
            lock = other_thread.submit(cuda.capture_lock.acquire, blocking=False)
        assert not lock.result(), "torch allows one capture at a time in a process"
        recording.pool = pool
        recording.stream = stream
        recordings.append(recording)
        if len(recordings) == fails_at:
            raise error
        return recording
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    for name in "Stream", "current_stream", "device", "stream", "synchronize":
        monkeypatch.setattr(torch.cuda, name, lambda *_: MagicMock())
    return recordings
