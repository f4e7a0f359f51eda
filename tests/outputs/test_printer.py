"""Printing samples to a pipe and to a terminal."""
import math
import os
import re
from pathlib import Path

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


@pytest.mark.parametrize("probability, colorterm, background", [
    (0.5, "", None), (0.3, "truecolor", "2;252;239;231"), (0.3, "", "5;230"), (0.001, "24bit", "2;240;160;113")])
def test_less_likely_tokens_have_a_background(monkeypatch, probability, colorterm, background):
    monkeypatch.setenv("COLORTERM", colorterm)
    line = f"\x1b[38;5;16;48;{background}ma\x1b[0m" if background else "a"
    assert colorize("a\n\na", math.log(probability)) == f"{line}\n\n{line}"


def test_the_backgrounds_have_the_limits_of_the_page():
    page = Path(html.__file__).with_name("page.html").read_text(encoding="utf-8")
    limits = re.search(r"const LIMITS = \[(.*)\]", page)[1].split(", ")
    assert [limit for limit, *_ in TINTS][::-1] == list(map(float, limits))


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
def test_every_character_of_a_streaming_sample_is_printed_once(steps, capsys):
    sample, printer = Sample(SampleRequest(0, Prompt("<"), [60])), Printer(CodePointTokenizer())
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
