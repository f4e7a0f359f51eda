"""out_file and html_file of a run: what they hold, and how a later run resumes them."""
import json
import os
import sys
from contextlib import contextmanager

import pytest

from pages import SETTINGS, finished_sample, make_tokens, model_of
from sampling.outputs.jsonl import open_output
from sampling.outputs.outputs import Outputs, num_logprobs
from sampling.params import Prompt, Sample
from terminal import redirected

needs_unix = pytest.mark.skipif(sys.platform == "win32", reason="no such files or locks")


@contextmanager
def outputs_in(folder, **settings):
    """Outputs of a.jsonl and a.html in a folder. They are closed after the block, as at the end of a process."""
    paths = {"out_file": f"{folder}/a.jsonl", "html_file": f"{folder}/a.html"}
    outputs = Outputs(SETTINGS | paths | settings)
    try:
        yield outputs
    finally:
        if outputs.jsonl:
            outputs.jsonl.close()


@pytest.fixture
def run(tmp_path):
    """Run until count samples are saved: run(count, **settings) -> how many were already saved."""
    def run(count, models=None, die_after=99, **settings):
        with outputs_in(tmp_path, **settings) as outputs:
            for model in models or [model_of()]:
                samples = (Sample(index, Prompt("O"), []) for index in range(count))
                for sample in outputs.open(model, samples):
                    if not sample.already_saved and sample.index < die_after:
                        outputs.write(finished_sample(sample.index, "O", make_tokens(1 + sample.index)))
                if die_after == 99:
                    outputs.write_page()
        return outputs.num_saved
    return run


@pytest.fixture
def contents(tmp_path):
    """The contents of the two files: contents() -> (lines, page)."""
    return lambda: ((tmp_path / "a.jsonl").read_bytes(), (tmp_path / "a.html").read_bytes())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
@pytest.mark.parametrize("settings, name", [({}, "a.jsonl"), ({"out_file": None}, "a.html")], ids=["lines", "page"])
def test_a_full_disk_is_named_by_the_users_file(tmp_path, settings, name):
    with outputs_in(tmp_path, **settings) as outputs, open("/dev/full", "r+b", 0) as full:
        outputs.open(model_of(), iter([]))
        outputs.jsonl.close()
        outputs.jsonl = full
        with pytest.raises(OSError, match=f"cannot write '{tmp_path}/{name}': No space left on device"):
            outputs.write(finished_sample(0, "O", make_tokens(1)))


# ---- resuming

@pytest.mark.parametrize("end, message", [
    (-1, "is complete, with 3 samples: nothing to sample"), (-2, "holds 2 samples already: resuming after them"),
    (0, ""), (10, "")], ids=["no-newline", "half-a-line", "no-line", "half-the-first"])
def test_lines_and_page_of_a_killed_run_become_those_of_a_whole_one(run, contents, tmp_path, messages, end, message):
    run(3)
    whole = contents()
    (tmp_path / "a.jsonl").write_bytes(whole[0][:end])
    if end >= 0: # a page is written after the first line
        (tmp_path / "a.html").unlink()
    run(3)
    assert contents() == whole
    assert messages == ([f"{tmp_path}/a.jsonl {message}"] if message else [])


@pytest.mark.parametrize("logprobs, num_top", [(None, 5), (2, 5), (7, 7)])
def test_a_longer_run_adds_to_both_files(run, contents, tmp_path, logprobs, num_top):
    run(5, logprobs=logprobs)
    whole = contents()
    for path in tmp_path.iterdir():
        path.unlink()
    assert run(2, logprobs=logprobs) == 0 and run(5, logprobs=logprobs) == 2
    assert contents() == whole and b'"application/json">[[' in whole[1]
    assert json.loads(whole[0].splitlines()[0])["settings"]["logprobs"] == num_top
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "a.html"}


@pytest.mark.parametrize("settings", [{}, {"out_file": None}], ids=str)
def test_the_page_grows_with_the_run_but_is_not_written_for_every_sample(tmp_path, settings):
    with outputs_in(tmp_path, **settings) as outputs:
        for model, index, is_due, num_shown in [(1, 0, True, 1), (1, 1, False, 1), (2, 0, True, 3), (2, 1, True, 4)]:
            outputs.open(model_of(str(model)), iter([]))
            outputs.next_page_time = 0 if is_due else outputs.next_page_time
            outputs.write(finished_sample(index, "O", make_tokens(1)))
            assert (tmp_path / "a.html").read_text().count("</article>") == num_shown


def test_a_page_alone_leaves_no_other_file_and_no_page_is_replaced_without_its_lines(run, tmp_path):
    run(2, out_file=None)
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
    page = (tmp_path / "a.html").read_bytes()
    for settings, content in ({"out_file": None}, page), ({}, page), ({}, b"<!DOCTYPE html>mine"):
        (tmp_path / "a.html").write_bytes(content)
        with pytest.raises(ValueError, match="exists already, and nothing is overwritten"):
            run(2, **settings)
        assert (tmp_path / "a.html").read_bytes() == content


@pytest.mark.parametrize("changes, message", [
    ({"seed": 5}, "line 1, is from another run: seed is 1 there, and 5 here"),
    ({"models": [model_of("2")]}, "line 1, is from another run: the checkpoint's checksum is '00000000' there"),
    ({"count": 2}, "holds 3 samples, more than this run generates")], ids=str)
