"""Random logits, batches and files of samples, against slow and plain versions of what should come of them."""
import io
import json
import pickle
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from batches import Drawer, Sample
from console import Printer
from graphs import GraphedGPT
from hypothesis import assume, example, given
from hypothesis import strategies as st
from packed import pack
from prompts import Prompt
from saving import SampleFile
from tokenizer import CharTokenizer

from conftest import CHARS, make_gpt, save_meta
from fuzzing import fuzz, ids, literals
from sampler import RowDraws, next_token

pytest_plugins = ["fuzzing"]


# ---- the choice of a token

def what_may_win(logits, seen, q, temperature, top_k, top_p, min_p, repetition_penalty):
    """The slow version of next_token for one row: the ids that may win, all but one of them thanks to a rounding or a tie."""
    logits = np.array(logits, dtype=np.float32)
    for i in set(seen):
        penalty = np.float32(repetition_penalty)
        logits[i] = logits[i] * penalty if logits[i] < 0 else logits[i] / penalty
    if temperature == 0:
        return {int(np.argmax(logits))} # of several the first
    with np.errstate(all="ignore"):
        scaled = (logits / np.float32(temperature)).astype(np.float64)
        cold = not np.isfinite(scaled.max() - scaled.min())
    if cold: # only the likeliest are left
        scaled = np.where(logits == logits.max(), 0.0, -np.inf)
    n = len(scaled)
    if top_k and top_k < n:
        scaled[scaled < sorted(scaled)[-top_k]] = -np.inf
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    surely, perhaps = p > 0, p > 0
    if top_p is not None and top_p < 1:
        above = np.array([p[p > x].sum() for x in p]) # the probability of all that are likelier
        ties = np.array([(p == x).sum() for x in p]) # of which any may be taken
        surely, perhaps = above + (ties - 1) * p < top_p - 1e-5, above < top_p + 1e-5
        surely |= p == (p.max() if (p == p.max()).sum() == 1 else 2)
    if min_p:
        surely &= p > min_p * p.max() * (1 + 1e-4)
        perhaps &= (p >= min_p * p.max() * (1 - 1e-4)) | (p == p.max())
    race = p / q
    least = race[surely].max(initial=0) * (1 - 1e-4)
    return {i for i in range(n) if perhaps[i] and race[i] >= least}


numbers = (st.integers(-12, 12).map(lambda n: n / 4) | st.floats(-20, 20, width=32)
           | st.sampled_from([0.0, -0.0, 1e4, -1e4, 1e30, -1e30, 1e-40, 50.0, -200.0]))


@fuzz(700)
@given(st.data())
def test_a_token_is_the_slow_versions(data):
    rows, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 30) | st.just(200))
    flat = data.draw(st.booleans()) # many ties
    one = st.integers(0, 2).map(float) if flat else numbers
    logits = data.draw(st.lists(st.lists(one, min_size=width, max_size=width), min_size=rows, max_size=rows)) if width < 200 else (
        torch.randn(rows, width, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))).mul(0.4 if flat else 3).round(decimals=0 if flat else 9).tolist())
    seen = data.draw(st.lists(st.lists(st.integers(0, width - 1), min_size=4, max_size=4), min_size=rows, max_size=rows))
    how = dict(
        temperature=data.draw(st.sampled_from([0.8, 1.0, 0.0, 1e-300, 1e-45, 1e-38, 1e-5, 0.1, 2.0, 1e10, 1e300]) | st.floats(1e-3, 5)),
        top_k=data.draw(st.none() | st.integers(0, width + 3)),
        top_p=data.draw(st.none() | st.floats(1e-9, 1) | st.sampled_from([0.5, 0.9, 1.0])),
        min_p=data.draw(st.none() | st.floats(0, 1) | st.just(1.0)),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.5, 0.01, 100.0])))
    q = torch.empty(rows, width).exponential_(generator=torch.Generator().manual_seed(data.draw(st.integers(0, 10**6))))

    def draw(shape, ids, device):
        assert shape == (rows, width)
        return q if ids is None else q.gather(1, ids)
    given_logits, before = torch.tensor(logits), torch.tensor(logits)
    tokens = next_token(given_logits, draw=draw, ids=torch.tensor(seen), **how)
    assert torch.equal(given_logits, before) and tokens.shape == (rows, 1)
    for row, token in enumerate(tokens.flatten().tolist()):
        assert token in what_may_win(logits[row], seen[row], q[row].double().numpy(), **how)
    if how["temperature"] == 0 or (how["temperature"] >= 1e-3 and np.abs(logits).max() < 1e5): # as on a GPU, unchecked
        unchecked = next_token(given_logits, draw=draw, ids=torch.tensor(seen), **how, checked=False)
        for row, token in enumerate(unchecked.flatten().tolist()):
            assert token in what_may_win(logits[row], seen[row], q[row].double().numpy(), **how)


