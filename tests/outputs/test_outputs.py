"""out_file and html_file of a run: what they hold, and how a later run resumes them."""
import fcntl
import gc
import os
import sys

import pytest

from pages import SETTINGS, make_tokens, model_of
from sampling.outputs import console
from sampling.outputs.jsonl import open_output
from sampling.outputs.outputs import OutputFiles, Outputs
from sampling.params import Piece, Prompt, Sample, choose_params, complete_settings
from script_process import redirected

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning") # files stay open


@pytest.fixture
def start(tmp_path):
    """Makes the Outputs of a run with a.jsonl and a.html, unless settings say otherwise."""
    console.setup_console(owns_process=False)
    paths = {"out_file": f"{tmp_path}/a.jsonl", "html_file": f"{tmp_path}/a.html"}
    yield lambda **settings: OutputFiles(complete_settings(SETTINGS | paths | settings))
    console.before_exit.clear()
    gc.collect() # a run that ends early leaves its files open: the warnings must not come in another test


def generate(files, count, gpt=None, num_finished=99):
    """Finish samples of a model, as the engine does. Sample i has i + 1 tokens. Returns the Outputs."""
    samples = (Sample(index, Prompt("O"), [79]) for index in range(count))
    outputs = Outputs(files, gpt or model_of(), count)
    for sample in outputs.resume(samples):
        if not sample.already_saved and sample.index < num_finished:
            sample.tokens, sample.finish_reason = make_tokens(sample.index + 1), "length"
            outputs.update(sample, [Piece(sample.text)])
    return outputs


@pytest.fixture
def run(start):
    """A run of count samples of each model. It is killed if num_finished is given."""
    def run(count=3, models=(None,), num_finished=None, **settings):
        files = start(**settings)
        try:
            for gpt in models:
                outputs = generate(files, count, gpt, num_finished or 99)
                if num_finished is None:
                    outputs.finish()
            if num_finished is None:
                with console.report_user_errors(): # at its end, the run ends
                    pass
        finally:
            console.before_exit.clear()
            if files.lines:
                files.lines.file.close()
    return run


