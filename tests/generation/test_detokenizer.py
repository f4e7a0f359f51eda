"""From tokens to text, and the search for stop texts."""
import pytest

from engines import truncate_at_stop
from sampling.generation.detokenizer import IncrementalDetokenizer
from sampling.inputs.tiktoken_tokenizer import TiktokenTokenizer
from sampling.params import Prompt, Sample, SamplingParams


def append_all(tokenizer, ids, max_new_tokens, stop=None, logprobs=None):
    """The sample of these ids, of which none is appended after it has finished, and its new pieces after each."""
    row = IncrementalDetokenizer(Sample(0, Prompt("a"), [64]), tokenizer, SamplingParams(max_new_tokens, stop=stop))
    taken = []
    for i, token_id in enumerate(ids):
        if not row.is_finished:
            row.append(token_id, logprobs and logprobs[i])
            taken.append(row.take_pieces())
    return row.sample, taken


def texts(taken):
    return ["".join(piece.text for piece in pieces) for pieces in taken]


@pytest.mark.parametrize("stop", [[], ["語"], ["\N{REPLACEMENT CHARACTER}"]], ids=ascii)
def test_no_piece_ends_inside_a_character(gpt2_encoding, stop):
    tokenizer, text = TiktokenTokenizer(), "naïve 🙂 — 日本語 x"
    ids = tokenizer.encode(text)
    sample, taken = append_all(tokenizer, ids, len(ids), stop)
    assert sample.text == "".join(texts(taken)) == truncate_at_stop(text, stop)


@pytest.mark.parametrize("text, stop, expected, num_tokens, reason", [
    ("abcdef", "cd", "ab", 4, "stop"),
    ("abcdef", ["ef", "cde"], "ab", 5, "stop"), # "ef" would begin later
    ("abcdef", ["ef", "def"], "abc", 6, "stop"), # both end with the same token
    ("abcdef", "f", "abcde", 6, "stop"), # also as the last token
    ("ababac", "abac", "ab", 6, "stop"), # the first "aba" does not hide the second
    ("abcdef", "fg", "abcdef", 6, "length"),
])
def test_a_stop_text_truncates_the_text_but_keeps_all_token_ids(tokenizer, text, stop, expected, num_tokens, reason):
    sample, taken = append_all(tokenizer, tokenizer.encode(text), 6, stop)
    assert (sample.text, sample.finish_reason, "".join(texts(taken))) == (expected, reason, expected)
    assert sample.token_ids == tokenizer.encode(text)[:num_tokens]
    assert [token.text for token in sample.tokens] == [*expected, *[""] * (num_tokens - len(expected))]


def test_a_possible_start_of_a_stop_text_is_withheld_but_for_that_of_the_last_token(tokenizer):
    _, taken = append_all(tokenizer, tokenizer.encode("abcabc"), 6, ["bcd", "bb"])
    assert texts(taken) == ["a", "", "", "bca", "", "bc"]


def test_a_piece_has_the_log_probability_of_all_tokens_of_its_character(gpt2_encoding):
    tokenizer = TiktokenTokenizer()
    ids = tokenizer.encode("a🙂b")
    assert len(ids) == 4, "the emoji has two tokens"
    _, taken = append_all(tokenizer, ids, 4, logprobs=[-1.0, -2.0, -0.5, -4.0])
    assert [piece for pieces in taken for piece in pieces] == [("a", -1.0), ("🙂", -2.5), ("b", -4.0)]


def test_a_row_that_begins_again_does_not_repeat_its_pieces(tokenizer):
    row = IncrementalDetokenizer(Sample(0, Prompt("a"), [64]), tokenizer, SamplingParams(9))
    ids = tokenizer.encode("abcd")
    row.append(ids[0])
    assert texts([row.take_pieces()]) == ["a"]
    row.append(ids[1])
    row.restart()
    assert row.sample.tokens == []
    for token_id in ids:
        row.append(token_id)
    assert texts([row.take_pieces()]) == ["bcd"] and row.sample.text == "abcd"
