"""The loop that samples, with every backend, and its batches."""
from dataclasses import replace
from functools import cache

import pytest
import torch

from engines import (
    BACKENDS,
    PARAMS,
    PROMPTS,
    SETTINGS,
    TOKENIZER,
    NotingBackend,
    continue_ids,
    decode,
    expected_ids,
    expected_texts,
    make_generator,
    make_samples,
    run,
    texts_of,
    truncate_at_stop,
    without_facts,
)
from models import CHARS, make_gpt, random_prompt
from sampling.backends.backend import EagerBackend
from sampling.backends.backend_choice import cast_linears
from sampling.backends.cuda import CUDABackend
from sampling.generation.batch import NOT_FINITE
from sampling.generation.detokenizer import Detokenizer
from sampling.inputs.tokenizer_choice import TiktokenTokenizer
from sampling.samples import Prompt, Sample
from sampling.settings import SamplingParams


def prompts_of(*lengths):
    return [random_prompt(length, seed=length)[0].tolist() for length in lengths]


WINDOWS = { # block_size is mostly 16
    "equal": 3 * random_prompt(5).tolist(),
    "different lengths": prompts_of(9, 1, 16, 4),
    "longer than block_size": prompts_of(40, 17),
}
SHIFT = dict(context_shift=True, top_k=20)


@pytest.mark.parametrize("block_size, settings", [
    *((16, settings) for settings in SETTINGS), (16, SHIFT), (7, SHIFT), (1, SHIFT)])
def test_text_inside_and_past_the_window_is_that_of_the_plain_loop(
        make_backend, block_size, settings):
    if make_backend is BACKENDS["recorded graphs"] and settings not in (SETTINGS[0], SHIFT):
        pytest.skip("the sampler is that of the backend without graphs")
    for name, prompts in WINDOWS.items():
        backend = make_backend(make_gpt(block_size=block_size))
        found = decode(backend, prompts, 20, **settings)
        assert found == plain_ids(name, backend.device, block_size, **settings), name


@cache # for all backends
def plain_ids(window, device, block_size, **settings):
    return expected_ids(WINDOWS[window], 20, device=device, block_size=block_size, **settings)


def test_a_model_may_have_no_layers(make_backend):
    prompts = WINDOWS["different lengths"]
    backend = make_backend(make_gpt(n_layer=0))
    found = decode(backend, prompts, 20, top_k=20)
    model = make_gpt(n_layer=0).to(backend.device)
    torch.manual_seed(3)
    assert found == [continue_ids(model, ids, 20, top_k=20) for ids in prompts]


def test_for_cuda_tokens_are_sampled_in_the_dtype_of_the_logits_as_in_nanogpt():
    model = cast_linears(make_gpt(), torch.bfloat16)
    settings = dict(temperature=0.3, top_k=30)
    samples = make_samples(2 * CHARS)
    params = SamplingParams(1, **settings, seed=1)
    found = run(make_generator(CUDABackend(model)), samples, params, 1)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        expected = [continue_ids(model, sample.prompt_ids, 1, **settings, in_own_dtype=True)
                    for sample in samples]
    assert [sample.token_ids for sample in found] == expected


@pytest.mark.parametrize("batch_size, max_new_tokens", [(1, 20), (3, 20), (99, 20), (3, 0)])
def test_samples_are_yielded_in_order_with_the_text_that_each_would_have_alone(
        batch_size, max_new_tokens):
    def read():
        for sample in make_samples(prompts):
            read_samples.append(sample)
            yield sample
    prompts = 2 * PROMPTS
    read_samples = []
    finished = []
    params = replace(PARAMS, max_new_tokens=max_new_tokens)
    for sample, _ in make_generator().run(read(), params, batch_size):
        if sample.finish_reason == "length":
            finished.append(sample)
            num_ahead = len(read_samples) - len(finished)
            assert num_ahead < batch_size, "samples are read one batch at a time"
    assert finished == read_samples
    assert texts_of(finished) == expected_texts(prompts, max_new_tokens)


def test_saved_samples_are_not_yielded_and_the_others_are_equal_to_the_last_bit():
    gpt = make_generator(EagerBackend(make_gpt(n_embd=256)))
    params = replace(PARAMS, num_logprobs=2, stop="e")
    whole = run(gpt, make_samples(PROMPTS), params, 4)
    samples = make_samples(PROMPTS)
    for i in 0, 1, 2, 3, 5:
        samples[i].already_saved = True
    rest = run(gpt, samples, params, 4)
    assert [sample.tokens for sample in rest] == [whole[i].tokens for i in (4, 6, 7)]
    assert not any(sample.tokens for sample in samples[:4]), "nothing of this batch is needed"


