"""Validation of the values of settings."""
import math

import pytest

from configurator import find_settings
from project import SCRIPT
from sampling.validation import check_sampling_params, check_settings

DEFAULTS = {name: setting.default for name, setting in find_settings(SCRIPT).items()}
VALID = {
    "init_from": ["resume", "gpt2", "some/folder"],
    "start": ["\n", "FILE:x", "None"],
    "num_samples": [1, 10**9],
    "max_new_tokens": [0, 1, 10**9],
    "temperature": [0.0, 1e-30, 1e30, 10**300],
    "top_k": [None, 0, 1, 10**9],
    "top_p": [None, 1e-9, 1.0],
    "min_p": [None, 0.0, 1.0],
    "repetition_penalty": [0.01, 1.0, 100.0],
    "stop": [None, "a", [], ["a", "b"]],
    "seed": [-2**63, 0, 2**64 - 1, "random"],
    "device": ["auto", "cpu", "mps", "cuda", "cuda:0", "cuda:12"],
    "dtype": ["auto", "float32", "bfloat16", "float16", "int8"],
    "batch_size": [None, 1, 10**5],
    "draft": [None, "int8", "gpt2", "some/folder"],
    "out_file": [None, "a.jsonl", "-"],
    "html_file": [None, "a.html"],
}
INVALID = [
    ("init_from", ["", "scratch"], "init_from must be 'resume' or a Hugging Face id or folder"),
    ("start", [""], "start is empty"),
    ("num_samples", [0, -1, 10**9 + 1], "num_samples must be from 1"),
    ("max_new_tokens", [-1, 10**9 + 1], "max_new_tokens must be from 0"),
    ("temperature", [-0.1, math.inf, math.nan], "temperature must be 0"),
    ("top_k", [-1], "top_k must be at least 1"),
    ("top_p", [0.0, -0.5, 1.01, math.nan], "top_p must be above 0"),
    ("min_p", [-0.01, 1.01, math.nan], "min_p must be from 0"),
    ("repetition_penalty", [0.0, 0.009, 101.0, math.nan], "repetition_penalty must be from 0.01"),
    ("stop", ["", [""], ["a", 5], [None]], "stop must be a text"),
    ("seed", [-2**63 - 1, 2**64], "seed must be between"),
    ("seed", ["", "Random", "12", "1.5"], "seed must be a whole number, or random"),
    ("device", ["", "tpu", "cuda:", "cuda:x", "cuda:1 "], "device must be auto"),
    ("dtype", ["", "int4", "torch.float32"], "dtype must be auto"),
    ("batch_size", [0, -1, 10**5 + 1], "batch_size must be from 1"),
    ("draft", ["", "a\0b"], "draft must be int8, the name, folder or file of a model, or None"),
    ("out_file", ["", "a\0b"], "out_file must be the path"),
    ("html_file", ["", "a\0b", "-"], "html_file must be the path"),
    ("logprobs", [-1, 1001], "logprobs must be from 0"),
]


@pytest.mark.parametrize("name, value", [(name, value) for name, values in VALID.items() for value in values], ids=repr)
def test_a_valid_value_passes(name, value):
    check_settings(DEFAULTS | {name: value})


@pytest.mark.parametrize("name, value, message", [(name, value, message) for name, values, message in INVALID for value in values], ids=repr)
def test_the_error_for_an_invalid_value_states_the_rule_and_the_value(name, value, message):
    with pytest.raises(ValueError) as error:
        check_settings(DEFAULTS | {name: value})
    assert message in str(error.value) and (name == "start" or repr(value) in str(error.value))


def test_a_long_value_is_shortened_in_the_error():
    with pytest.raises(ValueError) as error:
        check_settings(DEFAULTS | {"device": "x" * 10**6})
    assert len(str(error.value)) < 200


def test_a_temperature_that_no_float_can_hold_is_refused():
    with pytest.raises(ValueError, match="temperature must be 0"):
        check_settings(DEFAULTS | {"temperature": 10**400})


def test_a_number_too_long_to_print_is_refused_like_others():
    with pytest.raises(ValueError, match="stop must be a text or a list of texts, none of them empty, or None; got a list"):
        check_settings(DEFAULTS | {"stop": ["a", 10**5000]})


def test_out_file_and_html_file_must_differ(tmp_path):
    for other in tmp_path / "a", tmp_path / "b" / ".." / "a":
        with pytest.raises(ValueError, match="out_file and html_file must be two files"):
            check_settings(DEFAULTS | {"out_file": str(tmp_path / "a"), "html_file": str(other)})
    check_settings(DEFAULTS | {"out_file": str(tmp_path / "a"), "html_file": str(tmp_path / "b")})


def test_logprobs_need_an_out_file():
    with pytest.raises(ValueError, match="logprobs are saved in out_file"):
        check_settings(DEFAULTS | {"logprobs": 0})
    check_settings(DEFAULTS | {"logprobs": 0, "out_file": "a"})


@pytest.mark.parametrize("changes", [
    dict(top_p=0.9), dict(min_p=0.1), dict(repetition_penalty=1.1), dict(context_shift=True), dict(batch_size=2), dict(compile=True), dict(temperature=0.0)], ids=str)
def test_exact_refuses_what_nanogpt_does_not_have(changes):
    (name, value), = changes.items()
    with pytest.raises(ValueError, match="exact=True does only what nanoGPT does: ") as error:
        check_settings(DEFAULTS | {"exact": True} | changes)
    assert f"leave out {name}={value}, or exact" in str(error.value) or name == "temperature" in str(error.value)
    check_settings(DEFAULTS | changes)


@pytest.mark.parametrize("name", ["exact", "compile"])
def test_a_draft_excludes_exact_and_compile(name):
    with pytest.raises(ValueError, match=f"draft does not work with {name}=True: leave out {name}, or draft='gpt2'"):
        check_settings(DEFAULTS | {"draft": "gpt2", name: True})


def test_exact_accepts_values_that_change_nothing():
    check_settings(DEFAULTS | dict(exact=True, top_p=1.0, min_p=0.0, repetition_penalty=1.0, batch_size=1, top_k=None, stop="a", temperature=1e-3))


@pytest.mark.parametrize("name", ["out_file", "html_file"])
def test_an_interactive_session_accepts_no_output_file(name):
    with pytest.raises(ValueError, match="leave out_file and html_file out"):
        check_settings(DEFAULTS | {"interactive": True, name: "a"})


def test_the_defaults_are_valid():
    check_settings(DEFAULTS)
    check_sampling_params(DEFAULTS)
