"""out_file and html_file of a run together."""
import os
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from models import make_gpt, save_checkpoint
from pages import finished_sample, make_token
from sampling.checkpoints.checkpoint import Checkpoint
from sampling.outputs.outputs import num_logprobs, open_outputs
from sampling.params import Prompt, SampleRequest

CHECKPOINT = Checkpoint("out/ckpt.pt", {}, {}, 3, Path("out"), crc32="00000000")
SETTINGS = dict(init_from="resume", out_dir="out", start="O", num_samples=2, max_new_tokens=9, temperature=0.8, top_k=None, top_p=None, min_p=None,
                repetition_penalty=1.0, stop=None, seed=1, compile=False, context_shift=False, exact=False, tokenizer=None, out_file=None, logprobs=None, html_file=None,
                overwrite=False)
REQUESTS = [SampleRequest(index, Prompt("O"), []) for index in range(4)]


def run(tmp_path, count, out_file=True, html_file=True, overwrite=False):
    """Run until count samples are saved. Return how many were already saved."""
    settings = {**SETTINGS, "out_file": f"{tmp_path}/a.jsonl" if out_file else None, "html_file": f"{tmp_path}/a.html" if html_file else None, "overwrite": overwrite}
    outputs = open_outputs(settings, CHECKPOINT, "cpu", "float32")
    with closing(outputs):
        for request in outputs.resume(iter(REQUESTS[:count])):
            if not request.already_saved:
                outputs.write(finished_sample(request.index, "O", [make_token("x", 0.5)]))
    return outputs.num_saved


@contextmanager
def redirected(descriptor, file):
    """Let a file descriptor of this process be another file."""
    saved = os.dup(descriptor)
    os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)


def test_without_files_nothing_is_saved(tmp_path):
    assert run(tmp_path, 3, out_file=False, html_file=False) == 0
    assert not list(tmp_path.iterdir())


def test_both_files_resume_together(tmp_path, capsys):
    assert run(tmp_path, 4) == 0
    whole = (tmp_path / "a.jsonl").read_bytes(), (tmp_path / "a.html").read_bytes()
    (tmp_path / "a.jsonl").write_bytes(b"".join(whole[0].splitlines(keepends=True)[:2]))
    assert run(tmp_path, 4) == 2
    assert f"{tmp_path}/a.jsonl holds 2 samples already: resuming after them\n" in capsys.readouterr().err
    assert ((tmp_path / "a.jsonl").read_bytes(), (tmp_path / "a.html").read_bytes()) == whole


@pytest.mark.parametrize("end", [-1, -2], ids=["no-newline", "truncated"])
def test_both_files_resume_together_after_a_line_without_its_newline(tmp_path, end):
    run(tmp_path, 3)
    whole = (tmp_path / "a.jsonl").read_bytes(), (tmp_path / "a.html").read_bytes()
    (tmp_path / "a.jsonl").write_bytes(whole[0][:end])
    run(tmp_path, 3)
    assert ((tmp_path / "a.jsonl").read_bytes(), (tmp_path / "a.html").read_bytes()) == whole


@pytest.mark.parametrize("line", [b"", b'{"version"'], ids=["no-line", "truncated-line"])
def test_a_run_that_died_on_its_first_sample_is_resumed(tmp_path, line):
    run(tmp_path, 3)
    whole = (tmp_path / "a.jsonl").read_bytes(), (tmp_path / "a.html").read_bytes()
    (tmp_path / "a.jsonl").write_bytes(line)
    (tmp_path / "a.html").write_bytes(whole[1].partition(b'<article id="sample-1"')[0])
    assert run(tmp_path, 3) == 0
    assert ((tmp_path / "a.jsonl").read_bytes(), (tmp_path / "a.html").read_bytes()) == whole


def test_a_refused_resume_changes_neither_file(run_script, tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt())
    (tmp_path / "prompts.txt").write_text("O\nyes\nno\n")
    arguments = "--start=LINES:prompts.txt", "--num_samples=1", "--max_new_tokens=9", "--out_file=a.jsonl", "--html_file=a.html"
    assert run_script(*arguments, cwd=tmp_path).returncode == 0
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:2])) # the page has a sample more
    files = (tmp_path / "a.jsonl").read_bytes(), (tmp_path / "a.html").read_bytes()
    (tmp_path / "prompts.txt").write_text("O\nother\nno\n")
    done = run_script(*arguments, cwd=tmp_path)
    assert done.returncode == 1 and "line 2, is from another run" in done.stderr
    assert ((tmp_path / "a.jsonl").read_bytes(), (tmp_path / "a.html").read_bytes()) == files


