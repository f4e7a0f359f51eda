"""The configurator executes settings files and reads what they set. The script is that of conftest.py."""
import os
import subprocess
import sys

import pytest

from configurator import override
from project import SCRIPT
from sampling.messages import training_settings


def test_files_and_arguments_apply_in_order(script, tmp_path):
    (tmp_path / "a.py").write_text("count = 1\nrate = 1\n")
    (tmp_path / "b.py").write_text("count = count + 1\n")
    assert script("a.py", "b.py", "--rate=0.5") == {"count": 2, "rate": 0.5}
    assert script("--count=7", "b.py") == {"count": 8}
    assert script("b.py", "a.py") == {"count": 1, "rate": 1.0}


def test_a_settings_file_is_found_in_any_folder_and_next_to_the_script(script, tmp_path):
    (tmp_path / "else where").mkdir()
    (tmp_path / "else where" / "a.py").write_text("count = 1\n")
    (tmp_path / "project" / "b.py").write_text("count = 2\n")
    assert script("else where/a.py") == {"count": 1} and script("b.py") == {"count": 2}


@pytest.mark.parametrize("arguments, where", [
    (["a.py", "b.py", "--text=x"], "a.py: "), (["a.py", "--count=13"], ""), (["c.py", "--flag"], "c.py: "),
    (["--count=13", "b.py"], ""),
], ids=str)
def test_the_error_for_an_invalid_value_names_the_file_that_set_it(script, tmp_path, arguments, where):
    (tmp_path / "a.py").write_text("count = 13\n")
    (tmp_path / "b.py").write_text("rate = 0.5\n")
    (tmp_path / "c.py").write_text("rate = 13.0\n")

    def refuse(settings):
        for name in "count", "rate":
            if settings[name] == 13 and (name == "count" or settings["flag"]):
                raise ValueError(f"{name} must not be 13")
    with pytest.raises(ValueError) as error:
        script(*arguments, validate=refuse)
    assert str(error.value) == f"{where}{'rate' if 'c.py' in arguments else 'count'} must not be 13"
    assert script("a.py", "--count=3", validate=refuse) == {"count": 3} # what does not count is not refused


def test_arguments_replace_what_a_file_sets_and_add_to_each_other(script, tmp_path):
    (tmp_path / "a.py").write_text("ends = ['X']\n")
    (tmp_path / "b.py").write_text("count = 3\n")
    assert script("a.py", "--ends=A", "--ends=B") == {"ends": ["A", "B"]}
    assert script("--ends=A", "a.py", "--ends=B") == {"ends": "B"}
    assert script("--ends=A", "b.py", "--ends=B") == {"ends": ["A", "B"], "count": 3}


def test_a_file_whose_name_begins_with_a_dash_is_a_file(script, tmp_path):
    (tmp_path / "-t").write_text("count = 1\n")
    assert script("-t", aliases={"t": "text"}) == {"count": 1}


@pytest.mark.parametrize("content", ["# count = 3\n", '{"count": 3, "rate": 1}', "count: 3\nrate: 0.5\n"])
def test_a_file_that_sets_nothing_gets_a_warning(script, tmp_path, messages, content):
    (tmp_path / "a.py").write_text(content)
    assert script("a.py") == {}
    assert messages == ["a.py sets nothing; a settings file is Python, such as: text = '\\n'"]


@pytest.mark.parametrize("content", ["count = 10", "learning_rate = 3", "exec('count = 3')"])
def test_a_file_that_sets_something_gets_no_warning(script, tmp_path, messages, content):
    """Also what it sets to the value that it has, and names that are no settings."""
    (tmp_path / "a.py").write_text(content)
    script("a.py")
    assert all(line.startswith("settings: ") for line in messages)


def test_ignore_sees_the_names_of_a_file_and_passes_its_settings_over(script, tmp_path, messages):
    (tmp_path / "a.py").write_text("count = 3\nrate = 2\ndepth = 5\n")
    (tmp_path / "b.py").write_text("count = 4\n")

    def ignore(names):
        return {"count": "it is deep", "top": "it is not there"} if "depth" in names else {}
    assert script("a.py", "--text=" + "x" * 1000, ignore=ignore) == {"rate": 2.0, "text": "x" * 1000}
    assert messages == ["a.py: count is ignored, it is deep", f"settings: rate=2.0, text='{'x' * 99}"]
    assert script("b.py", "a.py", ignore=ignore) == {"count": 4, "rate": 2.0}
    assert script("a.py", "--count=5", ignore=ignore) == {"count": 5, "rate": 2.0}


def test_a_file_may_be_a_pipe(script, tmp_path):
    """As in bash: sample.py <(echo count=3)"""
    if sys.platform == "win32":
        pytest.skip("Windows has no named pipes in folders")
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["sh", "-c", "echo count=3 > pipe"], cwd=tmp_path):
        assert script("pipe") == {"count": 3}


@pytest.mark.parametrize("content, message", [
    ("count = 'three'", "count takes a whole number, got 'three'"),
    ("text = 3", "text takes text, got 3"),
    ("flag = 0", "a.py: flag takes True or False, got 0"), # although 0 == False
    ("x = 1\ncount = (", "a.py, line 2: SyntaxError"),
    ("\n\nraise RuntimeError('no')", "a.py, line 3: RuntimeError: no"),
    ("def f():\n    1 / 0\nf()", "a.py, line 2: ZeroDivisionError"),
    ("import sys\nsys.exit(0)", "a.py, line 2: SystemExit: 0"),
], ids=repr)
def test_an_error_in_a_settings_file_names_the_file_and_line(script, tmp_path, content, message):
    (tmp_path / "a.py").write_text(content)
    with pytest.raises(ValueError) as error:
        script("a.py")
    assert message in str(error.value)


TRAINING = """
import os
out_dir = 'o'; dataset = 'd'; gradient_accumulation_steps = 1; batch_size = 12; block_size = 64; learning_rate = 1e-3
num, temp = 1, 2.0 # prefixes of settings' names cause no warnings either
def helper(): return 1
"""


def test_training_settings_files_cause_no_warnings(tmp_path, messages):
    (tmp_path / "train.py").write_text(TRAINING)
    scope = {"__file__": str(SCRIPT)}
    exec(SCRIPT.read_text(encoding="utf-8").split("def ")[0], scope)
    settings = override(scope, [str(tmp_path / "train.py")], ignore=training_settings)
    assert settings["out_dir"] == "o" and settings["batch_size"] is None
    assert [line.partition(": ")[0] for line in messages] == [str(tmp_path / "train.py"), "settings"]


def test_a_misspelt_setting_causes_a_warning_and_what_a_file_prints_goes_to_stderr(script, tmp_path, messages, capsys):
    (tmp_path / "a.py").write_text("conut = 3\nfor c in range(3): pass\nprint('hello')\n")
    assert script("a.py") == {}
    assert messages == ["a.py sets conut, which is not a setting; did you mean count?"]
    assert capsys.readouterr() == ("", "hello\n")


def test_a_settings_file_may_use_torch_as_in_nanogpt(script, tmp_path):
    source = "def three(): return torch.ones(3).numel()\ncount = three() + int(math.sqrt(4))\n"
    (tmp_path / "a.py").write_text(source)
    assert script("a.py") == {"count": 5}
