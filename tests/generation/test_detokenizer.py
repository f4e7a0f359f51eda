"""Incremental detokenization, and the check for stop texts."""
import pytest

from engines import truncate_at_stop
from sampling.generation.engine import IncrementalDetokenizer
from sampling.inputs.tiktoken_tokenizer import TiktokenTokenizer
from sampling.params import Prompt, Sample, SamplingParams


def append_all(tokenizer, ids, max_new_tokens, stop=None):
    """The sample of these ids, of which none is appended after it has finished, and what was emittable after each."""
    sample, shown = Sample(0, Prompt("a"), [64]), []
    detokenizer = IncrementalDetokenizer(sample, tokenizer, SamplingParams(max_new_tokens, stop=stop))
    for token_id in ids:
        if not sample.finish_reason:
            detokenizer.append(token_id)
            shown.append(sample.text[:sample.num_emittable_chars])
    return sample, shown


@pytest.mark.parametrize("stop", [[], ["語"], ["\N{REPLACEMENT CHARACTER}"]], ids=ascii)
def test_emittable_text_never_ends_inside_a_character(gpt2_encoding, stop):
    tokenizer, text = TiktokenTokenizer(), "naïve 🙂 — 日本語 x"
    ids = tokenizer.encode(text)
    sample, shown = append_all(tokenizer, ids, len(ids), stop)
    assert sample.text == truncate_at_stop(text, stop) and all(text.startswith(part) for part in shown)


@pytest.mark.parametrize("text, stop, expected, num_tokens, reason", [
    ("abcdef", "cd", "ab", 4, "stop"),
    ("abcdef", ["ef", "cde"], "ab", 5, "stop"), # "ef" would begin later
    ("abcdef", ["ef", "def"], "abc", 6, "stop"), # both end with the same token
    ("abcdef", "f", "abcde", 6, "stop"), # also as the last token
    ("ababac", "abac", "ab", 6, "stop"), # the first "aba" does not hide the second
    ("abcdef", "fg", "abcdef", 6, "length"),
])
def test_a_stop_text_truncates_the_text_but_keeps_all_token_ids(tokenizer, text, stop, expected, num_tokens, reason):
    sample, _ = append_all(tokenizer, tokenizer.encode(text), 6, stop)
    assert (sample.text, sample.finish_reason, sample.num_emittable_chars) == (expected, reason, len(expected))
    assert sample.token_ids == tokenizer.encode(text)[:num_tokens]
    assert [token.text for token in sample.tokens] == [*expected, *[""] * (num_tokens - len(expected))]


def test_a_possible_start_of_a_stop_text_is_not_emittable_but_for_that_of_the_last_token(tokenizer):
    _, shown = append_all(tokenizer, tokenizer.encode("abcabc"), 6, ["bcd", "bb"])
    assert shown == ["a", "a", "a", "abca", "abca", "abcabc"]
