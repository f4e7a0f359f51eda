"""Printing samples to a pipe and to a terminal."""
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

from models import make_gpt, save_checkpoint, save_meta
from pages import finished_sample, make_token
from project import RULE
from sampling.outputs import html
from sampling.outputs.printer import TINTS, Printer, colorize
from sampling.params import Prompt, Sample, SampleRequest, Token
from script_process import start_script

RUN = ("--start=The ", "--num_samples=3", "--max_new_tokens=30", "--device=cpu")


def test_a_terminal_and_a_pipe_get_the_same_bytes(terminal, run_script, char_checkpoint):
    for more in [], ["--stop=e"]:
        printed = run_script(f"--out_dir={char_checkpoint}", *RUN, *more).stdout
        assert printed and terminal(*RUN, *more, stderr=False).read_to_end() == printed


def test_the_first_sample_streams_to_a_terminal(terminal):
    screen = terminal("--start=The ", "--num_samples=2", "--max_new_tokens=400", "--context_shift", stderr=False)
    seen = []
    while screen.read_some():
        seen.append(screen.text)
    first = [text for text in seen if RULE not in text]
    assert len(first) > 20 and all(text.startswith("The ") for text in first[1:])


def test_a_pipe_receives_each_sample_as_a_whole(char_checkpoint):
    run = (*RUN, "--num_samples=10", "--batch_size=1", "--max_new_tokens=60")
    process = start_script(f"--out_dir={char_checkpoint}", *run)
    parts = []
    while part := os.read(process.stdout.fileno(), 10**6):
        parts.append(part.decode())
    process.communicate()
    assert len(parts) > 5 and all(part.endswith(f"\n{RULE}\n") for part in parts)


def test_show_probs_only_adds_colours(run_script, char_checkpoint):
    plain = run_script(f"--out_dir={char_checkpoint}", *RUN).stdout
    done = run_script(f"--out_dir={char_checkpoint}", *RUN, "--show_probs", FORCE_COLOR="1")
    assert plain and re.sub(r"\x1b\[[0-9;]*m", "", done.stdout) == plain
    assert len(set(re.findall(r"\x1b\[38;5;16;48;5;(\d+)m", done.stdout))) >= 3
    assert all("\n" not in text for text in re.findall(r"\x1b\[38;5;16;48;5;\d+m(.*?)\x1b\[0m", done.stdout, re.DOTALL))
    assert done.stdout.startswith("The ") # the prompt has no colours


def test_show_probs_writes_no_colours_to_files(run_script, char_checkpoint):
    plain = run_script(f"--out_dir={char_checkpoint}", *RUN).stdout
    done = run_script(f"--out_dir={char_checkpoint}", *RUN, "--show_probs")
    assert plain and done.stdout == plain
    assert "show_probs has no effect: standard output is not a terminal, or NO_COLOR is set\n" in done.stderr


@pytest.mark.parametrize("colorterm, column", [("truecolor", 0), ("", 1)])
@pytest.mark.parametrize("probability, background", [
    (0.9, None), (0.5, None), (0.3, ("2;252;239;231", "5;230")), (0.15, ("2;251;227;212", "5;224")),
    (0.07, ("2;250;212;190", "5;223")), (0.03, ("2;247;195;166", "5;217")), (0.015, ("2;244;179;141", "5;216")),
    (0.001, ("2;240;160;113", "5;209"))])
def test_less_likely_tokens_have_a_stronger_background(monkeypatch, colorterm, column, probability, background):
    monkeypatch.setenv("COLORTERM", colorterm)
    line = "a" if background is None else f"\x1b[38;5;16;48;{background[column]}ma\x1b[0m"
    assert colorize("a\n\na", math.log(probability)) == f"{line}\n\n{line}"


def test_the_tints_are_those_of_the_page():
    page = Path(html.__file__).with_name("page.html").read_text(encoding="utf-8")
    limits = re.search(r"const LIMITS = \[(.*)\]", page)[1].split(", ")
    assert [limit for limit, *_ in TINTS][::-1] == list(map(float, limits))
    shares = [int(share) / 100 for share in re.findall(r"\.p[1-6] { --unlikely: (\d+)%; }", page)]
    paper, strong = (as_oklab(re.search(f"--{name}: (#\\w+)", page)[1]) for name in ("paper", "strong"))
    for share, (_, (red, green, blue), _) in zip(shares[::-1], TINTS, strict=True):
        mixed = [share * s + (1 - share) * p for s, p in zip(strong, paper, strict=True)]
        assert as_oklab(f"#{red:02x}{green:02x}{blue:02x}") == pytest.approx(mixed, abs=0.003)


def as_oklab(color):
    """A CSS colour of six digits in Oklab, the space in which the page mixes its colours (Ottosson 2020)."""
    shares = [byte / 255 for byte in bytes.fromhex(color[1:])]
    rgb = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    lms = [float(np.dot(row, rgb)) ** (1 / 3) for row in [(0.4122214708, 0.5363325363, 0.0514459929),
           (0.2119034982, 0.6806995451, 0.1073969566), (0.0883024619, 0.2817188376, 0.6299787005)]]
    return [float(np.dot(row, lms)) for row in [(0.2104542553, 0.7936177850, -0.0040720468),
            (1.9779984951, -2.4285922050, 0.4505937099), (0.0259040371, 0.7827717662, -0.8086757660)]]


def test_a_character_of_several_tokens_has_the_tint_of_all_of_them(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLORTERM", raising=False)
    tokens = [make_token("a", 0.9), make_token("", 0.5), make_token("", 0.5), make_token("é", 0.5)]
    sample = finished_sample(0, "<", tokens)
    sample.num_emittable_chars = 2
    Printer(CodePointTokenizer(), show_probs=True).update(sample)
    assert capsys.readouterr().out == f"a\x1b[38;5;16;48;5;224mé\x1b[0m\n{RULE}\n"


class CodePointTokenizer:
    """A tokenizer whose ids are code points."""

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.mark.parametrize("steps", [[1, 2, 3, 4, 5, 6], [6], [0, 0, 3, 3, 6]], ids=str)
@pytest.mark.parametrize("show_probs", [False, True])
def test_every_character_of_a_streaming_sample_is_printed_once(steps, show_probs, capsys):
    sample, printer = Sample(SampleRequest(0, Prompt("<"), [60])), Printer(CodePointTokenizer(), show_probs)
    sample.tokens, whole = [Token(0, text, -0.1) for text in ["a", "", "bc", "d", "", "ef"]], "abcdef"
    printed = ""
    for sample.num_emittable_chars in steps:
        printer.update(sample)
        printed += capsys.readouterr().out
        assert printed == "<" + whole[:sample.num_emittable_chars]
    sample.finish_reason = "length"
    printer.update(sample)
    assert capsys.readouterr().out == f"\n{RULE}\n"
    printer.update(Sample(SampleRequest(1, Prompt("<"), [62]), finish_reason="length"))
    assert capsys.readouterr().out == f">\n{RULE}\n"


def test_reset_discards_the_state_of_an_unfinished_sample(capsys):
    printer = Printer(CodePointTokenizer())
    for text in "ab", "cd":
        sample = finished_sample(0, "<", [Token(0, text)], None)
        sample.num_emittable_chars = 1
        printer.update(sample)
        printer.reset()
    assert capsys.readouterr().out == "ac"


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
