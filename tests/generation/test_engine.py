"""The engine generates samples in batches of any prompt lengths. Each sample has the same tokens as if it were generated alone."""
from dataclasses import replace

import pytest
import torch

from engines import BACKENDS, PARAMS, PROMPTS, generate, make_requests, reference_token_ids, token_ids, truncate_at_stop
from models import CHARS, make_gpt
from oracles import nanogpt_samples, reference_generate
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.backends.eager import EagerGPT
from sampling.checkpoints.init_draws import count_init_draws
from sampling.generation.engine import Engine
from sampling.sampler.per_row_rng import PerRowRNG

each_backend = pytest.mark.parametrize("make_engine", BACKENDS, indirect=True)


@pytest.mark.parametrize("make_engine, samples_per_prompt, batch_size", [
    pytest.param(backend, samples_per_prompt, batch_size, marks=[] if (samples_per_prompt, batch_size) == (1, 3) or (backend, batch_size) == ("eager", 5) else pytest.mark.slow)
    for backend in BACKENDS for samples_per_prompt, batch_size in [(1, 8), (3, 5), (2, 1), (1, 3)]], indirect=["make_engine"])
def test_samples_in_batches_of_mixed_prompt_lengths_equal_samples_generated_alone(tokenizer, make_engine, samples_per_prompt, batch_size):
    requests = make_requests(tokenizer, PROMPTS, samples_per_prompt)
    expected = reference_token_ids(requests)
    found = generate(make_engine(make_gpt(), tokenizer, batch_size=batch_size), requests)
    assert [sample.index for sample in found] == list(range(len(requests)))
    assert [sample.token_ids for sample in found] == expected
    assert [sample.text for sample in found] == [tokenizer.decode(ids) for ids in expected]
    assert {sample.finish_reason for sample in found} == {"length"}


@each_backend
def test_context_shift_in_batches_of_mixed_prompt_lengths_equals_samples_generated_alone(tokenizer, make_engine):
    requests = make_requests(tokenizer, PROMPTS)
    params = replace(PARAMS, max_new_tokens=40, temperature=1.0, context_shift=True)
    assert token_ids(make_engine(make_gpt(), tokenizer, params, batch_size=8), requests) == reference_token_ids(requests, 40, context_shift=True)


@pytest.mark.parametrize("max_new_tokens", [0, 1, 2])
def test_few_new_tokens(tokenizer, make_engine, max_new_tokens):
    requests = make_requests(tokenizer, PROMPTS)
    engine = make_engine(make_gpt(), tokenizer, replace(PARAMS, max_new_tokens=max_new_tokens), batch_size=8)
    assert token_ids(engine, requests) == reference_token_ids(requests, max_new_tokens)


