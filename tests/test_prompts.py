"""What the setting start stands for."""
import json
import os
import subprocess
import sys

import pytest
from prompts import Prompt, Prompts, read_prompts
from tokenizer import CharTokenizer

from conftest import PROJECT, save_meta


def texts(start):
    return [prompt.text for prompt in read_prompts(start)]


@pytest.mark.parametrize("start", ["Once", "\n", "FILE", "lines:a", "LINE:a", "a FILE:b", " JSONL:x"])
def test_a_text_is_a_prompt(start):
    assert texts(start) == [start]


@pytest.mark.parametrize("content, lines", [
    ("a\nb\n", ["a", "b"]), ("a\n\n\nb", ["a", "b"]), ("a\r\nb\r\n", ["a", "b"]), (" a \n\tb\n", [" a ", "\tb"]), ("é\n🙂", ["é", "🙂"]), ("\ufeffa\r\nb", ["a", "b"]),
], ids=repr)
def test_lines(tmp_path, content, lines):
    (tmp_path / "p.txt").write_bytes(content.encode())
    assert texts(f"LINES:{tmp_path}/p.txt") == lines
    assert len(texts(f"FILE:{tmp_path}/p.txt")) == 1 and not texts(f"FILE:{tmp_path}/p.txt")[0].startswith("\ufeff")


def test_jsonl(tmp_path):
    found = [{"prompt": "a\nb", "id": 7}, {"prompt": "ü"}, {"id": {"x": 1}, "prompt": "c", "other": None}]
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n".join(map(json.dumps, found)))
    assert list(read_prompts(f"JSONL:{path}")) == [Prompt("a\nb", 7, f"{path}, line 1"), Prompt("ü", None, f"{path}, line 3"),
                                                    Prompt("c", {"x": 1}, f"{path}, line 5")]


@pytest.mark.parametrize("line", ["[]", '"a"', "{}", '{"prompt": 5}', '{"prompt": ""}', "{", "[" * 10**5, '{"prompt": null}', '{"prompt": "a", "id": 1e400}'], ids=lambda line: line[:20])
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line)
    prompts = read_prompts(f"JSONL:{tmp_path}/p.jsonl")
    next(prompts)
    with pytest.raises(ValueError, match=r"p.jsonl, line 2: every line must be an object"):
        next(prompts)


def test_a_survey_counts_and_checks_all_before_anything_is_drawn(tmp_path):
    save_meta(tmp_path / "meta.pkl", "\nabc")
    tokenizer = CharTokenizer(tmp_path / "meta.pkl")
    (tmp_path / "p.txt").write_text("a\nabc\nca\n")
    prompts = Prompts(f"LINES:{tmp_path}/p.txt")
    assert prompts.survey(tokenizer, 10) == (30, 3)
    assert [prompt.text for prompt in prompts] == ["a", "abc", "ca"] == [prompt.text for prompt in prompts]
    (tmp_path / "p.txt").write_text("a\nabx\n")
    with pytest.raises(ValueError, match=r"p.txt, line 2: the prompt has characters"):
        Prompts(f"LINES:{tmp_path}/p.txt").survey(tokenizer, 10)
    assert Prompts("abc").survey(tokenizer, 2) == (2, 3)


def test_a_line_from_a_pipe_is_answered_before_the_next_comes(letters, vocabulary):
    command = [sys.executable, PROJECT / "sample.py", f"--out_dir={letters}", "--start=LINES:-", "--num_samples=1", "--batch_size=1",
               "--max_new_tokens=5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        for line in b"The \n", b"O\n":
            process.stdin.write(line)
            process.stdin.flush()
            assert os.read(process.stdout.fileno(), 1000).startswith(line[:-1])
        process.stdin.close()


def test_a_pipe_is_read_once(sample, letters):
    done = sample(f"--out_dir={letters}", "--start=LINES:-", "--num_samples=2", "--max_new_tokens=5", stdin=b"The \n\nO\n")
    assert done.returncode == 0, done.stderr
    assert [text[:1] for text in done.stdout.split("\n---------------\n")] == ["T", "T", "O", "O", ""]
    with pytest.raises(ValueError, match="is empty"):
        Prompts("LINES:/dev/null")


def test_many_prompts_are_not_held_in_memory(tmp_path):
    (tmp_path / "p.txt").write_text("a\n" * 10**5)
    prompts = iter(Prompts(f"LINES:{tmp_path}/p.txt"))
    assert next(prompts) == Prompt("a", place=f"{tmp_path}/p.txt, line 1")
    assert sum(1 for _ in prompts) == 10**5 - 1


def test_an_id_that_is_taken_can_be_read_again(tmp_path):
    """From a line of out_file, where it lies deeper."""
    path = tmp_path / "p.jsonl"
    for depth in range(800, 1000):
        path.write_text('{"prompt": "a", "id": ' + "[" * depth + "]" * depth + "}")
        try:
            prompt = next(read_prompts(f"JSONL:{path}"))
        except ValueError:
            break
        assert json.loads(json.dumps([[[prompt.id]]])) == [[[prompt.id]]]
    assert depth > 800
