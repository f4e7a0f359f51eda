"""The prompts that the setting start selects, and what a user is told about prompts."""
import os

import pytest

from engines import PARAMS, TOKENIZER, make_generator
from sampling.inputs.prompts import make_samples, read_prompts
from sampling.samples import Prompt
from script_process import redirected


def test_a_prompt_is_a_text_or_a_file_or_each_line_of_one_that_is_not_empty(tmp_path):
    path = tmp_path / "a:b" # only the first colon counts
    path.write_bytes("\ufeff a \r\n\n\té\n".encode())
    assert [prompt.text for prompt in read_prompts(f"LINES:{path}")] == [" a ", "\té"]
    whole, = read_prompts(f"FILE:{path}")
    assert whole.text == "\ufeff a \n\n\té\n" # as in nanoGPT


def test_a_text_that_names_a_file_gets_a_line(tmp_path, monkeypatch, messages):
    monkeypatch.chdir(tmp_path)
    assert read_prompts("p.txt") == [Prompt("p.txt")]
    assert messages == []
    (tmp_path / "p.txt").write_text("a")
    assert read_prompts("p.txt") == [Prompt("p.txt")] # the text stays the prompt, as in nanoGPT
    assert messages == [
        "the prompt is the text 'p.txt'; to read the file, pass --start=FILE:p.txt"]


def test_jsonl_prompts_have_ids_and_lines_of_blanks_are_skipped(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\\nb", "id": 7}\n\n  \t \n'
                    '{"id": {"x": 1}, "prompt": "c", "topic": null}\n   ')
    prompts = read_prompts(f"JSONL:{path}")
    assert prompts == [
        Prompt("a\nb", 7, f"{path}, line 1"),
        Prompt("c", {"x": 1}, f"{path}, line 4", {"topic": None})]


def test_a_setting_of_another_program_in_a_file_of_prompts_gets_one_line(tmp_path, messages):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "n": 1, "model": "m"}\n'
                    + 2 * '{"prompt": "b", "max_tokens": 5}\n')
    assert len(read_prompts(f"JSONL:{path}")) == 3
    assert messages == [f"{path}, line 2: max_tokens is saved, but changes no sample: "
                        "--max_new_tokens does, for all prompts"]


def test_a_bad_prompt_in_a_list_is_found_at_once():
    prompts = 1000 * [Prompt("ab")] + [Prompt("d\u00e9", location="p.txt, line 1001")]
    message = "^p.txt, line 1001: the prompt has characters that .* lacks: 'é' at 2"
    with pytest.raises(ValueError, match=message):
        next(make_samples(prompts, TOKENIZER))


def test_a_long_prompt_is_announced_before_it_is_encoded(tmp_path, messages):
    (tmp_path / "p.txt").write_text("a" * 1_000_001)
    samples = make_samples(read_prompts(f"FILE:{tmp_path}/p.txt"), TOKENIZER)
    assert messages == []
    next(samples)
    assert messages == [f"{tmp_path}/p.txt: encoding 1,000,001 characters"]


@pytest.mark.parametrize("start, data, lines", [
    ("\n", b"Once", ["the prompt is a newline; for the text in the pipe, pass --start=FILE:-"]),
    ("\n", b"", []),
    ("Twice", b"Once", []),
])
def test_a_pipe_with_data_beside_the_default_prompt_gets_a_line(
        start, data, lines, messages):
    reader, writer = os.pipe()
    with open(reader) as pipe, open(writer, "wb", buffering=0) as end, redirected(0, pipe):
        end.write(data)
        assert read_prompts(start) == [Prompt(start)]
    assert messages == lines


@pytest.mark.parametrize("start, content, message", [
    ("JSONL:p", '{"prompt": "b", "temperature": 1}',
     "p, line 2: temperature is a setting of the whole run"),
    ("JSONL:p", '{"prompt": "b", "text": 1}',
     "p, line 2: text is .* a field that out_file already has: rename"),
    ("JSONL:p", '{"prompt": ""}',
     "p, line 2: every line must be an object with a prompt that is not empty, like"),
    ("JSONL:p", '{"prompt": "a", "id": 1e999}',
     r"p, line 2 is not JSON that out_file could hold \(Out of range float"),
    ("JSONL:p", '[{"prompt": "a"}]', r'\(jq -c "\.\[\]" makes such lines'),
    ("JSONL:p", '{"prompt": "a", "x": ' + "[" * 101 + "]" * 101 + "}",
     "p, line 2: the field 'x' has lists or objects in each other, more than 100 deep: save it"),
    ("JSONL:p", '{"prompt": "a", "id": ' + '{"a": [' * 60 + "]}" * 60 + "}", "the field 'id' has"),
    ("JSONL:p", "[" * 10**5, r"p, line 2 is not JSON .*\(maximum recursion depth"),
    ("FILE:val.bin", "",
     "val.bin is a file of tokens, as a prepare.py writes it: give the text"),
    ("FILE:p", "é", r"^p is not UTF-8 \(.*\): save it as UTF-8, and not compressed$"),
    ("LINES:p", "é", r"^p is not UTF-8 after line 1 \(.*\): save it"),
])
def test_the_error_names_what_is_no_prompt(tmp_path, monkeypatch, start, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").write_text('{"prompt": "a"}\n' + content, "latin-1")
    with pytest.raises(ValueError, match=message):
        read_prompts(start)


def test_the_first_new_prompt_that_is_long_is_logged(messages):
    texts = ["b" * 20, "a" * 16, "ab cd" + "e" * 15, "x" * 17]
    prompts = [Prompt(text, location=f"line {i}") for i, text in enumerate(texts)]
    samples = [*make_samples(prompts, TOKENIZER)]
    samples[0].already_saved = True
    list(make_generator().run(samples, PARAMS, batch_size=1))
    assert [message for message in messages if "sees only" in message] == [
        "line 2: the prompt has 20 tokens, but the model sees only the last 16 of any, "
        "here from 'deeeeeeeeeeeeeee' on"]
