"""Random settings, prompts, texts and tokens are read correctly, or raise a one-line error."""
import ast
import io
import re
import runpy
from contextlib import redirect_stderr, redirect_stdout
from itertools import chain

from hypothesis import assume, example, given
from hypothesis import strategies as st

from configurator import find_settings, override
from fuzzing import fuzz, literals
from project import PROJECT
from sampling.inputs.prompts import PromptSource
from sampling.validation import check_settings

# ---- settings

SETTINGS = find_settings(PROJECT / "sample.py")
SCOPE = runpy.run_path(PROJECT / "sample.py")

odd = st.sampled_from([
    "", "None", "none", "true", "off", "nan", "-inf", "1e999", "{{}}", "{[]: 1}", "{1, 2", "(" * 3000, "-" * 3000,
    "1_0", "0x" + "f" * 5000, "9" * 5000, "'\\0'", '"\\n"', "'a' 'b'", "b'a'", "f'{1}'", "LINES:", "a=b", "cuda:1"])
values = literals | odd | st.text(max_size=8) | st.floats(0, 2).map(str) | st.integers(-1, 10**10).map(str)
names = st.sampled_from(list(SETTINGS))
keys = names | names.map(lambda name: name.replace("_", "-")) | names.map(lambda name: name[1:]) | st.text(max_size=8)
one = (st.tuples(st.builds("--{}={}".format, keys, values)) | st.tuples(keys.map("--{}".format), values)
       | st.tuples(keys.map("--{}".format) | st.text(max_size=8) | st.just("-h")))
arguments = st.lists(one, max_size=5).map(lambda parts: list(chain(*parts)))
statements = st.sampled_from([
    "import sys; sys.exit(0)", "raise SystemExit", "raise OSError", "raise Exception('a\\nb\\x1b[2J')", "del seed",
    "print(3)", "import torch", "x" * 3000 + "()", "1 / 0", "stop = ('a', 'b')", "stop = stop + ['a']",
    "stop = []; stop.append(stop)", "num_smaples = 3", "x = yield", "seed = 16**5000", "top_k = 16**5000",
    "def f(): f()\nf()", "import numpy; seed = numpy.int64(3)", "__file__ = 3", "if True:"])
assignments = st.builds("{} = {}".format, names | st.text("abc_", min_size=1, max_size=3), literals)
files = st.binary(max_size=20) | st.lists(assignments | statements | st.text(max_size=20), max_size=4).map(
    lambda lines: "\n".join(lines).encode(errors="surrogatepass"))


def settings_of(arguments):
    """The settings from these arguments. None if the script would print its help or one error line, and exit."""
    scope, messages = dict(SCOPE), []
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()) as printed:
            settings = override(scope, arguments, check_settings, messages.append)
    except SystemExit as end:
        assert end.code == 0 and {"--help", "-h"} & set(arguments) and "--top_k=200" in printed.getvalue()
        return None
    except ValueError as error:
        assert scope == SCOPE and len(str(error)) < 1000
        # The message is not one of Python's own. It names the wrong argument, setting or file.
        known = "|".join(SETTINGS)
        assert re.match(rf"unknown setting -|cannot read the settings file|--|.*mine\.py|{known}", str(error)), error
        return None
    assert settings.keys() == SETTINGS.keys() and all(scope[name] is value for name, value in settings.items())
    changed = settings != {name: SCOPE[name] for name in SETTINGS}
    assert any(message.startswith("settings: ") for message in messages) or not changed
    for name, setting in SETTINGS.items():
        assert ("None" if settings[name] is None else type(settings[name]).__name__) in setting.types
    return settings


@fuzz(400)
@given(arguments)
@example(["--start={{}}"])
@example(["--top_k=0x" + "f" * 5000])
@example(["--num_samples=0x" + "f" * 5000])
@example(["--out_file='a\\0'"])
@example(["--stop=[0x" + "f" * 5000 + "]"])
@example(["--stop=[]", "--stop=a", "b"])
@example(["--repetition_penalty=1e-300"])
def test_any_arguments_give_settings_or_a_one_line_error(arguments):
    found = settings_of(arguments)
    if found is not None: # the sampler and the output files rely on this
        assert 0 <= found["temperature"] < float("inf") and 1e-3 <= found["repetition_penalty"] <= 1e3
        assert "\0" not in (found["out_file"] or "") + (found["html_file"] or "")


