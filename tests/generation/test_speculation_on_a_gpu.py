"""A draft on a GPU: the samples are those without a draft, and the passes of both models are CUDA graphs.

Each test runs on a GPU, and on a CPU that simulates one.
"""
from dataclasses import replace
from itertools import product

import pytest
import torch

from engines import make_requests, token_ids
from models import add_noise, make_gpt, save_checkpoint
from sampling.backends.cuda import decode_state, self_check
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.backends.cuda.static_forward import StaticForward
from sampling.backends.devices import autocast
from sampling.generation.engine import Engine
from sampling.generation.flush_schedule import MAX_FLUSH_INTERVAL
from sampling.generation.speculation import prepare_with_draft
from sampling.params import ModelOptions, SamplingParams
from sampling.sampler import per_row_rng
from sampling.sampler.sample_token import TokenSampler

PARAMS = SamplingParams(max_new_tokens=28, temperature=0.9, top_k=30, seed=3) # with the prompt "The ", these tokens fill the window
SHAPE = dict(block_size=32, n_layer=4)
SETTINGS = {
    "plain": {}, "greedy": {"temperature": 0.0}, "penalty": {"top_k": None, "top_p": 0.8, "repetition_penalty": 1.4}, "logprobs": {"num_logprobs": 3},
    "stop": {"stop": ["O", "a"]}, "context_shift": {"max_new_tokens": 70, "context_shift": True}, "past_the_window": {"max_new_tokens": 40},
}
DRAFTS = {"same": lambda: make_gpt(**SHAPE), "half_right": lambda: add_noise(make_gpt(**SHAPE), 0.5), "other": lambda: make_gpt(seed=2, block_size=32)}
BROKEN_DRAFTS = {"nan": lambda: add_noise(make_gpt(**SHAPE), torch.nan)}

CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
GPUS = {"simulated": [], "recorded": [], "cuda": CUDA} # and their marks
with_graphs = pytest.mark.parametrize("gpu", ["recorded", pytest.param("cuda", marks=CUDA)], indirect=True)


def gpu_cases(*axes, quick):
    """All combinations of a GPU and these values, for parametrize. A case without a GPU is slow if quick(gpu, *values) is false."""
    return [pytest.param(gpu, *values, marks=marks if gpu == "cuda" or quick(gpu, *values) else pytest.mark.slow, id="-".join(map(str, (gpu, *values))))
            for gpu, marks in GPUS.items() for values in product(*axes)]


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, marks in GPUS.items()])
def gpu(request, monkeypatch):
    """The type of the device on which a model for a GPU runs: "cuda", or "cpu" in its place, without graphs or with recorded ones."""
    monkeypatch.setattr(decode_state, "BUCKET", 8)
    if request.param == "cuda":
        return "cuda"
    request.getfixturevalue("simulated_gpu")
    if request.param == "recorded":
        request.getfixturevalue("recordings")
    monkeypatch.setattr(per_row_rng, "exponential_is_from_bits", lambda: False) # a GPU draws with exponential_
    monkeypatch.setattr(Engine, "max_flush_interval", MAX_FLUSH_INTERVAL)
    return "cpu"


def prepare(draft=None, dtype=torch.float32, model=None, **options):
    """The model for a GPU, with the draft in this folder, if any. Its messages are the list of the lines that it logs."""
    messages, options = [], ModelOptions(draft=draft and str(draft), **options)
    backend = prepare_with_draft(model or make_gpt(**SHAPE), torch.device("cuda"), dtype, options, messages.append)
    backend.messages = messages
    if draft:
        backend.relative_cost = 0.05 # the estimate for such small models would turn the draft off
    return backend


