"""Printing samples to a pipe and to a terminal, the progress bar, and the last line of a run."""
import io
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from pages import CodePointTokenizer, finished_sample
from project import RULE
from sampling.outputs import html, printer
from sampling.outputs.printer import TINTS, Printer, Progress
from sampling.params import Piece, Prompt, Sample, Token
from terminal import Terminal


def test_the_first_sample_streams_to_a_terminal(char_checkpoint, tiktoken_cache):
    screen, seen = Terminal([f"--out_dir={char_checkpoint}", "--start=The ", "--num_samples=2", "--max_new_tokens=400",
                             "--context_shift"], tiktoken_cache, stderr=False), []
    while screen.read_some():
        seen.append(screen.text)
    first = [text for text in seen if RULE not in text]
    assert len(first) > 20 and all(text.startswith("The ") for text in first[1:])
    screen.close()


def test_a_bar_comes_between_the_samples_that_tee_shows(char_checkpoint, tiktoken_cache, run_script):
    run = (f"--out_dir={char_checkpoint}", "--start=The ", "--num_samples=4", "--max_new_tokens=2000", "--batch_size=1",
           "--context_shift", "--device=cpu")
    screen = Terminal(run, tiktoken_cache, tee=True)
    shown = screen.read_to_end()
    screen.close()
    screen.tee.wait()
    assert re.search(r"%\|.* [\d.]+k/8.00k \[.*[1-3] sample", shown), "the bar"
    expected = [line.rstrip() for line in run_script(*run).stdout.split("\n")[:-1]]
    assert [line for line in screen.shown if line in expected and line] == [line for line in expected if line]
    assert not any("%|" in line for line in screen.shown)


@pytest.mark.parametrize("environment, on_terminal, in_file", [
    ({}, True, False), ({"NO_COLOR": "1"}, False, False), ({"FORCE_COLOR": "1"}, True, True),
    ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False)], ids=str)
def test_colours_are_for_terminals_and_can_be_switched_off(monkeypatch, messages, environment, on_terminal, in_file):
    for name in "NO_COLOR", "FORCE_COLOR":
        monkeypatch.setenv(name, environment.get(name, "")) # empty: as if it was not set
    for is_terminal, is_shown in (True, on_terminal), (False, in_file):
        messages.clear()
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        assert Printer(CodePointTokenizer(), show_probs=True).show_probs == is_shown != bool(messages)


def test_the_backgrounds_have_the_limits_of_the_page():
    page = Path(html.__file__).with_name("page.html").read_text(encoding="utf-8")
    limits = re.search(r"const LIMITS = \[(.*)\]", page)[1].split(", ")
    assert [*TINTS][::-1] == list(map(float, limits))


@pytest.mark.parametrize("streams, printed", [(True, ["<a", "bc", "", f"d\n{RULE}\n"]),
                                              (False, ["", "", "", f"<abcd\n{RULE}\n"])])
def test_pieces_are_printed_at_once_or_with_the_whole_sample(streams, printed, capsys):
    sample, printer = Sample(0, Prompt("<"), [ord("<")]), Printer(CodePointTokenizer(), streams_always=streams)
    for texts, expected in zip([["a"], ["b", "c"], [], ["d"]], printed, strict=True):
        sample.finish_reason = "length" if texts == ["d"] else None
        printer.update(sample, map(Piece, texts))
        assert capsys.readouterr().out == expected
    printer.update(Sample(1, Prompt(">"), [ord(">")], finish_reason="stop"), [])
    assert capsys.readouterr().out == f">\n{RULE}\n"


