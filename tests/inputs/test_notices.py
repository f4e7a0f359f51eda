"""What a user is told about stop texts and long prompts."""
import random

import pytest

from hf_tokenizers import KINDS, LINES, save_tokenizer
from models import CHARS, save_meta
from sampling.inputs.char_tokenizer import CharTokenizer
from sampling.inputs.gpt2_tokenizer import GPT2Tokenizer
from sampling.inputs.hf_tokenizer import HFTokenizer
from sampling.inputs.notices import can_produce, log_cropped, warn_about_stop_texts
from sampling.inputs.tokenizer_files import find_tokenizer
from sampling.params import Prompt, SampleRequest


@pytest.fixture
def chars(tmp_path):
    """A tokenizer of characters."""
    save_meta(tmp_path / "meta.pkl")
    return CharTokenizer(tmp_path / "meta.pkl")


def warnings_of(stop_texts, tokenizer):
    lines = []
    warn_about_stop_texts(stop_texts, tokenizer, lines.append)
    return lines


def test_a_stop_text_that_a_tokenizer_lacks_gets_a_warning(chars):
    assert warnings_of(["\n\n", "KING", CHARS], chars) == warnings_of([], chars) == []
    line, = warnings_of(["KING", "<|endoftext|>"], chars)
    assert line == f"warning: the stop text '<|endoftext|>' cannot end a sample: {chars.source} never produces this text"
    assert len(warnings_of(["é", "KING", "5" * 10**6], chars)) == 2 and all(len(line) < 500 for line in warnings_of(["5" * 10**6], chars))


def test_a_stop_text_with_a_backslash_n_gets_one_warning(chars, gpt2_encoding):
    for tokenizer in chars, GPT2Tokenizer():
        line, = warnings_of(["\\n\\n", "\n"], tokenizer)
        assert line.startswith("warning: the stop text '\\\\n\\\\n' has a backslash") and """--stop='"\\n\\n"'""" in line


def test_a_stop_text_that_looks_like_a_list_gets_its_own_advice(chars):
    line, = warnings_of(['["\\n", KING]'], chars)
    assert line.endswith(r'a list needs quotes around each text, such as ["\n\n", "KING"]')


def test_gpt2s_encoding_can_produce_all_text(gpt2_encoding):
    stop_texts = ["\n\n", " the", "<|endoftext|>", "é", "\N{GRINNING FACE}", "\x00", "  "]
    assert warnings_of(stop_texts, GPT2Tokenizer()) == []
    assert len(warnings_of(["a\udcff"], GPT2Tokenizer())) == 1 # no valid Unicode


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_that_the_tokenizer_can_produce_gets_no_warning(tmp_path, kind):
    """Any part of a text, also one that begins or ends inside a word."""
    save_tokenizer(kind, tmp_path)
    tokenizer, rng = HFTokenizer(find_tokenizer(tmp_path), 10**6), random.Random(kind)
    for line in LINES[:5]:
        ids = tokenizer.encode(line)
        decode = tokenizer.incremental_decoder(tokenizer.encode("Hello world"))
        text = "".join(decode(token_id, i == len(ids) - 1) for i, token_id in enumerate(ids))
        for _ in range(20):
            begin = rng.randrange(len(text))
            part = text[begin:begin + rng.choice([1, 2, 3, 5, 8, 12])]
            assert can_produce(tokenizer, part), part


@pytest.mark.parametrize("kind, stop", [("wordpiece", "KING"), ("wordpiece", "\n\n"), ("suffix", "The"), ("words", "\n"), ("unigram", "<|endoftext|>")])
def test_a_stop_text_that_the_tokenizer_changes_or_drops_gets_a_warning(tmp_path, kind, stop):
    save_tokenizer(kind, tmp_path)
    tokenizer = HFTokenizer(find_tokenizer(tmp_path), 10**6)
    assert len(warnings_of([stop], tokenizer)) == 1


def request(index, text, tokenizer, **more):
    location = more.pop("location", "")
    return SampleRequest(index, Prompt(text, location=location), tokenizer.encode(text), **more)


def test_the_first_prompt_that_is_too_long_is_logged(chars):
    requests = [request(0, "a" * 16, chars), request(1, "b" * 20 + "c" * 16, chars, already_saved=True),
                request(2, "ab cd" + "e" * 15, chars, location="a.txt, line 3"), request(3, "x" * 17, chars)]
    lines, found = [], []
    for each in log_cropped(iter(requests), chars, 16, lines.append):
        found.append(each)
        assert len(lines) == (each.index >= 2)
    assert found == requests
    assert lines == ["a.txt, line 3: the prompt has 20 tokens, but the model sees only the last 16, which begin with 'deeeeeeeeeeeeeee'"
                     "; of later prompts too, it sees at most 16"]


def test_a_prompt_as_long_as_the_window_is_not_cropped(chars):
    requests = [request(0, "a" * 16, chars), request(1, "a", chars)]
    assert list(log_cropped(requests, chars, 16, pytest.fail)) == requests
