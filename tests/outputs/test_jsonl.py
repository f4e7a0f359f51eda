"""The JSONL file of samples: its lines, and that the writer resumes a file with the same bytes."""
import json
import math
import re
from contextlib import closing
from dataclasses import replace

import pytest

from pages import finished_sample, make_token, make_tokens, write_page
from sampling.inputs.prompts import RESULT_FIELDS
from sampling.outputs.jsonl import JsonlWriter, LineFormat, reproducibility_settings
from sampling.params import Prompt, SampleRequest, Token

CHECKPOINT_ID, SETTINGS = {"path": "ckpt.pt", "crc32": "00000000"}, {"seed": 1, "stop": []}
REQUESTS = [SampleRequest(index, Prompt(text, id), []) for index, (text, id) in enumerate([("a", None), ("é", 5), ("", {"x": 1}), ("\ud800", None)])]
LIKELY = [make_token("a", 0.5, a=0.5, b=0.25, c=0.125), make_token("", 0.7), make_token("é\n", 0.0004, x=0.9)]


def write_file(path, requests=REQUESTS, settings=SETTINGS):
    """Write a finished file of these requests. Return its bytes."""
    with closing(JsonlWriter(path, LineFormat(CHECKPOINT_ID, settings))) as writer:
        for request in writer.resume(requests):
            if not request.already_saved:
                writer.write(replace(finished_sample(0, "", [make_token("x\n", 0.5)]), request=request))
    return path.read_bytes()


def written(path, *samples, logprobs=None):
    """Write a file of these samples. Return its lines."""
    with closing(JsonlWriter(path, LineFormat(CHECKPOINT_ID, SETTINGS, logprobs))) as writer:
        for sample in samples:
            writer.write(sample)
    return path.read_text(encoding="utf-8").splitlines()


def test_other_fields_of_jsonl_prompts_are_passed_on(tmp_path):
    prompt = Prompt("O", 3, "", {"label": [1], "none": None, "é": "ü"})
    request = SampleRequest(0, prompt, [])
    whole = write_file(tmp_path / "a.jsonl", [request])
    line = json.loads(whole)
    assert list(line)[:7] == ["version", "index", "prompt", "id", "label", "none", "é"] and line["label"] == [1] and line["none"] is None
    assert line.keys() - set(prompt.other_fields) - {"prompt", "id"} <= RESULT_FIELDS # no prompt may have these
    assert write_file(tmp_path / "a.jsonl", [request]) == whole
    for fields, message in ({"label": [2]}, "label is [1] there, and [2] here"), ({}, "label is [1] there, and None here"), ({"new": 1, **prompt.other_fields}, "new is None there, and 1 here"):
        other = replace(request, prompt=replace(prompt, other_fields=fields))
        with pytest.raises(ValueError, match=re.escape(message)):
            write_file(tmp_path / "a.jsonl", [other])


def test_other_fields_may_have_the_names_of_version_1(tmp_path):
    request = SampleRequest(0, Prompt("O", other_fields=dict.fromkeys(["sample", "tokens", "ended", "logprob"], 1)), [])
    whole = write_file(tmp_path / "a.jsonl", [request])
    assert write_file(tmp_path / "a.jsonl", [request]) == whole


def test_equivalent_settings_are_equal():
    settings = dict(start="O", num_samples=2, max_new_tokens=9, temperature=0.8, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0,
                    stop="e", seed=1, compile=False, context_shift=False, exact=False, tokenizer=None)
    found = reproducibility_settings(settings, "cuda", "bfloat16")
    assert found == reproducibility_settings({**settings, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "stop": ["e"]}, "cuda", "bfloat16")
    assert found["device"] == "cuda" and found["dtype"] == "bfloat16" and found["stop"] == ["e"]
    assert reproducibility_settings({**settings, "stop": None}, "cpu", "float32")["stop"] == []
    # Files of earlier versions, which lack "exact", can still be resumed.
    assert "exact" not in found and reproducibility_settings({**settings, "exact": True}, "cpu", "float32")["exact"] is True
    # With one prompt, a later run may add samples to the file. With several prompts, num_samples must stay the same.
    assert "num_samples" not in found
    assert reproducibility_settings({**settings, "start": "LINES:a"}, "cpu", "float32")["num_samples"] == 2


