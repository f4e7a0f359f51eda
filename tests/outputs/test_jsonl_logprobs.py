"""Log-probabilities in the file of samples."""
import json
import math
import re
from dataclasses import replace

import pytest

from pages import finished_sample, make_token, make_tokens, write_page
from sampling.outputs.jsonl import JsonlWriter, LineFormat
from sampling.params import Prompt, SampleRequest, Token

CHECKPOINT_ID, SETTINGS = {"path": "ckpt.pt", "crc32": "00000000"}, {"seed": 1, "stop": []}
REQUEST = SampleRequest(0, Prompt("a"), [])


def test_a_log_probability_has_three_decimals_however_large(tmp_path):
    tokens = [make_token("x", 0.1234)] * 700
    writer = JsonlWriter(tmp_path / "a.jsonl", LineFormat(CHECKPOINT_ID, SETTINGS))
    writer.write(finished_sample(0, "O", tokens))
    writer.write(finished_sample(1, "O", [Token(0, "x", -1e-9)]))
    writer.close()
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["cumulative_logprob"] == round(700 * math.log(0.1234), 3) == -1464.627
    assert '"cumulative_logprob": 0.0,' in lines[1]


LIKELY = [make_token("a", 0.5, a=0.5, b=0.25, c=0.125), make_token("", 0.7), make_token("é\n", 0.0004, x=0.9)]


@pytest.mark.parametrize("logprobs, num_top", [(0, [0, 0, 0]), (2, [2, 0, 1]), (5, [3, 0, 1])])
def test_logprobs_adds_each_token_and_the_most_likely_ones(tmp_path, logprobs, num_top):
    writer = JsonlWriter(tmp_path / "a.jsonl", LineFormat(CHECKPOINT_ID, SETTINGS, logprobs))
    writer.write(finished_sample(0, "O", LIKELY))
    writer.close()
    line = json.loads((tmp_path / "a.jsonl").read_text())
    content = line["logprobs"]["content"]
    assert content[1] == {"id": 0, "token": "", "logprob": -0.357, "top_logprobs": []}
    assert [(token["id"], token["token"], token["logprob"]) for token in content] == [(0, "a", -0.693), (0, "", -0.357), (0, "é\n", -7.824)]
    assert "".join(token["token"] for token in content) == line["text"]
    assert [len(token["top_logprobs"]) for token in content] == num_top
    if logprobs == 2:
        assert content[0]["top_logprobs"] == [{"token": "a", "logprob": -0.693}, {"token": "b", "logprob": -1.386}]


def test_the_page_and_the_file_have_the_same_numbers(tmp_path):
    writer = JsonlWriter(tmp_path / "a.jsonl", LineFormat(CHECKPOINT_ID, SETTINGS, 5))
    writer.write(finished_sample(0, "O", make_tokens(50)))
    writer.close()
    content = json.loads((tmp_path / "a.jsonl").read_text())["logprobs"]["content"]
    saved = [[token["logprob"], *(top["logprob"] for top in token["top_logprobs"])] for token in content]
    page = re.search('json">(.*)</script>', write_page(tmp_path / "a.html", [make_tokens(50)]).read_text())[1]
    assert [[-cost / 1000 for cost in token[1::2]] for token in json.loads(page)] == saved


def test_a_file_with_other_logprobs_is_refused(tmp_path):
    for first, second, message in [(None, 0, "logprobs is None there, and 0 here"), (2, None, "logprobs is 2 there, and None here"), (2, 3, "logprobs is 2 there, and 3 here")]:
        path = tmp_path / f"{first}-{second}.jsonl"
        writer = JsonlWriter(path, LineFormat(CHECKPOINT_ID, SETTINGS, first))
        writer.write(replace(finished_sample(0, "", LIKELY), request=REQUEST))
        writer.close()
        writer = JsonlWriter(path, LineFormat(CHECKPOINT_ID, SETTINGS, second))
        with pytest.raises(ValueError, match=message):
            list(writer.resume(iter([REQUEST])))
        writer.close()
