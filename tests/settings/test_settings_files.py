"""The configurator executes settings files and reads what they set.

The script is that of conftest.py. In the tables, a space ends an argument.
"""
import os
import runpy
import sys
from pathlib import Path

import pytest

from project import SCRIPT
from sampling.configurator import ADVICE, find_settings, override
from sampling.settings import ALIASES, FOREIGN, SettingError


def write_modules(folder, contents):
    for name, content in contents.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def write(**contents):
    """Write NAME.py, with this content, in the working directory of the script."""
    write_modules(Path(), contents)


@pytest.mark.parametrize("arguments, changes", {
    "a.py b.py --rate=0.5": {"count": 2, "rate": 0.5},
    "b.py a.py": {"count": 1, "rate": 1.0},
    "c.py --ends=A --ends=B": {"ends": ["A", "B"]},
    "--ends=A c.py --ends=B": {"ends": "B"},
    "--count=7 --ends=A b.py --ends=B": {"count": 8, "ends": ["A", "B"]},
}.items())
def test_files_and_arguments_apply_in_order(script, arguments, changes):
    write(a="count = 1\nrate = 1\n", b="count = count + 1\n", c="ends = ['X']\n")
    assert script(*arguments.split()) == changes


NUMBERS = """
import numpy, pathlib
def seven(): return torch.tensor(7)
count = seven()
rate = numpy.float32(math.sqrt(0.25))
flag = numpy.True_
text = pathlib.Path('x')
ends = ('A', 'B')
"""


def test_numbers_of_numpy_and_torch_and_paths_are_plain_values(script):
    """As in nanoGPT, a file may use torch, and what the script has imported."""
    write(a=NUMBERS)
    changes = {"text": "x", "count": 7, "rate": 0.5, "flag": True, "ends": ["A", "B"]}
    assert repr(script("a.py")) == repr(changes)


@pytest.mark.parametrize("path", ["else where/a.py", "project/b.py", "-t"])
def test_a_settings_file_is_found_in_any_folder_and_next_to_the_script(script, path):
    Path("else where").mkdir()
    Path(path).write_text("count = 1\n")
    found = path.removeprefix("project/") # where the script is
    assert script(found, aliases={"t": "text"}) == {"count": 1}


def test_a_file_may_be_a_pipe(script):
    """As in bash: sample.py <(echo count=3)"""
    reader, writer = os.pipe()
    os.write(writer, b"count = 3\n")
    os.close(writer)
    assert script(f"/dev/fd/{reader}") == {"count": 3}
    os.close(reader)


def refuse(settings, flags):
    if settings["count"] == 13:
        # The message of d.py has the name of a setting that is not wrong.
        raise SettingError(f"count must not be 13; the {settings['text']} is another", "count")
    if settings["rate"] == 13 and settings["flag"]:
        raise SettingError("flag needs another rate", "flag", "rate")


@pytest.mark.parametrize("arguments, error", {
    "a.py b.py --text=x": "a.py: count must not be 13",
    "a.py --count=13": "count must not be 13",
    "d.py --count=13": "count must not be 13",
    "b.py --flag --rate=13": "flag needs another rate",
    "c.py --count=3 --rate=13": "c.py: flag needs another rate",
}.items())
def test_the_error_for_an_invalid_value_names_the_file_that_set_it(script, arguments, error):
    write(a="count = 13\n", b="rate = 0.5\n", c="count = 13\nflag = True\n", d="text = 'text'\n")
    with pytest.raises(ValueError, match=f"^{error}"):
        script(*arguments.split(), validate=refuse)
    replaced = script("a.py", "--count=3", validate=refuse)
    assert replaced == {"count": 3}


NOTHING = [f"a.py sets nothing; {ADVICE}"]
CONUT = ["a.py sets conut, which is not a setting; did you mean count?"]


@pytest.mark.parametrize("content, warnings", [
    ("# count = 3\n", NOTHING),
    ("count: 3\nrate: 0.5\n", NOTHING), # YAML
    ("count == 3", NOTHING),
    ("count = 10", []),
    ("learning_rate = 3", []),
    ("exec('count = 3')", []),
    ("conut = 3\nfor c in range(3): pass\n", CONUT),
    ("t = 'a'", ["a.py sets t, which is not a setting; did you mean text?"]),
])
def test_a_file_that_sets_nothing_or_misspells_a_setting_gets_a_warning(
        script, messages, content, warnings):
    write(a=content)
    script("a.py", aliases={"t": "text"})
    assert [line for line in messages if not line.startswith("settings: ")] == warnings


