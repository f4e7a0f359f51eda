"""Random settings, prompts, tokens and batches: each is read correctly, or raises a one-line error."""
import io
import pickle
import re
import runpy
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from itertools import chain

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import engines
from models import CHARS, make_gpt, save_meta
from oracles import reference_generate
from project import PROJECT
from sampling.configurator import find_settings, override
from sampling.inputs.char_tokenizer import CharTokenizer
from sampling.inputs.tokenizer_choice import TiktokenTokenizer
from sampling.params import Prompt, Sample, SamplingParams, check_settings

pytestmark = pytest.mark.fuzz


literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner), max_leaves=5).map(repr)
SETTINGS = find_settings(PROJECT / "sample.py")
SCOPE = runpy.run_path(PROJECT / "sample.py")

odd = st.sampled_from([
    "", "None", "none", "true", "off", "nan", "-inf", "1e999", "{{}}", "{[]: 1}", "{1, 2", "(" * 3000, "-" * 3000,
    "1_0", "9" * 5000, "'\\0'", '"\\n"', "'a' 'b'", "b'a'", "f'{1}'", "LINES:", "a=b", "cuda:1"])
values = literals | odd | st.text(max_size=8) | st.floats(0, 2).map(str) | st.integers(-1, 10**10).map(str)
names = st.sampled_from(list(SETTINGS))
keys = names | names.map(lambda name: name.replace("_", "-")) | names.map(lambda name: name[1:]) | st.text(max_size=8)
one = (st.tuples(st.builds("--{}={}".format, keys, values)) | st.tuples(keys.map("--{}".format), values)
       | st.tuples(keys.map("--{}".format) | st.text(max_size=8) | st.just("-h")))
arguments = st.lists(one, max_size=5).map(lambda parts: list(chain(*parts)))
statements = st.sampled_from([
    "import sys; sys.exit(0)", "raise SystemExit", "raise OSError", "raise Exception('a\\nb\\x1b[2J')", "del seed",
    "print(3)", "import torch", "x" * 3000 + "()", "1 / 0", "stop = ('a', 'b')", "stop = stop + ['a']",
    "stop = []; stop.append(stop)", "num_smaples = 3", "x = yield", "seed = 2**64", "top_k = 10**10",
    "def f(): f()\nf()", "import numpy; seed = numpy.int64(3)", "__file__ = 3", "if True:"])
assignments = st.builds("{} = {}".format, names | st.text("abc_", min_size=1, max_size=3), literals)
files = st.binary(max_size=20) | st.lists(assignments | statements | st.text(max_size=20), max_size=4).map(
    lambda lines: "\n".join(lines).encode(errors="surrogatepass"))


@given(arguments, st.none() | files)
@example(["--start={{}}"], None)
@example(["--stop=[]", "--stop=a", "b"], None)
@example([], b"stop = ('a', 'b')")
@example([], b"raise Exception('a' * 10**6)")
def test_any_arguments_and_any_settings_file_give_settings_or_a_one_line_error(tmp_path, arguments, file):
    scope, path = dict(SCOPE), tmp_path / "mine.py"
    if file is not None:
        path.write_bytes(file)
        arguments = [str(path), *arguments]
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()) as printed:
            settings = override(scope, arguments, check_settings)
    except SystemExit as end:
        assert end.code == 0 and {"--help", "-h"} & set(arguments) and "--top_k=200" in printed.getvalue()
        return
    except ValueError as error:
        assert scope == SCOPE and len(str(error)) < 1000
        # The message is not one of Python's own. It names the wrong argument, setting or file.
        known = "|".join(["unknown setting -", "cannot read the settings file", "--", r".*mine\.py", *SETTINGS])
        assert re.match(known, str(error)) or " is not a settings file" in str(error), error
        return
    assert settings.keys() == SETTINGS.keys() and all(scope[name] is value for name, value in settings.items())
    for name, setting in SETTINGS.items():
        assert type(settings[name]).__name__ in setting.types


