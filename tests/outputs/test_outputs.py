"""out_file and html_file of a run: what they hold, and how a later run resumes them."""
import fcntl
import itertools
import os
import re
import sys

import pytest

from pages import SETTINGS, make_tokens, model_of
from sampling.outputs import console, lines_file
from sampling.outputs.lines_file import open_output
from sampling.outputs.outputs import OutputFiles, Outputs
from sampling.samples import Piece, Prompt, Sample
from sampling.settings import complete_settings
from script_process import redirected


@pytest.fixture
def start(tmp_path):
    """start(**settings): a run's settings and OutputFiles, by default a.jsonl and a.html."""
    console.setup_console(owns_process=False)
    paths = {"out_file": f"{tmp_path}/a.jsonl", "html_file": f"{tmp_path}/a.html"}

    def start(**changes):
        settings = complete_settings(SETTINGS | paths | changes)
        names = "out_file", "html_file", "start", "overwrite"
        return settings, OutputFiles(*(settings[name] for name in names))

    yield start
    console.end_run(1)


def generate(started, count, gpt=None, num_finished=99):
    """Finish samples of a model, as the engine does. Sample i has i + 1 tokens.

    Returns the Outputs.
    """
    samples = (Sample(index, Prompt("O"), [79]) for index in range(count))
    outputs = Outputs(*started, gpt or model_of(), iter([]))
    for sample in outputs.resume(samples):
        if not sample.already_saved and sample.index < num_finished:
            sample.tokens = make_tokens(sample.index + 1)
            sample.finish_reason = "length"
            outputs.update(sample, [Piece(sample.text)])
    return outputs


@pytest.fixture
def run(start):
    """run(count, models, **settings): a whole run of count samples of each model."""
    def run(count=3, models=(None,), **settings):
        try:
            started = start(**settings)
            for gpt in models:
                generate(started, count, gpt).finish()
        finally:
            console.end_run(0)
    return run


@pytest.fixture
def files(tmp_path):
    """The files that there are: files() -> {name: content}."""
    return lambda: {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def num_shown(folder):
    return (folder / "a.html").read_bytes().count(b"</article>")


COMPLETE = "a.jsonl is complete, with 3 samples: nothing to do"


@pytest.mark.parametrize("end, more, message", [
    (-1, b"", COMPLETE), # the last line is whole
    (-2, b"", "a.jsonl holds 2 samples already: resuming after them"),
    (0, b"", ""),
    (10, b"", ""),
    (None, b"\n \r\n", COMPLETE), # an editor adds blank lines, a crash adds zeros
    (None, b"\0" * 300, COMPLETE),
])
def test_the_files_of_a_killed_run_become_those_of_a_whole_one(
        run, files, tmp_path, messages, capsys, end, more, message):
    run()
    whole = files()
    printed = capsys.readouterr().out
    (tmp_path / "a.jsonl").write_bytes(whole["a.jsonl"][:end] + more)
    if not message: # without samples in out_file, no page is replaced
        (tmp_path / "a.html").unlink()
    messages.clear()
    run()
    assert files() == whole
    assert num_shown(tmp_path) == 3
    text = "\n".join(messages)
    assert message in text
    assert text.count("a.jsonl ") == bool(message)
    assert printed.endswith(capsys.readouterr().out), "saved samples are not shown again"


@pytest.mark.parametrize("mine, changes, message", [
    ({}, {"watch": True, "seed": 5, "models": [model_of("2")]},
     "line 1, is from another run: seed is 1 there"),
    ({}, {"count": 2}, "line 3, is one sample more than this run generates"),
    ({"a.jsonl": b'{"version": 1, "index": 0, "pro'}, {},
     r"a\.jsonl, line 1: another version of sample\.py wrote it"),
    ({"a.jsonl": b'{"version": "1.0"}'}, {"overwrite": True},
     r"a\.jsonl was not written by sample\.py"),
    ({"a.html": b"<!DOCTYPE html>\nmine"}, {"overwrite": True},
     r"a\.html was not written by sample\.py"),
])
def test_other_files_are_refused_and_stay_unchanged(run, files, tmp_path, mine, changes, message):
    run()
    for name, content in mine.items():
        (tmp_path / name).write_bytes(content)
    before = files()
    with pytest.raises(ValueError, match=message):
        run(**changes)
    assert files() == before


@pytest.mark.parametrize("order, message", [
    ([0, 2], "line 2: the line of sample 1 is missing before it: put that back"),
    ([1, 2], "line 1: the line of sample 0 is missing"),
    ([0, 1, 1, 2], "line 3: it is doubled, or moved: sample 1 comes before sample 2, which"),
    ([0, 1, 2, 2], "line 4: it is doubled, or moved: sample 2 comes before sample 3"),
])
def test_a_line_that_is_missing_or_doubled_is_named_and_nothing_is_lost(
        run, files, tmp_path, order, message):
    run(html_file=None)
    whole = files()
    lines = whole["a.jsonl"].splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[i] for i in order))
    before = files()
    with pytest.raises(ValueError, match=message):
        run(html_file=None)
    assert files() == before
    number = int(message[5]) - 1
    if "doubled" in message: # what the message says
        del order[number]
    else:
        order.insert(number, number)
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[i] for i in order))
    run(html_file=None)
    assert files() == whole


