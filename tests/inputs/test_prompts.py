"""The prompts that the setting start selects."""
import json
import os

import pytest

from models import save_meta
from project import RULE
from sampling.inputs.char_tokenizer import CharTokenizer
from sampling.inputs.prompts import PromptSource, parse_start, read_prompts
from sampling.params import Prompt, SampleRequest
from script_process import PIPE, start_script


@pytest.fixture
def abc(tmp_path):
    """A tokenizer with few characters."""
    save_meta(tmp_path / "meta.pkl", "\nabc")
    return CharTokenizer(tmp_path / "meta.pkl")


def texts(start):
    return [prompt.text for prompt in read_prompts(start)]


@pytest.mark.parametrize("start", ["Once", "\n", "FILE", "lines:a", "LINE:a", "a FILE:b", " JSONL:x"])
def test_text_without_a_prefix_is_a_prompt(start):
    assert parse_start(start) == ("TEXT", start) and texts(start) == [start]


@pytest.mark.parametrize("kind, is_multi", [("FILE", False), ("LINES", True), ("JSONL", True)])
def test_a_prefix_selects_a_file(tmp_path, kind, is_multi):
    path = tmp_path / "a:b" # only the first colon counts
    path.write_text('{"prompt": "a"}')
    assert parse_start(f"{kind}:{path}") == (kind, str(path))
    assert PromptSource(f"{kind}:{path}").is_multi == is_multi


@pytest.mark.parametrize("content, lines", [
    ("a\nb\n", ["a", "b"]), ("a\n\n\nb", ["a", "b"]), ("a\r\nb\r\n", ["a", "b"]), (" a \n\tb\n", [" a ", "\tb"]), ("é\n🙂", ["é", "🙂"]), ("\ufeffa\r\nb", ["a", "b"]),
], ids=repr)
def test_every_nonempty_line_is_a_prompt(tmp_path, content, lines):
    (tmp_path / "p.txt").write_bytes(content.encode())
    assert texts(f"LINES:{tmp_path}/p.txt") == lines
    assert texts(f"FILE:{tmp_path}/p.txt") == [content.removeprefix("\ufeff").replace("\r\n", "\n")]


def test_jsonl_prompts_have_ids(tmp_path):
    objects = [{"prompt": "a\nb", "id": 7}, {"prompt": "ü"}, {"id": {"x": 1}, "prompt": "c", "other": None}]
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n".join(map(json.dumps, objects)))
    assert list(read_prompts(f"JSONL:{path}")) == [Prompt("a\nb", 7, f"{path}, line 1"), Prompt("ü", None, f"{path}, line 3"),
                                                    Prompt("c", {"x": 1}, f"{path}, line 5", {"other": None})]


@pytest.mark.parametrize("name, message", [("temperature", "temperature is a setting of the whole run, not of one prompt"), ("seed", "seed is a setting"), ("stop", "stop is a setting"),
                                        ("text", "out_file already has a field text"), ("finish_reason", "out_file already has a field finish_reason")])
@pytest.mark.parametrize("number", [1, 2])
def test_a_field_of_a_setting_or_of_a_result_is_an_error(tmp_path, name, message, number):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' * (number - 1) + json.dumps({"prompt": "b", name: 1}))
    with pytest.raises(ValueError, match=f"line {number}: {message}"):
        list(PromptSource(f"JSONL:{path}"))


def test_the_script_names_its_settings(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "device": "my own"}')
    assert list(PromptSource(f"JSONL:{tmp_path}/p.jsonl"))
    with pytest.raises(ValueError, match="device is a setting of the whole run"):
        PromptSource(f"JSONL:{tmp_path}/p.jsonl", {"device": "cpu"})


@pytest.mark.parametrize("line", ["[]", '"a"', "{}", '{"prompt": 5}', '{"prompt": ""}', "{", "[" * 10**5, '{"prompt": null}', '{"prompt": "a", "id": 1e400}'], ids=lambda line: line[:20])
def test_the_error_names_a_line_that_is_not_a_prompt(tmp_path, line):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line)
    prompts = read_prompts(f"JSONL:{tmp_path}/p.jsonl")
    next(prompts)
    with pytest.raises(ValueError, match=r"p.jsonl, line 2: every line must be an object"):
        next(prompts)


@pytest.mark.parametrize("field, reason", [("1e999", "Out of range float"), ("9" * 5000, "Exceeds the limit"), ('"', "Unterminated string")],
                         ids=lambda text: text[:5])
def test_the_error_says_why_a_line_is_not_json(tmp_path, field, reason):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "field": ' + field + "}")
    with pytest.raises(ValueError, match=rf"p.jsonl, line 1: .*; got '{{\"prompt\".* \({reason}"):
        next(read_prompts(f"JSONL:{tmp_path}/p.jsonl"))


