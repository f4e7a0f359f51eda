"""Backends, the TextGenerator that runs them, the samples that it must generate, and the text of the oracle."""
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from models import as_checkpoint, make_gpt
from oracles import reference_generate
from sampling.backends import cuda
from sampling.backends.backend import EagerBackend
from sampling.backends.cpu import CPUBackend
from sampling.backends.cuda import CUDABackend
from sampling.inputs.tokenizer import Tokenizer
from sampling.params import Prompt, Sample, SamplingParams
from sampling.text_generator import TextGenerator

PROMPTS = ["The ", "Thou", "What is it?", "a" * 15, "b" * 16, "And then they all went home. ", "x", "yes, "]
PARAMS = SamplingParams(max_new_tokens=20, temperature=0.9, top_k=30, seed=3)


class NotingBackend(EagerBackend):
    """Notes the rows of each call, and raises error in the failing ones. The next call overwrites the logits."""

    def __init__(self, gpt, error=MemoryError, failing=()):
        super().__init__(gpt)
        self.error, self.failing, self.latest, self.num_rows = error, failing, torch.zeros(0), []

    def logits(self, ids, cache, num_positions=1):
        self.num_rows.append(len(ids))
        self.latest.fill_(torch.nan)
        logits = self.latest = super().logits(ids, cache, num_positions).clone()
        if len(self.num_rows) in self.failing:
            raise self.error
        return logits


BACKENDS = {
    "eager": EagerBackend, "noting": NotingBackend, "cpu": lambda gpt: CPUBackend(gpt.config, gpt.state_dict()),
    "no graphs": lambda gpt: CUDABackend(gpt, cuda_graphs=False), "recorded graphs": CUDABackend,
    "cuda": lambda gpt: CUDABackend(gpt.cuda())}


def make_generator(tokenizer, backend=None, draft=None):
    """A TextGenerator with the plain model of make_gpt(), or with this backend."""
    gpt = TextGenerator(as_checkpoint(make_gpt()), tokenizer, torch.device("cpu"), torch.float32, num_steps=0)
    gpt.backend, gpt.draft = backend or gpt.backend, draft
    gpt.device = gpt.backend.device
    return gpt


def make_samples(tokenizer, texts, samples_per_prompt=1):
    """Consecutive samples for each of these prompts, without tokens."""
    texts = [text for text in texts for _ in range(samples_per_prompt)]
    return [Sample(i, Prompt(text), tokenizer.encode(text)) for i, text in enumerate(texts)]


def without_tokens(samples):
    return [Sample(sample.index, sample.prompt, sample.prompt_ids, sample.already_saved) for sample in samples]


def run(gpt, samples, *arguments, **settings):
    """The finished samples as gpt.run yields them. The given ones stay without tokens. The pieces must be the texts."""
    finished, texts = [], {}
    for sample, pieces in gpt.run(without_tokens(samples), *arguments, **settings):
        texts[sample.index] = texts.get(sample.index, "") + "".join(piece.text for piece in pieces)
        if sample.finish_reason:
            assert texts[sample.index] == sample.text
            finished.append(sample)
    return finished


def expected_ids(prompts, num_tokens=20, seed=3, block_size=16, device="cpu", **settings):
    """The token ids with which make_gpt() continues prompts (lists of ids), one after another in one random stream."""
    return continue_each(tuple(map(tuple, prompts)), num_tokens, seed, block_size, device, **settings)


@cache # several tests expect the same
def continue_each(prompts, num_tokens, seed, block_size, device, **settings):
    model = make_gpt(block_size=block_size).to(device)
    torch.manual_seed(seed)
    samples = [reference_generate(model, torch.tensor([ids], device=device), num_tokens, **settings) for ids in prompts]
    return [sample[0, len(ids):].tolist() for ids, sample in zip(prompts, samples, strict=True)]


def expected_texts(samples, tokenizer, num_tokens=PARAMS.max_new_tokens, stops=(), device="cpu"):
    """The texts of the plain model with PARAMS, up to the first stop text."""
    prompts, settings = [sample.prompt_ids for sample in samples], dict(temperature=0.9, top_k=30)
    texts = map(tokenizer.decode, expected_ids(prompts, num_tokens, device=device, **settings))
    return [truncate_at_stop(text, stops) for text in texts]


def without_facts(messages):
    """The messages, without those about every model and about every text that goes past the window."""
    return [line for line in messages if "parameters on" not in line and "recomputes the whole window" not in line]


def truncate_at_stop(text, stops):
    return text[:min([start for stop in stops if (start := text.find(stop)) >= 0], default=len(text))]


def decode(backend, prompts, num_tokens, seed=3, context_shift=False, temperature=1.0, top_k=None,
           dtype=torch.float32, **settings):
    """The num_tokens ids with which a run continues each of prompts (lists of ids)."""
    params = SamplingParams(num_tokens, temperature, top_k, seed=seed, context_shift=context_shift, **settings)
    samples = [Sample(i, Prompt("a"), ids) for i, ids in enumerate(prompts)]
    gpt = make_generator(IdTokenizer(), backend)
    gpt.dtype = dtype
    return [sample.token_ids for sample in run(gpt, samples, params)]


class IdTokenizer(Tokenizer):
    """The text of each token is one character."""

    def token_bytes(self, token_id):
        return chr(token_id + 32).encode()


# ---- CUDA graphs on a machine without a GPU, and the mark of tests that need one

NEEDS_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
ON_GPU = pytest.param("cuda", marks=NEEDS_GPU) # a device, for parametrize


class Recording(TorchFunctionMode):
    """Stands in for a CUDA graph and the block that captures it: replay runs the operations again in their places."""

    def __init__(self):
        super().__init__()
        self.calls, self.num_replays = [], 0 # (operation, its arguments, its result)

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.logits = self.calls[-1][-1].fill_(torch.nan) # a capture computes nothing

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func.__name__ not in ("item", "tolist", "cpu", "__bool__", "nonzero"), "a capture must not synchronise"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        self.num_replays += 1
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            if isinstance(result, Tensor) and again.data_ptr() != result.data_ptr(): # neither a view nor in place
                result.copy_(again)


def record_graphs(monkeypatch, fails_at=None, error=None):
    """Let CUDA graphs work on a CPU, as Recordings, but let capture fails_at raise error. Returns all Recordings."""
    recordings, pools = [], count()

    def graph(recording, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local", "another thread's allocations would end the capture"
        with ThreadPoolExecutor(1) as other_thread:
            can_capture = other_thread.submit(cuda.capture_lock.acquire, blocking=False).result()
        assert not can_capture, "torch allows one capture at a time in a process"
        recording.pool, recording.stream = pool, stream
        recordings.append(recording)
        if len(recordings) == fails_at:
            raise error
        return recording
    for name, replacement in {"CUDAGraph": Recording, "graph": graph, "graph_pool_handle": lambda: next(pools)}.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    for name in "Stream", "current_stream", "device", "stream", "synchronize":
        monkeypatch.setattr(torch.cuda, name, MagicMock(side_effect=lambda *_: MagicMock()))
    return recordings
