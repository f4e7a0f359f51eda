"""The configurator reads a script's settings from its source, and prints them for --help."""
import shlex
import sys

import pytest

import sample
from project import SCRIPT
from sampling.configurator import Setting, find_settings, help_text, override, parse, to_argument


def test_help_lists_every_setting_with_its_default_and_comment(capsys):
    with pytest.raises(SystemExit) as end:
        override({"__file__": str(SCRIPT)}, ["--nonsense", "--help"])
    assert end.value.code == 0
    settings, words = find_settings(SCRIPT), " ".join(capsys.readouterr().out.split())
    assert {"init_from", "out_dir", "start", "num_samples", "top_k", "batch_size", "compile"} <= settings.keys()
    for name, setting in settings.items():
        assert setting.comment and setting.group and f"{to_argument(name, setting)} {setting.comment}" in words


@pytest.mark.parametrize("name, program, shown", [("__main__", "sample.py", "python sample.py config/story.py"),
                                                  ("nanogpt_sample.sample", "nanogpt-sample", "nanogpt-sample config")])
def test_help_and_version_name_the_program_as_the_user_called_it(name, program, shown, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"/bin/{program}"])
    scope = {"__file__": str(SCRIPT), "__doc__": sample.__doc__, "__name__": name, "__version__": "1.2.3"}
    for argument in "--help", "--version":
        with pytest.raises(SystemExit):
            override(scope, ["--seed=5", argument])
    printed = capsys.readouterr().out
    assert shown in printed and printed.endswith("\n1.2.3\n")
    assert ("python sample.py" in printed) == (name == "__main__")
    assert max(map(len, printed.splitlines())) <= 80, "also an example, which is not wrapped"


def test_comments_of_all_settings_begin_in_the_same_column():
    settings = {"text": Setting(["str"], "a", "word " * 7, "First"), "other": Setting(["int"], 3, "short", "First"),
                "third": Setting(["int"], 4, "short", "Second")}
    assert help_text("What it does.\n\n    script.py --long\n", settings, 40).splitlines() == [
        "What it does.", "", "    script.py --long", "", "Settings, with their defaults:",
        "", "First:", "  --text=a   word word word word word", "             word word", "  --other=3  short",
        "", "Second:", "  --third=4  short"]


@pytest.mark.parametrize("default, types", [
    ("\n", ["str"]), ("it's $x", ["str"]), ("'a'", ["str"]), ("", ["str"]), ("\\n", ["str"]), (False, ["bool"]),
    ("None", ["str", "NoneType"]), (None, ["str", "NoneType"]), ("[1]", ["str", "list"]), ("5", ["int", "str"]),
    (["\n", "a"], ["str", "list"])], ids=repr)
def test_a_default_can_be_pasted_into_a_shell(default, types):
    argument, = shlex.split(to_argument("name", Setting(types, default, "")))
    found = parse("name", argument.removeprefix("--name="), types)
    assert argument.startswith("--name=") and found == default and type(found) is type(default)


def test_settings_come_from_the_source(script, tmp_path):
    found = find_settings(tmp_path / "project" / "script.py") # that of conftest.py
    assert [found[name] for name in ("text", "count", "rate", "top")] == [
        Setting(["str"], "\n", "any text", "First"), Setting(["int"], 10, "", "First"),
        Setting(["float"], 0.8, "how fast, # how far; and more: #2 indented", "First"),
        Setting(["int", "NoneType"], 200, "may be off", "Second")]
    assert list(found)[4:] == ["flag", "ends", "pick"] and found["pick"].group == "Third"
