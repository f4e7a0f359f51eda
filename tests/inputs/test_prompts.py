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


@pytest.mark.parametrize("start", ["\n", "FILE", "lines:a", "a FILE:b"])
def test_text_without_a_prefix_is_a_prompt(start):
    assert list(PromptSource(start)) == [Prompt(start)]


def test_every_nonempty_line_is_a_prompt(tmp_path):
    path = tmp_path / "a:b" # only the first colon counts
    path.write_bytes("\ufeff a \r\n\n\té\n".encode())
    source = PromptSource(f"LINES:{path}")
    assert [prompt.text for prompt in source] == [" a ", "\té"] == [prompt.text for prompt in source]
    assert list(PromptSource(f"FILE:{path}")) == [Prompt(" a \n\n\té\n")]


def test_jsonl_prompts_have_ids(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\\nb", "id": 7}\n\n{"id": {"x": 1}, "prompt": "c", "topic": null}')
    assert list(PromptSource(f"JSONL:{path}")) == [Prompt("a\nb", 7, f"{path}, line 1"),
                                                   Prompt("c", {"x": 1}, f"{path}, line 3", {"topic": None})]


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


def test_prompts_are_counted_and_checked_before_sampling(tmp_path, chars):
    (tmp_path / "p.txt").write_text("a\nabc\nca\n")
    source = PromptSource(f"LINES:{tmp_path}/p.txt")
    assert source.count_and_max_len(chars, 10) == (30, 3)
    samples = list(prompts.make_samples(source, chars, 2, first_index=7))
    assert [sample.index for sample in samples] == [7, 8, 9, 10, 11, 12]
    assert samples[2].prompt.text == "abc" and samples[2].prompt_ids == chars.encode("abc")
    (tmp_path / "p.txt").write_text("a\nab5\n")
    with pytest.raises(ValueError, match=r"p.txt, line 2: the prompt has characters"):
        source.count_and_max_len(chars, 10)


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
    def warnings(stop_texts, tokenizer):
        lines = []
        prompts.warn_about_stop_texts(stop_texts, tokenizer, lines.append)
        return lines

    lines = warnings(["\n\n", "KING", "<|endoftext|>", "\\n\\n", "5" * 10**6], chars)
    assert lines[0] == ("warning: the stop text '<|endoftext|>' cannot end a sample: "
                        f"{chars.source} never produces this text")
    assert len(lines) == 3 and lines[1].endswith("""as Python does: --stop='"\\n"'""")
    assert warnings([" the", "<|endoftext|>", "🙂", "\x00", "  "], TiktokenTokenizer()) == []
    save_tokenizer("wordpiece", tmp_path)
    words = HFTokenizer(tmp_path / "tokenizer.json", 10**6) # its tokens have no spaces, but its text has
    assert warnings([" world", "o the", "world "], words) == [] and len(warnings(["KING"], words)) == 1


def test_the_first_new_prompt_that_is_long_or_ends_in_a_space_is_logged(chars, gpt2_encoding, tmp_path):
    def logged(tokenizer, *texts):
        """The lines about these prompts, of which the first one is saved already."""
        lines = []
        samples = [Sample(i, Prompt(text, location=f"a.txt, line {i}"), tokenizer.encode(text), already_saved=i == 0)
                   for i, text in enumerate(texts)]
        assert list(prompts.log_notices(iter(samples), tokenizer, 16, lines.append)) == samples
        return lines

    assert logged(chars, "b" * 20, "a" * 16, "ab cd" + "e" * 15, "x" * 16 + " ") == [
        "a.txt, line 2: the prompt has 20 tokens, but the model sees only the last 16 of any prompt, here from "
        "'deeeeeeeeeeeeeee' on"]
    save_tokenizer("byte-level", tmp_path) # of a GPT-2 from the hub
    for tokenizer in TiktokenTokenizer(), HFTokenizer(tmp_path / "tokenizer.json", 10**6):
        lines = logged(tokenizer, "b ", "a", "c ", "d ")
        assert len(lines) == 1 and lines[0].startswith("a.txt, line 2: the prompt ends in a space")
