"""A draft on a GPU: the samples are those of CUDAGraphGPT, which runs there without a draft. Each test runs on a GPU, and on a CPU that simulates one."""
from dataclasses import replace

import pytest
import torch

from engines import make_requests, token_ids
from models import add_noise, make_gpt, save_checkpoint
from sampling.backends.cuda import decode_state
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.backends.devices import autocast
from sampling.generation.engine import Engine
from sampling.generation.flush_schedule import MAX_STEPS_BETWEEN_COPIES
from sampling.generation.speculation import prepare_with_draft
from sampling.params import ModelOptions, SamplingParams
from sampling.sampler import per_row_rng

PARAMS = SamplingParams(max_new_tokens=28, temperature=0.9, top_k=30, seed=3) # with the prompt "The ", these tokens fill the window
SHAPE = dict(block_size=32, n_layer=4)
SETTINGS = {
    "plain": {}, "greedy": {"temperature": 0.0}, "penalty": {"top_k": None, "top_p": 0.8, "repetition_penalty": 1.4}, "logprobs": {"num_logprobs": 3},
    "stop": {"stop": ["O", "a"]}, "context_shift": {"max_new_tokens": 70, "context_shift": True}, "past_the_window": {"max_new_tokens": 40},
}
DRAFTS = {"same": lambda: make_gpt(**SHAPE), "half_right": lambda: add_noise(make_gpt(**SHAPE), 0.5), "other": lambda: make_gpt(seed=2, block_size=32)}


@pytest.fixture(params=["simulated", "recorded", pytest.param("cuda", marks=[
    pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")])])
def gpu(request, monkeypatch):
    """The type of the device on which a model for a GPU runs: "cuda", or "cpu" in its place, without graphs or with recorded ones."""
    monkeypatch.setattr(decode_state, "BUCKET", 8)
    if request.param == "cuda":
        return "cuda"
    request.getfixturevalue("simulated_gpu")
    if request.param == "recorded":
        request.getfixturevalue("recordings")
    monkeypatch.setattr(per_row_rng, "exponential_is_from_bits", lambda: False) # a GPU draws with exponential_
    monkeypatch.setattr(Engine, "sync_interval", MAX_STEPS_BETWEEN_COPIES)
    return "cpu"


with_graphs = pytest.mark.parametrize("gpu", ["recorded", pytest.param("cuda", marks=[
    pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")])], indirect=True)


def prepare(draft=None, dtype=torch.float32, model=None, **options):
    """The model for a GPU, with the draft in this folder, if any. Its messages are the list of the lines that it logs."""
    messages, options = [], ModelOptions(draft=draft and str(draft), **options)
    backend = prepare_with_draft(model or make_gpt(**SHAPE), torch.device("cuda"), dtype, options, messages.append)
    backend.messages = messages
    if draft:
        backend.draft_cost = 0.05 # the estimate for such small models would turn the draft off
    return backend


def run(backend, tokenizer, params=PARAMS, dtype=torch.float32, **settings):
    """The token ids of two samples, one after the other unless batch_size says more."""
    engine = Engine(backend, tokenizer, params, log=lambda message: None, **settings)
    engine.sampler.sample = replace(engine.sampler.sample, in_own_dtype=True) # as on a GPU
    with torch.no_grad(), autocast(backend.device, dtype):
        return token_ids(engine, make_requests(tokenizer, ["The "], 2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each draft."""
    return {name: save_checkpoint(tmp_path_factory.mktemp(name), make_draft()).parent for name, make_draft in DRAFTS.items()}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_in_float32_the_samples_are_the_same_as_without_a_draft(tokenizer, folders, gpu, draft, setting):
    plain, backend, params = prepare(), prepare(folders[draft]), replace(PARAMS, **SETTINGS[setting])
    assert isinstance(plain, CUDAGraphGPT) and type(backend.target) is type(backend.draft) is CUDAGraphGPT
    assert plain.device.type == backend.target.device.type == backend.draft.device.type == gpu
    assert run(backend, tokenizer, params) == run(plain, tokenizer, params)
    rate = backend.num_accepted / backend.num_proposed
    assert {"same": rate > 0.95, "half_right": 0 < rate < 1, "other": rate < 0.5}[draft]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("draft", DRAFTS)
def test_in_half_precision_most_proposals_of_the_same_model_are_accepted(tokenizer, folders, gpu, draft, dtype):
    """Rounding may change tokens, so the samples may differ from those without a draft."""
    backend = prepare(folders[draft], dtype)
    assert backend.target.model.lm_head.weight.shape == (64, 24), "the head is padded from 61 tokens"
    assert [len(ids) for ids in run(backend, tokenizer, dtype=dtype)] == [28, 28]
    assert backend.num_proposed > 0 and (draft != "same" or backend.num_accepted > 0.5 * backend.num_proposed)