def test_a_random_seed_is_named_in_the_command_that_resumes(run, start, files, messages):
    generate(start(seed="random", html_file=None), 3, num_finished=2)
    console.end_run(130) # Ctrl-C
    drawn = re.fullmatch(r"seed: (\d+), .*", messages[0])[1]
    assert messages[-1].endswith(f": the same command with --seed={drawn} goes on after them")
    with pytest.raises(ValueError, match=f"run with --seed={drawn}, or"):
        run(3, seed="random", html_file=None)
    run(3, seed=int(drawn), html_file=None)
    assert files()["a.jsonl"].count(b"\n") == 3


@pytest.mark.parametrize("num_whole", [0, 1])
def test_on_a_full_disk_the_disks_error_is_the_last_line_and_only_whole_lines_stay(
        start, run, tmp_path, monkeypatch, messages, num_whole):
    write = os.write
    calls = itertools.count()

    def fill_disk(descriptor, content):
        call = next(calls)
        if call > num_whole:
            raise OSError(28, "No space left on device")
        return write(descriptor, content[:-9] if call == num_whole else content)
    monkeypatch.setattr(os, "write", fill_disk)
    with pytest.raises(SystemExit), console.report_user_errors():
        generate(start(), 3)
    assert messages[-1] == f"cannot write '{tmp_path}/a.jsonl': No space left on device"
    monkeypatch.undo()
    assert num_whole == 0 or num_shown(tmp_path) == num_whole
    run()
    assert num_shown(tmp_path) == 3


def test_a_large_file_is_announced_before_it_is_read(run, messages, monkeypatch):
    run(html_file=None)
    monkeypatch.setattr(lines_file, "LARGE", 1000)
    run(html_file=None)
    assert messages[-2].endswith("a.jsonl: reading the 0 MB that are saved")


@pytest.mark.parametrize("num_whole, size, num_kept", [(3, -1, 4), (3, -2, 3), (2, 250, 2)])
@pytest.mark.parametrize("latest", ["2", "3"])
def test_watch_resumes_the_last_checkpoint_or_goes_on_with_a_newer_one(
        run, tmp_path, num_whole, size, num_kept, latest):
    """Of two lines of each of two checkpoints, some are whole, and size bytes are of the next."""
    def watch(crc32):
        run(2, [model_of(crc32)], watch=True, html_file=None)
    path = tmp_path / "a.jsonl"
    watch("1")
    watch("2")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:num_whole]) + lines[num_whole][:size])
    watch(latest)
    if latest == "3":
        lines[num_kept:] = [line.replace(b"00000001", b"00000003") for line in lines[:2]]
    assert path.read_bytes() == b"".join(lines)


def test_the_page_is_written_after_each_model_and_before_an_early_end(start, tmp_path, capsys):
    started = start(watch=True)
    outputs = generate(started, 2, model_of("1"))
    # No heading comes first.
    assert capsys.readouterr().out.startswith("O w0\n")
    assert not (tmp_path / "a.html").exists()
    outputs.finish()
    assert num_shown(tmp_path) == 2
    generate(started, 2, model_of("2"), num_finished=1)
    assert num_shown(tmp_path) == 2
    with pytest.raises(SystemExit), console.report_user_errors():
        raise ValueError("the next prompt cannot be encoded")
    assert num_shown(tmp_path) == 3


def test_a_page_that_another_run_wrote_meanwhile_is_not_replaced(start, run, files, tmp_path):
    generate(start(out_file=f"{tmp_path}/b.jsonl"), 2)
    first = console.before_exit[:]
    console.before_exit.clear()
    run(3)
    page = files()["a.html"]
    console.before_exit[:] = first
    with pytest.raises(ValueError, match=r"a\.html since .*b\.jsonl has the samples; give html_f"):
        console.end_run(0)
    assert files()["a.html"] == page
    run(2, out_file=f"{tmp_path}/b.jsonl", html_file=f"{tmp_path}/b.html")
    assert files()["b.html"].count(b"</article>") == 2


def test_without_out_file_the_lines_are_in_the_file_of_the_same_name(
        run, files, tmp_path, capsys):
    lines = tmp_path / "a.jsonl"
    run(2)
    whole = files()
    lines.write_bytes(whole["a.jsonl"].splitlines(keepends=True)[0])
    run(2, out_file=None)
    assert files() == whole
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1, is from another run: seed is 1 there"):
        run(2, out_file=None, seed=5)
    capsys.readouterr()
    run(2, out_file="-", overwrite=True)
    assert files() == whole
    assert capsys.readouterr().out == whole["a.jsonl"].decode()
    lines.unlink()
    with pytest.raises(ValueError, match="exists already, and nothing is overwritten"):
        run(2, out_file=None) # no page is replaced without its lines
    assert files() == {"a.html": whole["a.html"]}


