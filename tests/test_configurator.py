"""The configurator reads settings files and command-line arguments into a script's globals. The script here is an example."""
import subprocess
import sys

import pytest

from configurator import Setting, find_settings, override, parse, suggest
from project import PROJECT, SCRIPT

SOURCE = '''"""A script."""
import math
text = "\\n" # any text
count = 10 # a whole number
rate = 0.8 # how fast, # how far
top: int | None = 200 # may be off
flag = False # on or off

def main():
    inner = 3 # not a setting
'''
DEFAULTS = {"text": "\n", "count": 10, "rate": 0.8, "top": 200, "flag": False}


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Runs override on a fresh script: script(*arguments, validate=..., log=...) -> the settings that differ from the defaults."""
    path = tmp_path / "project" / "script.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)

    def run(*arguments, **options):
        scope = {"__file__": str(path)}
        exec(SOURCE, scope)
        before = dict(scope)
        try:
            settings = override(scope, arguments, **options)
        except ValueError:
            assert scope == before
            raise
        assert settings.keys() == DEFAULTS.keys() and scope == before | settings
        return {name: value for name, value in settings.items() if repr(value) != repr(DEFAULTS[name])}
    return run


@pytest.mark.parametrize("arguments, changes", [
    (["--text=hello"], {"text": "hello"}),
    (["--text=a=b"], {"text": "a=b"}),
    (["--text=123"], {"text": "123"}),
    (["--text=None"], {"text": "None"}),
    (["--text=True"], {"text": "True"}),
    (["--text="], {"text": ""}),
    (["--text=[1, 2]"], {"text": "[1, 2]"}),
    (["--text=it's"], {"text": "it's"}),
    (['--text="\\n"'], {}),
    (['--text="\\n\\n"'], {"text": "\n\n"}),
    (["--text='a b'"], {"text": "a b"}),
    (['--text="\\d"'], {"text": "\\d"}),
    (["--text=" + "(" * 5000], {"text": "(" * 5000}),
    (["--text", "two words"], {"text": "two words"}),
    (["--count=3"], {"count": 3}),
    (["--count", "-3"], {"count": -3}),
    (["--rate=1"], {"rate": 1.0}),
    (["--rate=1e-3"], {"rate": 0.001}),
    (["--top=5"], {"top": 5}),
    (["--top=None"], {"top": None}),
    (["--top=none"], {"top": None}),
    (["--flag"], {"flag": True}),
    (["--flag", "--count=3"], {"flag": True, "count": 3}),
    (["--flag", "--flag", "false"], {}),
    (["--flag=true"], {"flag": True}),
    (["--flag=True"], {"flag": True}),
    (["--flag", "--flag=0"], {}),
    (["--count=3", "--count=4"], {"count": 4}),
    ([], {}),
], ids=str)
def test_arguments_change_settings(script, arguments, changes):
    found = script(*arguments)
    assert found == changes
    assert all(type(found[name]) is type(value) for name, value in changes.items()) # True == 1


@pytest.mark.parametrize("arguments, message", [
    (["--cuont=3"], "unknown setting --cuont; did you mean count?; --help lists all settings"),
    (["--inner=3"], "unknown setting --inner"),
    (["--fla"], "did you mean flag?"),
    (["--COUNT=3"], "did you mean count?"),
    (["--"], "unknown setting --"),
    (["--math=3"], "unknown setting --math"),
    (["--__file__=x"], "unknown setting"),
    (["--count"], "--count needs a value"),
    (["--count", "--flag"], "--count needs a value"),
    (["--count=3.5"], "count takes a whole number, got '3.5'"),
    (["--count=None"], "count takes a whole number"),
    (["--count=True"], "count takes a whole number"),
    (["--count=many"], "count takes a whole number, got 'many'"),
    (["--rate=nan"], "rate takes a number"),
    (["--rate=1" + "0" * 400], "rate takes a number"),
    (["--top=half"], "top takes a whole number or None"),
    (["--flag=maybe"], "flag takes True or False, got 'maybe'"),
    (["missing.py"], "cannot read the settings file 'missing.py': No such file"),
    (["."], "cannot read the settings file '.'"),
    (["a\0b"], "cannot read the settings file 'a\\x00b': embedded null byte"),
    (["--count=3", "--flag", "--rate=fast"], "rate takes a number"),
], ids=str)
def test_an_invalid_argument_raises_and_changes_nothing(script, arguments, message):
    with pytest.raises(ValueError) as error:
        script(*arguments)
    assert message in str(error.value)


def test_dashes_in_names_are_read_as_underscores(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("top_k = 200\n")
    scope = {"__file__": str(path), "top_k": 200}
    assert override(scope, ["--top-k", "5"]) == {"top_k": 5} and scope["top_k"] == 5


def test_files_and_arguments_apply_in_order(script, tmp_path):
    (tmp_path / "a.py").write_text("count = 1\nrate = 1\n")
    (tmp_path / "b.py").write_text("count = count + 1\n")
    assert script("a.py", "b.py", "--rate=0.5") == {"count": 2, "rate": 0.5}
    assert script("--count=7", "b.py") == {"count": 8}
    assert script("b.py", "a.py") == {"count": 1, "rate": 1.0}


def test_a_settings_file_is_found_in_any_folder_and_next_to_the_script(script, tmp_path):
    (tmp_path / "else where").mkdir()
    (tmp_path / "else where" / "a.py").write_text("count = 1\n")
    (tmp_path / "project" / "config").mkdir()
    (tmp_path / "project" / "config" / "b.py").write_text("count = 2\n")
    assert script("else where/a.py") == script(str(tmp_path / "else where" / "a.py")) == {"count": 1}
    assert script("config/b.py") == {"count": 2}


def test_validate_sees_all_settings_before_they_apply(script):
    seen = []
    assert script("--count=3", validate=seen.append) == {"count": 3}
    assert seen == [DEFAULTS | {"count": 3}]

    def refuse(settings):
        raise ValueError("count must not be 3")
    lines = []
    with pytest.raises(ValueError, match="must not be 3"): # the fixture checks that nothing has changed
        script("--count=3", validate=refuse, log=lines.append)
    assert lines == []


def test_one_log_line_lists_the_changes(script, tmp_path):
    (tmp_path / "a.py").write_text("rate = 1\ncount = 10\n")
    lines = []
    script("a.py", "--text=" + "x" * 1000, "--flag=False", log=lines.append)
    assert lines == [f"settings: rate=1.0, text='{'x' * 99}, flag=False"]
    script(log=lines.append)
    assert len(lines) == 1


@pytest.mark.parametrize("content, message", [
    ("count = 'three'", "count takes a whole number, got 'three'"),
    ("text = 3", "text takes text, got 3"),
    ("flag = 0", "a.py: flag takes True or False, got 0"), # although 0 == False
    ("x = 1\ncount = (", "a.py, line 2: SyntaxError"),
    ("\n\nraise RuntimeError('no')", "a.py, line 3: RuntimeError: no"),
    ("count = undefined", "a.py, line 1: NameError"),
    ("def f():\n    1 / 0\nf()", "a.py, line 2: ZeroDivisionError"),
    ("\0", "a.py"),
    ("import sys\nsys.exit(0)", "a.py, line 2: SystemExit: 0"),
    ("raise GeneratorExit", "a.py, line 1: GeneratorExit"),
    ("count = 16**5000", "a.py: count takes a whole number, got an integer of 20001 bits"),
], ids=repr)
def test_an_error_in_a_settings_file_names_the_file_and_line(script, tmp_path, content, message):
    (tmp_path / "a.py").write_text(content)
    with pytest.raises(ValueError) as error:
        script("a.py")
    assert message in str(error.value)


TRAINING = """
out_dir = 'o'; eval_interval = 1; log_interval = 1; eval_iters = 1; eval_only = False; always_save_checkpoint = True
init_from = 'resume'; wandb_log = False; wandb_project = 'p'; wandb_run_name = 'r'; dataset = 'd'; gradient_accumulation_steps = 1
batch_size = 12; block_size = 64; n_layer = 4; n_head = 4; n_embd = 128; dropout = 0.0; bias = False; learning_rate = 1e-3
max_iters = 1; weight_decay = 0.1; beta1 = 0.9; beta2 = 0.95; grad_clip = 1.0; decay_lr = True; warmup_iters = 1
lr_decay_iters = 1; min_lr = 0.1; backend = 'nccl'; device = 'cpu'; dtype = 'float16'; compile = False
import os
num, temp = 1, 2.0 # prefixes of settings' names cause no warnings either
def helper(): return 1
"""


def test_training_settings_files_cause_no_warnings(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    scope = {"__file__": str(SCRIPT), "__doc__": ""}
    exec(SCRIPT.read_text(encoding="utf-8").split("def ")[0], scope)
    before, lines = dict(scope), []
    settings = override(scope, [str(tmp_path / "train.py")], log=lines.append)
    assert len(lines) == 1 and lines[0].startswith("settings: ")
    assert {name for name, value in settings.items() if value != before[name]} == {"out_dir", "device", "dtype", "batch_size"}


def test_ctrl_c_in_a_settings_file_raises_keyboard_interrupt(script, tmp_path):
    (tmp_path / "a.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        script("a.py")


def test_a_misspelt_setting_in_a_file_causes_a_warning(script, tmp_path, capsys):
    (tmp_path / "a.py").write_text("conut = 3\nfor c in range(3): pass\n")
    assert script("a.py") == {}
    assert capsys.readouterr().out == "warning: a.py sets conut, which is not a setting; did you mean count?\n"


def test_output_of_a_settings_file_goes_to_stderr(script, tmp_path, capsys):
    (tmp_path / "a.py").write_text("print('hello')\n")
    script("a.py")
    assert capsys.readouterr() == ("", "hello\n")


def test_a_settings_file_may_use_torch_as_in_nanogpt(script, tmp_path):
    (tmp_path / "a.py").write_text("def three(): return torch.ones(3).numel()\ncount = three() + int(math.sqrt(4))\n")
    assert script("a.py") == {"count": 5}


def test_help_lists_every_setting_with_its_default_and_comment():
    command = [sys.executable, "-X", "importtime", SCRIPT, "--nonsense", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "configurator" in imported and not imported & {"torch", "numpy", "tqdm", "transformers"} # torch takes a second
    settings = find_settings(SCRIPT)
    assert {"init_from", "out_dir", "start", "num_samples", "top_k", "batch_size", "compile"} <= settings.keys()
    for name, setting in settings.items():
        line, = [line for line in done.stdout.splitlines() if line.strip().startswith(f"--{name}=")]
        assert repr(setting.default) in line and setting.comment and setting.comment in line


def test_types_defaults_and_comments_come_from_the_source(tmp_path):
    (tmp_path / "script.py").write_text(SOURCE)
    settings = find_settings(tmp_path / "script.py")
    assert {name: setting.default for name, setting in settings.items()} == DEFAULTS and list(settings) == list(DEFAULTS)
    assert settings["rate"] == Setting(["float"], 0.8, "how fast, # how far") and settings["top"].types == ["int", "None"]


def test_a_single_value_can_be_parsed():
    assert parse("top", "None", ["int", "None"]) is None and parse("rate", "3", ["float"]) == 3.0
    assert parse("stop", "['a']", ["str", "list", "None"]) == "['a']" # on the command line, a list is text
    with pytest.raises(ValueError, match="top takes a whole number or None, got 'half'"):
        parse("top", "half", ["int", "None"])


@pytest.mark.parametrize("name, hint", [("cuont", "; did you mean count?"), ("cou", "; did you mean count?"), ("co", ""), ("other", "")])
def test_similar_names_are_suggested(name, hint):
    assert suggest(name, DEFAULTS) == hint


def test_prefixes_are_suggested_for_arguments_only():
    assert suggest("temp", ["temperature"]) == "; did you mean temperature?"
    assert suggest("temp", ["temperature"], prefixes=False) == ""
