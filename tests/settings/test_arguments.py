"""The configurator reads command-line arguments into a script's globals.

The script is that of conftest.py. In the tables, a space ends an argument.
"""
from pathlib import Path

import pytest
import torch

from sampling.configurator import ADVICE

CHANGES = { # what arguments change
    "--text=a=b": {"text": "a=b"},
    "--text=it's": {"text": "it's"},
    '--text="\\n\\n"': {"text": "\n\n"},
    "--text=" + "(" * 5000: {"text": "(" * 5000},
    "--count -3": {"count": -3},
    "--rate=1": {"rate": 1.0},
    "--top=none": {"top": None},
    "--flag --count=3": {"count": 3, "flag": True},
    "--flag false": {},
    "--flag --flag=0": {},
    '--ends=["\\n\\n","KING"]': {"ends": ["\n\n", "KING"]},
    "--ends='[\"a\"]'": {"ends": '["a"]'},
    "--ends=A --ends=['B','C'] --count=3 --ends D": {"count": 3, "ends": ["A", "B", "C", "D"]},
    "--ends=A --ends=None --ends=B": {"ends": "B"},
    "--ends=('A','B')": {"ends": ["A", "B"]},
    "--ends=(A)": {"ends": "(A)"},
    '--ends="[A]"': {"ends": "[A]"},
    "--ends=[A": {"ends": "[A"},
    "--text=[A]": {"text": "[A]"},
    "--count=007": {"count": 7},
    "--rate -00.5": {"rate": -0.5},
    "--pick=08": {"pick": 8},
    "--pick='8'": {"pick": "8"},
}


@pytest.mark.parametrize("arguments, changes", CHANGES.items())
def test_arguments_change_settings(script, arguments, changes):
    assert repr(script(*arguments.split(" "))) == repr(changes) # True == 1


CARRIAGE_RETURN = "ends in a carriage return: save your script with Unix line ends"
ERRORS = {
    "--cuont=3": "unknown setting --cuont; did you mean count?; --help lists all settings",
    "--co=3": "unknown setting --co; --help lists",
    "--inner=3": "unknown setting --inner; --help lists all settings",
    "--count=1 --n_layer=4 --cuont=3 --rate 1": "unknown setting --n_layer; --help lists",
    "-": "unknown setting -; settings begin with --",
    "-count=3": "unknown setting -count; did you mean count?; settings begin with --",
    "-t=x": "unknown setting -t; did you mean text?",
    "--size x": "--size; did you mean count or top?",
    "--a-b x": "unknown setting --a-b; did you mean rate?",
    "--count": "--count needs a value",
    "--count=3.5": "count takes a whole number, got '3.5'",
    "--flag=maybe": "flag takes True or False, got 'maybe'",
    "--rate=1" + "0" * 400: "rate takes a number",
    "--count=3 --flag --rate=fast": "rate takes a number",
    '--ends=["A",': """ends: '["A",' is no list: write ["A", "B"], in a shell""",
    "--ends=[\\n,A]": r"""for the text itself, '"[\\n,A]"'""", # a shell makes it of ["\n", "A"]
    "missing.py": f"the settings file 'missing.py': No such file or directory; {ADVICE}",
    "folder": f"cannot read the settings file 'folder': Is a directory; {ADVICE}",
    "folder/ckpt.pt": ADVICE,
    "\u2013count=3": ADVICE, # a program for texts makes this dash of --
    "--flag\r": rf"'--flag\r' {CARRIAGE_RETURN}",
    "--count=3 --text a\r": rf"'a\r' {CARRIAGE_RETURN}", # of a text, too: quoted, it is "a\r"
    "a\0b": r"cannot read the settings file 'a\x00b': embedded null byte",
    "--text=Once upon a time --flag": 'settings are --key="a value"',
}
ALIASES = {"t": "text", "size": "count or top", "a_b": "rate"} # of other programs


@pytest.mark.parametrize("arguments, message", ERRORS.items())
def test_an_invalid_argument_raises_and_changes_nothing(script, arguments, message):
    Path("folder").mkdir()
    torch.save({"model": {}}, "folder/ckpt.pt")
    with pytest.raises(ValueError) as error:
        script(*arguments.split(" "), aliases=ALIASES)
    assert message in str(error.value)
