"""The loop that samples, with every backend; its batches; and how several processes share samples."""
import os
from dataclasses import replace

import pytest
import torch

import engines
from engines import PARAMS, PROMPTS, NotingBackend, expected_ids, expected_texts, make_generator, make_samples, run
from models import CHARS, make_gpt, random_prompt
from sampling.backends.backend import EagerBackend
from sampling.backends.cuda import CUDABackend
from sampling.generation import workers
from sampling.generation.batch import NOT_FINITE
from sampling.generation.detokenizer import Detokenizer
from sampling.generation.engine import group_by_length
from sampling.inputs.tokenizer_choice import TiktokenTokenizer
from sampling.params import Prompt, Sample, SamplingParams

WINDOWS = { # block_size is mostly 16
    "equal": 3 * random_prompt(5).tolist(),
    "different lengths": [random_prompt(length, seed=length)[0].tolist() for length in (9, 1, 16, 4)],
    "longer than block_size": [random_prompt(length, seed=length)[0].tolist() for length in (40, 17)],
}


@pytest.mark.parametrize("block_size, settings", [
    (16, dict(temperature=0.8, top_k=20)), (16, dict(temperature=0)), (16, dict(temperature=0, repetition_penalty=1.5)),
    (16, dict(top_k=None)), (16, dict(top_p=0.7)), (16, dict(min_p=0.2)),
    (16, dict(temperature=1.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=0.8)),
    (16, dict(context_shift=True, top_k=20)), (7, dict(context_shift=True, top_k=20)),
    (1, dict(context_shift=True, top_k=20)),
], ids=str)
def test_text_inside_and_past_the_window_is_that_of_the_plain_loop(make_backend, block_size, settings):
    for name, prompts in WINDOWS.items():
        gpt = make_backend(make_gpt(block_size=block_size))
        expected = expected_ids(prompts, 30, block_size=block_size, device=gpt.device, **settings)
        assert engines.decode(gpt, prompts, 30, **settings) == expected, name


@pytest.mark.parametrize("batch_size, max_new_tokens", [(1, 20), (3, 20), (99, 20), (3, 0)])
def test_samples_are_yielded_in_order_with_the_text_that_each_would_have_alone(tokenizer, batch_size, max_new_tokens):
    samples, taken, found = make_samples(tokenizer, PROMPTS, 2), [], []
    gpt, params = make_generator(tokenizer), replace(PARAMS, max_new_tokens=max_new_tokens)
    given = (taken.append(sample) or sample for sample in engines.without_tokens(samples))
    for sample, _ in gpt.run(given, params, batch_size):
        if sample.finish_reason:
            found.append((sample.index, sample.text, sample.finish_reason))
            assert len(taken) < len(found) + batch_size, "samples are read one batch at a time"
    assert found == [(i, text, "length") for i, text in enumerate(expected_texts(samples, tokenizer, max_new_tokens))]
    assert [sample.text for sample in run(gpt, samples[9:], params, batch_size)] == [text for _, text, _ in found[9:]]


def test_saved_samples_are_not_yielded_and_the_others_are_equal_to_the_last_bit(tokenizer):
    gpt, samples = make_generator(tokenizer, EagerBackend(make_gpt(n_embd=256))), make_samples(tokenizer, PROMPTS)
    params = replace(PARAMS, num_logprobs=2, stop="e")
    whole = run(gpt, samples, params, 4)
    samples = [replace(sample, already_saved=sample.index in (0, 1, 2, 5)) for sample in samples]
    assert [sample.tokens for sample in run(gpt, samples, params, 4)] == [whole[i].tokens for i in (3, 4, 6, 7)]


@pytest.mark.parametrize("lengths, most, sizes", [
    (9 * [4], 8, [8, 1]), (9 * [4], 4, [4, 4, 1]), (9 * [4], 0, 9 * [1]),
    ([4, 4, 4, 8, 4, 4, 4, 4], 4, [3, 1, 1, 3])]) # a long prompt makes only its own batch smaller
