"""The configurator reads settings files and command-line arguments into a script's globals. The script here is an example."""
import os
import shlex
import subprocess
import sys
import textwrap

import pytest

from configurator import Setting, find_settings, help_text, override, parse, suggest, to_argument
from project import PROJECT, SCRIPT
from sampling.compatibility import training_settings

SOURCE = '''"""A script."""
import math
text = "\\n" # any text
count = 10 # a whole number
rate = 0.8 # how fast, # how far
top: int | None = 200 # may be off
flag = False # on or off
ends: str | list | None = None # a text, or several
pick: int | str = 7 # a number, or a word

def main():
    inner = 3 # not a setting
'''
DEFAULTS = {"text": "\n", "count": 10, "rate": 0.8, "top": 200, "flag": False, "ends": None, "pick": 7}


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
    (["--text=a", "--text=b"], {"text": "b"}),
    (["--ends=a"], {"ends": "a"}),
    (['--ends=["\\n\\n", "KING"]'], {"ends": ["\n\n", "KING"]}),
    (["--ends", "['a']"], {"ends": ["a"]}),
    (["--ends=[]"], {"ends": []}),
    (["--ends=[a]"], {"ends": "[a]"}),
    (["--ends=('a', 'b')"], {"ends": "('a', 'b')"}),
    (["--ends='[\"a\"]'"], {"ends": '["a"]'}),
    (["--ends=5"], {"ends": "5"}),
    (["--ends=A", "--ends=B", "--count=3", "--ends", "C"], {"ends": ["A", "B", "C"], "count": 3}),
    (["--ends=A", "--ends=['B', 'C']", "--ends='\\n'"], {"ends": ["A", "B", "C", "\n"]}),
    (["--ends=A", "--ends=None"], {}),
    (["--ends=A", "--ends=None", "--ends=B"], {"ends": "B"}),
    (["--pick=8"], {"pick": 8}),
    (["--pick=any"], {"pick": "any"}),
    (["--pick='8'"], {"pick": "8"}),
    (["--pick=8.5"], {"pick": "8.5"}),
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
    (["missing.py"], "; give settings as --key=value"),
    (["--text=Once", "upon", "a", "time", "--flag"], "cannot read the settings file 'upon': No such file or directory; "
                                                     "a value with spaces needs quotes: --text=\"Once upon a time\""),
    (["--text", "it's", "so"], """--text="it's so\""""),
    (["--text", "5", "$", "each"], "--text='5 $ each'"),
    (["--text=Once", "missing.py"], "give settings as --key=value"),
    (["--count=3", "upon", "a"], "give settings as --key=value"),
    (["-t", "x"], "unknown setting -t; settings begin with --; --help lists all settings"),
    (["-count=3"], "unknown setting -count; did you mean count?; settings begin with --"),
    (["-"], "unknown setting -; settings begin with --"),
    (["--pick=0x" + "f" * 5000], "pick takes a whole number or text, got an integer of 20000 bits"),
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


@pytest.mark.parametrize("arguments, where", [
    (["a.py"], "a.py: "), (["b.py", "a.py"], "a.py: "), (["a.py", "b.py", "--text=x"], "a.py: "), (["--count=13"], ""),
    (["a.py", "--count=13"], ""), (["b.py", "--count=13"], ""), (["c.py", "--flag"], "c.py: "), (["--count=13", "b.py"], ""),
], ids=str)
def test_what_validate_refuses_in_a_file_names_the_file(script, tmp_path, arguments, where):
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


@pytest.mark.parametrize("argument, meant", [("-t", "text"), ("-t=x", "text"), ("--words", "text"), ("--words=x", "text"),
                                             ("--size", "count or top"), ("--a-b", "rate")], ids=str)
def test_names_of_other_programs_suggest_the_settings(script, argument, meant):
    with pytest.raises(ValueError, match=f"unknown setting {argument.partition('=')[0]}; did you mean {meant}?"):
        script(argument, "x", aliases={"t": "text", "words": "text", "size": "count or top", "a_b": "rate"})


def test_quotes_are_suggested_only_for_what_follows_a_text(script, tmp_path):
    (tmp_path / "a.py").write_text("count = 1\n")
    with pytest.raises(ValueError, match=r"'upon': .*; give settings as --key=value"):
        script("--text=Once", "a.py", "upon")
    with pytest.raises(ValueError, match=r"'upon': .* needs quotes: --ends=.Once upon.$"):
        script("--ends=A", "--ends=Once", "upon")


