"""The loop that samples, with every backend; the Engine around it; and how several processes share samples."""
import os
from dataclasses import replace

import pytest
import torch

import engines
from engines import PARAMS, PROMPTS, LeastBackend, expected_ids, expected_texts, load, make_samples, on_fake_gpu, run
from models import CHARS, make_gpt
from sampling.backends.backend import EagerBackend
from sampling.generation.engine import Engine, group_by_length
from sampling.generation.workers import Workers
from sampling.params import Prompt, Sample
from sampling.sampler.sampler import NOT_FINITE
from streams import decode, random_prompt

WINDOWS = { # block_size is mostly 16
    "equal": 3 * random_prompt(5).tolist(),
    "different lengths": [random_prompt(length, seed=length)[0].tolist() for length in (9, 1, 16, 4)],
    "longer than block_size": [random_prompt(length, seed=length)[0].tolist() for length in (40, 17)],
}


@pytest.mark.parametrize("block_size, settings", [
    (16, dict(temperature=0.8, top_k=20)), (16, dict(temperature=0)), (16, dict(temperature=0, repetition_penalty=1.5)),
    (16, dict(top_k=None)), (16, dict(top_k=1000)), (16, dict(top_p=0.7)), (16, dict(min_p=0.2)),
    (16, dict(repetition_penalty=1.4, top_k=9)),
    (16, dict(temperature=1.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=0.8)),
    (16, dict(context_shift=True, top_k=20)), (7, dict(context_shift=True, top_k=20)),
    (1, dict(context_shift=True, top_k=20)),
], ids=str)
def test_text_inside_and_past_the_window_is_that_of_the_plain_loop(make_backend, block_size, settings):
    for name, prompts in WINDOWS.items():
        gpt = make_backend(make_gpt(block_size=block_size))
        expected = expected_ids(prompts, 30, block_size=block_size, device=gpt.device, **settings)
        assert decode(gpt, prompts, 30, **settings) == expected, name


@pytest.mark.parametrize("batch_size, max_new_tokens", [(1, 20), (3, 20), (99, 20), (3, 1), (3, 0)])
def test_samples_are_yielded_in_order_with_the_text_that_each_would_have_alone(tokenizer, batch_size, max_new_tokens):
    samples, taken, found = make_samples(tokenizer, PROMPTS, 2), [], []
    engine = Engine(load(tokenizer), replace(PARAMS, max_new_tokens=max_new_tokens), batch_size)
    for sample in engine.generate(taken.append(sample) or sample for sample in engines.without_tokens(samples)):
        found.append((sample.index, sample.text, sample.finish_reason))
        assert len(taken) < len(found) + batch_size, "samples are read one batch at a time"
    assert found == [(i, text, "length") for i, text in enumerate(expected_texts(samples, tokenizer, max_new_tokens))]
    assert [sample.text for sample in run(engine, samples[9:])] == [text for _, text, _ in found[9:]]


def test_saved_samples_are_not_yielded_and_the_others_are_equal_to_the_last_bit(tokenizer):
    model, params = load(tokenizer, EagerBackend(make_gpt(n_embd=256))), replace(PARAMS, num_logprobs=2, stop="e")
    samples, counts = make_samples(tokenizer, PROMPTS), []
    whole = run(Engine(model, params, 4), samples)
    samples = [replace(sample, already_saved=sample.index in (0, 1, 2, 5)) for sample in samples]
    rest = run(Engine(model, params, 4, on_tokens=counts.append), samples)
    assert [sample.tokens for sample in rest] == [whole[i].tokens for i in (3, 4, 6, 7)]
    assert sum(counts) == sum(sample.num_tokens for sample in rest)


def sample_of(index, prompt_length=1, already_saved=False):
    return Sample(index, Prompt("a" * prompt_length), list(range(prompt_length)), already_saved)


