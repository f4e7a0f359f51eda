"""Printing samples to a pipe and to a terminal, the progress bar, and the last line of a run."""
import io
import math
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from models import make_gpt, save_checkpoint, save_meta
from pages import finished_sample, make_token
from project import RULE
from sampling.outputs import html, printer
from sampling.outputs.printer import TINTS, Printer, Progress, colorize
from sampling.params import Prompt, Sample, Token

RUN = ("--start=The ", "--num_samples=3", "--max_new_tokens=30", "--device=cpu")


def test_the_first_sample_streams_to_a_terminal(terminal):
    screen = terminal("--start=The ", "--num_samples=2", "--max_new_tokens=400", "--context_shift", stderr=False)
    seen = []
    while screen.read_some():
        seen.append(screen.text)
    first = [text for text in seen if RULE not in text]
    assert len(first) > 20 and all(text.startswith("The ") for text in first[1:])


def test_show_probs_only_adds_colours_and_only_where_they_are_shown(run_script, char_checkpoint):
    plain = run_script(f"--out_dir={char_checkpoint}", *RUN).stdout
    done = run_script(f"--out_dir={char_checkpoint}", *RUN, "--show_probs", FORCE_COLOR="1")
    assert plain and re.sub(r"\x1b\[[0-9;]*m", "", done.stdout) == plain
    assert len(set(re.findall(r"\x1b\[38;5;16;48;5;(\d+)m", done.stdout))) >= 3
    assert all("\n" not in text for text in re.findall(r"\x1b\[38;5;16;48;5;\d+m(.*?)\x1b\[0m", done.stdout, re.DOTALL))
    assert done.stdout.startswith("The ") # the prompt has no colours
    done = run_script(f"--out_dir={char_checkpoint}", *RUN, "--show_probs")
    assert done.stdout == plain
    assert "show_probs has no effect: standard output is not a terminal, or NO_COLOR is set\n" in done.stderr


@pytest.mark.parametrize("environment, on_terminal, in_file", [
    ({}, True, False), ({"NO_COLOR": "1"}, False, False), ({"NO_COLOR": ""}, True, False),
    ({"FORCE_COLOR": "1"}, True, True), ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False)], ids=str)
def test_colours_are_for_terminals_and_can_be_switched_off(monkeypatch, environment, on_terminal, in_file):
    for name in "NO_COLOR", "FORCE_COLOR":
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for is_terminal, is_shown in (True, on_terminal), (False, in_file):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        assert Printer(CodePointTokenizer(), show_probs=True).show_probs == is_shown


@pytest.mark.parametrize("probability, background", [(0.5, None), (0.3, 230), (0.001, 209)])
def test_less_likely_tokens_have_a_background(probability, background):
    line = f"\x1b[38;5;16;48;5;{background}ma\x1b[0m" if background else "a"
    assert colorize("a\n\na", math.log(probability)) == f"{line}\n\n{line}"


def test_the_backgrounds_have_the_limits_of_the_page():
    page = Path(html.__file__).with_name("page.html").read_text(encoding="utf-8")
    limits = re.search(r"const LIMITS = \[(.*)\]", page)[1].split(", ")
    assert [*TINTS][::-1] == list(map(float, limits))


def test_a_character_of_several_tokens_has_the_tint_of_all_of_them(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    tokens = [make_token("a", 0.9), make_token("", 0.5), make_token("", 0.5), make_token("é", 0.5)]
    sample = finished_sample(0, "<", tokens)
    sample.num_emittable_chars = 2
    Printer(CodePointTokenizer(), show_probs=True).update(sample)
    assert capsys.readouterr().out == f"a\x1b[38;5;16;48;5;224mé\x1b[0m\n{RULE}\n"


class CodePointTokenizer:
    """A tokenizer whose ids are code points."""

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_a_full_standard_output_is_an_error_that_names_it(monkeypatch):
    def write(text):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: False, write=write))
    with pytest.raises(OSError, match="cannot write 'standard output': No space left on device"):
        Printer(CodePointTokenizer()).update(finished_sample(0, "<", []))


