"""SamplingParams, Sample and TextCursor."""
import random
from dataclasses import FrozenInstanceError, replace

import pytest

from sampling.params import Prompt, Sample, SampleRequest, SamplingParams, TextCursor, Token, choose_seed


def unfinished_sample(*texts):
    """An unfinished sample of tokens with these texts. None of its text is emittable yet."""
    return Sample(SampleRequest(3, Prompt("<"), [60]), [Token(i, text, -i / 10) for i, text in enumerate(texts)])


def test_params_are_validated_when_created_or_replaced():
    params = SamplingParams(seed=5)
    assert replace(params, temperature=0.0).seed == 5
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        replace(params, top_k=-1)
    with pytest.raises(ValueError, match="temperature must be"):
        SamplingParams(temperature=-1)
    with pytest.raises(ValueError, match="context_shift must be True or False; got 'False'"):
        SamplingParams(context_shift="False")
    with pytest.raises(FrozenInstanceError):
        params.seed = 6


@pytest.mark.parametrize("stop, texts", [(None, []), ("a", ["a"]), (["a", "b"], ["a", "b"]), ([], [])])
def test_stop_texts_is_always_a_list(stop, texts):
    assert SamplingParams(stop=stop).stop_texts == texts


@pytest.mark.parametrize("seed", [1337, 0, -5])
def test_a_seed_is_kept(seed):
    assert choose_seed(seed, pytest.fail) == seed


def test_a_random_seed_is_drawn_and_logged():
    lines = []
    seeds = {choose_seed("random", lines.append) for _ in range(5)}
    assert len(seeds) == 5 and all(SamplingParams(seed=seed) for seed in seeds)
    assert {int(line.partition("--seed=")[2].split()[0]) for line in lines} == seeds


def test_properties_of_a_sample_come_from_its_tokens():
    sample = unfinished_sample("a", "", "bc", "") # a stop text has removed the text of the last token
    assert (sample.index, sample.prompt.text, sample.text, sample.token_ids, sample.num_tokens) == (3, "<", "abc", [0, 1, 2, 3], 4)
    assert sample.cumulative_logprob == pytest.approx(-0.6)
    assert unfinished_sample().text == "" and unfinished_sample().cumulative_logprob == 0


def test_a_cursor_reads_only_emittable_text():
    sample = unfinished_sample("ab", "", "cde", "f")
    cursor = TextCursor(sample)
    assert list(cursor.read()) == []
    sample.num_emittable_chars = 1
    assert list(cursor.read()) == [("a", 0)]
    assert list(cursor.read()) == []
    sample.num_emittable_chars = 4
    assert list(cursor.read()) == [("b", 0), ("cd", 2)]
    sample.num_emittable_chars = 6
    assert list(cursor.read()) == [("e", 2), ("f", 3)]


def test_a_cursor_reads_every_character_once():
    rng = random.Random(1)
    for _ in range(200):
        texts = ["".join(rng.choices("xyz", k=rng.choice([0, 0, 1, 2, 5]))) for _ in range(rng.randrange(8))]
        sample, seen = unfinished_sample(), []
        cursor = TextCursor(sample)
        for token in unfinished_sample(*texts).tokens:
            sample.tokens.append(token)
            sample.num_emittable_chars = rng.randint(sample.num_emittable_chars, len(sample.text))
            seen += cursor.read()
            assert "".join(text for text, _ in seen) == sample.text[:sample.num_emittable_chars]
        sample.num_emittable_chars = len(sample.text)
        seen += cursor.read()
        for index, token in enumerate(sample.tokens):
            assert "".join(text for text, token_index in seen if token_index == index) == token.text


@pytest.mark.parametrize("values", [dict(temperature="hot"), dict(top_k=2.5), dict(max_new_tokens=3.0), dict(seed=True), dict(num_logprobs=-1)], ids=str)
def test_values_of_other_types_raise_value_error(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        SamplingParams(**values)
