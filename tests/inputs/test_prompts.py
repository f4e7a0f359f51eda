"""The prompts that the setting start selects, and what a user is told about prompts and stop texts."""
import json
import os

import pytest

from hf_tokenizers import save_tokenizer
from models import CHARS, save_meta
from project import RULE
from sampling.inputs import prompts
from sampling.inputs.char_tokenizer import CharTokenizer
from sampling.inputs.hf_tokenizer import HFTokenizer
from sampling.inputs.prompts import PromptSource, parse_start, read_prompts
from sampling.inputs.tiktoken_tokenizer import TiktokenTokenizer
from sampling.params import Prompt, SampleRequest
from script_process import PIPE, start_script


@pytest.fixture
def chars(tmp_path):
    """A tokenizer of characters."""
    save_meta(tmp_path / "meta.pkl")
    return CharTokenizer(tmp_path / "meta.pkl")


@pytest.mark.parametrize("start", ["Once", "\n", "FILE", "lines:a", "LINE:a", "a FILE:b", " JSONL:x"])
def test_text_without_a_prefix_is_a_prompt(start):
    assert parse_start(start) == ("TEXT", start) and list(read_prompts(start)) == [Prompt(start)]


@pytest.mark.parametrize("content, lines", [
    ("a\n\n\nb", ["a", "b"]), (" a \n\tb\n", [" a ", "\tb"]), ("\ufeffé\r\n🙂", ["é", "🙂"])])
def test_every_nonempty_line_is_a_prompt(tmp_path, content, lines):
    path = tmp_path / "a:b" # only the first colon counts
    path.write_bytes(content.encode())
    source = PromptSource(f"LINES:{path}")
    assert [prompt.text for prompt in source] == lines == [prompt.text for prompt in source] and source.is_multi
    assert list(PromptSource(f"FILE:{path}")) == [Prompt(content.removeprefix("\ufeff").replace("\r\n", "\n"))]


def test_jsonl_prompts_have_ids(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\\nb", "id": 7}\n\n{"id": {"x": 1}, "prompt": "c", "topic": null}')
    assert list(PromptSource(f"JSONL:{path}")) == [Prompt("a\nb", 7, f"{path}, line 1"),
                                                   Prompt("c", {"x": 1}, f"{path}, line 3", {"topic": None})]


@pytest.mark.parametrize("line, message", [
    ('{"prompt": "b", "temperature": 1}', "temperature is a setting of the whole run, not of one prompt"),
    ('{"prompt": "b", "text": 1}', "out_file already has a field text"),
    ("[]", "every line must be an object"), ('{"prompt": ""}', "every line must be an object"),
    ("[" * 10**5, "every line must be an object"),
    ('{"prompt": "a", "id": 1e999}', r".*; got '{\"prompt\".* \(Out of range float"),
    ('{"prompt": "a", "id": ' + "9" * 5000 + "}", r".*\(Exceeds the limit"),
    ('{"prompt": "', r".*\(Unterminated string"),
], ids=lambda text: text[:30])
def test_the_error_names_a_line_that_is_not_a_prompt(tmp_path, line, message):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ValueError, match=f"p.jsonl, line 2: {message}"):
        list(PromptSource(f"JSONL:{tmp_path}/p.jsonl"))


@pytest.mark.parametrize("start, message", [
    ("FILE:nowhere", "cannot read the prompt file 'nowhere': No such file"), ("LINES:/dev/null", "is empty"),
    ("LINES:.", "cannot read the prompt file '.': "), ("FILE:empty", "the prompt file empty is empty"),
    ("JSONL:a\0b", "cannot read the prompt file 'a\\x00b': the path has a null byte"),
    ("FILE:latin", "the prompt file latin is not UTF-8 (invalid continuation byte): save it as UTF-8"),
    ("JSONL:", "JSONL: needs the path of a file after the colon, or - for standard input")])
def test_the_error_names_a_file_without_prompts(tmp_path, monkeypatch, start, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "latin").write_bytes(b"a\n\xe9\n")
    with pytest.raises(ValueError) as error:
        PromptSource(start)
    assert message in str(error.value)


def test_prompts_are_counted_and_checked_before_sampling(tmp_path, chars):
    (tmp_path / "p.txt").write_text("a\nabc\nca\n")
    source = PromptSource(f"LINES:{tmp_path}/p.txt")
    assert source.count_and_max_len(chars, 10) == (30, 3)
    requests = list(prompts.make_requests(source, chars, 2, first_index=7))
    assert [request.index for request in requests] == [7, 8, 9, 10, 11, 12]
    assert requests[2] == SampleRequest(9, Prompt("abc", location=f"{tmp_path}/p.txt, line 2"), chars.encode("abc"))
    (tmp_path / "p.txt").write_text("a\nab5\n")
    with pytest.raises(ValueError, match=r"p.txt, line 2: the prompt has characters"):
        PromptSource(f"LINES:{tmp_path}/p.txt").count_and_max_len(chars, 10)


