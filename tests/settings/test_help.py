"""The configurator reads a script's settings from its source, and prints them for --help."""
import ast
import shlex
import sys

import pytest

from project import SCRIPT
from sampling.configurator import Setting, find_settings, help_text, override, parse, to_argument

HELP = '''\
What it does.

    script.py --text=one --count=3 --rate=0.5

Settings, with their defaults:

First:
  --text='"\\n"'  any text
  --count=10     -
  --rate=0.8     how fast, # how far;
                 and more: #2 indented

Second:
  --top=200      may be off
  --flag=False   on or off

Third:
  --ends=None    a text, or several
  --pick=7       a number, or a word
'''


@pytest.mark.usefixtures("script")
def test_help_has_all_settings_in_groups_with_comments_in_one_column(tmp_path):
    settings = find_settings(tmp_path / "project" / "script.py") # that of conftest.py
    doc = HELP.partition("\n\nSettings")[0]
    assert help_text(doc, settings, 40) == HELP
    # With python -OO, there is no docstring.
    assert help_text("", settings, 40) == HELP[len(doc) + 2:]


def test_each_setting_of_the_script_has_a_comment_and_a_group():
    for setting in find_settings(SCRIPT).values():
        assert setting.comment
        assert setting.group


@pytest.mark.parametrize("name, program, shown", [
    ("__main__", "sample.py", "python sample.py config/story.py"),
    ("nanogpt_sample.sample", "nanogpt-sample", "nanogpt-sample config"),
])
def test_help_and_version_name_the_program_as_the_user_called_it(
        name, program, shown, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"/bin/{program}"])
    doc = ast.get_docstring(ast.parse(SCRIPT.read_text()))
    scope = {"__file__": str(SCRIPT), "__name__": name, "__doc__": doc, "__version__": "1.2.3"}
    for argument in "--help", "--version":
        with pytest.raises(SystemExit):
            override(scope, ["--nonsense", argument])
    printed = capsys.readouterr().out
    assert shown in printed
    assert ("python sample.py" in printed) == (name == "__main__")
    assert printed.endswith("\n1.2.3\n")
    longest = max(map(len, printed.splitlines()))
    assert longest <= 80, "also an example, which is not wrapped"


@pytest.mark.parametrize("types, defaults", [
    ("str", ["\n", "it's $x", "'a'", "", "\\n"]),
    ("bool", [False]),
    ("str | NoneType", ["None", None]),
    ("str | list", ["[1]", ["\n", "a"]]),
])
def test_a_default_can_be_pasted_into_a_shell(types, defaults):
    types = types.split(" | ")
    for default in defaults:
        argument, = shlex.split(to_argument("name", Setting(types, default, "")))
        name, _, text = argument.partition("=")
        assert name == "--name"
        assert repr(parse("name", text, types)) == repr(default)
