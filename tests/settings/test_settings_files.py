"""The configurator executes settings files and reads what they set. The script is that of conftest.py."""
import os
import sys
from pathlib import Path

import pytest

from project import SCRIPT
from sampling.configurator import find_settings, override
from sampling.params import ALIASES, SettingError


def write(**files):
    """Write NAME.py, with this content, in the working directory of the script."""
    for name, content in files.items():
        Path(f"{name}.py").write_text(content)


@pytest.mark.parametrize("arguments, changes", [
    (["a.py", "b.py", "--rate=0.5"], {"count": 2, "rate": 0.5}), (["b.py", "a.py"], {"count": 1, "rate": 1.0}),
    (["c.py", "--ends=A", "--ends=B"], {"ends": ["A", "B"]}), (["--ends=A", "c.py", "--ends=B"], {"ends": "B"}),
    (["--count=7", "--ends=A", "b.py", "--ends=B"], {"count": 8, "ends": ["A", "B"]})], ids=str)
def test_files_and_arguments_apply_in_order(script, arguments, changes):
    write(a="count = 1\nrate = 1\n", b="count = count + 1\n", c="ends = ['X']\n")
    assert script(*arguments) == changes


def test_numbers_of_numpy_and_paths_are_plain_values(script):
    write(a="import numpy, pathlib\ncount = numpy.int64(7)\nrate = numpy.float32(0.5)\nflag = numpy.True_\n"
            "text = pathlib.Path('x')\nends = ('A', 'B')\n")
    changes = {"text": "x", "count": 7, "rate": 0.5, "flag": True, "ends": ["A", "B"]}
    assert repr(script("a.py")) == repr(changes)


@pytest.mark.parametrize("path", ["else where/a.py", "project/b.py", "-t"])
def test_a_settings_file_is_found_in_any_folder_and_next_to_the_script(script, path):
    Path("else where").mkdir()
    Path(path).write_text("count = 1\n")
    assert script(path.removeprefix("project/"), aliases={"t": "text"}) == {"count": 1} # the script is in project/


def test_a_file_may_be_a_pipe(script):
    """As in bash: sample.py <(echo count=3)"""
    reader, writer = os.pipe()
    os.write(writer, b"count = 3\n")
    os.close(writer)
    assert script(f"/dev/fd/{reader}") == {"count": 3}
    os.close(reader)


@pytest.mark.parametrize("arguments, error", [
    (["a.py", "b.py", "--text=x"], "a.py: count must not be 13"), (["a.py", "--count=13"], "count must not be 13"),
    (["--count=13", "b.py"], "count must not be 13"), (["b.py", "--flag", "--rate=13"], "flag needs another rate"),
    (["c.py", "--count=3", "--rate=13"], "c.py: flag needs another rate"),
    (["d.py", "--count=13"], "count must not be 13")], ids=str) # although the error has a word that is a setting
def test_the_error_for_an_invalid_value_names_the_file_that_set_it(script, arguments, error):
    write(a="count = 13\n", b="rate = 0.5\n", c="count = 13\nflag = True\n", d="text = 'text'\n")

    def refuse(settings, flags):
        if settings["count"] == 13:
            raise SettingError(f"count must not be 13; the {settings['text']} is another", "count")
        if settings["rate"] == 13 and settings["flag"]:
            raise SettingError("flag needs another rate", "flag", "rate")
    with pytest.raises(ValueError, match=f"^{error}"):
        script(*arguments, validate=refuse)
    assert script("a.py", "--count=3", validate=refuse) == {"count": 3} # the argument replaces what the file sets


@pytest.mark.parametrize("content, sets_nothing", [
    ("# count = 3\n", True), ('{"count": 3, "rate": 1}', True), ("count: 3\nrate: 0.5\n", True),
    ("count = 10", False), ("learning_rate = 3", False), ("exec('count = 3')", False)])
def test_a_file_that_sets_nothing_gets_a_warning(script, messages, content, sets_nothing):
    write(a=content)
    script("a.py")
    warning = "a.py sets nothing; a settings file is Python that assigns settings"
    assert [line for line in messages if not line.startswith("settings: ")] == [warning] * sets_nothing