def test_a_sample_is_written_to_the_file_immediately(tmp_path):
    writer = JsonlWriter(tmp_path / "a.jsonl", LineFormat(CHECKPOINT_ID, SETTINGS))
    for index in range(3):
        writer.write(finished_sample(index, "O", []))
        assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == index + 1
    writer.close()


def test_a_removed_file_is_an_error(tmp_path):
    """Otherwise all later samples would be lost. A renamed file still receives them."""
    writer = JsonlWriter(str(tmp_path / "a.jsonl"), LineFormat(CHECKPOINT_ID, SETTINGS))
    (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
    writer.write(finished_sample(0, "O", []))
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(OSError, match=r"a\.jsonl': it was removed"):
        writer.write(finished_sample(1, "O", []))
    writer.close()


# ---- log-probabilities

def test_a_log_probability_has_three_decimals_however_large(tmp_path):
    many, one = written(tmp_path / "a.jsonl", finished_sample(0, "O", [make_token("x", 0.1234)] * 700), finished_sample(1, "O", [Token(0, "x", -1e-9)]))
    assert json.loads(many)["cumulative_logprob"] == round(700 * math.log(0.1234), 3) == -1464.627
    assert '"cumulative_logprob": 0.0,' in one


@pytest.mark.parametrize("logprobs, num_top", [(0, [0, 0, 0]), (2, [2, 0, 1]), (5, [3, 0, 1])])
def test_logprobs_adds_each_token_and_the_most_likely_ones(tmp_path, logprobs, num_top):
    line, = map(json.loads, written(tmp_path / "a.jsonl", finished_sample(0, "O", LIKELY), logprobs=logprobs))
    content = line["logprobs"]["content"]
    assert content[1] == {"id": 0, "token": "", "logprob": -0.357, "top_logprobs": []}
    assert [(token["id"], token["token"], token["logprob"]) for token in content] == [(0, "a", -0.693), (0, "", -0.357), (0, "é\n", -7.824)]
    assert "".join(token["token"] for token in content) == line["text"]
    assert [len(token["top_logprobs"]) for token in content] == num_top
    if logprobs == 2:
        assert content[0]["top_logprobs"] == [{"token": "a", "logprob": -0.693}, {"token": "b", "logprob": -1.386}]


def test_the_page_and_the_file_have_the_same_numbers(tmp_path):
    line, = written(tmp_path / "a.jsonl", finished_sample(0, "O", make_tokens(50)), logprobs=5)
    saved = [[token["logprob"], *(top["logprob"] for top in token["top_logprobs"])] for token in json.loads(line)["logprobs"]["content"]]
    page = re.search('json">(.*)</script>', write_page(tmp_path / "a.html", [make_tokens(50)]).read_text())[1]
    assert [[-cost / 1000 for cost in token[1::2]] for token in json.loads(page)] == saved


# ---- resuming

def test_a_file_truncated_anywhere_is_resumed(tmp_path):
    requests = [REQUESTS[1], REQUESTS[3]] # with a character of two bytes, and a lone surrogate
    whole = write_file(tmp_path / "whole.jsonl", requests)
    for end in range(len(whole) + 1):
        (tmp_path / "a.jsonl").write_bytes(whole[:end])
        assert write_file(tmp_path / "a.jsonl", requests) == whole


def test_requests_are_marked_as_already_saved(tmp_path):
    whole = write_file(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:2]) + b'{"version"')
    writer = JsonlWriter(tmp_path / "a.jsonl", LineFormat(CHECKPOINT_ID, SETTINGS))
    assert writer.num_saved == 2
    assert list(writer.resume(iter(REQUESTS))) == [replace(request, already_saved=request.index < 2) for request in REQUESTS]
    writer.close()


def test_a_whole_line_counts_without_its_newline(tmp_path):
    whole = write_file(tmp_path / "a.jsonl")
    for end, num_saved in (len(whole), 4), (len(whole) - 1, 4), (len(whole) - 2, 3):
        (tmp_path / "a.jsonl").write_bytes(whole[:end])
        writer = JsonlWriter(tmp_path / "a.jsonl", LineFormat(CHECKPOINT_ID, SETTINGS))
        assert writer.num_saved == num_saved == sum(request.already_saved for request in writer.resume(REQUESTS))
        writer.close()


