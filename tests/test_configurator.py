"""Settings files and arguments -> a script's globals. The script here is made up: configurator knows none."""
import subprocess
import sys

import pytest
from conftest import PROJECT

from configurator import find_settings, override

SCRIPT = '''"""A script."""
import math
text = "\\n" # any text
count = 10 # a whole number
rate = 0.8 # how fast, # how far
top: int | None = 200 # may be off
flag = False # on or off

def main():
    inner = 3 # no setting
'''


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Runs override on a fresh script: script(*arguments) -> what changed, and what stands then."""
    path = tmp_path / "project" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        scope = {"__file__": str(path)}
        exec(SCRIPT, scope)
        changed = override(scope, arguments)
        assert all(scope[name] == value for name, value in changed.items())
        return changed
    return run


@pytest.mark.parametrize("arguments, changed", [
    (["--text=hello"], {"text": "hello"}),
    (["--text=a=b"], {"text": "a=b"}),
    (["--text=123"], {"text": "123"}),
    (["--text=None"], {"text": "None"}),
    (["--text=True"], {"text": "True"}),
    (["--text="], {"text": ""}),
    (["--text=[1, 2]"], {"text": "[1, 2]"}),
    (["--text=it's"], {"text": "it's"}),
    (['--text="\\n"'], {"text": "\n"}),
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
    (["--flag", "false"], {"flag": False}),
    (["--flag=true"], {"flag": True}),
    (["--flag=True"], {"flag": True}),
    (["--flag=0"], {"flag": False}),
    (["--count=3", "--count=4"], {"count": 4}),
    ([], {}),
], ids=str)
def test_arguments(script, arguments, changed):
    found = script(*arguments)
    assert found == changed
    assert [type(value) for value in found.values()] == [type(value) for value in changed.values()]


@pytest.mark.parametrize("arguments, said", [
    (["--cuont=3"], "unknown setting --cuont; did you mean count?"),
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
], ids=str)
def test_wrong_arguments(script, arguments, said):
    with pytest.raises(ValueError) as error:
        script(*arguments)
    assert said in str(error.value)


def test_a_dash_is_an_underscore(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("top_k = 200\n")
    scope = {"__file__": str(path), "top_k": 200}
    assert override(scope, ["--top-k", "5"]) == {"top_k": 5} and scope["top_k"] == 5


def test_files_and_arguments_are_taken_in_order(script, tmp_path):
    (tmp_path / "a.py").write_text("count = 1\nrate = 1\n")
    (tmp_path / "b.py").write_text("count = count + 1\n")
    assert script("a.py", "b.py", "--rate=0.5") == {"count": 2, "rate": 0.5}
    assert script("--count=7", "b.py") == {"count": 8}
    assert script("b.py", "a.py") == {"count": 1, "rate": 1.0}


def test_a_file_may_lie_in_another_folder_or_beside_the_script(script, tmp_path):
    (tmp_path / "else where").mkdir()
    (tmp_path / "else where" / "a.py").write_text("count = 1\n")
    (tmp_path / "project" / "config").mkdir()
    (tmp_path / "project" / "config" / "b.py").write_text("count = 2\n")
    assert script("else where/a.py") == script(str(tmp_path / "else where" / "a.py")) == {"count": 1}
    assert script("config/b.py") == {"count": 2}


@pytest.mark.parametrize("content, said", [
    ("count = 'three'", "count takes a whole number, got 'three'"),
    ("text = 3", "text takes text, got 3"),
    ("x = 1\ncount = (", "a.py, line 2: SyntaxError"),
    ("\n\nraise RuntimeError('no')", "a.py, line 3: RuntimeError: no"),
    ("count = undefined", "a.py, line 1: NameError"),
    ("def f():\n    1 / 0\nf()", "a.py, line 2: ZeroDivisionError"),
    ("\0", "a.py"),
    ("import sys\nsys.exit(0)", "a.py, line 2: SystemExit: 0"),
    ("raise GeneratorExit", "a.py, line 1: GeneratorExit"),
], ids=repr)
def test_wrong_files(script, tmp_path, content, said):
    (tmp_path / "a.py").write_text(content)
    with pytest.raises(ValueError) as error:
        script("a.py")
    assert said in str(error.value)


TRAINING = """
out_dir = 'o'; eval_interval = 1; log_interval = 1; eval_iters = 1; eval_only = False; always_save_checkpoint = True
init_from = 'resume'; wandb_log = False; wandb_project = 'p'; wandb_run_name = 'r'; dataset = 'd'; gradient_accumulation_steps = 1
batch_size = 12; block_size = 64; n_layer = 4; n_head = 4; n_embd = 128; dropout = 0.0; bias = False; learning_rate = 1e-3
max_iters = 1; weight_decay = 0.1; beta1 = 0.9; beta2 = 0.95; grad_clip = 1.0; decay_lr = True; warmup_iters = 1
lr_decay_iters = 1; min_lr = 0.1; backend = 'nccl'; device = 'cpu'; dtype = 'float16'; compile = False
import os
def helper(): return 1
"""


def test_training_files_are_taken_without_a_word(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    source = (PROJECT / "sample.py").read_text()
    scope = {"__file__": str(PROJECT / "sample.py"), "__doc__": ""}
    exec(source.split("def check_settings")[0], scope)
    warnings = []
    changed = override(scope, [str(tmp_path / "train.py")], warn=warnings.append)
    assert not warnings
    assert changed.keys() == {"out_dir", "device", "dtype", "batch_size"}


def test_a_near_miss_in_a_file_is_warned_of(script, tmp_path, capsys):
    (tmp_path / "a.py").write_text("conut = 3\nfor c in range(3): pass\n")
    assert script("a.py") == {}
    assert capsys.readouterr().out == "warning: a.py sets conut, which is no setting; did you mean count?\n"


def test_what_a_file_prints_goes_to_stderr(script, tmp_path, capsys):
    (tmp_path / "a.py").write_text("print('hello')\n")
    script("a.py")
    assert capsys.readouterr() == ("", "hello\n")


def test_a_file_may_use_torch_as_in_nanogpt(script, tmp_path):
    (tmp_path / "a.py").write_text("def three(): return torch.ones(3).numel()\ncount = three() + int(math.sqrt(4))\n")
    assert script("a.py") == {"count": 5}


def test_help_lists_every_setting_with_its_default_and_comment():
    command = [sys.executable, "-X", "importtime", PROJECT / "sample.py", "--nonsense", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "configurator" in done.stderr and "torch" not in done.stderr # which would take a second
    settings = find_settings(PROJECT / "sample.py")
    assert {"init_from", "out_dir", "start", "num_samples", "top_k", "batch_size", "compile"} <= settings.keys()
    for name, setting in settings.items():
        line, = [line for line in done.stdout.splitlines() if line.strip().startswith(f"--{name}=")]
        assert repr(setting.default) in line and setting.comment and setting.comment in line


def test_comments_are_read_from_the_source(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = find_settings(tmp_path / "script.py")
    assert list(settings) == ["text", "count", "rate", "top", "flag"]
    assert settings["rate"].comment == "how fast, # how far" and settings["top"].kinds == ["int", "None"]
