"""Incremental detokenization, and the check for stop texts."""
import pytest

from engines import truncate_at_stop
from sampling.generation.detokenizer import IncrementalDetokenizer
from sampling.inputs.gpt2_tokenizer import GPT2Tokenizer
from sampling.params import Prompt, Sample, SampleRequest, SamplingParams, Token


def new_sample():
    return Sample(SampleRequest(0, Prompt("a"), [64]))


def append_all(tokenizer, ids, max_new_tokens, stop=None):
    """The sample of these ids. No ids are appended after it has finished."""
    sample = new_sample()
    detokenizer = IncrementalDetokenizer(sample, tokenizer, SamplingParams(max_new_tokens, stop=stop))
    for token_id in ids:
        if not sample.finish_reason:
            detokenizer.append(token_id)
    return sample


@pytest.mark.parametrize("text", ["naïve 🙂 café — 日本語", "e\N{COMBINING ACUTE ACCENT}", "plain"])
def test_a_character_of_several_tokens_is_decoded_whole(gpt2_encoding, text):
    tokenizer = GPT2Tokenizer()
    ids = tokenizer.encode(text)
    assert append_all(tokenizer, ids, len(ids)).text == text
    for length in range(1, len(ids) + 1): # a sample may also end within a character
        assert append_all(tokenizer, ids[:length], length).text == tokenizer.decode(ids[:length])


@pytest.mark.parametrize("stop", [[], ["語"], ["\N{REPLACEMENT CHARACTER}"]], ids=ascii)
def test_emittable_text_never_ends_inside_a_character(gpt2_encoding, stop):
    tokenizer, text = GPT2Tokenizer(), "naïve 🙂 — 日本語 x"
    ids, shown, sample = tokenizer.encode(text), [], new_sample()
    detokenizer = IncrementalDetokenizer(sample, tokenizer, SamplingParams(len(ids), stop=stop))
    for token_id in ids:
        if not sample.finish_reason:
            detokenizer.append(token_id)
        shown.append(sample.text[:sample.num_emittable_chars])
    assert sample.text == truncate_at_stop(text, stop) and all(text.startswith(part) for part in shown)


def test_tokens_keep_their_ids_and_logprobs(tokenizer):
    sample = new_sample()
    detokenizer = IncrementalDetokenizer(sample, tokenizer, SamplingParams(3))
    ids = tokenizer.encode("abc")
    for i, token_id in enumerate(ids):
        assert sample.finish_reason is None
        detokenizer.append(token_id, -float(i), (("x", -0.5),))
    assert sample.tokens == [Token(ids[i], char, -float(i), (("x", -0.5),)) for i, char in enumerate("abc")]
    assert (sample.finish_reason, sample.cumulative_logprob, sample.num_emittable_chars) == ("length", -3, 3)


@pytest.mark.parametrize("text, stop, expected, num_tokens, reason", [
    ("abcdef", "cd", "ab", 4, "stop"),
    ("abcdef", ["ef", "cde"], "ab", 5, "stop"), # "ef" would begin later
    ("abcdef", "f", "abcde", 6, "stop"), # also as the last token
    ("abcdef", "a", "", 1, "stop"),
    ("ababac", "abac", "ab", 6, "stop"), # the first "aba" does not hide the second
    ("abcdef", "fg", "abcdef", 6, "length"),
])
def test_a_stop_text_truncates_the_text_but_keeps_all_token_ids(tokenizer, text, stop, expected, num_tokens, reason):
    sample = append_all(tokenizer, tokenizer.encode(text), 6, stop)
    assert (sample.text, sample.finish_reason, sample.num_emittable_chars) == (expected, reason, len(expected))
    assert sample.token_ids == tokenizer.encode(text)[:num_tokens]
    assert [token.text for token in sample.tokens] == [*expected, *[""] * (num_tokens - len(expected))]


def test_a_possible_start_of_a_stop_text_is_not_emittable(tokenizer):
    sample, shown = new_sample(), []
    detokenizer = IncrementalDetokenizer(sample, tokenizer, SamplingParams(6, stop=["bcd", "bb"]))
    for token_id in tokenizer.encode("abcabc"):
        detokenizer.append(token_id)
        shown.append(sample.text[:sample.num_emittable_chars])
    assert shown == ["a", "a", "a", "abca", "abca", "abcabc"], "the last token makes all text emittable"


def test_a_stop_text_may_be_inside_one_token_or_span_several(gpt2_encoding):
    tokenizer = GPT2Tokenizer()
    ids = tokenizer.encode("Hello there, something else")
    for stop in "ello", "lo the", "re, s", "g else", "some":
        sample = append_all(tokenizer, ids, len(ids), stop)
        assert (sample.text, sample.finish_reason) == (truncate_at_stop("Hello there, something else", [stop]), "stop")