def test_files_that_grow_equal_files_made_at_once(run_script, tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt())
    run = ("--start=O", "--max_new_tokens=20", "--device=cpu")
    for name, counts in ("grown", [2, 5]), ("whole", [5]):
        for count in counts:
            assert run_script(*run, f"--num_samples={count}", f"--out_file={name}.jsonl", f"--html_file={name}.html", cwd=tmp_path).returncode == 0
    for kind in "jsonl", "html":
        assert (tmp_path / f"grown.{kind}").read_bytes() == (tmp_path / f"whole.{kind}").read_bytes()


def test_a_refused_file_is_not_said_to_be_resumed(tmp_path, capsys):
    run(tmp_path, 2)
    capsys.readouterr()
    with pytest.raises(ValueError, match="more than this run generates"):
        run(tmp_path, 1)
    (tmp_path / "a.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes().replace(b'"seed": 1', b'"seed": 2'))
    with pytest.raises(ValueError, match="from another run"):
        run(tmp_path, 4, html_file=False)
    assert capsys.readouterr().err == ""


def test_a_complete_file_is_named(tmp_path, capsys):
    run(tmp_path, 2)
    assert capsys.readouterr().err == ""
    run(tmp_path, 2)
    assert capsys.readouterr().err == f"{tmp_path}/a.jsonl is complete, with 2 samples: nothing to sample\n"


def test_lines_of_json_go_to_standard_output(tmp_path, capsys):
    run(tmp_path, 2)
    outputs = open_outputs({**SETTINGS, "out_file": "-"}, CHECKPOINT, "cpu", "float32")
    assert outputs.uses_stdout and outputs.num_saved == 0 and list(outputs.resume(iter(REQUESTS))) == REQUESTS
    for index in range(2):
        outputs.write(finished_sample(index, "O", [make_token("x", 0.5)]))
    outputs.close()
    assert capsys.readouterr().out == (tmp_path / "a.jsonl").read_text()
    assert not open_outputs(SETTINGS, CHECKPOINT, "cpu", "float32").uses_stdout


def test_lines_of_json_on_a_terminal_hold_no_commands(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    open_outputs({**SETTINGS, "out_file": "-"}, CHECKPOINT, "cpu", "float32").write(finished_sample(0, "O", [make_token("\x1b\x9b\n", 0.5)]))
    assert '"text": "\\u001b\ufffd\\n"' in capsys.readouterr().out


@pytest.mark.parametrize("settings, number", [
    ({}, None), ({"show_probs": True}, 0), ({"out_file": "a"}, 0), ({"out_file": "a", "logprobs": 0}, 0), ({"out_file": "a", "logprobs": 3}, 3),
    ({"html_file": "a"}, 5), ({"html_file": "a", "out_file": "b", "logprobs": 3}, 5), ({"html_file": "a", "out_file": "b", "logprobs": 7}, 7),
], ids=str)
def test_log_probabilities_are_computed_if_an_output_needs_them(settings, number):
    assert num_logprobs({**SETTINGS, "show_probs": False, **settings}) == number


def test_overwrite_replaces_both_files(tmp_path):
    run(tmp_path, 2)
    whole = (tmp_path / "a.jsonl").read_bytes(), (tmp_path / "a.html").read_bytes()
    run(tmp_path, 4, overwrite=True)
    assert run(tmp_path, 2, overwrite=True) == 0
    assert ((tmp_path / "a.jsonl").read_bytes(), (tmp_path / "a.html").read_bytes()) == whole
    (tmp_path / "a.html").unlink()
    (tmp_path / "a.html").mkdir()
    with pytest.raises(ValueError, match="is not a regular file"):
        run(tmp_path, 4, overwrite=True)
    assert (tmp_path / "a.jsonl").read_bytes() == whole[0] # neither is emptied


@pytest.mark.parametrize("name", ["out_file", "html_file"])
@pytest.mark.parametrize("content", [b"weights", b'{"prompt": "O"}\n', b'{"version": "1.0", "truncation": null}', b"<!DOCTYPE html>\n<p>mine</p>"], ids=repr)
def test_overwrite_replaces_no_file_that_sample_py_did_not_write(tmp_path, name, content):
    """Such as the checkpoint, the prompts or a tokenizer. The other file is not emptied either."""
    run(tmp_path, 1)
    (tmp_path / "other").write_bytes(content)
    paths = {"out_file": f"{tmp_path}/a.jsonl", "html_file": f"{tmp_path}/a.html", name: f"{tmp_path}/other"}
    saved = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"^.*other was not written by sample.py, so --overwrite does not replace it: move it, or give the file another name$"):
        open_outputs({**SETTINGS, **paths, "overwrite": True}, CHECKPOINT, "cpu", "float32")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == saved


@pytest.mark.parametrize("name", ["out_file", "html_file"])
@pytest.mark.parametrize("start", ["FILE:{}/a", "LINES:{}/link", "JSONL:-", "LINES:/dev/stdin"])
def test_overwrite_does_not_replace_the_prompts(tmp_path, name, start):
    run(tmp_path, 1, html_file=False)
    path = (tmp_path / "a.jsonl").rename(tmp_path / "a")
    (tmp_path / "link").hardlink_to(path)
    with open(path) as stdin, redirected(0, stdin), pytest.raises(ValueError, match="/a is also the file of prompts: give the file of samples another name"):
        open_outputs({**SETTINGS, "start": start.format(tmp_path), name: str(path), "overwrite": True}, CHECKPOINT, "cpu", "float32")


def test_overwrite_keeps_the_files_until_a_sample_is_finished(tmp_path):
    run(tmp_path, 2)
    saved = {path: path.read_bytes() for path in tmp_path.iterdir()}
    settings = {**SETTINGS, "out_file": f"{tmp_path}/a.jsonl", "html_file": f"{tmp_path}/a.html", "overwrite": True}
    outputs = open_outputs(settings, CHECKPOINT, "cpu", "float32")
    assert not any(request.already_saved for request in outputs.resume(iter(REQUESTS)))
    assert {path: path.read_bytes() for path in saved} == saved
    outputs.write(finished_sample(0, "O", [make_token("y", 0.5)]))
    assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == (tmp_path / "a.html").read_bytes().count(b"</article>") == 1
    outputs.close()


def test_a_run_of_many_prompts_does_not_resume_a_run_of_one(tmp_path):
    run(tmp_path, 2, html_file=False)
    (tmp_path / "p.txt").write_text("O\n")
    outputs = open_outputs({**SETTINGS, "start": f"LINES:{tmp_path}/p.txt", "out_file": f"{tmp_path}/a.jsonl"}, CHECKPOINT, "cpu", "float32")
    with closing(outputs), pytest.raises(ValueError, match="that run had one prompt, and this one has a file of many prompts"):
        list(outputs.resume(iter(REQUESTS)))


def test_replaced_characters_in_lines_of_json_are_logged(monkeypatch):
    told = []
    monkeypatch.setattr("sampling.outputs.jsonl.log_replacements", lambda: told.append(True))
    open_outputs({**SETTINGS, "out_file": "-"}, CHECKPOINT, "cpu", "float32").write(finished_sample(0, "O", [make_token("x", 0.5)]))
    assert told


def test_a_page_alone_is_not_resumed(tmp_path):
    run(tmp_path, 2, out_file=False)
    with pytest.raises(ValueError, match="exists already"):
        run(tmp_path, 2, out_file=False)


def test_the_page_names_the_model_the_prompt_and_the_settings(tmp_path):
    """The page of another run begins differently, so it is refused."""
    run(tmp_path, 1, out_file=False)
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    for text in "<title>Samples from out</title>", "<dt>start</dt><dd>&#x27;O&#x27;</dd>", "<dt>temperature</dt><dd>0.8</dd>", "<dt>device</dt><dd>&#x27;cpu&#x27;</dd>":
        assert text in page


def test_a_sample_is_written_to_the_page_before_the_jsonl_file(tmp_path, monkeypatch):
    """If a run dies between the two writes, only the page has the sample, and a resumed run removes it from the page."""
    settings = {**SETTINGS, "out_file": f"{tmp_path}/a.jsonl", "html_file": f"{tmp_path}/a.html"}
    outputs = open_outputs(settings, CHECKPOINT, "cpu", "float32")
    (tmp_path / "a.jsonl").unlink() # the next write to it fails
    with pytest.raises(OSError):
        outputs.write(finished_sample(0, "O", [make_token("x", 0.5)]))
    assert b"</article>" in (tmp_path / "a.html").read_bytes()
    outputs.close()
