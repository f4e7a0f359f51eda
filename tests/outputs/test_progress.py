"""The progress bar and the last line of a run."""
import io
import re
import signal
import sys
import time

import pytest
from tqdm import tqdm

from pages import finished_sample
from sampling.outputs import progress
from sampling.outputs.progress import Progress
from sampling.params import Token


def test_a_bar_is_shown_if_stderr_is_a_terminal_and_stdout_is_not(terminal):
    screen = terminal("--num_samples=2000", "--max_new_tokens=100", "--batch_size=4", "--device=cpu", stdout=False)
    deadline = time.monotonic() + 60
    while not re.search(r"\d+ samples\]", screen.text) and time.monotonic() < deadline:
        screen.read_some()
    assert re.search(r"\d%.*/200k \[.*tokens/s, \d+ samples\]", screen.text)
    screen.process.send_signal(signal.SIGINT)


@pytest.mark.slow # a bar would appear after a second
def test_no_bar_is_shown_between_samples_on_a_terminal(terminal):
    run = terminal("--num_samples=30", "--max_new_tokens=100", "--batch_size=1", "--device=cpu")
    assert "%|" not in run.read_to_end()


@pytest.mark.parametrize("num_tokens, tokens", [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens")])
def test_the_last_line_summarises_the_run(capsys, num_tokens, tokens):
    counter = Progress(1, 5)
    counter.add_tokens(num_tokens)
    with tqdm(total=5, file=io.StringIO()) as counter.bar:
        counter.add_sample(finished_sample(0, "a", [Token(1, "b")] * num_tokens, "stop"))
        assert counter.bar.postfix == "1 sample"
    counter.close(3 * 2**20)
    line = rf"1 sample, {tokens} in \d+\.\d s: [\d.]+ tokens/s, peak memory 3 MB\n"
    assert re.fullmatch(line, capsys.readouterr().err)
    Progress(0, 5).close(None) # out_file was complete
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("total, before, after", [
    (5, "0 of 5 samples", "1 of 5 samples"), (None, "0 samples", "1 sample")])
def test_without_a_terminal_on_stderr_a_line_comes_every_half_minute(capsys, monkeypatch, total, before, after):
    clock = iter([0, 10, 29, 31, 50, 62, 90, 93])
    monkeypatch.setattr(progress.time, "perf_counter", clock.__next__)
    counter = Progress(total, 100)
    for _ in range(5):
        counter.add_tokens(100)
    counter.add_sample(finished_sample(0, "a", [Token(1, "b")] * 100))
    for _ in range(2):
        counter.add_tokens(-50) # a batch ran out of memory
    assert capsys.readouterr().err.splitlines() == [f"{before}, 300 tokens so far: 9.7 tokens/s",
        f"{before}, 500 tokens so far: 8.1 tokens/s", f"{after}, 400 tokens so far: 4.3 tokens/s"]


def test_a_terminal_without_a_bar_gets_no_lines(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LOG_INTERVAL", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "shows_progress_bar", lambda: False) # samples go to the same terminal
    Progress(5, 100).add_tokens(10)
    assert capsys.readouterr().err == ""


def test_a_sample_that_stops_early_shortens_the_bar():
    counter = Progress(10, 100)
    with tqdm(total=1000, file=io.StringIO()) as counter.bar:
        counter.add_tokens(40)
        counter.add_tokens(-10) # a batch ran out of memory
        assert counter.bar.n == 30
        counter.add_sample(finished_sample(0, "a", [Token(1, "b")] * 30, "stop"))
        assert counter.bar.total == 930
