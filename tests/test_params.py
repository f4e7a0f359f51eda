"""The rules of the settings, SamplingParams and Sample."""
import math
from dataclasses import FrozenInstanceError, replace

import pytest

from configurator import find_settings
from project import SCRIPT
from sampling.params import Prompt, Sample, SampleRequest, SamplingParams, Token, check_settings, choose_seed

DEFAULTS = {name: setting.default for name, setting in find_settings(SCRIPT).items()}
VALID = [
    ("init_from", ["resume", "gpt2", "some/folder"]),
    ("start", ["\n", "FILE:x", "None"]),
    ("num_samples", [1, 10**9]),
    ("max_new_tokens", [0, 1, 10**9]),
    ("temperature", [0.0, 1e-30, 1e30, 10**300]),
    ("top_k", [None, 0, 1, 10**9]),
    ("top_p", [None, 1e-9, 1.0]),
    ("min_p", [None, 0.0, 1.0]),
    ("repetition_penalty", [0.01, 1.0, 100.0]),
    ("stop", [None, "a", [], ["a", "b"]]),
    ("seed", [-2**63, 0, 2**64 - 1, "random"]),
    ("device", ["auto", "cpu", "mps", "cuda", "cuda:0", "cuda:12"]),
    ("dtype", ["auto", "float32", "bfloat16", "float16", "int8"]),
    ("batch_size", [None, 1, 10**5]),
    ("draft", [None, "int8", "gpt2", "some/folder"]),
    ("out_file", [None, "a.jsonl", "-"]),
    ("html_file", [None, "a.html"]),
]
INVALID = [
    ("init_from", ["", "scratch"], "init_from must be 'resume' or a Hugging Face id or folder"),
    ("start", [""], "start is empty"),
    ("num_samples", [0, -1, 10**9 + 1], "num_samples must be from 1"),
    ("max_new_tokens", [-1, 10**9 + 1, 3.0], "max_new_tokens must be from 0"),
    ("temperature", [-0.1, math.inf, math.nan, "hot"], "temperature must be 0"),
    ("top_k", [-1, 2.5, 10**9 + 1], "top_k must be from 1 to 10"),
    ("top_p", [0.0, -0.5, 1.01, math.nan], "top_p must be above 0"),
    ("min_p", [-0.01, 1.01, math.nan], "min_p must be from 0"),
    ("repetition_penalty", [0.0, 0.009, 101.0, math.nan], "repetition_penalty must be from 0.01"),
    ("stop", ["", [""], ["a", 5], [None]], "stop must be a text"),
    ("seed", [-2**63 - 1, 2**64, True, "", "Random", "12"], "seed must be a whole number from"),
    ("device", ["", "tpu", "cuda:", "cuda:x", "cuda:1 "], "device must be auto"),
    ("dtype", ["", "int4", "torch.float32"], "dtype must be auto"),
    ("context_shift", ["False"], "context_shift must be True or False"),
    ("batch_size", [0, -1, 10**5 + 1], "batch_size must be from 1"),
    ("draft", ["", "a\0b"], "draft must be int8, the name, folder or file of a model, or None"),
    ("out_file", ["", "a\0b"], "out_file must be the path"),
    ("html_file", ["", "a\0b", "-"], "html_file must be the path"),
    ("logprobs", [-1, 1001], "logprobs must be from 0"),
]
EXCLUDED = [ # settings that do not work together, and what the error says
    (dict(dtype="int8", compile=True), "dtype=int8 does not work with compile=True: leave out one of them"),
    (dict(dtype="int8", exact=True), "dtype=int8 does not work with exact=True: leave out one of them"),
    (dict(dtype="int8", draft="int8"), "draft=int8 has no use with dtype=int8"),
    (dict(draft="gpt2", compile=True), "draft does not work with compile=True: leave out compile, or draft='gpt2'"),
    (dict(exact=True, draft="gpt2"), "exact=True does only what nanoGPT does: leave out draft='gpt2', or exact"),
    (dict(exact=True, top_p=0.9), "leave out top_p=0.9, or exact"),
    (dict(exact=True, min_p=0.1), "leave out min_p=0.1, or exact"),
    (dict(exact=True, repetition_penalty=1.1), "leave out repetition_penalty=1.1, or exact"),
    (dict(exact=True, context_shift=True), "leave out context_shift=True, or exact"),
    (dict(exact=True, batch_size=2), "leave out batch_size=2, or exact"),
    (dict(exact=True, compile=True), "leave out compile=True, or exact"),
    (dict(exact=True, temperature=0.0), "leave out temperature=0.0, or exact"),
    (dict(logprobs=0), "logprobs are saved in out_file: give out_file too"),
    (dict(out_file="a", html_file="b/../a"), "out_file and html_file must be two files"),
    (dict(watch=True, init_from="gpt2"), "watch=True waits for a ckpt.pt that train.py saves: leave out init_from"),
    (dict(watch=True, interactive=True), "watch=True does not work with interactive=True: in a session, type :reload"),
    (dict(interactive=True, out_file="a"), "leave out_file and html_file out"),
    (dict(interactive=True, html_file="a"), "leave out_file and html_file out"),
]


