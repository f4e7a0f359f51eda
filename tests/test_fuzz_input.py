"""Random settings, prompts, texts and tokens: what is read gives what was meant, or one line."""
import ast
import io
import json
import pickle
import re
from contextlib import redirect_stderr, redirect_stdout
from itertools import chain

import pytest
import rules
from hypothesis import assume, example, given
from hypothesis import strategies as st
from prompts import Prompts
from tokenizer import CharTokenizer

from configurator import find_settings, override
from conftest import PROJECT
from fuzzing import fuzz, ids, literals

pytest_plugins = ["fuzzing"]


# ---- settings

SETTINGS = find_settings(PROJECT / "sample.py")
SCOPE = {"__file__": str(PROJECT / "sample.py"), "__doc__": "A script."}
exec((PROJECT / "sample.py").read_text().split("def main")[0], SCOPE)

odd = st.sampled_from(["", "None", "none", "true", "off", "nan", "-inf", "1e999", "{{}}", "{[]: 1}", "{1, 2", "(" * 3000, "-" * 3000, "1_0",
                       "0x" + "f" * 5000, "9" * 5000, "'\\0'", '"\\n"', "'a' 'b'", "b'a'", "f'{1}'", "LINES:", "a=b", "cuda:1", "float16"])
values = literals | odd | st.text(max_size=8) | st.floats(0, 2).map(str) | st.integers(-1, 10**10).map(str)
names = st.sampled_from(list(SETTINGS))
keys = names | names.map(lambda name: name.replace("_", "-")) | names.map(lambda name: name[1:]) | st.text(max_size=8)
arguments = st.lists(st.builds(lambda key, value: [f"--{key}={value}"], keys, values) | st.builds(lambda key, value: [f"--{key}", value], keys, values)
                     | st.builds(lambda key: [f"--{key}"], keys) | st.builds(lambda text: [text], st.text(max_size=8) | st.just("-h")),
                     max_size=5).map(lambda parts: list(chain(*parts)))
lines = (st.builds("{} = {}".format, names | st.text("abc_", min_size=1, max_size=3), literals) | st.text(max_size=20) | st.sampled_from([
    "import sys; sys.exit(0)", "raise SystemExit", "raise OSError", "raise Exception('a\\nb\\x1b[2J')", "del seed", "print(3)", "import torch",
    "x" * 3000 + "()", "1 / 0", "stop = ('a', 'b')", "stop = stop + ['a']", "stop = []; stop.append(stop)", "num_smaples = 3", "x = yield",
    "seed = 16**5000", "top_k = 16**5000", "def f(): f()\nf()", "import numpy; seed = numpy.int64(3)", "__file__ = 3", "if True:"]))
files = st.lists(lines, max_size=4).map("\n".join).map(lambda text: text.encode(errors="surrogatepass")) | st.binary(max_size=20)


def outcome(arguments):
    """The settings that these arguments give; None where the script would end, as it may: with its help or one line."""
    scope = dict(SCOPE)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()) as printed:
            changed = override(scope, arguments, warn=lambda text: None)
            rules.check(scope)
    except SystemExit as end:
        assert end.code == 0 and {"--help", "-h"} & set(arguments) and "--top_k=200" in printed.getvalue()
        return None
    except ValueError as error:
        assert len(str(error)) < 1000
        # Not something of Python's: what is wrong is named.
        assert re.match(rf"unknown setting --|cannot read the settings file|--|.*mine\.py|{'|'.join(SETTINGS)}", str(error)), error
        return None
    assert all(scope[name] == value for name, value in changed.items()) and changed.keys() <= SETTINGS.keys()
    assert repr(changed) # as the script tells them
    for name, setting in SETTINGS.items():
        assert ("None" if scope[name] is None else type(scope[name]).__name__) in setting.kinds
    return scope


@fuzz(400)
@given(arguments)
@example(["--start={{}}"])
@example(["--top_k=0x" + "f" * 5000])
@example(["--num_samples=0x" + "f" * 5000])
@example(["--out_file='a\\0'"])
@example(["--repetition_penalty=1e-300"])
def test_any_arguments_are_settings_or_one_line(arguments):
    found = outcome(arguments)
    if found is not None: # what the sampler and the files stand on
        assert 0 <= found["temperature"] < float("inf") and 1e-3 <= found["repetition_penalty"] <= 1e3
        assert "\0" not in (found["out_file"] or "") + (found["html_file"] or "")


@fuzz(200)
@given(files)
@example(b"stop = ('a', 'b')")
@example(b"stop = 5")
@example(b"top_k = 16**5000")
@example(b"seed = 16**5000")
@example(b"raise Exception('a' * 10**6)")
def test_any_file_holds_settings_or_is_one_line(folder, content):
    (folder / "mine.py").write_bytes(content)
    outcome([str(folder / "mine.py")])


@fuzz(150)
@given(st.data())
def test_a_value_that_fits_is_taken_as_it_is(folder, data):
    """However it is passed: as an argument, as two, or in a file."""
    name = data.draw(names)
    kinds = {"int": st.integers(), "float": st.floats(allow_nan=False, allow_infinity=False), "bool": st.booleans(), "None": st.none(),
             "str": st.text(st.characters(codec="utf-8")), "list": st.lists(st.text(max_size=3), max_size=3)}
    kind = data.draw(st.sampled_from(SETTINGS[name].kinds))
    value = data.draw(kinds[kind])
    (folder / "one.py").write_text(f"{name} = {value!r}", encoding="utf-8")
    ways = [[str(folder / "one.py")]]
    if kind != "list":
        ways.append([f"--{name}={value!r}"])
    if kind == "str" and not quoted(value) and (value.lower() != "none" or "None" not in SETTINGS[name].kinds):
        ways.append([f"--{name}={value}"]) # text as it stands
    for way in ways:
        scope = dict(SCOPE)
        assume(not {"-h", "--help"} & set(way))
        override(scope, way)
        assert scope[name] == value and type(scope[name]) is type(value)
    if kind == "float" and value == int(value):
        scope = dict(SCOPE)
        override(scope, [f"--{name}={int(value)}"])
        assert scope[name] == value and type(scope[name]) is float