@pytest.fixture
def tokenizers(tmp_path, gpt2_encoding):
    """[(tokenizer, how many of its tokens to use)]: characters, overlapping special tokens, the bytes of GPT-2's."""
    save_meta(tmp_path / "letters.pkl")
    symbols = ["a", "b", "<a>", "", "<b>", "<a|", "<<a>>", "<a>b>"]
    (tmp_path / "special.pkl").write_bytes(pickle.dumps({"stoi": {"a": 0, "b": 1}, "itos": symbols}))
    return [(CharTokenizer(tmp_path / "letters.pkl"), len(CHARS)),
            (CharTokenizer(tmp_path / "special.pkl"), len(symbols)), (TiktokenTokenizer(), 300)]


def reference_stop(tokenizer, prompt_ids, token_ids, stops):
    """Slow reference: search the whole text after every token -> (token ids, text, finish reason)."""
    for n in range(1, len(token_ids) + 1):
        decode = tokenizer.decoder(prompt_ids)
        text = "".join(decode(token_id, i == len(token_ids) - 1) for i, token_id in enumerate(token_ids[:n]))
        if starts := [text.index(stop) for stop in stops if stop in text]:
            return token_ids[:n], text[:min(starts)], "stop"
    before, after = tokenizer.decode(prompt_ids), tokenizer.decode(prompt_ids + token_ids)
    while not after.startswith(before): # a character of the prompt was incomplete
        before = before[:-1]
    return token_ids, after[len(before):], "length"


SAMPLING = [dict(temperature=0.9, top_k=30), dict(temperature=1.0, top_k=None), dict(temperature=0, top_k=None),
            dict(temperature=1.0, top_k=None, top_p=0.8),
            dict(temperature=1.0, top_k=5, min_p=0.1, repetition_penalty=1.3)]


@cache
def make_backend(name, width):
    return engines.BACKENDS[name](make_gpt(vocab_size=width, n_layer=1))


@pytest.mark.usefixtures("recordings")
@given(st.data())
def test_samples_in_batches_equal_samples_generated_alone(tokenizers, data):
    """With any prompts, batch sizes, settings, stop texts and saved samples. The pieces are the text."""
    tokenizer, width = data.draw(st.sampled_from(tokenizers))
    backend = make_backend(data.draw(st.sampled_from(["eager", "cpu", "recorded graphs"])), width)
    prompt = st.lists(st.integers(0, width - 1), min_size=1, max_size=data.draw(st.sampled_from([3, 40])))
    prompts = data.draw(st.lists(prompt, min_size=1, max_size=5) | prompt.flatmap(
        lambda ids: st.integers(1, 7).map(lambda count: [ids] * count)))
    max_new_tokens, sampling = data.draw(st.integers(0, 30)), data.draw(st.sampled_from(SAMPLING))
    model = make_gpt(vocab_size=width, n_layer=1)
    torch.manual_seed(5)
    expected = [reference_generate(model, torch.tensor([ids]), max_new_tokens, **sampling)[0, len(ids):].tolist()
                for ids in prompts]
    stops = []
    for _ in range(data.draw(st.integers(0, 3))): # texts that occur in a sample, or whose start occurs in one
        text = tokenizer.decode(data.draw(st.sampled_from(expected)))
        begin = data.draw(st.integers(0, len(text)))
        stop = text[begin:begin + data.draw(st.integers(1, 6))] + data.draw(st.sampled_from(["", "", "!", "a"]))
        stops += [stop] if stop else []
    expected = [reference_stop(tokenizer, *ids, stops) for ids in zip(prompts, expected, strict=True)]

    params = SamplingParams(max_new_tokens, **sampling, stop=stops, seed=5)
    gpt, batch_size = engines.make_generator(tokenizer, backend), data.draw(st.integers(1, 9))
    num_saved = data.draw(st.integers(0, len(prompts))) # this run resumes one that has saved these samples
    samples = [Sample(i, Prompt(""), ids, already_saved=i < num_saved) for i, ids in enumerate(prompts)]
    shown, finished = {}, []
    for sample, pieces in gpt.run(samples, params, batch_size, stream=data.draw(st.booleans())):
        shown[sample] = shown.get(sample, "") + "".join(piece.text for piece in pieces)
        finished += [sample] if sample.finish_reason else []
    assert finished == samples[num_saved:] and all(shown[sample] == sample.text for sample in finished)
    assert [(sample.token_ids, sample.text, sample.finish_reason) for sample in finished] == expected[num_saved:]