@fuzz(100)
@given(st.lists(numbers, min_size=1, max_size=10), st.data())
def test_no_logit_that_is_no_number_passes(logits, data):
    logits.insert(data.draw(st.integers(0, len(logits))), data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")])))
    how = dict(temperature=data.draw(st.sampled_from([0, 1e-300, 0.8, 1e300])), top_k=data.draw(st.none() | st.integers(0, 12)),
               repetition_penalty=data.draw(st.sampled_from([1.0, 0.01, 1.2])), top_p=data.draw(st.sampled_from([None, 0.1, 1.0])))
    with pytest.raises(ValueError, match="NaN or infinite"):
        next_token(torch.tensor([[1.0] * len(logits), logits]), ids=torch.zeros(2, 1, dtype=torch.long), **how)


# ---- batches

@pytest.fixture(scope="module")
def tokenizers(folder, gpt2):
    """Of single characters, of syllables that overlap, and GPT-2's, whose first tokens are bytes; and how many tokens to use."""
    save_meta(folder / "letters.pkl")
    syllables = ["a", "b", "ab", "", "ba", "aab", "bb", "abba"]
    (folder / "syllables.pkl").write_bytes(pickle.dumps({"stoi": {"a": 0, "b": 1}, "itos": syllables}))
    return [(CharTokenizer(folder / "letters.pkl"), len(CHARS)), (CharTokenizer(folder / "syllables.pkl"), len(syllables)), (gpt2, 300)]


@torch.no_grad()
def drawn_alone(model, prompts, first, new, how):
    """The oracle: one sample after another from one stream, the whole window again for every token; the first ones unseen."""
    torch.manual_seed(5)
    found = []
    for number in range(first + len(prompts)):
        ids = list(prompts[number - first] if number >= first else [0])
        for _ in range(new):
            window = torch.tensor([ids[-model.config.block_size:]])
            # Those before the first only spend their numbers.
            logits = model(window)[0][:, -1] if number >= first else torch.zeros(1, model.config.vocab_size)
            ids.append(next_token(logits, ids=window, **how).item())
        if number >= first:
            found.append(ids[len(prompts[number - first]):])
    return found


def stopped(tokenizer, tokens, stops):
    """The slow stop rule: after every token, look for the stop texts in all that it says so far -> (tokens, text, why it ended)."""
    for n in range(1, len(tokens) + 1):
        decode = tokenizer.decoder()
        text = "".join(decode(token, i == len(tokens) - 1) for i, token in enumerate(tokens[:n]))
        if begins := [text.index(stop) for stop in stops if stop in text]:
            return tokens[:n], text[:min(begins)], "stop"
    return tokens, tokenizer.decode(tokens), "length"


MODELS = {width: make_gpt(vocab_size=width, n_layer=1) for width in (len(CHARS), 8, 300)}
PACKED = {width: pack(make_gpt(vocab_size=width, n_layer=1)) for width in MODELS}


@fuzz(200)
@given(st.data())
def test_samples_in_batches_are_those_drawn_alone(tokenizers, data):
    """Of any prompts, batch sizes and settings, stopped where the slow rule says; and what is called ready never changes."""
    tokenizer, width = data.draw(st.sampled_from(tokenizers))
    kind = data.draw(st.sampled_from(["plain", "packed", "graphs"]))
    ragged, live, watch = data.draw(st.booleans()), data.draw(st.booleans()), data.draw(st.sampled_from([None, 0, 3]))
    prompts = data.draw(st.lists(st.lists(st.integers(0, width - 1), min_size=1, max_size=data.draw(st.sampled_from([3, 40]))), min_size=1, max_size=5))
    prompts = [ids for ids in prompts for _ in range(data.draw(st.integers(1, 2)))] if ragged else prompts[:1] * data.draw(st.integers(1, 7))
    first, new, at_once = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 30)), data.draw(st.integers(1, 9))
    how = data.draw(st.sampled_from([
        dict(temperature=0.9, top_k=30), dict(), dict(top_p=0.8), dict(top_k=5, min_p=0.1, repetition_penalty=1.3), dict(temperature=0)]))
    expected = drawn_alone(MODELS[width], prompts, first, new, how)
    stops = []
    for _ in range(data.draw(st.integers(0, 3))): # what comes in a text, or only its beginning does
        text = tokenizer.decode(data.draw(st.sampled_from(expected)))
        begin = data.draw(st.integers(0, len(text)))
        stop = text[begin:begin + data.draw(st.integers(1, 6))] + data.draw(st.sampled_from(["", "", "!", "a"]))
        stops += [stop] if stop else []
    expected = [stopped(tokenizer, tokens, stops) for tokens in expected]

    generator = PACKED[width] if kind == "packed" else GraphedGPT(MODELS[width]) if kind == "graphs" else MODELS[width]
    drawer = Drawer(generator, tokenizer, RowDraws(5, steps=new, width=width), how, new, at_once=at_once, stops=stops, watch=watch, live=live, ragged=ragged)
    kept = data.draw(st.integers(0, len(prompts))) # by a run that this one takes up
    samples = [Sample(first + i, Prompt(""), ids, kept=i < kept) for i, ids in enumerate(prompts)]
    shown, done, printed = {}, [], io.StringIO()
    printer = Printer(tokenizer)
    for sample in drawer.draw(samples):
        ready = sample.text[:sample.ready]
        assert ready.startswith(shown.get(sample, "")) and len(ready) == sample.ready
        shown[sample] = ready
        done += [sample] if sample.ended else []
        with redirect_stdout(printed):
            printer.show(sample)
    samples, expected = samples[kept:], expected[kept:]
    assert done == samples
    assert [(sample.new, sample.text, sample.ended) for sample in samples] == expected
    assert printed.getvalue() == "".join(f"{tokenizer.decode(ids)}{text}\n---------------\n" for ids, (_, text, _) in zip(prompts[kept:], expected, strict=True))
    assert all(sample.ready == len(sample.text) for sample in samples)
    assert all(len(sample.looks) == (0 if watch is None else len(sample.new)) for sample in samples)


