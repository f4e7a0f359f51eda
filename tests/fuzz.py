"""Random settings, prompts, tokens and batches, for test_fuzz.py."""
import io
import re
import runpy
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from itertools import chain

import torch
from hypothesis import example, given
from hypothesis import strategies as st

import engines
from models import make_gpt
from project import SCRIPT
from sampling.configurator import find_settings, override
from sampling.samples import Prompt, Sample
from sampling.settings import SamplingParams, check_settings

literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=5).map(repr)
SETTINGS = find_settings(SCRIPT)
SCOPE = runpy.run_path(SCRIPT)
KNOWN = "|".join([
    "unknown setting -", "cannot read the settings file", "--", r".*mine\.py", *SETTINGS,
    ".*; a settings file is Python"])

odd = st.sampled_from([
    "", "none", "true", "off", "1e999", "{{}}", "{[]: 1}", "{1, 2",
    "(" * 3000, "-" * 3000, "1_0", "9" * 5000, "'\\0'", '"\\n"', "'a' 'b'", "f'{1}'",
    "LINES:", "a=b", "cuda:1"])
numbers = st.floats(0, 2) | st.integers(-1, 10**10)
values = literals | odd | st.text(max_size=8) | numbers.map(str)
names = st.sampled_from(list(SETTINGS))
spelt = names.map(lambda name: name.replace("_", "-")) | names.map(lambda name: name[1:])
keys = (names | spelt | st.text(max_size=8)).map("--{}".format)
one = (
    st.tuples(st.builds("{}={}".format, keys, values))
    | st.tuples(keys, values)
    | st.tuples(keys | st.text(max_size=8) | st.just("-h")))
arguments = st.lists(one, max_size=5).map(lambda parts: list(chain(*parts)))
statements = st.sampled_from([
    "raise SystemExit", "raise OSError", "raise Exception('a\\nb\\x1b[2J')", "del seed", "print(3)",
    "import torch", "x" * 3000 + "()", "stop = stop + ['a']", "stop = []; stop.append(stop)",
    "num_smaples = 3", "x = yield", "seed = 2**64", "top_k = 10**10", "def f(): f()\nf()",
    "import numpy; seed = numpy.int64(3)", "__file__ = 3", "if True:"])
variables = names | st.text("abc_", min_size=1, max_size=3)
assignments = st.builds("{} = {}".format, variables, literals)
lines = st.lists(assignments | statements | st.text(max_size=20), max_size=4)
sources = lines.map(lambda lines: "\n".join(lines).encode(errors="surrogatepass"))
files = st.binary(max_size=20) | sources


@given(arguments, st.none() | files)
@example(["--start={{}}"], None)
@example(["--stop=[]", "--stop=a", "b"], None)
@example([], b"stop = ('a', 'b')")
@example([], b"raise Exception('a' * 10**6)")
def check_settings_or_error(tmp_path, arguments, file):
    """Any arguments and any settings file give settings, or a one-line error."""
    scope = dict(SCOPE)
    path = tmp_path / "mine.py"
    if file is not None:
        path.write_bytes(file)
        arguments = [str(path), *arguments]
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()) as printed:
            settings = override(scope, arguments, check_settings)
    except SystemExit as end:
        assert end.code == 0
        assert "--help" in arguments or "-h" in arguments
        assert "--top_k=200" in printed.getvalue()
        return
    except ValueError as error:
        assert scope == SCOPE
        assert len(str(error)) < 1000
        # The message is not one of Python's own. It names the wrong argument, setting or file.
        assert re.match(KNOWN, str(error)), error
        return
    assert settings.keys() == SETTINGS.keys()
    for name, setting in SETTINGS.items():
        assert scope[name] is settings[name]
        assert type(settings[name]).__name__ in setting.types


def reference_stop(tokenizer, prompt_ids, token_ids, stops):
    """Search the whole text after every token -> (token ids, text, finish reason)."""
    for n in range(1, len(token_ids) + 1):
        decode = tokenizer.decoder(prompt_ids)
        text = ""
        for i in range(n):
            text += decode(token_ids[i], i == len(token_ids) - 1)
        shown = engines.truncate_at_stop(text, stops)
        if shown != text:
            return token_ids[:n], shown, "stop"
    before = tokenizer.decode(prompt_ids)
    after = tokenizer.decode(prompt_ids + token_ids)
    while not after.startswith(before): # a character of the prompt was incomplete
        before = before[:-1]
    return token_ids, after[len(before):], "length"


@cache
def make_backend(name, width):
    return engines.BACKENDS[name](make_gpt(vocab_size=width, n_layer=1))


@given(st.data())
def check_batches(tokenizers, data):
    """Samples in batches equal those generated alone, with any prompts, batch sizes, settings and
    stop texts. tokenizers: [(tokenizer, how many of its tokens to use)].
    """
    def pick(*choices):
        return data.draw(st.sampled_from(choices))
    tokenizer, width = pick(*tokenizers)
    backend = make_backend(pick("eager", "cpu", "recorded graphs"), width)
    prompt = st.lists(st.integers(0, width - 1), min_size=1, max_size=pick(3, 40))
    same = prompt.flatmap(lambda ids: st.lists(st.just(ids), min_size=1, max_size=7))
    prompts = data.draw(same | st.lists(prompt, min_size=1, max_size=5))
    max_new_tokens = data.draw(st.integers(0, 30))
    sampling = engines.OFF | pick(*engines.SETTINGS)
    model = make_gpt(vocab_size=width, n_layer=1)
    torch.manual_seed(5)
    plain = [engines.continue_ids(model, ids, max_new_tokens, **sampling) for ids in prompts]
    stops = []
    for _ in range(pick(*range(4))): # texts that occur in a sample, or whose start occurs in one
        text = tokenizer.decode(pick(*plain))
        begin = data.draw(st.integers(0, len(text)))
        stop = text[begin:begin + pick(*range(1, 7))] + pick("", "", "!", "a")
        if stop:
            stops.append(stop)

    params = SamplingParams(max_new_tokens, **sampling, stop=stops, seed=5)
    gpt = engines.make_generator(backend, tokenizer=tokenizer)
    samples = [Sample(i, Prompt(""), ids) for i, ids in enumerate(prompts)]
    finished = engines.run(gpt, samples, params, pick(*range(1, 10)), stream=pick(True, False))
    assert finished == samples
    for sample in finished:
        expected = reference_stop(tokenizer, sample.prompt_ids, plain[sample.index], stops)
        assert (sample.token_ids, sample.text, sample.finish_reason) == expected