def test_a_batch_is_not_too_large(tokenizer, lengths, most, sizes):
    backend = NotingBackend(make_gpt())
    backend.max_rows, backend.bytes_per_row = 8, {4 + 2: 1, 8 + 2: 2}.get # of the prompt, and of the new tokens
    backend.max_batch_bytes = most
    samples = make_samples(tokenizer, ["a" * length for length in lengths])
    run(make_generator(tokenizer, backend), samples, replace(PARAMS, max_new_tokens=2))
    assert [size for i, size in enumerate(backend.num_rows) if i % 2] == sizes, "every other call is a prefill"


@pytest.mark.parametrize("lengths, block_size, expected", [
    ([30, 1, 40, 11, 12], 99, [[0, 2], [1, 3], [4]]), # 12 is too far from 1, and 30 from 12
    ([30, 1, 2], 8, [[0, 1, 2]]), # the model sees 8 tokens of the first
], ids=str)
def test_prompt_lengths_in_a_group_differ_by_at_most_max_new_tokens(tokenizer, lengths, block_size, expected):
    samples = make_samples(tokenizer, ["a" * length for length in lengths])
    rows = [Detokenizer(sample, tokenizer, PARAMS) for sample in samples]
    groups = group_by_length(rows, block_size, 10)
    assert [[row.sample.index for row in group] for group in groups] == expected


@pytest.mark.parametrize("num_logprobs, expected_number", [(0, 0), (4, 4), (99, len(CHARS))])
@torch.no_grad()
def test_logprobs_are_those_of_the_model_at_temperature_1(tokenizer, num_logprobs, expected_number):
    gpt, params = make_gpt(), replace(PARAMS, temperature=0.5, top_k=9, num_logprobs=num_logprobs)
    for sample in run(make_generator(tokenizer, NotingBackend(gpt)), make_samples(tokenizer, PROMPTS), params, 3):
        ids = list(sample.prompt_ids)
        for token in sample.tokens:
            logprobs = gpt(torch.tensor([ids[-16:]]))[0][0, -1].log_softmax(-1)
            top = logprobs.argsort(descending=True)[:expected_number].tolist()
            assert token.logprob == pytest.approx(logprobs[token.id].item(), abs=1e-4)
            found = {(other.id, other.text): other.logprob for other in token.top_logprobs}
            assert found == pytest.approx({(i, CHARS[i]): logprobs[i].item() for i in top}, abs=1e-4)
            ids.append(token.id)


@pytest.mark.parametrize("batch_size, stream", [(1, True), (6, True), (6, False)])
def test_a_sample_ends_where_a_stop_text_begins_and_the_rows_that_stay_keep_their_text(tokenizer, make_backend,
                                                                                       batch_size, stream):
    backend, samples = make_backend(make_gpt()), make_samples(tokenizer, PROMPTS)
    full = expected_texts(samples, tokenizer, 30, device=backend.device)
    stops = [full[0][13:16], full[1][28:30], full[2][:2], full[5][20:24], full[6][9:12] + "\n\n"]
    params = replace(PARAMS, max_new_tokens=30, stop=stops)
    found = run(make_generator(tokenizer, backend), samples, params, batch_size, stream)
    assert [sample.text for sample in found] == [engines.truncate_at_stop(text, stops) for text in full]
    assert [sample.finish_reason == "length" for sample in found] == [sample.text in full for sample in found]


def test_rows_leave_a_batch_when_they_are_finished(tokenizer):
    backend, samples, stops = NotingBackend(make_gpt()), make_samples(tokenizer, ["O"], 6), [*"STOP"]
    run(make_generator(tokenizer, backend), samples, replace(PARAMS, max_new_tokens=12, stop=stops), 6)
    lengths = [min(12, len(text) + 1) for text in expected_texts(samples, tokenizer, 12, stops)] # with the stop text
    left = [sum(length > step for length in lengths) for step in range(1, max(lengths))] # after each step
    assert len(set(lengths)) > 2 and backend.num_rows == [1, *left], "the prompt is read once"


