"""The prompts that the setting start selects, and what a user is told about prompts and stop texts."""
import os

import pytest

from hf_tokenizers import save_tokenizer
from models import save_meta
from sampling.inputs import prompts
from sampling.inputs.char_tokenizer import CharTokenizer
from sampling.inputs.hf_tokenizer import HFTokenizer
from sampling.inputs.prompts import PromptSource
from sampling.inputs.tiktoken_tokenizer import TiktokenTokenizer
from sampling.params import Prompt, Sample
from script_process import PIPE, start_script


@pytest.fixture
def chars(tmp_path):
    """A tokenizer of characters."""
    save_meta(tmp_path / "meta.pkl")
    return CharTokenizer(tmp_path / "meta.pkl")


def lines_of(notices, *arguments):
    """What this function logs."""
    lines = []
    list(notices(*arguments, lines.append) or [])
    return lines


def test_a_prompt_is_a_text_or_a_file_or_each_line_of_one_that_is_not_empty(tmp_path):
    path = tmp_path / "a:b" # only the first colon counts
    path.write_bytes("\ufeff a \r\n\n\té\n".encode())
    source = PromptSource(f"LINES:{path}")
    assert [prompt.text for prompt in source] == [" a ", "\té"] == [prompt.text for prompt in source]
    assert list(PromptSource(f"FILE:{path}")) == [Prompt(" a \n\n\té\n")]
    for text in "FILE", "lines:a", "a FILE:b":
        assert list(PromptSource(text)) == [Prompt(text)]


def test_jsonl_prompts_have_ids_and_are_counted(tmp_path, chars):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\\nb", "id": 7}\n\n{"id": {"x": 1}, "prompt": "c", "topic": null}')
    source = PromptSource(f"JSONL:{path}")
    assert list(source) == [Prompt("a\nb", 7, f"{path}, line 1"),
                            Prompt("c", {"x": 1}, f"{path}, line 3", {"topic": None})]
    assert source.count_and_max_len(chars, num_samples=10) == (20, 3)


@pytest.mark.parametrize("start, content, message", [
    ("JSONL:p", '{"prompt": "b", "temperature": 1}', "p, line 2: temperature is a setting of the whole run"),
    ("JSONL:p", '{"prompt": "b", "text": 1}', "p, line 2: text is .* a field that out_file already has: rename"),
    ("JSONL:p", '{"prompt": ""}', "p, line 2: every line must be an object with a prompt"),
    ("JSONL:p", '{"prompt": "a", "id": 1e999}', r"p, line 2: every line must .* \(Out of range float"),
    ("JSONL:p", "[" * 10**5, r"p, line 2: every line must .*\(maximum recursion depth"),
    ("LINES:p", "é", r"p is not UTF-8 after line 1 \(.*\): save it as UTF-8"),
], ids=lambda value: str(value)[:30])
def test_the_error_names_what_is_no_prompt(tmp_path, monkeypatch, start, content, message): # test_fuzz.py has more
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").write_text('{"prompt": "a"}\n' + content, "latin-1")
    with pytest.raises(ValueError, match=message):
        list(PromptSource(start))


def test_prompts_from_a_pipe_are_read_once_as_they_arrive(char_checkpoint):
    process = start_script(f"--out_dir={char_checkpoint}", "--start=LINES:-", "--max_new_tokens=5", "--num_samples=1",
                           "--batch_size=1", stdin=PIPE)
    for line in b"The \n", b"O\n":
        process.stdin.write(line)
        process.stdin.flush()
        assert os.read(process.stdout.fileno(), 1000).startswith(line[:-1])
    process.communicate()
    assert process.returncode == 0


# ---- notices

def test_a_stop_text_that_cannot_end_a_sample_gets_a_warning(chars, gpt2_encoding, tmp_path):
    warn = prompts.warn_about_stop_texts
    lines = lines_of(warn, ["\n\n", "KING", "<|endoftext|>", "\\n\\n", "5" * 10**6], chars)
    assert lines[0] == ("the stop text '<|endoftext|>' cannot end a sample: "
                        f"{chars.source} never produces this text")
    assert len(lines) == 3 and lines[1].endswith("""as Python does: --stop='"\\n"'""")
    assert lines_of(warn, [" the", "<|endoftext|>", "🙂", "\x00", "  "], TiktokenTokenizer()) == []
    save_tokenizer("wordpiece", tmp_path)
    words = HFTokenizer(tmp_path / "tokenizer.json", 10**6) # its tokens have no spaces, but its text has
    assert lines_of(warn, [" world", "o the", "world ", "KING"], words) == lines_of(warn, ["KING"], words) != []


def test_the_first_new_prompt_that_is_long_or_ends_in_a_space_is_logged(chars, gpt2_encoding, tmp_path):
    def logged(tokenizer, *texts):
        """The lines about these prompts, of which the first one is saved already."""
        samples = [Sample(i, Prompt(text, location=f"a.txt, line {i}"), tokenizer.encode(text), already_saved=i == 0)
                   for i, text in enumerate(texts)]
        return lines_of(prompts.log_notices, samples, tokenizer, 16)

    assert logged(chars, "b" * 20, "a" * 16, "ab cd" + "e" * 15, "x" * 16 + " ") == [
        "a.txt, line 2: the prompt has 20 tokens, but the model sees only the last 16 of any prompt, here from "
        "'deeeeeeeeeeeeeee' on"]
    save_tokenizer("byte-level", tmp_path) # of a GPT-2 from the hub
    for tokenizer in TiktokenTokenizer(), HFTokenizer(tmp_path / "tokenizer.json", 10**6):
        lines = logged(tokenizer, "b ", "a", "c ", "d ")
        assert len(lines) == 1 and lines[0].startswith("a.txt, line 2: the prompt ends in a space")