def test_each_piece_has_the_background_of_its_probability_but_no_line_end_has(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    pieces = [Piece("a", math.log(0.9)), Piece("é\n\n", math.log(0.125)), Piece("b", math.log(0.001)), Piece("c")]
    Printer(CodePointTokenizer(), show_probs=True).update(finished_sample(0, "<", []), pieces)
    expected = "a\x1b[38;5;16;48;5;224mé\x1b[0m\n\n\x1b[38;5;16;48;5;209mb\x1b[0mc"
    assert capsys.readouterr().out == f"{expected}\n{RULE}\n"


@pytest.mark.parametrize("is_terminal, printed", [(True, "a\u241b[2J\n\u2407\ufffd"), (False, "a\x1b[2J\n\x07\x9b")])
def test_a_terminal_gets_symbols_instead_of_control_characters(monkeypatch, capsys, is_terminal, printed):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    sample = Sample(0, Prompt(""), [*b"a\x1b[2J\n"], finish_reason="length")
    Printer(CodePointTokenizer()).update(sample, [Piece("\x07\x9b")])
    assert capsys.readouterr().out == f"{printed}\n{RULE}\n"


# ---- progress

@pytest.fixture
def start(monkeypatch):
    """Makes a Progress at second 0, and two samples that it follows, after a saved one: start(total_samples)."""
    def start(total_samples):
        monkeypatch.setattr(printer, "time", SimpleNamespace(perf_counter=lambda: 0))
        progress = Progress(total_samples, max_new_tokens=100)
        _, first, second = progress.follow(Sample(i, Prompt("a"), [], already_saved=i == 0) for i in range(3))
        return progress, first, second
    return start


def update(progress, second, sample, num_tokens, finish_reason=None):
    """Update progress when a sample has this many tokens."""
    printer.time.perf_counter = lambda: second
    sample.tokens, sample.finish_reason = [Token(0, "a")] * num_tokens, finish_reason
    progress.update(sample)


def test_the_bar_and_the_last_line_count_what_was_sampled(start, messages, monkeypatch):
    monkeypatch.setattr(printer, "start_progress_bar", lambda _: tqdm(file=io.StringIO()))
    progress, first, second = start(11) # one is saved already
    for seconds, sample, num_tokens, reason, shown in [
            (60, first, 10, None, (10, 1000, "0 samples")), (60.5, second, 10, None, (20, 1000, "0 samples")),
            (62, second, 0, None, (10, 1000, "0 samples")), # a batch ran out of memory
            (63, first, 30, "stop", (30, 930, "1 sample"))]: # it stopped early
        update(progress, seconds, sample, num_tokens, reason)
        assert (progress.bar.n, progress.bar.total, progress.bar.postfix) == shown
    update(progress, 100, second, 20, "length")
    progress.close(3 * 2**20)
    start(0)[0].close(None) # out_file was complete
    assert messages == ["2 samples, 50 tokens in 100.0 s: 0.5 tokens/s, peak memory 3 MB"]


def test_no_bar_comes_just_after_a_finished_sample(start, monkeypatch):
    """Its text may still be on its way through tee, and would be on the line of the bar."""
    monkeypatch.setattr(printer, "start_progress_bar", lambda _: tqdm(file=io.StringIO()))
    progress, first, second = start(3)
    for seconds, sample, num_tokens, reason, shown in [
            (60, first, 10, None, 10), (60.05, first, 20, "length", 10), (60.12, second, 10, None, 10),
            (60.16, second, 20, None, 40)]:
        update(progress, seconds, sample, num_tokens, reason)
        assert progress.bar.n == shown
    progress.close(None)


@pytest.mark.parametrize("total, is_terminal, lines", [
    (6, False, ["0 of 5 samples, 40 tokens in 40.0 s: 1.0 tokens/s",
                "1 of 5 samples, 130 tokens in 100.0 s: 1.3 tokens/s"]),
    (None, False, ["0 samples so far, 40 tokens in 40.0 s: 1.0 tokens/s",
                   "1 sample so far, 130 tokens in 100.0 s: 1.3 tokens/s"]),
    (6, True, [])]) # a terminal without a bar shows samples
def test_without_a_terminal_on_stderr_a_line_comes_every_half_minute(start, messages, monkeypatch, total, is_terminal,
                                                                     lines):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    progress, first, second = start(total)
    for seconds, sample, num_tokens, reason in [
            (20, first, 20, None), (40, first, 40, None), (60, first, 50, "length"), (100, second, 80, None)]:
        update(progress, seconds, sample, num_tokens, reason)
    assert messages == lines
