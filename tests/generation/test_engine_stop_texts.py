"""The engine ends samples at stop texts, and streams only final text."""
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from cases import cases
from engines import BACKENDS, PARAMS, PROMPTS, generate, make_requests, reference_token_ids, truncate_at_stop
from models import make_gpt


@pytest.mark.parametrize("make_engine, stream, num_rounds", cases(BACKENDS, [True, False], [1, 10],
                         quick=lambda backend, stream, num_rounds: num_rounds == 1 and (backend == "eager" or not stream)), indirect=["make_engine"])
def test_a_sample_ends_where_a_stop_text_begins(tokenizer, make_engine, stream, num_rounds):
    requests, rng = make_requests(tokenizer, PROMPTS, 2), random.Random(1)
    full = [tokenizer.decode(ids) for ids in reference_token_ids(requests, 30)]
    for _ in range(num_rounds):
        texts = rng.choices(full, k=3)
        stops = [text[start:start + rng.randint(1, 4)] for text in texts for start in [rng.randrange(25)]]
        params = replace(PARAMS, max_new_tokens=30, stop=stops)
        found = generate(make_engine(make_gpt(), tokenizer, params, batch_size=6, stream=stream), requests)
        assert [sample.text for sample in found] == [truncate_at_stop(text, stops) for text in full]
        for sample, text in zip(found, full, strict=True):
            assert sample.finish_reason == ("stop" if truncate_at_stop(text, stops) != text else "length")
            assert tokenizer.decode(sample.token_ids).startswith(sample.text)
            assert sample.num_emittable_chars == len(sample.text)


def test_finished_rows_are_dropped_from_the_batch(tokenizer, make_engine):
    model, batch_sizes, requests = make_gpt(), [], make_requests(tokenizer, ["O"], 6)
    full = [tokenizer.decode(ids) for ids in reference_token_ids(requests, 12)]
    stop = max("".join(full), key="".join(full).count)
    ends = sorted(min(12, len(truncate_at_stop(text, [stop])) + 1) for text in full)
    assert len(set(ends)) > 1
    model.transformer.h[0].register_forward_hook(lambda module, args, result: batch_sizes.append(args[0].size(0)))
    generate(make_engine(model, tokenizer, replace(PARAMS, max_new_tokens=12, stop=stop), batch_size=6), requests)
    assert batch_sizes[1:] == [sum(end > step for end in ends) for step in range(1, ends[-1])] # the shared prompt is prefilled once


def test_streamed_text_never_changes(tokenizer, make_engine):
    """Only text that no stop text can still remove is emittable."""
    requests, params = make_requests(tokenizer, ["O"]), replace(PARAMS, max_new_tokens=40)
    full = tokenizer.decode(reference_token_ids(requests, 40)[0])
    stops = [full[20:25], full[30:33] + "\n\n", full[5:8] + "!"]
    shown = [sample.text[:sample.num_emittable_chars]
             for sample in make_engine(make_gpt(), tokenizer, replace(params, stop=stops), stream=True).generate(requests)]
    assert shown[-1] == truncate_at_stop(full, stops) == full[:full.index(stops[0])]
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
    assert len(set(shown)) > 10


def test_streaming_yields_the_first_unfinished_sample_at_every_step_and_then_each_finished_sample(tokenizer, make_engine):
    found = [(sample.index, sample.num_tokens, sample.finish_reason)
             for sample in make_engine(make_gpt(), tokenizer, replace(PARAMS, max_new_tokens=3), batch_size=2, stream=True)
             .generate(make_requests(tokenizer, ["O", "x"]))]
    assert found == [(0, 1, None), (0, 2, None), (0, 3, "length"), (1, 3, "length")]
