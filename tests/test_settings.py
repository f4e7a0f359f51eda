"""The rules of the settings, SamplingParams and Sample."""
import math
from dataclasses import FrozenInstanceError, asdict, replace

import numpy as np
import pytest

from pages import DEFAULTS
from sampling.samples import Prompt, Sample, Score, Token
from sampling.settings import (
    ModelOptions,
    SamplingParams,
    check_settings,
    choose_params,
    complete_settings,
)

RULES = { # name: valid values, invalid ones, and what the error says
    "init_from": (["a/b"], ["", "scratch"], "must be 'resume' or a Hugging Face id or folder"),
    "start": (["None"], [""], "is empty"),
    "num_samples": ([1, 10**9], [0, 10**9 + 1], "must be from 1"),
    "max_new_tokens": ([0, 10**9], [-1, 10**9 + 1, 3.0], "must be from 0"),
    "temperature": ([0.0, 10**300], [-0.1, math.inf, math.nan, "hot", 10**400], "must be 0"),
    "top_k": ([None, 0, 10**9], [-1, 2.5, 10**9 + 1], "must be from 1 to 10"),
    "top_p": ([None, 1e-9, 1.0], [0.0, 1.01, math.nan], "must be above 0"),
    "min_p": ([None, 0.0, 1.0], [-0.01, 1.01, math.nan], "must be from 0"),
    "repetition_penalty": ([0.01, 100.0], [0.009, 101.0, math.nan], "must be from 0.01"),
    "stop": ([None, [], ["a", "b"]], ["", [""], ["a", 5]], "must be a text"),
    "seed": ([-2**63, 2**64 - 1, "random"], [-2**63 - 1, 2**64, True, "", "12"],
             "must be a whole number from"),
    "device": (["cuda", "cuda:12"], ["", "tpu", "cuda:", "cuda:1 ", "x" * 10**6], "must be auto"),
    "dtype": (["float16", "int8"], ["", "int4"], "must be auto"),
    "batch_size": ([1, 10**5], [0, 10**5 + 1], "must be from 1"),
    "draft": ([False], ["gpt2", "False"], "must be True or False"),
    "out_file": (["-", "a.gz.jsonl"], ["", "a\0b", "a.jsonl.gz"], "must be the path"),
    "html_file": (["a.html"], ["", "a\0b", "-"], "must be the path"),
    "logprobs": ([0, 1000], [-1, 1001], "must be from 0"),
}
EXCLUDED = [ # settings that do not work together, and what the error says
    (dict(dtype="int8", compile=True),
     "dtype=int8 does not work with compile=True: leave out one"),
    (dict(score=True, interactive=True),
     "score=True does not work with interactive=True: in a session, type :score"),
    (dict(logprobs=0),
     "logprobs are saved in out_file: give out_file too"),
    (dict(out_file="a", html_file="b/../a"),
     "out_file and html_file must be two files"),
    (dict(watch=True, init_from="gpt2"),
     "watch=True waits for a ckpt.pt that train.py saves: leave out init_from"),
    (dict(watch=True, interactive=True),
     "watch=True does not work with interactive=True: in a session, type :reload"),
    (dict(interactive=True, html_file="a"),
     "saves no samples: leave out out_file, html_file and logprobs; in a session, type :save"),
]


@pytest.mark.parametrize("name", RULES)
def test_valid_values_pass_and_the_error_for_others_has_the_rule_and_the_value(name):
    valid, invalid, message = RULES[name]
    settings = DEFAULTS | {"out_file": "a"}
    for value in valid:
        check_settings(settings | {name: value})
    for value in invalid:
        with pytest.raises(ValueError) as error:
            check_settings(settings | {name: value})
        assert str(error.value).startswith(f"{name} {message}")
        assert str(error.value).endswith(f"; got {value!r:.100}")


@pytest.mark.parametrize("settings, message", EXCLUDED)
def test_settings_that_exclude_each_other_are_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        check_settings(DEFAULTS | settings)


@pytest.mark.parametrize("name", ["watch", "interactive"])
def test_a_run_of_several_processes_has_nobody_who_types_or_watches(name, monkeypatch):
    for variable in "WORLD_SIZE", "TORCHELASTIC_RUN_ID":
        monkeypatch.setenv(variable, "2")
    with pytest.raises(ValueError, match="need a single process"):
        check_settings(DEFAULTS | {name: True})


def test_params_have_the_values_of_the_settings_in_plain_types():
    settings = dict(top_k=np.int64(3), temperature=np.float32(0.5), stop=("a", "b"))
    params = choose_params(DEFAULTS | settings)
    assert repr(params) == repr(SamplingParams(top_k=3, temperature=0.5, stop=["a", "b"]))
    assert replace(params, stop="a").stop_texts == ["a"]
    assert replace(params, stop=None).stop_texts == []
    assert DEFAULTS | asdict(ModelOptions()) == DEFAULTS


@pytest.mark.parametrize("settings, number", [
    (dict(), None),
    (dict(show_probs=True), 0),
    (dict(out_file="a"), 0),
    (dict(out_file="a", logprobs=3), 3),
    (dict(html_file="a"), 5),
    (dict(html_file="a", logprobs=7), 7),
])
def test_log_probabilities_are_computed_if_an_output_needs_them(settings, number):
    assert choose_params(complete_settings(DEFAULTS | settings)).num_logprobs == number


def test_params_are_validated_when_created_or_replaced_and_cannot_change():
    params = SamplingParams()
    for name, value in ("top_k", -1), ("seed", "Random"), ("num_logprobs", -1):
        with pytest.raises(ValueError, match=f"{name} must be"):
            replace(params, **{name: value})
    with pytest.raises(FrozenInstanceError):
        params.seed = 6


def test_a_random_seed_is_a_new_number_when_params_are_created_or_replaced(messages):
    created = SamplingParams(seed="random")
    replaced = replace(created, seed="random")
    assert replace(created, top_k=3).seed == created.seed != replaced.seed
    for params, message in zip([created, replaced], messages, strict=True):
        assert message == (f"seed: {params.seed}, drawn at random; seed={params.seed} gives the "
                           "same samples again")


def test_a_sample_as_a_dict_and_so_in_a_table_of_pandas_has_the_text_of_the_moment():
    sample = Sample(0, Prompt("a"), [0])
    assert asdict(sample)["text"] == ""
    sample.tokens += [Token(1, "b"), Token(2, "c")]
    assert asdict(sample)["text"] == asdict(replace(sample))["text"] == "bc"
    sample.tokens = [] # a batch ran out of memory
    assert asdict(sample)["text"] == ""


def test_the_repr_of_a_sample_is_short_and_has_its_text():
    sample = Sample(3, Prompt("Once " * 99), [1] * 99)
    sample.tokens = [Token(0, "ab", -0.5)] * 500
    text = repr(sample)
    assert text.startswith("Sample(index=3, prompt='Once Once ")
    assert ", text='abab" in text
    assert text.endswith("num_tokens=500, finish_reason=None, cumulative_logprob=-250.0)")
    assert len(text) < 300
    score = repr(Score(0, Prompt("a"), [], num_tokens=7))
    assert score.startswith("Score(index=0, prompt='a', num_tokens=7, num_bytes=0,")
