"""The lines of JSON that hold samples, and how a run recognises its own."""
import json
import math
from dataclasses import replace

import pytest

from pages import CHECKPOINT_ID, make_token
from sampling.inputs.prompts import RESULT_FIELDS
from sampling.outputs.jsonl import LineFormat, parse_record, run_settings
from sampling.params import Prompt, Sample, Token

SETTINGS = {"seed": 1, "stop": []}
SAMPLE = Sample(1, Prompt("é", 5, other_fields={"label": [1], "none": None}), [])
LIKELY = [make_token("a", 0.5, a=0.5, b=0.25, c=0.125), make_token("", 0.7), make_token("é\n", 0.0004, x=0.9)]


def line_of(tokens, logprobs=None, sample=SAMPLE):
    """The line of a sample of these tokens."""
    sample = replace(sample, tokens=tokens, finish_reason="length")
    return LineFormat(CHECKPOINT_ID, SETTINGS, logprobs).line(sample)


def test_a_line_has_the_fields_of_the_prompt_then_those_of_the_sample():
    line = json.loads(line_of(LIKELY))
    assert list(line) == ["version", "index", "prompt", "id", "label", "none", "text", "num_tokens", "finish_reason",
                          "cumulative_logprob", "seed", "checkpoint", "settings"]
    assert line["text"] == "aé\n" and line["checkpoint"] == CHECKPOINT_ID and line["settings"] == SETTINGS
    assert line.keys() - {"prompt", "id", "label", "none"} <= RESULT_FIELDS # no prompt may have these


@pytest.mark.parametrize("char", ["\ud800", "\x85", "\u2028", "\u2029"], ids=ascii)
def test_a_lone_surrogate_and_what_may_end_a_line_are_escapes(char):
    line = line_of([make_token(char, 0.5)], 0, sample=Sample(0, Prompt(char), []))
    assert len(line.decode().splitlines()) == 1 and f'"prompt": "\\u{ord(char):04x}"'.encode() in line
    record = json.loads(line)
    assert record["prompt"] == record["text"] == record["logprobs"]["content"][0]["token"] == char


def test_equivalent_settings_are_equal():
    settings = dict(start="O", num_samples=2, max_new_tokens=9, temperature=0.8, top_k=None, top_p=None, min_p=None,
                    repetition_penalty=1.0, stop="e", seed=1, compile=False, context_shift=False, exact=False,
                    tokenizer=None)
    found = run_settings(settings, "cuda", "bfloat16")
    same = {**settings, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "stop": ["e"]}
    assert found == run_settings(same, "cuda", "bfloat16")
    assert found["device"] == "cuda" and found["dtype"] == "bfloat16" and found["stop"] == ["e"]
    # Files of earlier versions, which lack "exact", can still be resumed.
    assert "exact" not in found and run_settings({**settings, "exact": True}, "cpu", "float32")["exact"]
    # With one prompt, a later run may add samples to the file. With several prompts, num_samples must stay the same.
    assert "num_samples" not in found
    assert run_settings({**settings, "start": "LINES:a"}, "cpu", "float32")["num_samples"] == 2


def test_a_log_probability_has_three_decimals_however_large():
    many = json.loads(line_of([make_token("x", 0.1234)] * 700))
    assert many["cumulative_logprob"] == round(700 * math.log(0.1234), 3) == -1464.627
    assert b'"cumulative_logprob": 0.0,' in line_of([Token(0, "x", -1e-9)])


@pytest.mark.parametrize("logprobs, num_top", [(0, [0, 0, 0]), (2, [2, 0, 1]), (5, [3, 0, 1])])
def test_logprobs_adds_each_token_and_the_most_likely_ones(logprobs, num_top):
    content = json.loads(line_of(LIKELY, logprobs))["logprobs"]["content"]
    assert content[1] == {"id": 0, "token": "", "logprob": -0.357, "top_logprobs": []}
    assert [(token["token"], token["logprob"]) for token in content] == [("a", -0.693), ("", -0.357), ("é\n", -7.824)]
    assert [len(token["top_logprobs"]) for token in content] == num_top
    assert content[0]["top_logprobs"] == [{"id": i, "token": text, "logprob": logprob} for i, text, logprob in [
        (0, "a", -0.693), (1, "b", -1.386), (2, "c", -2.079)]][:logprobs]


@pytest.mark.parametrize("changes, message", [
    ({"settings": {"seed": 2, "stop": []}}, "seed is 2 there, and 1 here"),
    ({"settings": {**SETTINGS, "new": True}}, "new is True there, and None here"),
    ({"checkpoint": {"crc32": "1"}}, "the checkpoint's checksum is '1' there, and '00000000' here"),
    ({"checkpoint": None}, "a.jsonl, line 2: not written by"),
    ({"index": 2}, "index is 2 there, and 1 here"),
    ({"prompt": "a"}, "prompt is 'a' there, and 'é' here"),
    ({"label": [2]}, "label is [2] there, and [1] here"),
    ({"more": 1}, "more is 1 there, and None here"),
    ({"version": 4}, "a.jsonl, line 2: not written by"),
    ({"version": 2}, "a.jsonl, line 2: an earlier version of sample.py wrote this file, so it cannot be continued"),
    (None, "a.jsonl, line 2: not written by"),
], ids=str)
def test_the_error_for_a_line_of_another_run_names_the_difference(changes, message):
    def check(line):
        LineFormat(CHECKPOINT_ID, SETTINGS).check(parse_record(line, "a.jsonl, line 2"), SAMPLE, "a.jsonl, line 2")
    check(line_of(LIKELY)) # other results are no error
    with pytest.raises(ValueError) as error:
        check(json.dumps([] if changes is None else json.loads(line_of([])) | changes).encode())
    assert message in str(error.value) and str(error.value).startswith("a.jsonl, line 2")