@pytest.mark.parametrize("start, message", [
    ("FILE:nowhere", "cannot read the prompt file 'nowhere': No such file"),
    ("LINES:.", "cannot read the prompt file '.': "),
    ("JSONL:a\0b", "cannot read the prompt file 'a\\x00b': the path has a null byte"),
    ("FILE:empty", "the prompt file empty is empty"),
    ("LINES:newlines", "the prompt file newlines is empty"),
    ("FILE:latin", "the prompt file latin is not UTF-8 (invalid continuation byte): save it as UTF-8"),
    ("LINES:latin", "the prompt file latin is not UTF-8 (invalid continuation byte): save it as UTF-8"),
    ("JSONL:", "JSONL: needs the path of a file after the colon, or - for standard input"),
], ids=str)
def test_the_error_names_a_file_without_prompts(tmp_path, monkeypatch, start, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "newlines").write_text("\n\n")
    (tmp_path / "latin").write_bytes(b"a\n\xe9\n")
    with pytest.raises(ValueError) as error:
        PromptSource(start)
    assert message in str(error.value)


@pytest.mark.parametrize("content, message", [
    (b"", "standard input is empty"), (b"\xe9\n", "standard input is not UTF-8"), (b"[]\n", "standard input, line 1: every line must be an object")], ids=repr)
def test_the_error_names_standard_input(content, message, run_script, char_checkpoint):
    done = run_script(f"--out_dir={char_checkpoint}", "--start=JSONL:-", stdin=content)
    assert done.returncode == 1 and f"error: {message}" in done.stderr


def test_prompts_are_counted_and_checked_before_sampling(tmp_path, abc):
    (tmp_path / "p.txt").write_text("a\nabc\nca\n")
    prompts = PromptSource(f"LINES:{tmp_path}/p.txt")
    assert prompts.count_and_max_len(abc, 10) == (30, 3)
    assert [prompt.text for prompt in prompts] == ["a", "abc", "ca"] == [prompt.text for prompt in prompts]
    (tmp_path / "p.txt").write_text("a\nabx\n")
    with pytest.raises(ValueError, match=r"p.txt, line 2: the prompt has characters"):
        PromptSource(f"LINES:{tmp_path}/p.txt").count_and_max_len(abc, 10)
    assert PromptSource("abc").count_and_max_len(abc, 2) == (2, 3)


def test_requests_have_consecutive_indices(tmp_path, abc):
    (tmp_path / "p.txt").write_text("a\ncb\n")
    a, cb = (Prompt(text, location=f"{tmp_path}/p.txt, line {n}") for n, text in enumerate(["a", "cb"], 1))
    requests = list(PromptSource(f"LINES:{tmp_path}/p.txt").requests(abc, 2))
    assert requests == [SampleRequest(0, a, [1]), SampleRequest(1, a, [1]), SampleRequest(2, cb, [3, 2]), SampleRequest(3, cb, [3, 2])]
    assert [request.index for request in PromptSource("a").requests(abc, 2, first_index=7)] == [7, 8]


def test_the_sample_of_a_line_from_a_pipe_is_printed_before_the_next_line_arrives(char_checkpoint):
    process = start_script(f"--out_dir={char_checkpoint}", "--start=LINES:-", "--num_samples=1", "--batch_size=1", "--max_new_tokens=5", stdin=PIPE)
    for line in b"The \n", b"O\n":
        process.stdin.write(line)
        process.stdin.flush()
        assert os.read(process.stdout.fileno(), 1000).startswith(line[:-1])
    process.communicate()
    assert process.returncode == 0


def test_prompts_from_a_pipe_are_read_once(run_script, char_checkpoint):
    done = run_script(f"--out_dir={char_checkpoint}", "--start=LINES:-", "--num_samples=2", "--max_new_tokens=5", stdin=b"The \n\nO\n")
    assert done.returncode == 0, done.stderr
    assert [text[:1] for text in done.stdout.split(f"\n{RULE}\n")] == ["T", "T", "O", "O", ""]


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="no /dev/null")
def test_an_empty_pipe_is_refused():
    with pytest.raises(ValueError, match="is empty"):
        PromptSource("LINES:/dev/null")


def test_prompts_from_a_pipe_are_not_counted(tmp_path, abc):
    if not hasattr(os, "mkfifo"):
        pytest.skip("no named pipes")
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(end, b"a\nb\n")
    prompts = PromptSource(f"LINES:{tmp_path}/pipe")
    assert prompts.count_and_max_len(abc, 1) == (None, None)
    os.close(end)
    assert [prompt.text for prompt in prompts] == ["a", "b"]


def test_prompts_are_not_all_in_memory_at_once(tmp_path):
    (tmp_path / "p.txt").write_text("a\n" * 10**5)
    prompts = iter(PromptSource(f"LINES:{tmp_path}/p.txt"))
    assert next(prompts) == Prompt("a", location=f"{tmp_path}/p.txt, line 1")
    assert sum(1 for _ in prompts) == 10**5 - 1


def test_a_nested_id_that_is_accepted_can_be_saved_and_loaded(tmp_path):
    """The code that saves it runs deeper in the call stack, where less recursion is possible."""
    path = tmp_path / "p.jsonl"
    for depth in range(800, 1000):
        path.write_text('{"prompt": "a", "id": ' + "[" * depth + "]" * depth + "}")
        try:
            prompt = next(read_prompts(f"JSONL:{path}"))
        except ValueError:
            break
        nested = prompt.id
        for _ in range(40):
            nested = [nested]
        assert json.loads(json.dumps(nested)) == nested
    assert depth > 800