def batch_sizes(backend, lengths, max_new_tokens):
    """The rows of each call for prompts of these lengths."""
    samples = make_samples("a" * length for length in lengths)
    run(make_generator(backend), samples, replace(PARAMS, max_new_tokens=max_new_tokens))
    return backend.num_rows


@pytest.mark.parametrize("lengths, max_batch_bytes, sizes", [
    (9 * [4], 8, [8, 1]),
    (9 * [4], 4, [4, 4, 1]),
    (9 * [4], 0, 9 * [1]),
    ([4, 4, 4, 8, 4, 4, 4, 4], 4, [3, 1, 1, 3]), # a long prompt makes only its own batch smaller
])
def test_a_batch_is_not_too_large(lengths, max_batch_bytes, sizes):
    backend = NotingBackend(make_gpt())
    backend.max_rows = 8
    backend.max_batch_bytes = max_batch_bytes
    backend.bytes_per_row = {4 + 2: 1, 8 + 2: 2}.get # of the prompt, and of the new tokens
    num_rows = batch_sizes(backend, lengths, 2)
    assert num_rows[1::2] == sizes
    assert {*num_rows[::2]} == {1}, "equal prompts are read once"


@pytest.mark.parametrize("block_size, lengths, num_rows", [
    (64, [1, 1, 11, 12], 3), # the last one is too long for the first ones
    (8, [1, 40], 2), # the model sees 8 tokens of the last one
])
def test_short_and_long_prompts_share_no_steps(block_size, lengths, num_rows):
    backend = NotingBackend(make_gpt(block_size=block_size))
    assert max(batch_sizes(backend, lengths, 10)) == num_rows


@pytest.mark.parametrize("num_logprobs", [0, 4, 99])
@torch.no_grad()
def test_logprobs_are_those_of_the_model_at_temperature_1(num_logprobs):
    model = make_gpt()
    params = replace(PARAMS, temperature=0.5, top_k=9, num_logprobs=num_logprobs)
    for sample in run(make_generator(NotingBackend(model)), make_samples(PROMPTS), params, 3):
        ids = [*sample.prompt_ids]
        for token in sample.tokens:
            logprobs = model(torch.tensor([ids[-16:]]))[0][0, -1].log_softmax(-1)
            top = logprobs.topk(min(num_logprobs, len(CHARS)))
            assert [other.id for other in token.top_logprobs] == top.indices.tolist()
            for other in token, *token.top_logprobs:
                assert other.text == CHARS[other.id]
                assert other.logprob == pytest.approx(logprobs[other.id].item(), abs=1e-4)
            ids.append(token.id)


@pytest.mark.parametrize("batch_size, stream", [(1, True), (6, True), (6, False)])
def test_a_sample_ends_at_a_stop_text_and_the_rows_that_stay_keep_their_text(
        make_backend, batch_size, stream):
    backend = make_backend(make_gpt())
    full = expected_texts(PROMPTS, 30, device=backend.device)
    # The first two end with the same token.
    stops = [full[0][14:16], full[0][13:16], full[1][28:], full[2][:2], full[5][20:24],
             full[6][9:12] + "\n\n"]
    params = replace(PARAMS, max_new_tokens=30, stop=stops)
    found = run(make_generator(backend), make_samples(PROMPTS), params, batch_size, stream)
    assert texts_of(found) == [truncate_at_stop(text, stops) for text in full]
    for sample in found:
        assert (sample.finish_reason == "length") == (sample.text in full)
        assert "".join(token.text for token in sample.tokens) == sample.text


def test_a_stream_has_a_text_after_the_first_step():
    backend = NotingBackend(make_gpt())
    assert len(next(make_generator(backend).stream("O", PARAMS))) == 1
    assert backend.num_rows == [1]


def test_out_of_memory_in_a_later_step_loses_no_sample_and_shows_no_text_twice(
        messages):
    backend = NotingBackend(make_gpt(), failing=[12])
    backend.free_buffers = lambda: messages.append("free")
    prompts = 4 * ["The "]
    stops = [expected_texts(prompts)[2][3:6]] # the third sample is finished after 6 tokens
    params = replace(PARAMS, stop=stops)
    found = run(make_generator(backend), make_samples(prompts), params, 4, stream=True)
    assert texts_of(found) == expected_texts(prompts, stops=stops)
    assert backend.num_rows[11] == 3, "without the third sample"
    assert max(backend.num_rows[12:]) == 2
    assert without_facts(messages) == [
        "out of memory with 4 samples at once: continuing with 2", "free"]