@pytest.mark.parametrize("num_rows, stops, leave", [(32, CHARS[::8], False), (33, CHARS[::8], True), (33, "f", False)])
def test_on_a_gpu_rows_leave_a_batch_only_above_32_rows_and_if_half_of_them_leave(tokenizer, num_rows, stops, leave):
    model, rows, samples = make_gpt(), [], make_samples(tokenizer, ["O"], num_rows)
    model.register_forward_hook(lambda module, arguments, output: rows.append(len(arguments[0])))
    gpt, params = make_generator(tokenizer, CUDABackend(model, cuda_graphs=False)), replace(PARAMS, max_new_tokens=24)
    found = run(gpt, samples, replace(params, stop=[*stops]), 36)
    assert [sample.text for sample in found] == expected_texts(samples, tokenizer, 24, stops)
    assert rows[:2] == [1, num_rows] and (rows[-1] < num_rows) == leave


@pytest.mark.parametrize("is_gpu, stream, stop, num_flushes", [
    (False, False, None, 2), (False, True, None, 20), (False, False, "never", 20), (True, True, None, 5),
    (True, False, "never", 5)])
def test_tokens_are_copied_every_16_steps_or_sooner_for_a_reader_or_a_stop_text(tokenizer, is_gpu, stream, stop,
                                                                               num_flushes):
    backend = engines.BACKENDS["no graphs" if is_gpu else "eager"](make_gpt(block_size=32)) # the window does not move
    samples, params = make_samples(tokenizer, ["O"]), replace(PARAMS, stop=stop)
    assert len([*make_generator(tokenizer, backend).run(samples, params, 1, stream)]) == num_flushes


def test_out_of_memory_in_a_later_step_keeps_finished_samples_and_shows_no_character_twice(tokenizer, messages):
    samples, backend = make_samples(tokenizer, ["The "], 4), NotingBackend(make_gpt(), failing=[12])
    backend.free_buffers = lambda: messages.append("free")
    stops = [expected_texts(samples, tokenizer)[2][3:6]] # the third sample is finished after 6 tokens
    found = run(make_generator(tokenizer, backend), samples, replace(PARAMS, stop=stops), 4, stream=True)
    assert [sample.text for sample in found] == expected_texts(samples, tokenizer, stops=stops)
    assert backend.num_rows[1] == 4 and backend.num_rows[11] == 3, "without the third sample"
    assert max(backend.num_rows[12:]) == 2
    assert engines.without_facts(messages) == ["out of memory with 4 samples at once: continuing with 2", "free"]


def test_samples_that_go_past_the_window_come_in_small_batches_one_after_another(tokenizer, messages):
    backend = NotingBackend(make_gpt())
    backend.max_window_tokens = 2 * 16 + 5 # two rows
    samples = make_samples(tokenizer, ["The "], 5)
    gpt = make_generator(tokenizer, backend)
    found = run(gpt, samples, PARAMS)
    assert [sample.text for sample in found] == expected_texts(samples, tokenizer)
    steps = PARAMS.max_new_tokens
    assert backend.num_rows == [1, *[2] * (steps - 1)] * 2 + [1] * steps, "a prompt is read once for both rows"
    run(gpt, samples, PARAMS) # as a session's next prompt
    assert sum(line.startswith("past 16 tokens, each token recomputes the whole") for line in messages) == 1
    for settings in dict(max_new_tokens=5), dict(context_shift=True): # the window does not move, or not each time
        backend.num_rows.clear()
        messages.clear()
        run(make_generator(tokenizer, backend), samples, replace(PARAMS, **settings))
        assert max(backend.num_rows) == 5 and engines.without_facts(messages) == messages[1:]


@pytest.mark.parametrize("error, num_tries", [(MemoryError("too large"), 4), (RuntimeError("illegal access"), 1)])
def test_out_of_memory_with_one_sample_and_other_errors_are_raised(tokenizer, error, num_tries): # 8, 4, 2 and 1
    backend = NotingBackend(make_gpt(), error, failing=range(99))
    with pytest.raises(type(error), match=str(error)):
        run(make_generator(tokenizer, backend), make_samples(tokenizer, ["O"] * 8), PARAMS, 8)
    assert len(backend.num_rows) == num_tries


@pytest.mark.parametrize("settings", [dict(), dict(num_logprobs=2), dict(stop="never", temperature=0)], ids=str)
@pytest.mark.parametrize("backend, stream", [
    (EagerBackend, False), (EagerBackend, True), (engines.BACKENDS["no graphs"], True)])