def test_a_file_whose_name_begins_with_a_dash_is_a_file(script, tmp_path):
    (tmp_path / "-t").write_text("count = 1\n")
    assert script("-t", aliases={"t": "text"}) == {"count": 1}


@pytest.mark.parametrize("content", ["", "# count = 3\n", '{"count": 3, "rate": 1}', "count: 3\nrate: 0.5\n", "print('hello')"], ids=repr)
def test_a_file_that_sets_nothing_gets_a_warning(script, tmp_path, content):
    (tmp_path / "a.py").write_text(content)
    lines = []
    assert script("a.py", log=lines.append) == {}
    assert lines == ["warning: a.py sets nothing; a settings file is Python, such as: text = ..."]


@pytest.mark.parametrize("content", ["count = 10", "learning_rate = 3", "def helper(): pass", "import os", "for count in [10]: pass",
                                     "globals().update(rate=3)", "exec('count = 3')", "if count != 10: rate = 3", "count: int = 10"], ids=repr)
def test_a_file_that_sets_something_gets_no_warning(script, tmp_path, content):
    """Also what it sets to the value that it has, and names that are no settings."""
    (tmp_path / "a.py").write_text(content)
    lines = []
    script("a.py", log=lines.append)
    assert not any("warning" in line for line in lines)


def test_ignore_sees_the_names_of_a_file_and_passes_its_settings_over(script, tmp_path):
    (tmp_path / "a.py").write_text("count = 3\nrate = 2\ndepth = 5\n")
    (tmp_path / "b.py").write_text("count = 4\n")
    lines = []

    def ignore(names):
        return {"count": "it is deep", "top": "it is not there"} if "depth" in names else {}
    assert script("a.py", log=lines.append, ignore=ignore) == {"rate": 2.0}
    assert lines == ["a.py: count is ignored, it is deep", "settings: rate=2.0"]
    assert script("b.py", "a.py", ignore=ignore) == {"count": 4, "rate": 2.0}
    assert script("a.py", "b.py", ignore=ignore) == {"count": 4, "rate": 2.0}
    assert script("a.py", "--count=5", ignore=ignore) == {"count": 5, "rate": 2.0}


def test_a_file_may_be_a_pipe(script, tmp_path):
    """As in bash: sample.py <(echo count=3)"""
    if sys.platform == "win32":
        pytest.skip("Windows has no named pipes in folders")
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["sh", "-c", "echo count=3 > pipe"], cwd=tmp_path):
        assert script("pipe") == {"count": 3}


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
    settings = override(dict(before), [str(tmp_path / "train.py")], log=lines.append, ignore=training_settings)
    assert {name for name, value in settings.items() if value != before[name]} == {"out_dir", "device", "dtype"}


def test_ctrl_c_in_a_settings_file_raises_keyboard_interrupt(script, tmp_path):
    (tmp_path / "a.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        script("a.py")


def test_a_misspelt_setting_in_a_file_causes_a_warning(script, tmp_path, capsys):
    (tmp_path / "a.py").write_text("conut = 3\nfor c in range(3): pass\n")
    assert script("a.py") == {}
    assert capsys.readouterr().out == "warning: a.py sets conut, which is not a setting; did you mean count?\n"


def test_output_of_a_settings_file_goes_to_stderr(script, tmp_path, capsys):
    (tmp_path / "a.py").write_text("print('hello')\ncount = 3\n")
    script("a.py", log=lambda text: None)
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


def test_a_single_value_can_be_parsed():
    assert parse("top", "None", ["int", "None"]) is None and parse("rate", "3", ["float"]) == 3.0
    assert parse("stop", "['a']", ["str", "list", "None"]) == ["a"] and parse("text", "['a']", ["str"]) == "['a']"
    with pytest.raises(ValueError, match="top takes a whole number or None, got 'half'"):
        parse("top", "half", ["int", "None"])


@pytest.mark.parametrize("name, hint", [("cuont", "; did you mean count?"), ("cou", "; did you mean count?"), ("co", ""), ("other", "")])
def test_similar_names_are_suggested(name, hint):
    assert suggest(name, DEFAULTS) == hint


def test_prefixes_are_suggested_for_arguments_only():
    assert suggest("temp", ["temperature"]) == "; did you mean temperature?"
    assert suggest("temp", ["temperature"], prefixes=False) == ""


def test_an_alias_comes_before_a_near_name():
    assert suggest("cou", DEFAULTS, {"cou": "rate or top"}) == "; did you mean rate or top?"