def test_what_a_file_prints_goes_to_stderr(script, capsys):
    write(a="print('hello')\n")
    script("a.py")
    assert capsys.readouterr() == ("", "hello\n")


@pytest.mark.parametrize("name, content, reason", [
    ("a.json", b'{"count": 3}', "a.json sets nothing"),
    ("model.py", b"SIZE = 3\nclass GPT: pass", "model.py sets nothing"),
    ("a.toml", b"flag = false", "a.toml, line 1: NameError"),
    ("a.py", b"\xff\xfea\0", "a.py: (Syntax|Value)Error"), # UTF-16
    ("a.py", b"PK\3\4\0", "a.py: .*null bytes"), # a checkpoint
    ("a.py", b"exec(open('configurator.py').read())", "'a.py': it is a script with settings"),
])
def test_a_file_that_is_no_settings_file_is_an_error_that_says_what_one_is(
        script, name, content, reason):
    Path(name).write_bytes(content)
    with pytest.raises(ValueError, match=reason) as error:
        script(name)
    assert str(error.value).endswith(ADVICE)


def test_the_script_is_no_settings_file_of_its_own(script):
    with pytest.raises(ValueError, match="it is a script with settings of its own"):
        script("project/script.py")


@pytest.mark.parametrize("content, message", [
    ("count = 'three'", "count takes a whole number, got 'three'"),
    ("flag = 0", "a.py: flag takes True or False, got 0"), # although 0 == False
    ("x = 1\ncount = (", "a.py, line 2: SyntaxError"),
    ("def f():\n    1 / 0\nf()", "a.py, line 2: ZeroDivisionError"),
    ("import sys\nsys.exit(0)", "a.py, line 2: SystemExit: 0"),
])
def test_an_error_in_a_settings_file_names_the_file_and_line(script, content, message):
    write(a=content)
    with pytest.raises(ValueError) as error:
        script("a.py")
    assert message in str(error.value)


TRAINING = """
import os
out_dir = 'o'; dataset = 'd'; batch_size = 12; block_size = 64; learning_rate = 1e-3
num, temp = 1, 2.0 # prefixes of settings cause no warnings either
def helper(): return 1
"""


def test_training_settings_files_cause_no_warnings(tmp_path, messages):
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    settings = override(runpy.run_path(str(SCRIPT)), [str(path)], foreign=FOREIGN)
    assert settings["out_dir"] == "o"
    assert settings["batch_size"] is None, "a training means something else"
    message, = messages
    assert message == "settings: out_dir='o'"


def test_a_file_sets_no_setting_that_means_something_else_in_its_program(script):
    write(a="count = 3\nrate = 3\n", b="other = 1\nfrom a import *\n")
    assert script("a.py", "b.py", foreign={"other": "rate"}) == {"count": 3, "rate": 3.0}
    assert script("b.py", foreign={"other": "rate"}) == {"count": 3}


def test_a_settings_file_imports_its_neighbours_and_no_module_of_theirs_stays(
        script, tmp_path, monkeypatch):
    """Two files import different neighbours of the same names.

    One is called like this package, one like a folder beside the script.
    """
    write_modules(tmp_path / "project", {"config/base": "from shared import *\n"})
    # As in a virtual environment in the working directory.
    write_modules(tmp_path / "lib", {"installed": ""})
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.syspath_prepend(tmp_path / "project") # Python puts a script's folder there
    path = list(sys.path)
    for number in 1, 2:
        folder = tmp_path / f"clone{number}"
        write_modules(folder, {
            "config/base": f"from shared import *\nrate = {number}\n",
            "shared": f"text = 'text {number}'\n",
            "sampling": f"count = {number}\n",
            "a": "import installed\nfrom config.base import *\nfrom sampling import count\n",
        })
        monkeypatch.chdir(folder)
        expected = {"text": f"text {number}", "count": number, "rate": float(number)}
        assert script("a.py") == expected
        assert sys.path == path
        assert sys.modules["sampling.configurator"].override is override
        assert "installed" in sys.modules
        assert not {"config", "config.base", "shared"} & sys.modules.keys()


def test_names_of_other_programs_stand_for_settings_but_are_none():
    settings = find_settings(SCRIPT).keys()
    assert not ALIASES.keys() & settings
    for meant in ALIASES.values():
        assert set(meant.split(" or ")) <= settings