def unfinished_sample(*texts):
    """An unfinished sample of tokens with these texts. None of its text is emittable yet."""
    return Sample(SampleRequest(3, Prompt("<"), [60]), [Token(i, text, -i / 10) for i, text in enumerate(texts)])


# ---- rules

@pytest.mark.parametrize("name, value", [(name, value) for name, values in VALID for value in values], ids=repr)
def test_a_valid_value_passes(name, value):
    check_settings(DEFAULTS | {name: value})


@pytest.mark.parametrize("name, value, message", [
    (name, value, message) for name, values, message in INVALID for value in values], ids=repr)
def test_the_error_for_an_invalid_value_states_the_rule_and_the_value(name, value, message):
    with pytest.raises(ValueError) as error:
        check_settings(DEFAULTS | {name: value})
    assert str(error.value).startswith(message) and str(error.value).endswith(f"; got {value!r}")


@pytest.mark.parametrize("name, value, shown", [
    ("device", "x" * 10**6, "'" + 99 * "x"), ("temperature", 10**400, "1" + 99 * "0"),
    ("stop", ["a", 10**5000], "a list")])
def test_a_long_value_is_shortened_in_the_error(name, value, shown):
    with pytest.raises(ValueError) as error:
        check_settings(DEFAULTS | {name: value})
    assert str(error.value).endswith(f"; got {shown}")


@pytest.mark.parametrize("settings, message", EXCLUDED, ids=str)
def test_settings_that_exclude_each_other_are_an_error(settings, message):
    with pytest.raises(ValueError) as error:
        check_settings(DEFAULTS | settings)
    assert message in str(error.value)


def test_exact_accepts_values_that_change_nothing():
    check_settings(DEFAULTS | dict(exact=True, top_p=1.0, min_p=0.0, repetition_penalty=1.0, batch_size=1, top_k=None,
                                   stop="a", temperature=1e-3))


def test_params_are_validated_when_created_or_replaced():
    params = SamplingParams(seed=5)
    assert replace(params, temperature=0.0).seed == 5
    with pytest.raises(ValueError, match="top_k must be from 1 to 10"):
        replace(params, top_k=-1)
    with pytest.raises(ValueError, match="seed must be a whole number"):
        SamplingParams(seed="random")
    with pytest.raises(ValueError, match="num_logprobs must be at least 0"):
        SamplingParams(num_logprobs=-1)
    with pytest.raises(FrozenInstanceError):
        params.seed = 6


def test_params_of_the_settings_are_those_of_the_same_values():
    settings = DEFAULTS | dict(top_k=3, stop="a", context_shift=True)
    expected = SamplingParams(top_k=3, stop="a", context_shift=True, num_logprobs=2)
    assert SamplingParams.from_settings(settings, 2) == expected


@pytest.mark.parametrize("stop, texts", [(None, []), ("a", ["a"]), (["a", "b"], ["a", "b"]), ([], [])])
def test_stop_texts_is_always_a_list(stop, texts):
    assert SamplingParams(stop=stop).stop_texts == texts


def test_a_random_seed_is_drawn_and_logged():
    lines = []
    seeds = {choose_seed("random", lines.append) for _ in range(5)}
    assert len(seeds) == 5 and all(SamplingParams(seed=seed) for seed in seeds)
    assert {int(line.partition("--seed=")[2].split()[0]) for line in lines} == seeds
    assert choose_seed(0, pytest.fail) == 0


# ---- samples

def test_properties_of_a_sample_come_from_its_tokens():
    sample = unfinished_sample("a", "", "bc", "") # a stop text has removed the text of the last token
    assert (sample.index, sample.prompt.text, sample.text) == (3, "<", "abc")
    assert (sample.token_ids, sample.num_tokens) == ([0, 1, 2, 3], 4)
    assert sample.cumulative_logprob == pytest.approx(-0.6)
    assert unfinished_sample().text == "" and unfinished_sample().cumulative_logprob == 0