@pytest.fixture
def files(tmp_path):
    """The files that there are: files() -> {name: content}."""
    return lambda: {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def num_shown(folder):
    return (folder / "a.html").read_bytes().count(b"</article>")


@pytest.mark.parametrize("end, message", [
    (-1, "a.jsonl is complete, with 3 samples: nothing to do"),
    (-2, "a.jsonl holds 2 samples already: resuming after them"), (0, ""), (10, "")],
    ids=["no-newline", "half-a-line", "no-line", "half-the-first"])
def test_the_files_of_a_killed_run_become_those_of_a_whole_one(run, files, tmp_path, messages, capsys, end, message):
    run()
    whole, printed = files(), capsys.readouterr().out
    (tmp_path / "a.jsonl").write_bytes(whole["a.jsonl"][:end])
    if end >= 0: # without samples in out_file, no page is replaced
        (tmp_path / "a.html").unlink()
    messages.clear()
    run()
    assert files() == whole and num_shown(tmp_path) == 3
    assert "\n".join(messages).count("a.jsonl ") == bool(message) and message in "\n".join(messages)
    assert printed.endswith(capsys.readouterr().out) # saved samples are not shown again


@pytest.mark.parametrize("mine, changes, message", [
    ({}, {"watch": True, "seed": 5, "models": [model_of("2")]}, "line 1, is from another run: seed is 1 there"),
    ({}, {"count": 2}, "line 3, is one sample more than this run generates"),
    ({"a.jsonl": b"my notes\n"}, {}, r"a\.jsonl was not written by sample\.py"),
    ({"a.jsonl": b'{"version": 1, "index": 0, "pro'}, {}, r"a\.jsonl, line 1: another version of sample\.py wrote it"),
    ({"a.jsonl": b'{"version": "1.0"}'}, {"overwrite": True}, r"a\.jsonl was not written by sample\.py"),
    ({"a.html": b"<!DOCTYPE html>\nmine"}, {"overwrite": True}, r"a\.html was not written by sample\.py"),
])
def test_other_files_are_refused_and_stay_unchanged(run, files, tmp_path, mine, changes, message):
    run()
    for name, content in mine.items():
        (tmp_path / name).write_bytes(content)
    before = files()
    with pytest.raises(ValueError, match=message):
        run(**changes)
    assert files() == before


@pytest.mark.parametrize("end", [-1, -2, 250], ids=["no-newline", "half-a-line", "half-the-first"])
@pytest.mark.parametrize("is_newer", [False, True])
def test_watch_resumes_the_last_checkpoint_or_goes_on_with_a_newer_one(run, tmp_path, end, is_newer):
    path, watch = tmp_path / "a.jsonl", {"watch": True, "html_file": None}
    run(2, [model_of("1")], **watch)
    first = path.read_bytes()
    run(2, [model_of("2")], **watch)
    whole = path.read_bytes()
    cut = whole[:end] if end < 0 else whole[:len(first) + end]
    path.write_bytes(cut)
    run(2, [model_of("3" if is_newer else "2")], **watch)
    kept = whole if end == -1 else cut[:cut.rfind(b"\n") + 1] # the complete lines
    assert path.read_bytes() == (kept + first.replace(b"00000001", b"00000003") if is_newer else whole)


def test_the_page_is_written_after_each_model_and_before_an_early_end(start, tmp_path, capsys):
    outputs = generate(files := start(watch=True), 2, model_of("1"))
    assert capsys.readouterr().out.startswith("O w0\n") # without a heading, because this is no terminal
    assert not (tmp_path / "a.html").exists()
    outputs.finish()
    assert num_shown(tmp_path) == 2
    generate(files, 2, model_of("2"), num_finished=1)
    assert num_shown(tmp_path) == 2
    with pytest.raises(SystemExit), console.report_user_errors():
        raise ValueError("the next prompt cannot be encoded")
    assert num_shown(tmp_path) == 3


def test_without_out_file_the_lines_are_in_the_file_of_the_same_name(run, files, tmp_path, capsys):
    run(2)
    whole = files()
    for path in tmp_path.iterdir():
        path.unlink()
    run(2, out_file=None, num_finished=1) # it is killed
    assert files() == {"a.jsonl": whole["a.jsonl"].splitlines(keepends=True)[0]}
    run(2, out_file=None)
    assert files() == whole
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1, is from another run: seed is 1 there"):
        run(2, out_file=None, seed=5)
    capsys.readouterr()
    run(2, out_file="-", overwrite=True)
    assert files() == whole and capsys.readouterr().out == whole["a.jsonl"].decode()
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ValueError, match="exists already, and nothing is overwritten"):
        run(2, out_file=None) # no page is replaced without its lines
    assert files()["a.html"] == whole["a.html"]


@pytest.mark.parametrize("more", [b"\n \r\n", b"\0" * 300], ids=["blank-lines", "zeros"])
def test_what_an_editor_or_a_crash_adds_at_the_end_is_removed(run, files, tmp_path, more):
    run()
    whole = files()
    (tmp_path / "a.jsonl").write_bytes(whole["a.jsonl"] + more)
    run()
    assert files() == whole


def test_only_a_file_that_the_run_has_created_is_removed(start, tmp_path):
    (tmp_path / "mine").touch()
    (tmp_path / "link").symlink_to("created")
    for name in "mine", "link":
        start(out_file=f"{tmp_path}/{name}", html_file=None)
        console.end_run(1)
    assert sorted(os.listdir(tmp_path)) == ["link", "mine"]


def test_a_file_that_another_run_removes_meanwhile_is_made_again(start, tmp_path, monkeypatch):
    path, flock = tmp_path / "a.jsonl", fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: (path.unlink() if opened.pop() else None, flock(*arguments)))
    opened = [False, True]
    generate(start(html_file=None), 1)
    assert path.read_bytes().count(b"\n") == 1