@pytest.mark.parametrize("steps", [[1, 2, 3, 4, 5, 6], [6], [0, 0, 3, 3, 6]], ids=str)
def test_every_character_of_a_streaming_sample_is_printed_once(steps, capsys):
    sample, printer = Sample(0, Prompt("<"), [60]), Printer(CodePointTokenizer())
    sample.tokens, whole = [Token(0, text, -0.1) for text in ["a", "", "bc", "d", "", "ef"]], "abcdef"
    printed = ""
    for sample.num_emittable_chars in steps:
        printer.update(sample)
        printed += capsys.readouterr().out
        assert printed == "<" + whole[:sample.num_emittable_chars]
    sample.finish_reason = "length"
    printer.update(sample)
    assert capsys.readouterr().out == f"\n{RULE}\n"
    printer.update(Sample(1, Prompt("<"), [62], finish_reason="length"))
    assert capsys.readouterr().out == f">\n{RULE}\n"


def test_control_characters_in_samples_do_not_reach_a_terminal(terminal, run_script, tmp_path):
    """A terminal shows visible symbols instead of control characters. A pipe receives them unchanged."""
    chars = "\n\x1b[]2J\x07\x08\x9bab\r\x7f"
    save_checkpoint(tmp_path, make_gpt(vocab_size=len(chars)))
    save_meta(tmp_path / "meta.pkl", chars)
    run = (f"--out_dir={tmp_path}", "--start=\x1b[2Ja", "--num_samples=2", "--max_new_tokens=300", "--device=cpu")
    printed = run_script(*run).stdout
    shown = terminal(*run, stderr=False).read_to_end()
    assert all(char in printed for char in chars) and not set(chars) - set("\n[]2Jab") & set(shown)
    assert shown.translate({0x241b: 0x1b, 0x2407: 7, 0x2408: 8, 0xfffd: 0x9b, 0x240d: 0xd, 0x2421: 0x7f}) == printed


# ---- progress

def test_a_bar_is_shown_if_stderr_is_a_terminal_and_stdout_is_not(terminal):
    screen = terminal("--num_samples=2000", "--max_new_tokens=100", "--batch_size=4", "--device=cpu", stdout=False)
    deadline = time.monotonic() + 60
    while not re.search(r"\d+ samples\]", screen.text) and time.monotonic() < deadline:
        screen.read_some()
    assert re.search(r"\d%.*/200k \[.*tokens/s, \d+ samples\]", screen.text)
    screen.process.send_signal(signal.SIGINT)


def test_the_bar_and_the_last_line_count_what_was_sampled(messages):
    counter = Progress(10, 100)
    with tqdm(total=1000, file=io.StringIO()) as counter.bar:
        counter.add_tokens(40)
        counter.add_tokens(-10) # a batch ran out of memory
        counter.add_sample(finished_sample(0, "a", [Token(1, "b")] * 30, "stop"))
        assert (counter.bar.n, counter.bar.total, counter.bar.postfix) == (30, 930, "1 sample") # it stopped early
    counter.close(3 * 2**20)
    line = r"1 sample, 30 tokens in \d+\.\d s: [\d.]+ tokens/s, peak memory 3 MB"
    assert re.fullmatch(line, messages.pop())
    Progress(0, 5).close(None) # out_file was complete
    assert messages == []


@pytest.mark.parametrize("total, before, after", [
    (5, "0 of 5 samples", "1 of 5 samples"), (None, "0 samples", "1 sample")])
@pytest.mark.parametrize("is_terminal", [False, True]) # a terminal without a bar shows samples
def test_without_a_terminal_on_stderr_a_line_comes_every_half_minute(messages, monkeypatch, total, before, after,
                                                                     is_terminal):
    clock = iter([0, 10, 29, 31, 50, 62, 90, 93])
    monkeypatch.setattr(printer.time, "perf_counter", clock.__next__)
    monkeypatch.setattr(printer, "start_progress_bar", lambda total: None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    counter = Progress(total, 100)
    for _ in range(5):
        counter.add_tokens(100)
    counter.add_sample(finished_sample(0, "a", [Token(1, "b")] * 100))
    for _ in range(2):
        counter.add_tokens(-50) # a batch ran out of memory
    lines = [f"{before}, 300 tokens so far: 9.7 tokens/s", f"{before}, 500 tokens so far: 8.1 tokens/s",
             f"{after}, 400 tokens so far: 4.3 tokens/s"]
    assert messages == ([] if is_terminal else lines)