@pytest.mark.parametrize("watch", [False, True])
def test_lines_without_log_probabilities_stay_and_their_page_has_no_colours(
        run, files, tmp_path, messages, watch):
    run(2, html_file=None, watch=watch)
    before = files()["a.jsonl"]
    messages.clear()
    run(2, watch=watch)
    assert files()["a.jsonl"] == before
    assert num_shown(tmp_path) == 2
    assert b'/json">[' not in files()["a.html"]
    assert "a.jsonl has lines that were not saved with logprobs=5: they stay" in "".join(messages)
    if not watch:
        run(3)
        assert files()["a.html"].count(b'/json">[') == 1
        run(3, html_file=None)


def test_only_a_file_that_the_run_has_created_is_removed(start, tmp_path):
    (tmp_path / "mine").touch()
    (tmp_path / "link").symlink_to("created")
    for name in "mine", "link":
        start(out_file=f"{tmp_path}/{name}", html_file=None)
        console.end_run(1)
    assert sorted(os.listdir(tmp_path)) == ["link", "mine"]


def test_a_file_that_another_run_removes_meanwhile_is_made_again(start, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    flock = fcntl.flock

    def remove_and_lock(*arguments):
        monkeypatch.undo()
        path.unlink()
        flock(*arguments)
    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    generate(start(html_file=None), 1)
    assert path.read_bytes().count(b"\n") == 1


def test_a_file_system_whose_inode_numbers_change_is_used_without_them(
        run, files, monkeypatch):
    """As on Samba and some FUSE."""
    run(2)
    whole = files()
    monkeypatch.setattr(os.path, "samefile", lambda *_: False)
    run(2, overwrite=True)
    run(3)
    assert files()["a.jsonl"].startswith(whole["a.jsonl"])
    assert files()["a.jsonl"].count(b"\n") == 3


@pytest.mark.parametrize("paths", [{"html_file": None}, {"out_file": None}])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_run_that_ends_before_its_first_sample_leaves_no_file_and_says_so(
        start, files, messages, paths, is_loaded):
    started = start(**paths)
    if is_loaded:
        generate(started, 2, num_finished=0)
    console.end_run(130) # Ctrl-C
    assert files() == {}
    assert messages == ["nothing was finished, so nothing new is saved"]


def test_overwrite_replaces_both_files_when_the_first_sample_is_finished(
        run, start, files, messages):
    run(2)
    whole = files()
    for count in 0, 4:
        assert files() == whole
        generate(start(seed=5, overwrite=True), 4, num_finished=count)
        console.end_run(130) # Ctrl-C
    *_, nothing, message = messages
    assert nothing == "nothing was finished, so nothing new is saved"
    assert message.endswith("a.jsonl holds 4 lines: the same command with --seed=5 and without "
                            "--overwrite goes on after them")
    run(2, overwrite=True)
    assert files() == whole


def test_lines_on_standard_output_hold_no_commands_for_a_terminal(run, monkeypatch, capsys):
    settings = dict(models=[model_of(iter_num="\x9b")], out_file="-", html_file=None)
    run(1, **settings)
    assert '"iter_num": "\x9b"' in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    run(1, **settings)
    assert '"iter_num": "\ufffd"' in capsys.readouterr().out


def test_a_sample_is_saved_before_it_is_shown(start, tmp_path, monkeypatch):
    def write(text):
        raise OSError(28, "No space left on device")
    started = start(html_file=None)
    monkeypatch.setattr(sys.stdout, "write", write)
    with pytest.raises(OSError, match="cannot write 'standard output': No space left on device"):
        generate(started, 2)
    assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("settings, is_terminal, has_bar", [
    ({}, True, False), ({}, False, True), ({"score": True}, True, True),
    ({"out_file": "-"}, True, True)])
def test_a_progress_bar_disturbs_no_text_that_streams_to_a_terminal(
        start, monkeypatch, settings, is_terminal, has_bar):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    outputs = Outputs(*start(html_file=None, **settings), model_of(), [])
    outputs.finish() # which closes the bar
    assert (outputs.progress.bar is not None) == has_bar


@pytest.mark.parametrize("name, reason", [
    (".", "is a folder, a device or a pipe, and not a file"),
    ("pipe", "and not a file"),
    ("file/a", "Not a direc"),
    ("no/such", "the folder .*/no is missing, or takes no files"),
])
def test_a_path_that_takes_no_file_is_an_error_before_a_model_is_loaded(
        start, tmp_path, name, reason):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    path = str(tmp_path / name)
    for settings in {"out_file": path}, {"out_file": None, "html_file": path}:
        with pytest.raises((ValueError, OSError), match=reason):
            start(**settings)


def test_a_file_that_is_used_otherwise_is_an_error_before_a_model_is_loaded(
        start, tmp_path, monkeypatch):
    path = str(tmp_path / "file")
    with open_output(path), pytest.raises(ValueError, match=r"another run writes to .*file: g"):
        start(out_file=path)
    with (open(path, "wb") as file, redirected(1, file),
          pytest.raises(ValueError, match="out_file=-")):
        start(out_file=path)
    with pytest.raises(ValueError, match="is the file of the prompts"):
        start(out_file=path, start=f"JSONL:{path}", overwrite=True)
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(ValueError, match="standard output is closed"):
        start(out_file=None, html_file=None)