@pytest.mark.parametrize("lengths, block_size, expected", [
    ([1, 30, 11, 40, 12], 99, [[0, 2], [1, 3], [4]]), # 12 is too far from 1, and 30 from 12
    ([30, 1, 2], 99, [[0], [1, 2]]), # in the order of their first samples
    ([30, 1, 2], 8, [[0, 1, 2]]), # the model sees 8 tokens of the first
], ids=str)
def test_prompt_lengths_in_a_group_differ_by_at_most_max_new_tokens(lengths, block_size, expected):
    groups = group_by_length([sample_of(i, length) for i, length in enumerate(lengths)], block_size, 10)
    assert [[sample.index for sample in group] for group in groups] == expected


@pytest.mark.parametrize("num_logprobs, expected_number", [(0, 0), (4, 4), (99, len(CHARS))])
@torch.no_grad()
def test_logprobs_are_those_of_the_model_at_temperature_1(tokenizer, num_logprobs, expected_number):
    gpt, params = make_gpt(), replace(PARAMS, temperature=0.5, top_k=9, num_logprobs=num_logprobs)
    for sample in run(Engine(load(tokenizer, LeastBackend(make_gpt())), params, 3), make_samples(tokenizer, PROMPTS)):
        ids = list(sample.prompt_ids)
        for token in sample.tokens:
            logprobs = gpt(torch.tensor([ids[-16:]]))[0][0, -1].log_softmax(-1)
            top = logprobs.argsort(descending=True)[:expected_number].tolist()
            assert token.logprob == pytest.approx(logprobs[token.id].item(), abs=1e-4)
            assert dict(token.top_logprobs) == pytest.approx({CHARS[i]: logprobs[i].item() for i in top}, abs=1e-4)
            ids.append(token.id)


@pytest.mark.parametrize("batch_size, stream", [(1, True), (6, True), (6, False)])
def test_a_sample_ends_where_a_stop_text_begins_and_the_rows_that_stay_keep_their_text(tokenizer, make_backend,
                                                                                       batch_size, stream):
    backend, samples = make_backend(make_gpt()), make_samples(tokenizer, PROMPTS)
    full = expected_texts(samples, tokenizer, 30, device=backend.device)
    stops = [full[0][13:16], full[1][28:30], full[2][:2], full[5][20:24], full[6][9:12] + "\n\n"]
    params, model = replace(PARAMS, max_new_tokens=30, stop=stops), load(tokenizer, backend)
    found = run(Engine(model, params, batch_size, stream), samples)
    assert [sample.text for sample in found] == [engines.truncate_at_stop(text, stops) for text in full]
    assert [sample.finish_reason == "length" for sample in found] == [sample.text in full for sample in found]
    if stream:
        streamed = engines.streamed_texts(Engine(model, params, batch_size, stream), samples)
        assert streamed == [sample.text for sample in found]


def test_rows_leave_a_batch_when_they_are_finished(tokenizer):
    backend, samples, stops = LeastBackend(make_gpt()), make_samples(tokenizer, ["O"], 6), [*"STOP"]
    run(Engine(load(tokenizer, backend), replace(PARAMS, max_new_tokens=12, stop=stops), 6), samples)
    lengths = [min(12, len(text) + 1) for text in expected_texts(samples, tokenizer, 12, stops)] # with the stop text
    left = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    assert len(set(lengths)) > 2 and backend.num_rows == [1, *left], "the prompt is read once"


@pytest.mark.parametrize("num_rows, stops, num_left", [(32, CHARS[::8], 32), (33, CHARS[::8], 3), (33, "f", 33)])
def test_on_a_gpu_rows_leave_a_batch_only_above_32_rows_and_if_half_of_them_leave(tokenizer, num_rows, stops, num_left):
    backend, samples = on_fake_gpu(LeastBackend(make_gpt())), make_samples(tokenizer, ["O"], num_rows)
    found = run(Engine(load(tokenizer, backend), replace(PARAMS, max_new_tokens=24, stop=[*stops]), 36), samples)
    assert [sample.text for sample in found] == expected_texts(samples, tokenizer, 24, stops)
    assert backend.num_rows == [1, *15 * [num_rows], *8 * [num_left]], "at the first flush"