@pytest.mark.parametrize("path, content, message", [
    ("a.json", b'{"count": 3}', "'a.json' is JSON, but a settings file is Python, such as: temperature = 0.8"),
    ("a.toml", b"flag = false", "'a.toml' is TOML"), ("b/a.yml", b"count: 3", "'b/a.yml' is YML"),
    ("a.py", "count = 3".encode("utf-16-le"), "'a.py' is not a settings file"), # it could be anything
    ("a.py", "\ufeffcount = 3".encode("utf-16-le"), "'a.py' is in UTF-16: save it as UTF-8"),
    ("a.py", "\ufeffcount = 3".encode("utf-16-be"), "'a.py' is in UTF-16: save it as UTF-8")], ids=str)
def test_a_file_in_another_format_is_an_error_that_names_it(script, path, content, message):
    Path("b").mkdir()
    Path(path).write_bytes(content)
    with pytest.raises(ValueError) as error:
        script(path)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("content, message", [
    ("count = 'three'", "count takes a whole number, got 'three'"),
    ("flag = 0", "a.py: flag takes True or False, got 0"), # although 0 == False
    ("x = 1\ncount = (", "a.py, line 2: SyntaxError"),
    ("def f():\n    1 / 0\nf()", "a.py, line 2: ZeroDivisionError"),
    ("import sys\nsys.exit(0)", "a.py, line 2: SystemExit: 0")], ids=repr)
def test_an_error_in_a_settings_file_names_the_file_and_line(script, content, message):
    write(a=content)
    with pytest.raises(ValueError) as error:
        script("a.py")
    assert message in str(error.value)


def test_training_settings_files_cause_no_warnings(tmp_path, messages):
    path, scope = tmp_path / "train.py", {"__file__": str(SCRIPT)}
    path.write_text("import os\nout_dir = 'o'; dataset = 'd'; batch_size = 12; block_size = 64; learning_rate = 1e-3\n"
                    "num, temp = 1, 2.0 # prefixes of settings cause no warnings either\ndef helper(): return 1\n")
    exec(SCRIPT.read_text(encoding="utf-8").split("def ")[0], scope)
    settings = override(scope, [str(path)])
    assert settings["out_dir"] == "o" and settings["batch_size"] == 12 # samples at once
    assert [line.partition(": ")[0] for line in messages] == ["settings"]


def test_a_misspelt_setting_causes_a_warning_and_what_a_file_prints_goes_to_stderr(script, messages, capsys):
    write(a="conut = 3\nfor c in range(3): pass\nprint('hello')\n")
    assert script("a.py") == {}
    assert messages == ["a.py sets conut, which is not a setting; did you mean count?"]
    assert capsys.readouterr() == ("", "hello\n")


def test_a_settings_file_imports_its_neighbours_and_no_module_of_theirs_stays(script, tmp_path, monkeypatch):
    """Two files import different neighbours of the same names: one of this package, one of the script's folder."""
    Path("project/config").mkdir()
    Path("project/config/base.py").write_text("from shared import *\n")
    Path("lib").mkdir()
    Path("lib/installed.py").touch() # as in a virtual environment in the working directory
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.syspath_prepend(tmp_path / "project") # Python puts a script's folder there
    path = [*sys.path]
    for number in 1, 2:
        folder = tmp_path / f"clone{number}"
        (folder / "config").mkdir(parents=True)
        (folder / "config" / "base.py").write_text(f"from shared import *\nrate = {number}\n")
        (folder / "shared.py").write_text(f"text = 'text {number}'\n")
        (folder / "sampling.py").write_text(f"count = {number}\n")
        (folder / "a.py").write_text("import installed\nfrom config.base import *\nfrom sampling import count\n")
        monkeypatch.chdir(folder)
        assert script("a.py") == {"text": f"text {number}", "count": number, "rate": float(number)}
        assert sys.path == path and sys.modules["sampling.configurator"].override is override
        assert not {"config", "config.base", "shared"} & sys.modules.keys() and "installed" in sys.modules


def test_a_settings_file_may_use_torch_as_in_nanogpt(script):
    write(a="def three(): return torch.ones(3).numel()\ncount = three() + int(math.sqrt(4))\n")
    assert script("a.py") == {"count": 5}


# ---- names of other programs

def test_aliases_name_settings_but_are_not_settings():
    settings = find_settings(SCRIPT).keys()
    assert not ALIASES.keys() & settings
    for meant in ALIASES.values():
        assert set(meant.split(" or ")) <= settings