@pytest.mark.parametrize("error, num_halved", [
    (MemoryError("too large"), 3), (RuntimeError("illegal access"), 0)])
def test_out_of_memory_with_one_sample_and_other_errors_are_raised(error, num_halved, messages):
    backend = NotingBackend(make_gpt(), error, failing=range(99))
    with pytest.raises(type(error), match=str(error)):
        run(make_generator(backend), make_samples(8 * ["O"]), PARAMS, 8)
    assert sum("out of memory" in line for line in messages) == num_halved


def test_samples_that_go_past_the_window_come_in_small_batches(messages):
    backend = NotingBackend(make_gpt())
    backend.max_window_tokens = 2 * 16 + 5 # two rows
    prompts = 5 * ["The "]
    gpt = make_generator(backend)
    for _ in range(2): # the second as a session's next prompt
        assert texts_of(run(gpt, make_samples(prompts), PARAMS)) == expected_texts(prompts)
    assert max(backend.num_rows) == 2
    # Otherwise the window does not move, or not each time.
    for settings in dict(max_new_tokens=5), dict(context_shift=True):
        run(make_generator(backend), make_samples(prompts), replace(PARAMS, **settings))
        assert max(backend.num_rows) == 5
    line = "past 16 tokens, each token recomputes the whole"
    assert sum(text.startswith(line) for text in messages) == 1


@pytest.mark.parametrize("settings", [
    dict(), dict(num_logprobs=2), dict(stop="never", temperature=0)])
@pytest.mark.parametrize("backend, stream", [
    ("eager", False), ("eager", True), ("no graphs", True)])
def test_a_sample_whose_logits_are_nan_does_not_finish(backend, stream, settings):
    model = make_gpt()
    # Only the longest prompt reaches this position, in its third step.
    torch.nn.init.constant_(model.transformer.wpe.weight[12], torch.nan)
    samples = make_samples(["The ", "O", "What is it?"])
    params = replace(PARAMS, max_new_tokens=4, **settings)
    with pytest.raises(ValueError) as error:
        run(make_generator(BACKENDS[backend](model)), samples, params, 2, stream)
    assert str(error.value) == NOT_FINITE
    assert [sample.finish_reason for sample in samples] == ["length", "length", None]


# ---- from tokens to text, and the search for stop texts

def append_all(tokenizer, ids, stop=None, logprobs=None):
    """The sample of these ids, until it is finished, and its new pieces after each.

    Each token is its own alternative.
    """
    params = SamplingParams(len(ids), stop=stop)
    row = Detokenizer(Sample(0, Prompt("a"), [64]), tokenizer, params)
    taken = []
    for i, token_id in enumerate(ids):
        if not row.is_finished:
            row.append(token_id, logprobs and logprobs[i], [-1.0], [token_id])
            taken.append(row.take_pieces())
    return row.sample, taken


def texts(taken):
    return ["".join(piece.text for piece in pieces) for pieces in taken]


@pytest.mark.parametrize("stop", [[], ["語"], ["\N{REPLACEMENT CHARACTER}"]])
def test_no_piece_ends_inside_a_character(gpt2_encoding, stop):
    tokenizer = TiktokenTokenizer()
    text = "naïve 🙂 — 日本語 x"
    sample, taken = append_all(tokenizer, tokenizer.encode(text), stop)
    assert sample.text == "".join(texts(taken)) == truncate_at_stop(text, stop)
    if not stop: # which truncates only the tokens
        for token in sample.tokens:
            assert token.text == token.top_logprobs[0].text


def test_a_possible_start_of_a_stop_text_is_withheld_but_for_that_of_the_last_token():
    _, taken = append_all(TOKENIZER, TOKENIZER.encode("abcabc"), ["bcd", "bb"])
    assert texts(taken) == ["a", "", "", "bca", "", "bc"]


def test_a_piece_has_the_log_probability_of_all_tokens_of_its_character(gpt2_encoding):
    tokenizer = TiktokenTokenizer()
    ids = tokenizer.encode("a🙂b") # the emoji has two tokens
    _, taken = append_all(tokenizer, ids, logprobs=[-1.0, -2.0, -0.5, -4.0])
    pieces = [piece for pieces in taken for piece in pieces]
    assert pieces == [("a", -1.0), ("🙂", -2.5), ("b", -4.0)]