@pytest.mark.parametrize("first", [pytest.param(1, marks=pytest.mark.slow), 7, pytest.param(8, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_may_start_at_any_sample(tokenizer, make_engine, first):
    requests = make_requests(tokenizer, PROMPTS, 3)
    expected = reference_token_ids(requests)
    assert token_ids(make_engine(make_gpt(), tokenizer, batch_size=4), requests[first:]) == expected[first:]


def test_samples_equal_nanogpts_which_initialises_a_model_before_sampling(tokenizer, make_engine):
    model, requests = make_gpt(), make_requests(tokenizer, ["O"], 3)
    num_init_draws = count_init_draws(model.state_dict())
    args = {name: getattr(model.config, name) for name in model.config.__dataclass_fields__}
    expected = nanogpt_samples(args, model.state_dict(), 3, requests[0].prompt_ids, 3, 20, temperature=0.9, top_k=30)
    engine = make_engine(make_gpt(), tokenizer, num_init_draws=num_init_draws, batch_size=2)
    assert [requests[0].prompt_ids + ids for ids in token_ids(engine, requests)] == expected


def test_replace_returns_an_engine_with_new_params_and_a_fresh_random_stream(tokenizer, make_engine):
    requests = make_requests(tokenizer, ["O"], 3)
    engine = make_engine(make_gpt(), tokenizer, batch_size=2)
    expected = token_ids(engine, requests)
    assert token_ids(replace(engine), requests) == expected, "a fresh random stream starts at sample 0"
    other = replace(engine, params=replace(PARAMS, seed=4, temperature=1.5, max_new_tokens=30, stop="e"))
    assert other.backend is engine.backend and other.batch_size == 2
    found = token_ids(other, requests)
    assert found == token_ids(make_engine(make_gpt(), tokenizer, other.params), requests) and found != expected
    assert token_ids(replace(other, params=PARAMS), requests) == expected


@pytest.mark.parametrize("max_new_tokens", [1, 20])
def test_all_samples_of_a_batch_are_yielded_before_the_next_batch_is_read(tokenizer, make_engine, max_new_tokens):
    """Memory does not grow with the number of prompts."""
    requests, taken = make_requests(tokenizer, PROMPTS * 5), []
    engine = make_engine(make_gpt(), tokenizer, replace(PARAMS, max_new_tokens=max_new_tokens), batch_size=6)
    for sample in engine.generate(taken.append(request) or request for request in requests):
        assert len(taken) <= sample.index - sample.index % 6 + 6


def test_prompts_of_very_different_lengths_are_in_separate_batches(tokenizer, make_engine):
    model, shapes = make_gpt(block_size=256), []
    model.transformer.h[0].register_forward_hook(lambda module, args, result: shapes.append(tuple(args[0].shape[:2])))
    requests = make_requests(tokenizer, ["a", "b" * 200, "cc", "d" * 201])
    generate(make_engine(model, tokenizer, replace(PARAMS, max_new_tokens=10), batch_size=4), requests)
    assert len(shapes) == 2 * 11 and shapes[0][1] == 1 and shapes[11][1] == 200


def resumed_run(tokenizer, num_saved, **settings):
    """The samples of a run that resumes after num_saved saved samples."""
    requests = [replace(request, already_saved=request.index < num_saved) for request in make_requests(tokenizer, PROMPTS * 2)]
    backend, params = EagerGPT(make_gpt(n_embd=256, n_head=8)), replace(PARAMS, num_logprobs=2, stop=["e"])
    return generate(Engine(backend, tokenizer, params, batch_size=4, **settings), requests)


@pytest.fixture(scope="module")
def whole_run(tokenizer):
    return resumed_run(tokenizer, 0)


@pytest.mark.parametrize("num_saved", [pytest.param(n, marks=[] if n == 3 else pytest.mark.slow) for n in (1, 3, 4, 6, 7, 11)])
def test_saved_samples_are_not_yielded_and_the_others_are_bitwise_equal(tokenizer, whole_run, num_saved):
    counts = []
    rest = resumed_run(tokenizer, num_saved, on_tokens=counts.append)
    assert [sample.index for sample in rest] == list(range(num_saved, 16))
    assert [sample.tokens for sample in rest] == [sample.tokens for sample in whole_run[num_saved:]]
    assert sum(counts) == sum(sample.num_tokens for sample in rest), "tokens of saved samples are not counted"


# ---- log-probabilities and penalties

@each_backend
def test_logprobs_equal_those_of_the_model(tokenizer, make_engine):
    model, params = make_gpt(), replace(PARAMS, temperature=0.5, top_k=9, repetition_penalty=1.3, num_logprobs=4)
    for sample in generate(make_engine(make_gpt(), tokenizer, params, batch_size=3), make_requests(tokenizer, PROMPTS)):
        ids = list(sample.request.prompt_ids)
        for token in sample.tokens:
            texts, values = zip(*token.top_logprobs, strict=True)
            with torch.no_grad():
                expected = model(torch.tensor([ids[-16:]]))[0][0, -1].log_softmax(-1)
            assert token.logprob == pytest.approx(expected[token.id].item(), abs=1e-4)
            assert values == pytest.approx(expected.topk(4).values.tolist(), abs=1e-4)
            assert values == pytest.approx(expected[[CHARS.index(text) for text in texts]].tolist(), abs=1e-4)
            ids.append(token.id)
        assert sample.cumulative_logprob == pytest.approx(sum(token.logprob for token in sample.tokens))
        assert sample.text == tokenizer.decode(sample.token_ids)


def test_num_logprobs_is_limited_to_the_vocabulary_size(tokenizer, make_engine):
    params = replace(PARAMS, max_new_tokens=2, num_logprobs=99)
    sample, = generate(make_engine(make_gpt(), tokenizer, params), make_requests(tokenizer, ["O"]))
    assert [len(token.top_logprobs) for token in sample.tokens] == [61, 61]


@pytest.mark.parametrize("make_engine", ["eager", "direct"], indirect=True)
def test_the_repetition_penalty_in_a_batch_equals_the_penalty_alone(tokenizer, make_engine):
    params, requests = replace(PARAMS, max_new_tokens=30, temperature=0, top_k=None, repetition_penalty=1.5), make_requests(tokenizer, PROMPTS)
    alone = [token_ids(Engine(EagerGPT(make_gpt()), tokenizer, params), [request])[0] for request in requests]
    assert token_ids(make_engine(make_gpt(), tokenizer, params, batch_size=8), requests) == alone
    assert alone != token_ids(make_engine(make_gpt(), tokenizer, replace(params, repetition_penalty=1.0)), requests)


@each_backend
def test_at_temperature_0_no_random_numbers_are_drawn(tokenizer, make_engine, monkeypatch):
    engine = make_engine(make_gpt(), tokenizer, replace(PARAMS, temperature=0))
    monkeypatch.setattr(PerRowRNG, "prefetch", None)
    assert len(generate(engine, make_requests(tokenizer, PROMPTS))) == 8


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("stops", [[], ["e", "t"]], ids=["whole", "stopped"])
def test_batches_on_cuda_equal_samples_generated_alone(tokenizer, stops):
    torch.set_float32_matmul_precision("highest")
    model, requests = make_gpt(block_size=256).cuda(), make_requests(tokenizer, PROMPTS, 3)
    torch.manual_seed(3)
    expected = [reference_generate(model, torch.tensor([request.prompt_ids]).cuda(), 300, temperature=0.9, top_k=30)[0].tolist()
                for request in requests]
    params = replace(PARAMS, max_new_tokens=300, stop=stops, num_logprobs=3)
    found = generate(Engine(CUDAGraphGPT(model), tokenizer, params, batch_size=8), requests)
    assert [sample.text for sample in found] == [truncate_at_stop(tokenizer.decode(ids[len(request.prompt_ids):]), stops)
                                                 for ids, request in zip(expected, requests, strict=True)]
    assert all(len(token.top_logprobs) == 3 for sample in found for token in sample.tokens)
