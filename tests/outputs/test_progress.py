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
    assert "%|" not in terminal("--num_samples=30", "--max_new_tokens=100", "--batch_size=1", "--device=cpu").read_to_end()


def test_the_last_line_summarises_the_run(run_script, char_checkpoint):
    done = run_script(f"--out_dir={char_checkpoint}", "--start=The ", "--num_samples=3", "--max_new_tokens=30", "--device=cpu")
    assert re.fullmatch(r"3 samples, 90 tokens in \d+\.\d s: \d+ tokens/s, peak memory \d+ MB", done.stderr.splitlines()[-1])


@pytest.mark.parametrize("num_tokens, tokens", [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens")])
def test_one_sample_is_not_plural(capsys, num_tokens, tokens):
    counter = Progress(1, 5)
    counter.add_tokens(num_tokens)
    with tqdm(total=5, file=io.StringIO()) as counter.bar:
        counter.add_sample(finished_sample(0, "a", [Token(1, "b")] * num_tokens, "stop"))
        assert counter.bar.postfix == "1 sample"
    counter.close(None)
    assert re.fullmatch(rf"1 sample, {tokens} in \d+\.\d s: [\d.]+ tokens/s\n", capsys.readouterr().err)


def test_without_a_terminal_on_stderr_a_line_comes_every_half_minute(capsys, monkeypatch):
    for total, before, after in (5, "0 of 5 samples", "1 of 5 samples"), (None, "0 samples", "1 sample"):
        clock = iter([0, 10, 29, 31, 50, 62, 90, 93])
        monkeypatch.setattr(progress.time, "perf_counter", clock.__next__)
        counter = Progress(total, 100)
        for _ in range(5):
            counter.add_tokens(100)
        counter.add_sample(finished_sample(0, "a", [Token(1, "b")] * 100))
        for _ in range(2):
            counter.add_tokens(-50)
        assert capsys.readouterr().err == (f"{before}, 300 tokens so far: 9.7 tokens/s\n{before}, 500 tokens so far: 8.1 tokens/s\n"
                                           f"{after}, 400 tokens so far: 4.3 tokens/s\n")


def test_a_terminal_without_a_bar_gets_no_lines(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LOG_INTERVAL", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "shows_progress_bar", lambda: False) # samples go to the same terminal
    Progress(5, 100).add_tokens(10)
    assert capsys.readouterr().err == ""


def test_a_run_without_samples_has_no_last_line(capsys):
    Progress(0, 5).close(None)
    assert capsys.readouterr().err == ""


def test_a_sample_that_stops_early_shortens_the_bar():
    counter = Progress(10, 100)
    with tqdm(total=1000, file=io.StringIO()) as counter.bar:
        counter.add_tokens(40)
        counter.add_tokens(-10) # a batch ran out of memory
        assert counter.bar.n == 30
        counter.add_sample(finished_sample(0, "a", [Token(1, "b")] * 30, "stop"))
        assert counter.bar.total == 930
