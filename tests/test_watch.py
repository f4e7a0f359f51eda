"""watch: a run that stays beside a training, and samples from each checkpoint that it saves."""
import gc
import json
import os
import re
import signal
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from models import make_gpt, save_checkpoint
from project import RULE
from sampling import text_generator
from sampling.backends.backend import Backend
from sampling.checkpoints import saves
from sampling.checkpoints.nanogpt import load_nanogpt
from script_process import start_script

RUN = "--start=The ", "--num_samples=2", "--max_new_tokens=9", "--device=cpu"
WATCH = *RUN, "--watch", "--out_file=a.jsonl", "--html_file=a.html"


@contextmanager
def watching(folder):
    """A run that watches folder/out. Standard output and error go to the files stdout and stderr.

    The block gets a function that waits for a text on standard error.
    """
    stderr = folder / "stderr"
    with open(stderr, "wb") as messages, open(folder / "stdout", "wb") as samples:
        process = start_script(*WATCH, cwd=folder, stdout=samples, stderr=messages)

        def wait_for(text, times=1):
            deadline = time.monotonic() + 60
            while stderr.read_text().count(text) < times:
                is_waiting = process.poll() is None and time.monotonic() < deadline
                assert is_waiting, stderr.read_text()
                time.sleep(0.05)
        try:
            yield wait_for
            process.send_signal(signal.SIGINT) # Ctrl-C
            assert process.wait(60) == 130
        finally:
            process.kill()
            process.wait()


def test_each_saved_checkpoint_gets_samples_that_are_those_of_a_run_of_its_own(
        run_script, tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt())
    with watching(tmp_path) as wait_for:
        wait_for("out/ckpt.pt: iteration 100, validation loss 1.5000\n")
        # The first samples may not be there yet.
        save_checkpoint(tmp_path / "out", make_gpt(seed=2), iter_num=200, best_val_loss=1.25)
        wait_for("waiting for the next save of out/ckpt.pt\n"
                 "out/ckpt.pt: iteration 200, validation loss 1.2500\n")
        wait_for("waiting", times=2)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    rounds = [(line["checkpoint"]["iter_num"], line["index"]) for line in lines]
    assert rounds == [(100, 0), (100, 1), (200, 0), (200, 1)]
    page = (tmp_path / "a.html").read_text()
    assert page.count(">iteration 200, validation loss 1.2500</h3>") == 2
    printed = [f"The {line['text']}\n{RULE}\n" for line in lines]
    assert (tmp_path / "stdout").read_text() == "".join(printed) # only samples
    assert (tmp_path / "stderr").read_text().count(f"\n{RULE}\n") == 2 # one for each checkpoint
    assert run_script(*RUN, cwd=tmp_path).stdout == "".join(printed[2:])
    with watching(tmp_path) as wait_for: # the same command goes on where the run was
        wait_for("a.jsonl is complete, with 2 samples of this checkpoint: nothing to do\n")
        wait_for("waiting")


def test_a_save_that_stalls_and_what_is_no_checkpoint_are_waited_for_and_named_once(
        run_script, tmp_path, monkeypatch):
    """A clock that only runs while the script sleeps: each file is there for twelve seconds."""
    path = save_checkpoint(tmp_path / "out", make_gpt())
    content = path.read_bytes()
    contents = [content[:9999], b"", b"garbage", content[:20000], content, b"garbage"]
    now = time.time()
    end = now # of the latest file

    def sleep(seconds):
        nonlocal now, end
        now += seconds
        if now >= end:
            if not contents:
                raise KeyboardInterrupt
            path.write_bytes(contents.pop(0))
            os.utime(path, (now, now))
            end = now + 12
    clock = SimpleNamespace(sleep=sleep, time=lambda: now, monotonic=lambda: now)
    monkeypatch.setattr(saves, "time", clock)
    monkeypatch.setattr(saves, "POLL", 0.1) # fewer attempts
    sleep(0)
    done = run_script(*WATCH, cwd=tmp_path)
    waiting = "waiting for the next save of out/ckpt.pt\n"
    assert done.returncode == 130
    assert done.stdout.count(RULE) == 2
    assert done.stderr.count("out/ckpt.pt is being written: waiting\n") == 1
    stalled, after_samples, garbage = re.findall(f".*{waiting}", done.stderr)
    assert "it is being written, and was never complete" in stalled
    assert after_samples == waiting
    assert garbage == (
        "warning: cannot read out/ckpt.pt: it is not a checkpoint: neither torch.save nor "
        f"safetensors wrote it; pass the ckpt.pt of a training; {waiting}")


@pytest.mark.parametrize("flags, num_models", [
    (["--watch", "--num_samples=2"], 3), (["--interactive"], 2)])
def test_a_model_is_freed_before_the_next_is_loaded(
        monkeypatch, char_checkpoint, run_script, flags, num_models):
    num_alive = []
    load = text_generator.load_nanogpt

    def note_and_load(*arguments):
        num_alive.append(sum(issubclass(type(thing), Backend) for thing in gc.get_objects()))
        return load(*arguments)
    gc.collect()
    monkeypatch.setattr(text_generator, "load_nanogpt", note_and_load)
    monkeypatch.setattr(saves, "load_saves", lambda out_dir, load: (load() for _ in range(3)))
    session = b"The \n:reload\n:again\n"
    done = run_script(f"--out_dir={char_checkpoint}", "--device=cpu", "--max_new_tokens=9", *flags,
                      stdin=session)
    assert num_alive == num_models * num_alive[:1]
    assert done.stdout.count(RULE) >= num_models, done.stderr


def test_a_save_between_the_wait_and_the_load_is_sampled_once(tmp_path, monkeypatch):
    def save_and_load():
        save_checkpoint(tmp_path, make_gpt())
        return SimpleNamespace(checkpoint=load_nanogpt(tmp_path))
    save_checkpoint(tmp_path, make_gpt())
    monkeypatch.setattr(time, "sleep", MagicMock(side_effect=[None, None, TimeoutError]))
    models = saves.load_saves(tmp_path, save_and_load)
    next(models)
    with pytest.raises(TimeoutError): # no other save comes
        next(models)
