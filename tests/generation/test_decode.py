"""The loop that samples: with every backend, each row of a batch gets the text of the slow plain loop."""
from dataclasses import replace
from itertools import zip_longest

import pytest

from engines import PARAMS, expected_ids, expected_texts, load, make_requests
from models import make_gpt
from sampling.generation.engine import Engine
from streams import decode, random_prompt

PROMPTS = { # block_size is mostly 16
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
    for name, prompts in PROMPTS.items():
        gpt = make_backend(make_gpt(block_size=block_size))
        expected = expected_ids(prompts, 30, block_size=block_size, device=gpt.device, **settings)
        assert decode(gpt, prompts, 30, **settings) == expected, name


def test_two_runs_of_one_model_may_be_interleaved(tokenizer, make_backend):
    model, params = load(tokenizer, make_backend(make_gpt())), replace(PARAMS, max_new_tokens=40)
    requests = make_requests(tokenizer, ["The ", "O"]), make_requests(tokenizer, ["x", "yes, "])
    expected = [expected_texts(part, tokenizer, 40, device=model.backend.device) for part in requests]
    found, streams = [], [Engine(model, params, stream=True).generate(part) for part in requests]
    for pair in zip_longest(*streams):
        found += [sample.text for sample in pair if sample and sample.finish_reason]
    assert sorted(found) == sorted(expected[0] + expected[1])
