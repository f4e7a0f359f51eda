"""The configurator reads a script's settings from its source, and prints them for --help."""
import shlex
import subprocess
import sys
import textwrap

import pytest

from configurator import Setting, find_settings, help_text, override, parse, to_argument
from example_script import DEFAULTS, SOURCE
from project import PROJECT, SCRIPT


def test_help_lists_every_setting_with_its_default_and_comment():
    done = subprocess.run([sys.executable, SCRIPT, "--nonsense", "--help"], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0
    settings, words = find_settings(SCRIPT), " ".join(done.stdout.split())
    assert {"init_from", "out_dir", "start", "num_samples", "top_k", "batch_size", "compile"} <= settings.keys()
    for name, setting in settings.items():
        assert setting.comment and setting.group and f"{to_argument(name, setting)} {setting.comment}" in words


@pytest.mark.parametrize("width", [20, 60, 80, 300])
def test_help_wraps_to_the_width_of_the_terminal(width):
    doc = "What it does, in " + "many " * 40 + "words.\n\n    script.py --long\n"
    settings = {"text": Setting(["str"], "a", "long " * 30, "First"), "other": Setting(["int"], 3, "short", "First"),
                "third": Setting(["int"], 4, "short", "Second")}
    printed = help_text(doc, settings, width)
    lines, limit = printed.splitlines(), min(max(width, 40), 120)
    assert limit - 5 <= max(map(len, lines)) <= limit and "    script.py --long" in lines
    assert lines.count("First:") == lines.count("Second:") == 1
    assert printed.endswith("\n\nSecond:\n  --third=4  short\n")
    first = lines.index("First:")
    assert lines[first + 1].startswith("  --text=a   long") and lines[first + 2].startswith("             long")


@pytest.mark.parametrize("width", [50, 100])
def test_help_has_the_width_of_the_terminal(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        override({"__file__": str(SCRIPT), "__doc__": "many words " * 50}, ["--help"])
    assert width - 5 <= max(map(len, capsys.readouterr().out.splitlines())) <= width


@pytest.mark.parametrize("default, types", [
    ("\n", ["str"]), ("auto", ["str"]), ("two words", ["str"]), ("it's", ["str"]), ('"', ["str"]), ("'a'", ["str"]), ("", ["str"]), ("$x", ["str"]),
    ("\\n", ["str"]), ("None", ["str", "None"]), ("[1]", ["str", "list"]), ("5", ["int", "str"]), (5, ["int", "str"]), (None, ["str", "None"]),
    (["\n", "a"], ["str", "list"]), (0.5, ["float"]), (False, ["bool"]), ("é\t", ["str"]),
], ids=repr)
def test_a_default_can_be_pasted_into_a_shell(default, types):
    argument, = shlex.split(to_argument("name", Setting(types, default, "")))
    key, _, text = argument.partition("=")
    found = parse("name", text, types)
    assert key == "--name" and found == default and type(found) is type(default)


def test_all_defaults_of_the_script_can_be_pasted_into_a_shell():
    settings = find_settings(SCRIPT)
    flags = " ".join(to_argument(name, setting) for name, setting in settings.items())
    scope = {"__file__": str(SCRIPT)} | {name: None for name in settings}
    assert override(scope, shlex.split(flags), log=lambda text: None) == {name: setting.default for name, setting in settings.items()}
    assert "--start='\"\\n\"'" in flags and "--init_from=resume" in flags


def test_headings_and_longer_comments_come_from_the_source(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent("""\
        import os

        # First
        a = 1 # one
        b = 2 # two;
              # and more: #2
              #   indented

        # Second
        c = 3
        d = 4 # four
        # Third
        e = 5 # five
        """))
    settings = find_settings(tmp_path / "script.py")
    assert {name: (setting.group, setting.comment) for name, setting in settings.items()} == {
        "a": ("First", "one"), "b": ("First", "two; and more: #2 indented"), "c": ("Second", ""), "d": ("Second", "four"),
        "e": ("Third", "five")}


def test_types_defaults_and_comments_come_from_the_source(tmp_path):
    (tmp_path / "script.py").write_text(SOURCE)
    settings = find_settings(tmp_path / "script.py")
    assert {name: setting.default for name, setting in settings.items()} == DEFAULTS and list(settings) == list(DEFAULTS)
    assert settings["rate"] == Setting(["float"], 0.8, "how fast, # how far") and settings["top"].types == ["int", "None"]