# ---- the file of samples

CHECKPOINT = {"path": "out/ckpt.pt", "crc32": "a9f1f540"}
some = st.text(st.characters(codec="utf-8") | st.characters(min_codepoint=0xdc80, max_codepoint=0xdcff), max_size=8) # bytes of a command line too
samples = st.lists(st.tuples(some, ids, some, st.integers(0, 5), st.sampled_from(["length", "stop"]),
                             st.floats(-1e6, 0)), max_size=5)


def run_of(parts):
    """Samples that have ended, as a run makes them anew."""
    for number, (prompt, id, text, new, ended, logprob) in enumerate(parts):
        yield Sample(number, Prompt(prompt, id), [1], [3] * new, [text], [(logprob, [])], ended)


def written(path, parts, settings):
    """The bytes of a run's file, which a run had to take up where it was cut."""
    output = SampleFile(path, CHECKPOINT, settings)
    try:
        for sample in output.take_up(run_of(parts)):
            if not sample.kept:
                output.add(sample)
    finally:
        output.close()
    return path.read_bytes()


@fuzz(150)
@given(samples, ids, st.data())
@example([("a\n", {"a": ["\udcff"]}, "b\u2028", 1, "length", -1.0)] * 2, None, None)
def test_a_file_is_taken_up_wherever_it_was_cut(folder, parts, stop, data):
    path, settings = folder / "samples.jsonl", {"seed": 3, "stop": stop, "top_k": 200}
    path.unlink(missing_ok=True)
    whole = written(path, parts, settings)
    assert whole.count(b"\n") == len(parts) and all(json.loads(line)["sample"] == i for i, line in enumerate(whole.splitlines()))
    for cut in range(0, len(whole), 11) if data is None else [data.draw(st.integers(0, len(whole))) for _ in range(5)]:
        path.write_bytes(whole[:cut])
        assert written(path, parts, settings) == whole


@fuzz(150)
@given(samples, st.data())
def test_another_runs_file_is_refused_and_stays_as_it_is(folder, parts, data):
    """Also one that was cut: another run's last line is not this one's to take away."""
    path, settings = folder / "others.jsonl", {"seed": 3}
    path.unlink(missing_ok=True)
    whole = written(path, parts, settings)
    cut = whole[:data.draw(st.integers(0, len(whole)))]
    assume(b"\n" in cut)
    path.write_bytes(cut)
    with pytest.raises(ValueError, match="is of another run: there seed is 3, here 4"):
        written(path, parts, {"seed": 4})
    assert path.read_bytes() == cut


@fuzz(200)
@given(st.binary(max_size=60) | st.text(max_size=40).map(lambda text: b'{"sample": 0, "prompt": ' + text.encode(errors="replace"))
       | literals.map('{{"sample": 0, "prompt": {}}}\n'.format).map(str.encode) | ids.map(lambda id: json.dumps(
           {"sample": 0, "prompt": "a", "settings": id, "checkpoint": id}).encode() + b"\n"))
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning") # files that are refused are not closed
def test_what_is_no_file_of_samples_is_refused_and_stays_as_it_is(folder, content):
    path, parts = folder / "what.jsonl", [("a", None, "b", 1, "length", -1.0)]
    path.write_bytes(content)
    try:
        found = written(path, parts, {"seed": 3})
    except ValueError as error:
        assert str(path) in str(error) and path.read_bytes() == content
    else: # the beginning of a line of ours, cut short
        assert b"\n" not in content and found.count(b"\n") == 1 and found.startswith(content)