def test_a_sample_whose_logits_are_nan_does_not_finish(tokenizer, backend, stream, settings):
    gpt, samples, yielded = make_gpt(), make_samples(tokenizer, ["The ", "O", "What is it?"]), set()
    with torch.no_grad():
        gpt.transformer.wpe.weight[12] = torch.nan # a position that only the longest prompt reaches, in its third step
    params = replace(PARAMS, max_new_tokens=4, **settings)
    with pytest.raises(ValueError) as error:
        for sample, _ in make_generator(tokenizer, backend(gpt)).run(samples, params, 2, stream):
            yielded.update([sample.index] if sample.finish_reason else [])
    assert str(error.value) == NOT_FINITE and yielded == {0, 1}


def test_output_of_gloo_goes_to_stderr(capfd, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **settings: os.write(1, b"a greeting"))
    assert not workers.serve(None) # rank 0 does not serve
    os.write(1, b"a sample")
    assert capfd.readouterr() == ("a sample", "a greeting")


# ---- from tokens to text, and the search for stop texts

def append_all(tokenizer, ids, max_new_tokens, stop=None, logprobs=None):
    """The sample of these ids, until it is finished, and its new pieces after each. A token is its own alternative."""
    row = Detokenizer(Sample(0, Prompt("a"), [64]), tokenizer, SamplingParams(max_new_tokens, stop=stop))
    taken = []
    for i, token_id in enumerate(ids):
        if not row.is_finished:
            row.append(token_id, logprobs and logprobs[i], [-1.0], [token_id])
            taken.append(row.take_pieces())
    return row.sample, taken


def texts(taken):
    return ["".join(piece.text for piece in pieces) for pieces in taken]


@pytest.mark.parametrize("stop", [[], ["語"], ["\N{REPLACEMENT CHARACTER}"]], ids=ascii)
def test_no_piece_ends_inside_a_character(gpt2_encoding, stop):
    tokenizer, text = TiktokenTokenizer(), "naïve 🙂 — 日本語 x"
    ids = tokenizer.encode(text)
    sample, taken = append_all(tokenizer, ids, len(ids), stop)
    assert sample.text == "".join(texts(taken)) == engines.truncate_at_stop(text, stop)
    if not stop: # which truncates only the tokens
        assert [token.text for token in sample.tokens] == [token.top_logprobs[0].text for token in sample.tokens]


@pytest.mark.parametrize("text, stop, expected, num_tokens, reason", [
    ("abcdef", ["ef", "cde"], "ab", 5, "stop"), # "ef" would begin later
    ("abcdef", ["ef", "def"], "abc", 6, "stop"), # both end with the same token
    ("abcdef", "f", "abcde", 6, "stop"), # also as the last token
    ("ababac", "abac", "ab", 6, "stop"), # the first "aba" does not hide the second
    ("abcdef", "fg", "abcdef", 6, "length"),
])
def test_a_stop_text_truncates_the_text_but_keeps_all_token_ids(tokenizer, text, stop, expected, num_tokens, reason):
    sample, taken = append_all(tokenizer, tokenizer.encode(text), 6, stop)
    assert (sample.text, sample.finish_reason, "".join(texts(taken))) == (expected, reason, expected)
    assert sample.token_ids == tokenizer.encode(text)[:num_tokens]
    assert [token.text for token in sample.tokens] == [*expected, *[""] * (num_tokens - len(expected))]


def test_a_possible_start_of_a_stop_text_is_withheld_but_for_that_of_the_last_token(tokenizer):
    _, taken = append_all(tokenizer, tokenizer.encode("abcabc"), 6, ["bcd", "bb"])
    assert texts(taken) == ["a", "", "", "bca", "", "bc"]


def test_a_piece_has_the_log_probability_of_all_tokens_of_its_character(gpt2_encoding):
    tokenizer = TiktokenTokenizer()
    ids = tokenizer.encode("a🙂b") # the emoji has two tokens
    _, taken = append_all(tokenizer, ids, 4, logprobs=[-1.0, -2.0, -0.5, -4.0])
    assert [piece for pieces in taken for piece in pieces] == [("a", -1.0), ("🙂", -2.5), ("b", -4.0)]