def test_prompts_from_a_pipe_are_read_once_as_they_arrive(run_script, char_checkpoint, tmp_path, chars):
    arguments = f"--out_dir={char_checkpoint}", "--start=LINES:-", "--max_new_tokens=5"
    process = start_script(*arguments, "--num_samples=1", "--batch_size=1", stdin=PIPE)
    for line in b"The \n", b"O\n":
        process.stdin.write(line)
        process.stdin.flush()
        assert os.read(process.stdout.fileno(), 1000).startswith(line[:-1])
    process.communicate()
    assert process.returncode == 0
    done = run_script(*arguments, "--num_samples=2", stdin=b"The \n\nO\n")
    assert [text[:1] for text in done.stdout.split(f"\n{RULE}\n")] == ["T", "T", "O", "O", ""]
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(end, b"a\n")
    assert PromptSource(f"LINES:{tmp_path}/pipe").count_and_max_len(chars, 1) == (None, None)
    os.close(end)


def test_a_nested_id_that_is_accepted_can_be_saved_and_loaded(tmp_path):
    """The code that saves it runs deeper in the call stack, where less recursion is possible."""
    for depth in range(800, 1000):
        (tmp_path / "p.jsonl").write_text('{"prompt": "a", "id": ' + "[" * depth + "]" * depth + "}")
        try:
            nested = next(read_prompts(f"JSONL:{tmp_path}/p.jsonl")).id
        except ValueError:
            break
        for _ in range(40):
            nested = [nested]
        assert json.loads(json.dumps(nested)) == nested
    assert depth > 800


# ---- notices

def warnings_of(stop_texts, tokenizer):
    lines = []
    prompts.warn_about_stop_texts(stop_texts, tokenizer, lines.append)
    return lines


def test_a_stop_text_that_cannot_end_a_sample_gets_a_warning(chars, gpt2_encoding, tmp_path):
    assert warnings_of(["\n\n", "KING", CHARS], chars) == []
    lines = warnings_of(["KING", "<|endoftext|>", "\\n\\n", '["\\n", KING]', "5" * 10**6], chars)
    assert lines[0] == ("warning: the stop text '<|endoftext|>' cannot end a sample: "
                        f"{chars.source} never produces this text")
    assert "'\\\\n\\\\n' has a backslash" in lines[1] and """--stop='"\\n"'""" in lines[2] and len(lines[3]) < 500
    assert warnings_of(["\n\n", " the", "<|endoftext|>", "é", "🙂", "\x00", "  "], TiktokenTokenizer()) == []
    assert len(warnings_of(["a\udcff"], TiktokenTokenizer())) == 1 # no valid Unicode
    save_tokenizer("wordpiece", tmp_path)
    words = HFTokenizer(tmp_path / "tokenizer.json", 10**6) # its tokens have no spaces, but its text has
    assert warnings_of([" world", "o the", "world "], words) == [] and len(warnings_of(["KING"], words)) == 1


def request(index, text, tokenizer, location="", **more):
    return SampleRequest(index, Prompt(text, location=location), tokenizer.encode(text), **more)


def logged(requests, tokenizer):
    """The lines about these requests, which are yielded unchanged, with a block_size of 16."""
    lines = []
    assert list(prompts.log_notices(iter(requests), tokenizer, 16, lines.append)) == requests
    return lines


def test_the_first_new_prompt_that_is_too_long_is_logged(chars):
    requests = [request(0, "a" * 16, chars), request(1, "b" * 20 + "c" * 16, chars, already_saved=True),
                request(2, "ab cd" + "e" * 15, chars, "a.txt, line 3"), request(3, "x" * 17, chars)]
    assert logged(requests, chars) == [
        "a.txt, line 3: the prompt has 20 tokens, but the model sees only the last 16, which begin with "
        "'deeeeeeeeeeeeeee'; of later prompts too, it sees at most 16"]


def test_the_first_new_prompt_that_ends_in_a_space_is_logged_for_gpt2s_encoding(chars, gpt2_encoding, tmp_path):
    save_tokenizer("byte-level", tmp_path / "own") # of a GPT-2 from the hub
    for tokenizer in TiktokenTokenizer(), HFTokenizer(tmp_path / "own" / "tokenizer.json", 10**6):
        requests = [request(0, "a", tokenizer), request(1, "b ", tokenizer, already_saved=True),
                    request(2, "c ", tokenizer, "a.txt, line 3"), request(3, "d ", tokenizer)]
        assert logged(requests, tokenizer) == [
            "a.txt, line 3: the prompt ends in a space: a trailing space mostly gives worse text, because in "
            f"{tokenizer.source} a word begins with its space"]
    assert logged([request(0, "a ", chars)], chars) == []
