"""The configurator reads command-line arguments into a script's globals. The script is that of example_script.py."""
import pytest

from configurator import override, suggest
from example_script import DEFAULTS


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


@pytest.mark.parametrize("name, hint", [("cuont", "; did you mean count?"), ("cou", "; did you mean count?"), ("co", ""), ("other", "")])
def test_similar_names_are_suggested(name, hint):
    assert suggest(name, DEFAULTS) == hint


def test_prefixes_are_suggested_for_arguments_only():
    assert suggest("temp", ["temperature"]) == "; did you mean temperature?"
    assert suggest("temp", ["temperature"], prefixes=False) == ""


def test_an_alias_comes_before_a_near_name():
    assert suggest("cou", DEFAULTS, {"cou": "rate or top"}) == "; did you mean rate or top?"