def test_the_file_of_another_run_is_refused_and_stays_unchanged(run, contents, changes, message):
    run(3)
    before = contents()
    with pytest.raises(ValueError, match=message):
        run(**{"count": 3, **changes})
    assert contents() == before


@pytest.mark.parametrize("content", [b"my notes\n", b"no line end", b'{"version": 2, "index": 1, "pro'])
def test_other_files_are_refused_and_stay_unchanged(run, tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: .*is not overwritten"):
        run(3, html_file=None)
    assert (tmp_path / "a.jsonl").read_bytes() == content


# ---- watch: lines of several checkpoints

@pytest.mark.parametrize("end", [-1, -2, 250], ids=["no-newline", "half-a-line", "half-the-first"])
@pytest.mark.parametrize("is_newer", [False, True])
def test_watch_resumes_the_last_checkpoint_or_goes_on_with_a_newer_one(run, contents, tmp_path, end, is_newer):
    old, last, new = model_of("1", 100), model_of("2", 200), model_of("3", 300)
    run(2, [old], watch=True, html_file=None)
    first = (tmp_path / "a.jsonl").read_bytes()
    run(2, [last], watch=True, html_file=None)
    whole = (tmp_path / "a.jsonl").read_bytes()
    cut = whole[:end] if end < 0 else whole[:len(first) + end]
    (tmp_path / "a.jsonl").write_bytes(cut)
    run(2, [new if is_newer else last], watch=True, html_file=None)
    kept = whole if end == -1 else cut[:cut.rfind(b"\n") + 1] # the complete lines of the last checkpoint
    newer = kept + first.replace(b'"1"', b'"3"').replace(b": 100}", b": 300}")
    assert (tmp_path / "a.jsonl").read_bytes() == (newer if is_newer else whole)


@pytest.mark.parametrize("crc32, line", [("2", 3), ("3", 4)])
def test_watch_refuses_a_file_of_other_settings(run, crc32, line):
    run(2, [model_of("1"), model_of("2")], watch=True, html_file=None)
    with pytest.raises(ValueError, match=f"line {line}, is from another run: seed is 1 there, and 5 here"):
        run(2, [model_of(crc32)], watch=True, seed=5, html_file=None)


# ---- overwrite

def test_overwrite_replaces_both_files_when_the_first_sample_is_finished(run, contents):
    run(2)
    whole = contents()
    run(2, seed=5, overwrite=True, die_after=0)
    assert contents() == whole
    run(4, seed=5, overwrite=True)
    assert run(2, overwrite=True) == 0 and contents() == whole


@pytest.mark.parametrize("name", ["out_file", "html_file"])
@pytest.mark.parametrize("content", [b'{"version": "1.0"}', b"<!DOCTYPE html>\nmine"])
def test_overwrite_replaces_no_file_that_sample_py_did_not_write(run, tmp_path, name, content):
    run(1)
    (tmp_path / "other").write_bytes(content)
    saved = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"other was not written by sample.py, so --overwrite does not replace it"):
        run(1, overwrite=True, **{name: f"{tmp_path}/other"})
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == saved


@needs_unix
@pytest.mark.parametrize("start", ["LINES:{}/link", "JSONL:-", "LINES:/dev/stdin"])
def test_overwrite_does_not_replace_the_prompts(run, tmp_path, start):
    run(1, html_file=None)
    path = (tmp_path / "a.jsonl").rename(tmp_path / "a")
    (tmp_path / "link").hardlink_to(path)
    with open(path) as stdin, redirected(0, stdin), pytest.raises(ValueError, match="/a is also the file of prompts"):
        run(1, start=start.format(tmp_path), out_file=str(path), overwrite=True)


# ---- standard output, and files that cannot be used

def test_lines_on_standard_output_hold_no_commands_for_a_terminal(run, tmp_path, monkeypatch, capsys):
    run(2, start="O", html_file=None)
    run(2, out_file="-", html_file=None)
    assert capsys.readouterr().out == (tmp_path / "a.jsonl").read_text()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    outputs = Outputs(SETTINGS | {"out_file": "-"})
    outputs.open(model_of(), [])
    outputs.write(finished_sample(0, "\x1b\x9b", make_tokens(1)))
    assert '"prompt": "\\u001b\ufffd"' in capsys.readouterr().out


@pytest.mark.parametrize("settings, number", [
    ({}, None), ({"show_probs": True}, 0), ({"out_file": "a"}, 0), ({"out_file": "a", "logprobs": 3}, 3),
    ({"html_file": "a"}, 5), ({"html_file": "a", "out_file": "b", "logprobs": 7}, 7)], ids=str)
def test_log_probabilities_are_computed_if_an_output_needs_them(settings, number):
    assert num_logprobs(SETTINGS | {"show_probs": False} | settings) == number


@needs_unix
def test_a_file_that_cannot_be_used_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with open_output(tmp_path / "file"), pytest.raises(ValueError, match=r"another run writes to .*file: give"):
        open_output(tmp_path / "file")
    for path, reason in [("", "is not a regular file"), ("pipe", "is not a regular file"), ("file/a", "Not a direc"),
                         ("no/such", "there is no folder"), ("x" * 300, "File name too long")]:
        with pytest.raises((ValueError, OSError), match=reason):
            open_output(f"{tmp_path}/{path}")
    stdout_error = pytest.raises(ValueError, match=r"standard output goes to .*out: give the file another name")
    with open(tmp_path / "out", "wb") as out, redirected(1, out), stdout_error:
        open_output(tmp_path / "out")