@pytest.mark.parametrize("change, message", [
    (lambda line: line | {"settings": {"seed": 2, "stop": []}}, "line 2, is from another run: seed is 2 there, and 1 here"),
    (lambda line: line | {"settings": {"seed": 1, "stop": [], "new": 5}}, "new is 5 there, and None here"),
    (lambda line: line | {"settings": {"num_samples": 2, "seed": 1, "stop": []}}, "that run had a file of many prompts, and this one has one prompt"),
    (lambda line: line | {"settings": {}}, "seed is None there, and 1 here"),
    (lambda line: line | {"settings": 3}, "line 2: not written by sample.py; nothing is overwritten"),
    (lambda line: line | {"settings": "ab"}, "not written by sample.py"),
    (lambda line: line | {"checkpoint": {"crc32": "1"}}, "the checkpoint's checksum is '1' there, and '00000000' here"),
    (lambda line: line | {"checkpoint": {}}, "the checkpoint's checksum is None there"),
    (lambda line: line | {"checkpoint": None}, "not written by sample.py"),
    (lambda line: line | {"index": 2}, "index is 2 there, and 1 here"),
    (lambda line: line | {"prompt": "a"}, "prompt is 'a' there, and 'é' here"),
    (lambda line: line | {"id": 6}, "id is 6 there, and 5 here"),
    (lambda line: {"sample": 1, "tokens": 3, "ended": "stop", "logprob": -1.5}, "another version of sample.py wrote this file, with other fields; nothing is overwritten, so move the file, or give out_file another name"),
    (lambda line: line | {"version": 3}, "another version of sample.py wrote this file"),
    (lambda line: [line], "not written by sample.py"),
    (lambda line: 10**400, "not written by sample.py"),
], ids=["seed", "new-setting", "many-prompts", "no-settings", "number-as-settings", "text-as-settings", "checkpoint", "no-checksum", "no-checkpoint", "index", "prompt", "id",
        "version-1", "version-3", "list", "number"])
@pytest.mark.parametrize("newline", ["\n", ""], ids=["whole", "no-newline"])
def test_any_other_line_is_refused_and_stays_unchanged(tmp_path, change, message, newline):
    first, second = write_file(tmp_path / "a.jsonl", REQUESTS[:2]).splitlines(keepends=True)
    content = first + (json.dumps(change(json.loads(second))) + newline).encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    writer = JsonlWriter(tmp_path / "a.jsonl", LineFormat(CHECKPOINT_ID, SETTINGS))
    with pytest.raises(ValueError) as error:
        list(writer.resume(iter(REQUESTS)))
    assert message in str(error.value) and str(error.value).startswith(f"{tmp_path}/a.jsonl, line 2")
    writer.close()
    assert (tmp_path / "a.jsonl").read_bytes() == content


def test_a_file_with_more_samples_than_the_run_is_refused(tmp_path):
    whole = write_file(tmp_path / "a.jsonl")
    writer = JsonlWriter(tmp_path / "a.jsonl", LineFormat(CHECKPOINT_ID, SETTINGS))
    with pytest.raises(ValueError, match=r"holds 4 samples, more than this run generates: .* or replace it with --overwrite"):
        list(writer.resume(iter(REQUESTS[:3])))
    writer.close()
    assert (tmp_path / "a.jsonl").read_bytes() == whole


@pytest.mark.parametrize("first, second", [(None, 0), (2, None), (2, 3)], ids=str)
def test_a_file_with_other_logprobs_is_refused(tmp_path, first, second):
    written(tmp_path / "a.jsonl", replace(finished_sample(0, "", LIKELY), request=REQUESTS[0]), logprobs=first)
    with closing(JsonlWriter(tmp_path / "a.jsonl", LineFormat(CHECKPOINT_ID, SETTINGS, second))) as writer, pytest.raises(ValueError, match=f"logprobs is {first} there, and {second} here"):
        list(writer.resume(iter(REQUESTS)))
