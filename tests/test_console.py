"""What is seen: through a pipe, and on a real terminal."""
import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from batches import Sample
from console import Printer, Progress
from prompts import Prompt
from tqdm import tqdm

from conftest import PROJECT, Terminal, make_gpt, save_checkpoint, save_meta

RUN = ("--start=The ", "--num_samples=3", "--max_new_tokens=30", "--device=cpu")


@pytest.fixture
def terminal(letters, vocabulary):
    """Starts sample.py on a terminal; the text of stdout and stderr comes from there as a user sees it."""
    if sys.platform == "win32":
        pytest.skip("needs a pseudo-terminal")
    started = []

    def start(*arguments, **where):
        started.append(Terminal([f"--out_dir={letters}", *arguments], vocabulary, **where))
        return started[-1]
    yield start
    for one in started:
        one.close()


def test_a_terminal_and_a_pipe_get_the_same_bytes(terminal, sample, letters):
    printed = sample(f"--out_dir={letters}", *RUN).stdout
    assert terminal(*RUN, stderr=False).rest() == printed
    assert terminal(*RUN, "--stop=e", stderr=False).rest() == sample(f"--out_dir={letters}", *RUN, "--stop=e").stdout


def test_on_a_terminal_the_first_sample_appears_as_it_is_drawn(terminal):
    screen = terminal("--start=The ", "--num_samples=2", "--max_new_tokens=3000", "--context_shift", stderr=False)
    seen = []
    while screen.read_some():
        seen.append(screen.text)
    first = [text for text in seen if "-----" not in text]
    assert len(first) > 20 and all(text.startswith("The ") for text in first[1:])


def test_through_a_pipe_samples_come_whole_one_by_one(letters):
    command = [sys.executable, "-u", PROJECT / "sample.py", f"--out_dir={letters}", "--start=The ", "--num_samples=30", "--batch_size=1",
               "--max_new_tokens=200", "--device=cpu"]
    parts = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        while part := os.read(process.stdout.fileno(), 10**6):
            parts.append(part.decode())
    assert len(parts) > 5 and all(part.endswith("\n---------------\n") for part in parts)


def test_a_bar_counts_where_stderr_is_a_terminal_and_stdout_is_not(terminal):
    screen = terminal("--num_samples=2000", "--max_new_tokens=100", "--batch_size=4", "--device=cpu", stdout=False)
    deadline = time.monotonic() + 60
    while not re.search(r"\d+ samples\]", screen.text) and time.monotonic() < deadline:
        screen.read_some()
    assert re.search(r"\d%.*/200k \[.*tokens/s, \d+ samples\]", screen.text)
    screen.process.send_signal(signal.SIGINT)


def test_there_is_no_bar_between_samples_that_are_shown(terminal):
    assert "%|" not in terminal("--num_samples=30", "--max_new_tokens=100", "--batch_size=1", "--device=cpu").rest()


def test_the_last_line_says_how_it_went(sample, letters):
    done = sample(f"--out_dir={letters}", *RUN)
    assert re.fullmatch(r"3 samples, 90 tokens in \d+\.\d s: \d+ tokens/s, peak memory \d+ MB", done.stderr.splitlines()[-1])


def test_probabilities_are_shown_as_colours(sample, letters):
    plain = sample(f"--out_dir={letters}", *RUN).stdout
    done = sample(f"--out_dir={letters}", *RUN, "--show_probs")
    assert re.sub(r"\x1b\[[0-9;]*m", "", done.stdout) == plain
    assert len(set(re.findall(r"\x1b\[38;5;16;48;5;(\d+)m", done.stdout))) >= 3
    assert all("\n" not in text for text in re.findall(r"\x1b\[38;5;16;48;5;\d+m(.*?)\x1b\[0m", done.stdout, re.DOTALL))
    assert done.stdout.startswith("The ") # the prompt has no colours


def test_a_sample_that_ends_early_shortens_the_bar(monkeypatch):
    progress = Progress(10, 100)
    with tqdm(total=1000, file=io.StringIO()) as bar:
        monkeypatch.setattr(Progress, "bar", bar)
        progress.count(Sample(0, Prompt("a"), [1], new=[2] * 30, ended="stop"))
        assert bar.total == 930


class Letters:
    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.mark.parametrize("steps", [[1, 2, 3, 4, 5, 6], [6], [0, 0, 3, 3, 6]], ids=str)
@pytest.mark.parametrize("tinted", [False, True])
def test_a_growing_sample_is_printed_once(steps, tinted, capsys):
    sample, printer = Sample(0, Prompt("<"), [60]), Printer(Letters(), tinted)
    pieces, whole = ["a", "", "bc", "d", "", "ef"], "abcdef"
    for ready in steps:
        sample.pieces, sample.ready = pieces, ready
        sample.looks = [(-0.1, [])] * len(pieces)
        printer.show(sample)
        assert capsys.readouterr().out[-1:] in ("", "<", whole[ready - 1])
    sample.ended = "length"
    printer.show(sample)
    assert capsys.readouterr().out == "\n---------------\n"
    printer.show(Sample(1, Prompt("<"), [62], ended="length"))
    assert capsys.readouterr().out == ">\n---------------\n"


def test_a_terminal_gets_no_commands_from_samples(terminal, sample, tmp_path):
    """Control characters are shown as pictures there, and through a pipe are what they are."""
    chars = "\n\x1b[]2J\x07\x08\x9bab\r\x7f"
    save_checkpoint(tmp_path, make_gpt(vocab_size=len(chars)))
    save_meta(tmp_path / "meta.pkl", chars)
    run = (f"--out_dir={tmp_path}", "--start=\x1b[2Ja", "--num_samples=2", "--max_new_tokens=300", "--device=cpu")
    printed = sample(*run).stdout
    shown = terminal(*run, stderr=False).rest()
    assert all(char in printed for char in chars) and not set(chars) - set("\n[]2Jab") & set(shown)
    assert shown.translate({0x241b: 0x1b, 0x2407: 7, 0x2408: 8, 0xfffd: 0x9b, 0x240d: 0xd, 0x2421: 0x7f}) == printed


def test_error_messages_hold_no_commands(sample):
    done = sample("--out_dir=a\x1b[2Jb\x9bc\nd")
    assert done.returncode == 1 and done.stderr.count("\n") == 2 and not set("\x1b\x9b") & set(done.stderr)


def test_error_messages_are_not_longer_than_a_screen(sample):
    done = sample(f"--out_dir={'x' * 100_000}")
    assert done.returncode == 1 and len(done.stderr) < 4000 and "error: " in done.stderr and "xx ... xx" in done.stderr


def test_a_python_without_torch_is_told_so():
    done = subprocess.run([sys.executable, "-S", PROJECT / "sample.py"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: No module named 'torch' in ") and done.stderr.count("\n") == 1