@fuzz(200)
@given(files)
@example(b"stop = ('a', 'b')")
@example(b"stop = 5")
@example(b"top_k = 16**5000")
@example(b"seed = 16**5000")
@example(b"raise Exception('a' * 10**6)")
def test_any_settings_file_gives_settings_or_a_one_line_error(scratch, content):
    (scratch / "mine.py").write_bytes(content)
    settings_of([str(scratch / "mine.py")])


@fuzz(150)
@given(st.data())
def test_a_valid_value_is_parsed_unchanged(scratch, data):
    """It may be passed with or without quotes, or in a file."""
    name = data.draw(names)
    of_type = {"int": st.integers(), "float": st.floats(allow_nan=False, allow_infinity=False), "bool": st.booleans(),
               "None": st.none(), "str": st.text(st.characters(codec="utf-8")),
               "list": st.lists(st.text(max_size=3), max_size=3)}
    type_name = data.draw(st.sampled_from(SETTINGS[name].types))
    value = data.draw(of_type[type_name])
    (scratch / "one.py").write_text(f"{name} = {value!r}", encoding="utf-8")
    ways = [[str(scratch / "one.py")]]
    if type_name != "list" or "str" in SETTINGS[name].types: # one that takes both knows a list by its brackets
        ways.append([f"--{name}={value!r}"])
    types = SETTINGS[name].types
    if type_name == "str" and not is_literal(value, types) and (value.lower() != "none" or "None" not in types):
        ways.append([f"--{name}={value}"])
    for way in ways:
        scope = dict(SCOPE)
        assume(not {"-h", "--help"} & set(way))
        override(scope, way, log=ignore)
        assert scope[name] == value and type(scope[name]) is type(value)
    if type_name == "float" and value == int(value):
        scope = dict(SCOPE)
        override(scope, [f"--{name}={int(value)}"], log=ignore)
        assert scope[name] == value and type(scope[name]) is float


def ignore(message):
    """Discard a log message."""


def is_literal(text, types):
    """Whether this text is a Python literal of one of these types."""
    try:
        return type(ast.literal_eval(text)).__name__ in types
    except Exception:
        return False


# ---- prompts

@fuzz(150)
@given(st.sampled_from(["FILE", "LINES", "JSONL"]),
       st.binary(max_size=20) | (literals | literals.map('{{"prompt": {}}}'.format)).map(str.encode))
@example("JSONL", b"[" * 100_000)
@example("JSONL", b'{"prompt": null}')
@example("JSONL", b'{"prompt": "a", "id": NaN}')
@example("JSONL", b'{"prompt": "a", "id": 1' + b"0" * 5000 + b"}")
def test_any_prompt_file_gives_prompts_or_a_one_line_error(scratch, kind, content):
    (scratch / "any").write_bytes(content)
    try:
        found = list(PromptSource(f"{kind}:{scratch / 'any'}"))
    except ValueError as error:
        assert str(scratch / "any") in str(error) and "cannot read" not in str(error)
    else:
        assert found and all(isinstance(prompt.text, str) and prompt.text for prompt in found)


# ---- tokens

pieces = st.sampled_from(["<|endoftext|>", "<|", " ", "  ", "\n", "the", "🙂", "日", "e\u0301", "\x00", "'s"])
texts = st.text(st.characters(codec="utf-8")) | st.lists(pieces).map("".join)


@fuzz(300)
@given(st.data())
def test_incremental_decoding_equals_decoding_all_tokens(gpt2, data):
    """Any ids: beyond the vocabulary, single bytes (0 to 255), and parts of characters."""
    some = st.integers(0, 255) | st.integers(0, 60000) | st.just(50256)
    token_ids = data.draw(st.lists(some, max_size=12))
    text = data.draw(texts)
    assert gpt2.decode(gpt2.encode(text)) == text
    part = gpt2.encode(text)[data.draw(st.integers(0, 5)):data.draw(st.integers(0, 30))]
    token_ids = list(chain(*data.draw(st.permutations([token_ids, part, [222]]))))
    decode, end = gpt2.incremental_decoder(), len(token_ids) - 1
    parts = [decode(token_id, i == end) for i, token_id in enumerate(token_ids)]
    assert "".join(parts) == gpt2.decode(token_ids)