def run(backend, tokenizer, params=PARAMS, dtype=torch.float32, **settings):
    """The token ids of two samples, one after the other unless batch_size says more."""
    engine = Engine(backend, tokenizer, params, log=lambda message: None, **settings)
    engine.sampler.sample_fn = replace(engine.sampler.sample_fn, in_logits_dtype=True) # as on a GPU
    with torch.no_grad(), autocast(backend.device, dtype):
        return token_ids(engine, make_requests(tokenizer, ["The "], 2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each draft."""
    return {name: save_checkpoint(tmp_path_factory.mktemp(name), make_draft()).parent for name, make_draft in (DRAFTS | BROKEN_DRAFTS).items()}


@pytest.mark.parametrize("gpu, draft, setting", gpu_cases(DRAFTS, SETTINGS, quick=lambda gpu, draft, setting: (
    draft == "half_right" or (gpu == "simulated" and setting in ("plain", "context_shift")))), indirect=["gpu"])
def test_in_float32_the_samples_are_the_same_as_without_a_draft(tokenizer, folders, gpu, draft, setting):
    plain, backend, params = prepare(), prepare(folders[draft]), replace(PARAMS, **SETTINGS[setting])
    assert isinstance(plain, CUDAGraphGPT) and type(backend.target) is type(backend.draft_backend) is CUDAGraphGPT
    assert plain.device.type == backend.target.device.type == backend.draft_backend.device.type == gpu
    assert run(backend, tokenizer, params) == run(plain, tokenizer, params)
    assert not [message for message in backend.messages if "here" in message], "every check passed"
    rate = backend.num_accepted / backend.num_proposed
    assert {"same": rate > 0.95, "half_right": 0 < rate < 1, "other": rate < 0.5}[draft]


@pytest.mark.parametrize("gpu, draft, dtype", gpu_cases(DRAFTS, [torch.bfloat16, torch.float16], quick=lambda gpu, draft, dtype: draft == "same"), indirect=["gpu"])
def test_in_half_precision_most_proposals_of_the_same_model_are_accepted(tokenizer, folders, gpu, draft, dtype):
    """Rounding may change tokens, so the samples may differ from those without a draft."""
    backend = prepare(folders[draft], dtype)
    assert backend.target.model.lm_head.weight.shape == (64, 24), "the head is padded from 61 tokens"
    assert [len(ids) for ids in run(backend, tokenizer, dtype=dtype)] == [28, 28]
    assert backend.num_proposed > 0 and (draft != "same" or backend.num_accepted > 0.5 * backend.num_proposed)


@with_graphs
def test_the_passes_of_both_models_are_replayed_and_a_later_sample_captures_nothing(tokenizer, folders, gpu, monkeypatch):
    backend, params = prepare(folders["same"]), replace(PARAMS, temperature=0.0)
    run(backend, tokenizer, params) # two equal samples: the first one runs each pass, and the second one captures those that ran once
    models, replayed, replay = (backend.target, backend.draft_backend), [], torch.cuda.CUDAGraph.replay
    graphs = [dict(model.passes.graphs) for model in models]
    assert {T for T, _ in graphs[0]} >= {9} and {T for T, _ in graphs[1]} == {1, 2}
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replayed.append(graph) or replay(graph))
    run(backend, tokenizer, params)
    assert [model.passes.graphs for model in models] == graphs, "nothing was captured"
    assert set(replayed) == {graph for found in graphs for graph in found.values()}
    assert len(replayed) > backend.num_proposed / 2 and backend.messages == []


@with_graphs
@pytest.mark.parametrize("settings, batch_size", [({}, 2), ({"max_new_tokens": 40}, 2), ({"max_new_tokens": 40}, 1)], ids=str)
def test_batches_and_text_past_the_window_use_graphs_too(tokenizer, folders, gpu, settings, batch_size):
    backend, plain, params = prepare(folders["half_right"]), prepare(), replace(PARAMS, **settings)
    assert run(backend, tokenizer, params, batch_size=batch_size) == run(plain, tokenizer, params, batch_size=batch_size)
    graphs = backend.target.state.graphs
    assert list(graphs) == [8, 16, 24, 32, "window"][-1 if batch_size == 1 else 0:None if settings else 4] and all(graphs.values())
    assert (backend.target.passes is None) == (backend.draft_backend.passes is None) == (batch_size > 1)


def test_without_cuda_graphs_nothing_is_captured(tokenizer, folders, gpu):
    backend = prepare(folders["half_right"], cuda_graphs=False)
    assert run(backend, tokenizer) == run(prepare(), tokenizer)
    assert not any([*backend.target.passes.graphs.values(), *backend.draft_backend.passes.graphs.values()]) and backend.messages == []


def fail_to_capture(monkeypatch):
    def graph(*arguments, **options):
        raise RuntimeError("no graphs here")
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return "RuntimeError: no graphs here"


def replay_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    return "a replayed step computed other logits than the step itself"


@with_graphs
@pytest.mark.parametrize("breaks", [fail_to_capture, replay_nothing])
def test_without_working_graphs_the_samples_are_the_same_and_one_line_says_so(tokenizer, folders, gpu, breaks, monkeypatch, caplog):
    expected = run(prepare(), tokenizer)
    reason, backend = breaks(monkeypatch), prepare(folders["half_right"])
    for _ in range(2):
        assert run(backend, tokenizer) == expected
    assert backend.messages == [f"CUDA graphs do not work here ({reason}): continuing without them, which is slower"], "one line for both models"
    assert caplog.messages == [], "the draft uses the same log"
    assert not any([*backend.target.passes.graphs.values(), *backend.draft_backend.passes.graphs.values()])


def test_other_random_numbers_are_reported_once(folders, gpu, monkeypatch, caplog):
    monkeypatch.setattr(self_check, "draws_like_multinomial", lambda *arguments: False)
    message, = prepare(folders["same"]).messages
    assert message.startswith("the random numbers are not those of torch.multinomial here") and caplog.messages == []


def test_wrong_logits_of_a_pass_never_reach_the_text(tokenizer, folders, gpu, monkeypatch):
    expected, decode_step = run(prepare(), tokenizer), StaticForward.decode_step

    def wrong(self, tokens, positions, layers, num_keys):
        if tokens.size(1) > 1:
            layers = [layer.roll(1, dims=3) for layer in layers]
        return decode_step(self, tokens, positions, layers, num_keys)
    monkeypatch.setattr(StaticForward, "decode_step", wrong)
    backend = prepare(folders["half_right"])
    assert run(backend, tokenizer) == expected and backend.num_accepted
    assert 1 <= len(backend.messages) <= 2, "each model has its own check"
    assert all(message.startswith("the fast path for GPUs computes other logits than the plain model here") for message in backend.messages)


def test_a_draft_whose_logits_are_nan_changes_no_sample(tokenizer, folders, gpu):
    backend = prepare(folders["nan"])
    assert run(backend, tokenizer) == run(prepare(), tokenizer)
    assert backend.messages == ["the draft is off: its logits are NaN or infinite"] and backend.num_proposed == 0


def test_nan_logits_of_the_model_are_an_error(tokenizer, folders, gpu):
    with pytest.raises(ValueError, match="logits are NaN or infinite"):
        run(prepare(folders["same"], model=add_noise(make_gpt(**SHAPE), torch.nan)), tokenizer)


BAD = 5 # the id of a token that the model must not read


def model_with_a_bad_token():
    """A model whose logits are NaN after text with BAD. Its greedy text has no BAD, because the logit of BAD is always 0."""
    model = make_gpt(**SHAPE, tie_word_embeddings=False)
    with torch.no_grad():
        model.transformer.wte.weight[BAD] = torch.nan
        model.lm_head.weight[BAD] = 0
    return model


def test_nan_logits_end_only_the_sample_that_has_them(tokenizer, folders, gpu):
    backend, sampler = prepare(folders["same"], model=model_with_a_bad_token()), TokenSampler(temperature=0, allow_sync=False)
    idx = torch.tensor([tokenizer.encode("The ")], device=backend.device)
    for bad, good in (torch.full_like(idx, BAD), idx), (idx, idx.flip(1)):
        with pytest.raises(ValueError, match="logits are NaN or infinite"):
            list(backend.generate_stream(torch.where(bad == idx, BAD, bad), 9, sampler))
        found = torch.cat(list(backend.generate_stream(good, 20, sampler)), dim=1)
        assert torch.equal(found, backend.target.model.generate(good, 20, temperature=0)[:, 4:])
        assert backend.logits_are_finite()


def test_streams_may_be_interleaved(tokenizer, folders, gpu):
    backend, sampler = prepare(folders["half_right"]), TokenSampler(temperature=0, allow_sync=False)
    prompts = [torch.tensor([tokenizer.encode(text)], device=backend.device) for text in ("The ", "What")]
    expected = [backend.target.model.generate(idx, 28, temperature=0)[:, 4:].tolist() for idx in prompts]
    for _ in range(2):
        streams = [backend.generate_stream(idx, 28, sampler) for idx in prompts]
        found = [torch.cat(tokens, dim=1).tolist() for tokens in zip(*zip(*streams, strict=True), strict=True)]
        assert found == expected
