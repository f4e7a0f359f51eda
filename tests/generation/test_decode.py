"""The loop that samples: with every backend, each row of a batch gets the text of the slow plain loop."""
from dataclasses import replace
from itertools import zip_longest

import pytest

from engines import PARAMS, expected_ids, expected_texts, load, make_requests
from models import make_gpt
from sampling.generation.engine import Engine
from streams import decode, random_prompt

PROMPTS = { # block_size is 16
    "equal": 3 * random_prompt(5).tolist(),
    "different lengths": [random_prompt(length, seed=length)[0].tolist() for length in (9, 1, 16, 4)],
    "longer than block_size": [random_prompt(length, seed=length)[0].tolist() for length in (40, 17)],
}


@pytest.mark.parametrize("settings", [
    dict(temperature=0.8, top_k=20), dict(temperature=0), dict(temperature=0, repetition_penalty=1.5),
    dict(top_k=None), dict(top_k=1000), dict(top_p=0.7), dict(min_p=0.2), dict(repetition_penalty=1.4, top_k=9),
    dict(temperature=1.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=0.8), dict(context_shift=True, top_k=20),
], ids=str)
def test_text_inside_and_past_the_window_is_that_of_the_plain_loop(make_backend, settings):
    for name, prompts in PROMPTS.items():
        gpt = make_backend(make_gpt())
        assert decode(gpt, prompts, 20, **settings) == expected_ids(prompts, device=gpt.device, **settings), name


@pytest.mark.parametrize("block_size", [7, 1])
def test_context_shift_with_an_odd_block_size(make_backend, block_size):
    prompts, gpt = PROMPTS["different lengths"], make_backend(make_gpt(block_size=block_size))
    expected = expected_ids(prompts, 40, block_size=block_size, device=gpt.device, top_k=20, context_shift=True)
    assert decode(gpt, prompts, 40, top_k=20, context_shift=True) == expected


def test_two_runs_of_one_model_may_be_interleaved(tokenizer, make_backend):
    model, params = load(tokenizer, make_backend(make_gpt())), replace(PARAMS, max_new_tokens=40)
    requests = make_requests(tokenizer, ["The ", "O"]), make_requests(tokenizer, ["x", "yes, "])
    expected = [expected_texts(part, tokenizer, 40, device=model.backend.device) for part in requests]
    found, streams = [], [Engine(model, params, stream=True).generate(part) for part in requests]
    for pair in zip_longest(*streams):
        found += [sample.text for sample in pair if sample and sample.finish_reason]
    assert sorted(found) == sorted(expected[0] + expected[1])
