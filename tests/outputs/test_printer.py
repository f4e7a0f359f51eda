"""Printing samples to a pipe and to a terminal, the progress bar, and the last line of a run."""
import io
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from pages import CodePointTokenizer
from project import RULE
from sampling.outputs import html, printer
from sampling.outputs.printer import TINTS, Printer, Progress
from sampling.samples import Piece, Prompt, Sample, Token
from terminal import Terminal


def test_the_first_sample_streams_to_a_terminal(char_checkpoint, tiktoken_cache):
    run = (f"--out_dir={char_checkpoint}", "--start=The ", "--num_samples=2",
           "--max_new_tokens=400", "--context_shift")
    screen = Terminal(run, tiktoken_cache, stderr=False)
    num_parts = 0
    while RULE not in screen.text:
        assert screen.read_some()
        num_parts += 1
    screen.close()
    assert screen.text.startswith("The ")
    assert num_parts > 40, "otherwise, 16 tokens come at once"


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("no_color, force_color, expected", [
    ("", "", [False, True]), # empty: as if they were not set
    ("1", "", [False, False]),
    ("", "1", [True, True]),
    ("1", "1", [False, False]),
])
def test_colours_are_for_terminals_and_can_be_switched_off(
        monkeypatch, messages, is_terminal, no_color, force_color, expected):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("FORCE_COLOR", force_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    shown = Printer(CodePointTokenizer(), show_probs=True).show_probs
    assert shown == expected[is_terminal]
    assert shown == (not messages), "the user is told that nothing is shown"


def test_the_backgrounds_have_the_limits_of_the_page():
    page = Path(html.__file__).with_name("page.html").read_text(encoding="utf-8")
    limits = re.search(r"const LIMITS = \[(.*)\]", page)[1].split(", ")
    assert sorted(map(float, limits)) == list(TINTS)


@pytest.mark.parametrize("options, printed", [
    (dict(), ["<a", "bc", "", f"d\n{RULE}\n"]),
    (dict(streams_always=False), ["", "", "", f"<abcd\n{RULE}\n"]),
])
def test_pieces_are_printed_at_once_or_with_the_whole_sample(options, printed, capsys):
    printer = Printer(CodePointTokenizer(), **options)
    sample = Sample(0, Prompt("<"), [ord("<")])
    for texts, expected in zip(["a", "bc", "", "d"], printed, strict=True):
        if texts == "d":
            sample.finish_reason = "length"
        printer.update(sample, map(Piece, texts))
        assert capsys.readouterr().out == expected


def print_pieces(pieces, prompt="", **options):
    """Print a finished sample of these pieces."""
    sample = Sample(0, Prompt(prompt), list(map(ord, prompt)), finish_reason="length")
    Printer(CodePointTokenizer(), **options).update(sample, pieces)


def test_each_piece_has_the_background_of_its_probability_but_no_line_end_has(
        monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    pieces = [Piece("a", math.log(0.9)), Piece("é\n\n", math.log(0.125)),
              Piece("b", math.log(0.001)), Piece("c")]
    print_pieces(pieces, show_probs=True)
    expected = "a\x1b[38;5;16;48;5;224mé\x1b[0m\n\n\x1b[38;5;16;48;5;209mb\x1b[0mc"
    assert capsys.readouterr().out == f"{expected}\n{RULE}\n"


@pytest.mark.parametrize("is_terminal, printed", [
    (True, "a\u241b[2J\n\u2407\ufffd"), (False, "a\x1b[2J\n\x07\x9b")])
def test_a_terminal_gets_symbols_instead_of_control_characters(
        monkeypatch, capsys, is_terminal, printed):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    print_pieces([Piece("\x07\x9b")], prompt="a\x1b[2J\n")
    assert capsys.readouterr().out == f"{printed}\n{RULE}\n"


# ---- progress

@pytest.fixture
def start(monkeypatch):
    """start(total_samples, bar) -> (a Progress, whose samples are begun at second 0, update).

    It has a saved sample, number 0, and two others. At a second,
    update(second, number, num_tokens, finish_reason) changes one of these.
    """
    def start(total_samples, bar=None):
        clock = SimpleNamespace(perf_counter=lambda: -100) # the kernels are compiled
        monkeypatch.setattr(printer, "time", clock)
        progress = Progress(total_samples, max_new_tokens=100, bar=bar)
        samples = [Sample(i, Prompt("a"), [], already_saved=i == 0) for i in range(3)]
        for sample in samples:
            progress.add(sample)

        def update(second, number, num_tokens, finish_reason=None):
            clock.perf_counter = lambda: second
            samples[number].tokens = [Token(0, "a")] * num_tokens
            samples[number].finish_reason = finish_reason
            progress.update(samples[number])
        update(0, 1, 0)
        return progress, update
    return start


@pytest.fixture
def bar():
    return tqdm(file=io.StringIO())


def test_the_bar_and_the_last_line_count_what_was_sampled(start, bar, messages):
    progress, update = start(11, bar) # one is saved already
    update(60, 1, 10)
    assert (bar.n, bar.total, bar.postfix) == (10, 1000, "0 samples")
    update(60.5, 2, 10)
    assert bar.n == 20
    update(62, 2, 0) # a batch ran out of memory
    assert bar.n == 10
    update(63, 1, 30, "stop") # it stopped early
    assert (bar.n, bar.total, bar.postfix) == (30, 930, "1 sample")
    update(100, 2, 20, "length")
    progress.close(3 * 2**20)
    complete, _ = start(0)
    complete.close(None)
    assert messages == ["2 samples, 50 tokens in 100.0 s: 0.5 tokens/s, peak memory 3 MB"]


def test_no_bar_comes_just_after_a_finished_sample(start, bar):
    """Its text may still be on its way through tee, and would be on the line of the bar."""
    progress, update = start(3, bar)
    update(60, 1, 10)
    update(60.05, 1, 20, "length")
    update(60.12, 2, 10)
    assert bar.n == 10
    update(60.16, 2, 20)
    assert bar.n == 40
    progress.close(None)


@pytest.mark.parametrize("total, is_terminal, lines", [
    (6, False, ["0 of 5 samples, 40 tokens in 40.0 s: 1.0 tokens/s",
                "1 of 5 samples, 130 tokens in 100.0 s: 1.3 tokens/s"]),
    (None, False, ["0 samples so far, 40 tokens in 40.0 s: 1.0 tokens/s",
                   "1 sample so far, 130 tokens in 100.0 s: 1.3 tokens/s"]),
    (6, True, []), # a terminal without a bar shows samples
])
def test_without_a_terminal_on_stderr_a_line_comes_every_half_minute(
        start, messages, monkeypatch, total, is_terminal, lines):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    _, update = start(total)
    update(20, 1, 20)
    update(40, 1, 40)
    update(60, 1, 50, "length")
    update(100, 2, 80)
    assert messages == lines