def quoted(text):
    """Whether this is text that spells text in Python."""
    try:
        return isinstance(ast.literal_eval(text), str)
    except Exception:
        return False


# ---- prompts

@fuzz(150)
@given(st.text(st.characters(codec="utf-8"), max_size=30) | st.lists(st.text("ab \r\n\x0c\u2028", max_size=4)).map("\n".join))
def test_every_line_is_a_prompt(folder, text):
    (folder / "lines.txt").write_bytes(text.encode())
    expected = [line for line in re.split("\r\n|\r|\n", text.removeprefix("\ufeff")) if line]
    if expected:
        assert [prompt.text for prompt in Prompts(f"LINES:{folder / 'lines.txt'}")] == expected
    else:
        with pytest.raises(ValueError, match="is empty"):
            Prompts(f"LINES:{folder / 'lines.txt'}")


@fuzz(150)
@given(st.lists(st.tuples(st.text(min_size=1, max_size=5), ids), min_size=1, max_size=4), st.booleans())
def test_every_object_is_a_prompt(folder, objects, ascii):
    lines = [json.dumps({"prompt": text, "id": id}, ensure_ascii=ascii) for text, id in objects]
    try:
        content = "\n".join(lines).encode()
    except UnicodeEncodeError: # half a pair
        content = json.dumps({"prompt": "a", "id": None}).encode()
    (folder / "objects.jsonl").write_bytes(content)
    found = list(Prompts(f"JSONL:{folder / 'objects.jsonl'}"))
    expected = [json.loads(line) for line in content.splitlines()]
    assert repr([(prompt.text, prompt.id) for prompt in found]) == repr([(line["prompt"], line["id"]) for line in expected])


@fuzz(150)
@given(st.sampled_from(["FILE", "LINES", "JSONL"]), st.binary(max_size=20) | literals.map(str.encode) | literals.map('{{"prompt": {}}}'.format).map(str.encode))
@example("JSONL", b"[" * 100_000)
@example("JSONL", b'{"prompt": null}')
@example("JSONL", b'{"prompt": "a", "id": NaN}')
@example("JSONL", b'{"prompt": "a", "id": 1' + b"0" * 5000 + b"}")
def test_any_file_holds_prompts_or_is_refused(folder, kind, content):
    (folder / "any").write_bytes(content)
    try:
        found = list(Prompts(f"{kind}:{folder / 'any'}"))
    except ValueError as error:
        assert str(folder / "any") in str(error) and "cannot read" not in str(error)
    else:
        assert found and all(isinstance(prompt.text, str) and prompt.text for prompt in found)


# ---- text and tokens

texts = st.text(st.characters(codec="utf-8")) | st.lists(st.sampled_from(["<|endoftext|>", "<|", " ", "  ", "\n", "the", "🙂", "日", "e\u0301", "\x00", "'s"])).map("".join)


@fuzz(300)
@given(texts)
def test_gpt2s_encoding_gives_the_text_back(gpt2, text):
    found = gpt2.encode(text)
    assert gpt2.decode(found) == text and all(0 <= i < gpt2.size for i in found)


@fuzz(300)
@given(st.data())
def test_gpt2s_tokens_one_by_one_give_what_all_give(gpt2, data):
    """Of any ids: beyond the vocabulary, and single bytes (0 to 255) or pieces of characters."""
    some = st.integers(0, 255) | st.integers(0, 60000) | st.just(50256)
    tokens = data.draw(st.lists(some, max_size=12))
    cut = gpt2.encode(data.draw(texts))[data.draw(st.integers(0, 5)):data.draw(st.integers(0, 30))]
    tokens = list(chain(*data.draw(st.permutations([tokens, cut, [222]]))))
    decode, end = gpt2.decoder(), len(tokens) - 1
    pieces = [decode(token, n == end) for n, token in enumerate(tokens)]
    whole = gpt2.decode(tokens)
    assert "".join(pieces) == whole
    assert whole == b"".join(gpt2.encoding.decode_single_token_bytes(i) if i < 50257 else b"\xef\xbf\xbd" for i in tokens).decode(errors="replace")


@fuzz(100)
@given(st.dictionaries(st.characters(), st.integers(0, 300), min_size=1).filter(lambda table: len(set(table.values())) == len(table)),
       st.data(), st.lists(st.integers(0, 10**12)))
def test_a_character_table_gives_the_text_back(folder, table, data, tokens):
    (folder / "meta.pkl").write_bytes(pickle.dumps({"stoi": table, "itos": {i: char for char, i in table.items()}}))
    tokenizer = CharTokenizer(folder / "meta.pkl")
    text = data.draw(st.text(st.sampled_from(sorted(table))))
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.size == max(table.values()) + 1
    decode = tokenizer.decoder()
    assert "".join(map(decode, tokens)) == tokenizer.decode(tokens) and len(tokenizer.decode(tokens)) == len(tokens)
    other = data.draw(st.characters())
    assume(other not in table)
    with pytest.raises(ValueError, match=r"at 1 \(counted from 1\)"):
        tokenizer.encode(other + text)
