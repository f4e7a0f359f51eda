"""The progress bar and the last line of a run."""
import io
import re
import signal
import time

import pytest
from tqdm import tqdm

from pages import finished_sample
from sampling.outputs.progress import Progress
from sampling.params import Token
from terminal import Terminal


@pytest.fixture
def terminal(char_checkpoint, tiktoken_cache):
    """Starts sample.py on a terminal."""
    pytest.importorskip("pty")
    started = []

    def start(*arguments, **options):
        started.append(Terminal([f"--out_dir={char_checkpoint}", *arguments], tiktoken_cache, **options))
        return started[-1]
    yield start
    for one in started:
        one.close()


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


def test_one_sample_is_not_plural(capsys):
    progress = Progress(1, 5)
    progress.add_tokens(2)
    progress.add_sample(finished_sample(0, "a", [Token(1, "b")] * 2, "stop"))
    progress.close(None)
    assert re.fullmatch(r"1 sample, 2 tokens in \d+\.\d s: \d+ tokens/s\n", capsys.readouterr().err)


def test_a_run_without_samples_has_no_last_line(capsys):
    Progress(0, 5).close(None)
    assert capsys.readouterr().err == ""


def test_a_sample_that_stops_early_shortens_the_bar():
    progress = Progress(10, 100)
    with tqdm(total=1000, file=io.StringIO()) as progress.bar:
        progress.add_tokens(40)
        progress.add_tokens(-10) # a batch ran out of memory
        assert progress.bar.n == 30
        progress.add_sample(finished_sample(0, "a", [Token(1, "b")] * 30, "stop"))
        assert progress.bar.total == 930