def test_a_file_that_is_moved_during_the_run_is_an_error_that_says_so(start, tmp_path):
    generate(start(html_file=None), 1)
    (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl was moved, deleted or replaced while this run wrote to it"):
        console.end_run(0)
    assert (tmp_path / f"a.jsonl.{os.getpid()}").read_bytes() == (tmp_path / "b.jsonl").read_bytes() != b""


@pytest.mark.parametrize("paths", [{"html_file": None}, {"out_file": None}], ids=str)
def test_ctrl_c_before_the_first_sample_leaves_no_file_and_says_so(start, files, messages, paths):
    generate(start(**paths), 2, num_finished=0)
    console.end_run(130)
    assert files() == {} and messages == ["no sample was finished, so nothing new is saved"]


def test_overwrite_replaces_both_files_when_the_first_sample_is_finished(run, start, files, messages):
    run(2)
    whole = files()
    generate(start(seed=5, overwrite=True), 2, num_finished=0)
    console.end_run(130) # Ctrl-C
    assert files() == whole and "goes on" not in messages[-1]
    generate(start(seed=5, overwrite=True), 4)
    console.end_run(130)
    assert messages[-1].endswith("a.jsonl holds 4 samples: the same command with the same seed and without --overwrite "
                                 "goes on after them")
    run(2, overwrite=True)
    assert files() == whole


def test_lines_on_standard_output_hold_no_commands_for_a_terminal(run, tmp_path, monkeypatch, capsys):
    run(2, html_file=None)
    capsys.readouterr()
    run(2, out_file="-", html_file=None)
    assert capsys.readouterr().out == (tmp_path / "a.jsonl").read_text()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    run(1, [model_of(iter_num="\x9b")], out_file="-", html_file=None)
    assert '"iter_num": "\ufffd"' in capsys.readouterr().out


def test_a_sample_is_saved_before_it_is_shown(start, tmp_path, monkeypatch):
    def write(text):
        raise OSError(28, "No space left on device")
    files = start(html_file=None)
    monkeypatch.setattr(sys.stdout, "write", write)
    with pytest.raises(OSError, match="cannot write 'standard output': No space left on device"):
        generate(files, 2)
    assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("settings, number", [
    ({}, None), ({"show_probs": True}, 0), ({"out_file": "a"}, 0), ({"out_file": "a", "logprobs": 3}, 3),
    ({"html_file": "a"}, 5), ({"html_file": "a", "out_file": "b", "logprobs": 7}, 7)], ids=str)
def test_log_probabilities_are_computed_if_an_output_needs_them(settings, number):
    assert choose_params(complete_settings(SETTINGS | settings)).num_logprobs == number


def test_a_file_that_cannot_be_used_is_an_error_before_a_model_is_loaded(start, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with open_output(tmp_path / "file"), pytest.raises(ValueError, match=r"another run writes to .*file: give"):
        start(out_file=f"{tmp_path}/file")
    for path, reason in [("", "is a folder, a device or a pipe, and not a file"), ("pipe", "and not a file"),
                         ("file/a", "Not a direc"), ("no/such", "the folder .*/no is missing, or takes no files")]:
        for settings in {"out_file": f"{tmp_path}/{path}"}, {"out_file": None, "html_file": f"{tmp_path}/{path}"}:
            with pytest.raises((ValueError, OSError), match=reason):
                start(**settings)
    with open(tmp_path / "samples", "wb") as file, redirected(1, file), pytest.raises(ValueError, match="out_file=-"):
        start(out_file=file.name)
    with pytest.raises(ValueError, match="is the file of the prompts"):
        start(out_file=file.name, start=f"JSONL:{file.name}", overwrite=True)
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(ValueError, match="standard output is closed"):
        start(out_file=None, html_file=None)


@pytest.mark.parametrize("settings", [{}, {"out_file": None}], ids=str)
def test_a_run_that_fails_while_its_model_is_loaded_leaves_no_files(start, files, settings):
    start(**settings)
    with pytest.raises(SystemExit), console.report_user_errors():
        raise OSError("there is no folder out")
    assert files() == {}