@pytest.mark.parametrize("is_gpu, stream, stop, expected", [
    (False, False, None, [16, 4]), (False, True, None, 20 * [1]), (False, False, "never", 20 * [1]),
    (True, False, "never", [16, 4]), (True, True, None, 5 * [4])])
def test_tokens_are_copied_every_16_steps_or_sooner_for_a_reader(tokenizer, is_gpu, stream, stop, expected):
    """A CPU also looks for stop texts at every step. Each copy waits for a GPU."""
    backend, counts = EagerBackend(make_gpt()), []
    model = load(tokenizer, on_fake_gpu(backend) if is_gpu else backend)
    run(Engine(model, replace(PARAMS, stop=stop), 1, stream, on_tokens=counts.append), make_samples(tokenizer, ["O"]))
    assert counts == expected


def test_out_of_memory_in_a_later_step_keeps_finished_samples_and_shows_no_character_twice(tokenizer, messages):
    samples, backend = make_samples(tokenizer, ["The "], 4), LeastBackend(make_gpt(), fails_at=12)
    counts = []
    stops = [expected_texts(samples, tokenizer)[2][3:6]]
    engine = Engine(load(tokenizer, backend), replace(PARAMS, stop=stops), 4, True, counts.append)
    assert engines.streamed_texts(engine, samples) == expected_texts(samples, tokenizer, stops=stops)
    assert backend.num_rows == [1, *5 * [4], *6 * [3], 1, *19 * [2], 1, *19 * [1]] and sum(counts) == 66
    assert messages == ["out of memory with 4 samples at once: continuing with 2"]


@pytest.mark.parametrize("error, last_size", [(MemoryError("too large"), 1), (RuntimeError("illegal access"), 8)])
def test_out_of_memory_with_one_sample_and_other_errors_are_raised(tokenizer, error, last_size):
    engine = Engine(load(tokenizer, LeastBackend(make_gpt(), error, 0)), PARAMS, 8)
    with pytest.raises(type(error), match=str(error)):
        run(engine, make_samples(tokenizer, PROMPTS))
    assert engine.batch_size == last_size


@pytest.mark.parametrize("settings", [dict(), dict(num_logprobs=2), dict(stop="never"), dict(temperature=0)], ids=str)
@pytest.mark.parametrize("backend, stream", [(EagerBackend, False), (EagerBackend, True), (engines.static_steps, True)])
def test_a_sample_whose_logits_are_nan_does_not_finish(tokenizer, backend, stream, settings):
    gpt, samples, yielded = make_gpt(), make_samples(tokenizer, ["The ", "O", "What is it?"]), set()
    with torch.no_grad():
        gpt.transformer.wpe.weight[12] = torch.nan # a position that only the longest prompt reaches, in its third step
    engine = Engine(load(tokenizer, backend(gpt)), replace(PARAMS, max_new_tokens=4, **settings), 2, stream)
    with pytest.raises(ValueError) as error:
        yielded.update(sample.index for sample in engine.generate(samples) if sample.finish_reason)
    assert str(error.value) == NOT_FINITE and yielded == {0, 1}


# ---- several processes: script/test_distributed.py starts them

TORCHRUN = dict(TORCHELASTIC_RUN_ID="none", RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")


@pytest.mark.parametrize("variables, expected", [
    (TORCHRUN, (5, 8, 1, 4, False)), ({}, (0, 1, None, 1, True)),
    (dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="3"), (0, 1, None, 1, True)), # a cluster's own
], ids=["torchrun", "none", "a cluster's"])
def test_rank_and_world_size_come_from_torchrun_if_it_started_the_process(variables, expected, monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    workers = Workers()
    assert (workers.rank, workers.world_size, workers.local_rank, workers.local_world_size, workers.is_main) == expected


def test_output_of_gloo_goes_to_stderr(capfd, monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **settings: os.write(1, b"a greeting"))
    Workers().connect(is_attended=False)
    os.write(1, b"a sample")
    assert capfd.readouterr() == ("a sample", "a greeting")
