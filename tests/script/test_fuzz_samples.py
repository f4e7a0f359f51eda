"""Random logits, batches and output files, compared with slow and simple reference implementations."""
import io
import json
import pickle
from contextlib import closing, redirect_stdout
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fuzzing import fuzz, ids, literals
from models import CHARS, make_gpt, save_meta
from pages import SETTINGS, model_of
from sampling.backends.cpu import CPUBackend
from sampling.backends.cuda import CUDABackend
from sampling.backends.eager import EagerBackend
from sampling.checkpoints.checkpoint import Checkpoint
from sampling.generation.assembly import LoadedModel
from sampling.generation.engine import Engine
from sampling.inputs.char_tokenizer import CharTokenizer
from sampling.outputs.outputs import Outputs
from sampling.outputs.printer import Printer
from sampling.params import Prompt, Sample, SampleRequest, SamplingParams, Token
from sampling.sampler.sampler import Sampler

# ---- sampling a token

def possible_tokens(logits, seen, q, temperature, top_k, top_p, min_p, repetition_penalty):
    """Slow reference for Sampler, for one row: the ids that it may return. Only ties and rounding allow several ids."""
    logits = np.array(logits, dtype=np.float32)
    for i in set(seen):
        penalty = np.float32(repetition_penalty)
        logits[i] = logits[i] * penalty if logits[i] < 0 else logits[i] / penalty
    if temperature == 0:
        return {int(np.argmax(logits))} # the first one if several are equal
    with np.errstate(all="ignore"):
        scaled = (logits / np.float32(temperature)).astype(np.float64)
        cold = not np.isfinite(scaled.max())
    if cold: # only the most likely tokens remain
        scaled = np.where(logits == logits.max(), 0.0, -np.inf)
    n = len(scaled)
    if top_k and top_k < n:
        scaled[scaled < sorted(scaled)[-top_k]] = -np.inf
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    surely, perhaps = p > 0, p > 0
    if top_p is not None and top_p < 1:
        above = np.array([p[p > x].sum() for x in p]) # the total probability of all more likely tokens
        ties = np.array([(p == x).sum() for x in p]) # the filter may keep any of them
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
def test_a_sampler_returns_a_token_that_the_reference_allows(data):
    rows, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 30) | st.just(200))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    flat = data.draw(st.booleans()) # many ties
    if width < 200:
        row = st.lists(st.integers(0, 2).map(float) if flat else numbers, min_size=width, max_size=width)
        logits = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    else:
        logits = torch.randn(rows, width, generator=generator)
        logits = logits.mul(0.4).round() if flat else logits.mul(3)
    seen = torch.randint(width, (rows, 4), generator=generator)
    settings = dict(
        temperature=data.draw(st.sampled_from([0.8, 1.0, 0.0, 1e-300, 1e-45, 1e-38, 1e-5, 0.1, 2.0, 1e10, 1e300])
                              | st.floats(1e-3, 5)),
        top_k=data.draw(st.none() | st.integers(0, width + 3)),
        top_p=data.draw(st.none() | st.floats(1e-9, 1) | st.sampled_from([0.5, 0.9, 1.0])),
        min_p=data.draw(st.none() | st.floats(0, 1) | st.just(1.0)),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.5, 0.01, 100.0])))
    noise, before = torch.empty(rows, width).exponential_(generator=generator), logits.clone()
    for all_columns in False, True:
        tokens = Sampler(**settings, all_columns=all_columns)(logits, seen, noise)
        assert torch.equal(logits, before) and tokens.shape == (rows, 1)
        for i, token in enumerate(tokens.flatten().tolist()):
            assert token in possible_tokens(logits[i].tolist(), seen[i].tolist(), noise[i].double().numpy(), **settings)


# ---- batches

@pytest.fixture(scope="module")
def tokenizers(scratch, gpt2):
    """[(tokenizer, how many of its tokens to use)]: characters, overlapping special tokens, and the bytes of GPT-2's."""
    save_meta(scratch / "letters.pkl")
    symbols = ["a", "b", "<a>", "", "<b>", "<a|", "<<a>>", "<a>b>"]
    (scratch / "special.pkl").write_bytes(pickle.dumps({"stoi": {"a": 0, "b": 1}, "itos": symbols}))
    return [(CharTokenizer(scratch / "letters.pkl"), len(CHARS)),
            (CharTokenizer(scratch / "special.pkl"), len(symbols)), (gpt2, 300)]


@torch.no_grad()
def generate_alone(model, prompts, first, max_new_tokens, sampling):
    """Reference: one sample after another from one random stream, with the whole window for every token.

    Returns the samples from number first on.
    """
    torch.manual_seed(5)
    sampler, found = Sampler(**sampling), []
    for index in range(first + len(prompts)):
        ids = list(prompts[index - first] if index >= first else [0])
        for _ in range(max_new_tokens):
            window = torch.tensor([ids[-model.config.block_size:]])
            # The samples before first only advance the random stream.
            logits = model(window)[0][:, -1] if index >= first else torch.zeros(1, model.config.vocab_size)
            noise = None if sampler.is_greedy else torch.empty_like(logits).exponential_()
            ids.append(sampler(logits, window, noise).item())
        if index >= first:
            found.append(ids[len(prompts[index - first]):])
    return found


def reference_stop(tokenizer, token_ids, stops):
    """Slow reference: search the whole text after every token -> (token ids, text, finish reason)."""
    for n in range(1, len(token_ids) + 1):
        decode = tokenizer.incremental_decoder()
        text = "".join(decode(token_id, i == len(token_ids) - 1) for i, token_id in enumerate(token_ids[:n]))
        if starts := [text.index(stop) for stop in stops if stop in text]:
            return token_ids[:n], text[:min(starts)], "stop"
    return token_ids, tokenizer.decode(token_ids), "length"


MODELS = {width: make_gpt(vocab_size=width, n_layer=1) for width in (len(CHARS), 8, 300)}
BACKENDS = {"eager": EagerBackend, "loops": lambda gpt: CPUBackend(gpt.config, gpt.state_dict()), "steps of a GPU": CUDABackend}


@cache
def make_backend(name, width):
    return BACKENDS[name](make_gpt(vocab_size=width, n_layer=1))


@fuzz(200)
@given(st.data())
def test_samples_in_batches_equal_samples_generated_alone(tokenizers, data):
    """With any prompts, batch sizes, settings and stop texts. Emittable text never changes."""
    tokenizer, width = data.draw(st.sampled_from(tokenizers))
    backend = make_backend(data.draw(st.sampled_from(list(BACKENDS))), width)
    many, stream = data.draw(st.booleans()), data.draw(st.booleans())
    num_logprobs = data.draw(st.sampled_from([None, 0, 3]))
    prompt = st.lists(st.integers(0, width - 1), min_size=1, max_size=data.draw(st.sampled_from([3, 40])))
    prompts = data.draw(st.lists(prompt, min_size=1, max_size=5))
    if many:
        prompts = [ids for ids in prompts for _ in range(data.draw(st.integers(1, 2)))]
    else:
        prompts = prompts[:1] * data.draw(st.integers(1, 7))
    first, max_new_tokens = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 30))
    batch_size = data.draw(st.integers(1, 9))
    sampling = data.draw(st.sampled_from([
        dict(temperature=0.9, top_k=30), dict(temperature=1.0, top_k=None),
        dict(temperature=1.0, top_k=None, top_p=0.8), dict(temperature=0, top_k=None),
        dict(temperature=1.0, top_k=5, min_p=0.1, repetition_penalty=1.3)]))
    expected = generate_alone(MODELS[width], prompts, first, max_new_tokens, sampling)
    stops = []
    for _ in range(data.draw(st.integers(0, 3))): # texts that occur in a sample, or whose start occurs in one
        text = tokenizer.decode(data.draw(st.sampled_from(expected)))
        begin = data.draw(st.integers(0, len(text)))
        stop = text[begin:begin + data.draw(st.integers(1, 6))] + data.draw(st.sampled_from(["", "", "!", "a"]))
        stops += [stop] if stop else []
    expected = [reference_stop(tokenizer, token_ids, stops) for token_ids in expected]

    params = SamplingParams(max_new_tokens, **sampling, stop=stops, seed=5, num_logprobs=num_logprobs)
    model = LoadedModel(backend, tokenizer, Checkpoint("", {}, {}, width, Path()), torch.float32, num_params=0)
    engine = Engine(model, params, batch_size, stream)
    num_saved = data.draw(st.integers(0, len(prompts))) # this run resumes one that has saved these samples
    requests = [SampleRequest(first + i, Prompt(""), ids, already_saved=i < num_saved) for i, ids in enumerate(prompts)]
    shown, samples, printed = {}, [], io.StringIO()
    printer = Printer(tokenizer)
    for sample in engine.generate(requests):
        emittable = sample.text[:sample.num_emittable_chars]
        assert emittable.startswith(shown.get(sample, "")) and len(emittable) == sample.num_emittable_chars
        shown[sample] = emittable
        samples += [sample] if sample.finish_reason else []
        with redirect_stdout(printed):
            printer.update(sample)
    requests, expected = requests[num_saved:], expected[num_saved:]
    assert [sample.request for sample in samples] == requests
    assert [(sample.token_ids, sample.text, sample.finish_reason) for sample in samples] == expected
    assert printed.getvalue() == "".join(f"{tokenizer.decode(request.prompt_ids)}{text}\n---------------\n"
                                         for request, (_, text, _) in zip(requests, expected, strict=True))
    assert all(sample.num_emittable_chars == len(sample.text) for sample in samples)
    assert all((token.logprob is None) == (num_logprobs is None) for sample in samples for token in sample.tokens)


# ---- out_file

# Also undecodable bytes of a command line.
some = st.text(st.characters(codec="utf-8") | st.characters(min_codepoint=0xdc80, max_codepoint=0xdcff), max_size=8)
samples = st.lists(st.tuples(some, ids, some, st.integers(0, 5), st.sampled_from(["length", "stop"]),
                             st.floats(-1e6, 0)), max_size=5)


def make_requests(parts):
    """The requests of a run."""
    for index, (prompt, id, *_) in enumerate(parts):
        yield SampleRequest(index, Prompt(prompt, id), [1])


def write_run(path, parts, settings):
    """Write the samples that are not saved yet, and return the file's content."""
    with closing(Outputs(SETTINGS | settings | {"out_file": str(path)})) as outputs:
        outputs.open(model_of())
        for request in outputs.resume(make_requests(parts)):
            if not request.already_saved:
                _, _, text, num_tokens, finish_reason, logprob = parts[request.index]
                tokens = [Token(3, text, logprob), *[Token(3, "", 0.0)] * 4][:num_tokens]
                outputs.write(Sample(request, tokens, finish_reason))
    return path.read_bytes()


@fuzz(150)
@given(samples, ids, st.data())
@example([("a\n", {"a": ["\udcff"]}, "b\u2028", 1, "length", -1.0)] * 2, None, None)
def test_a_file_truncated_anywhere_is_resumed(scratch, parts, stop, data):
    path, settings = scratch / "samples.jsonl", {"seed": 3, "stop": stop, "top_k": 200}
    path.unlink(missing_ok=True)
    whole = write_run(path, parts, settings)
    assert [json.loads(line)["index"] for line in whole.splitlines()] == list(range(len(parts)))
    assert whole.count(b"\n") == len(parts)
    for cut in range(0, len(whole), 11) if data is None else [data.draw(st.integers(0, len(whole))) for _ in range(5)]:
        path.write_bytes(whole[:cut])
        assert write_run(path, parts, settings) == whole


@fuzz(150)
@given(samples, st.data())
def test_the_file_of_another_run_is_refused_and_stays_unchanged(scratch, parts, data):
    """Also a truncated file: this run must not remove an incomplete last line of another run."""
    path, settings = scratch / "others.jsonl", {"seed": 3}
    path.unlink(missing_ok=True)
    whole = write_run(path, parts, settings)
    cut = whole[:data.draw(st.integers(0, len(whole)))]
    assume(b"\n" in cut)
    path.write_bytes(cut)
    with pytest.raises(ValueError, match="is from another run: seed is 3 there, and 4 here"):
        write_run(path, parts, {"seed": 4})
    assert path.read_bytes() == cut


START = b'{"version": 2, "index": 0, "prompt": '


def line(content):
    """A line that begins as those of out_file do."""
    return START + content.encode(errors="replace") + b"}\n"


others = (st.binary(max_size=60) | st.text(max_size=40).map(lambda text: line(text)[:-2]) | literals.map(line)
          | ids.map(json.dumps).map(lambda id: line(f'"a", "settings": {id}, "checkpoint": {id}')))


@fuzz(200)
@given(others)
def test_any_other_file_is_refused_and_stays_unchanged(scratch, content):
    path, parts = scratch / "what.jsonl", [("a", None, "b", 1, "length", -1.0)]
    path.write_bytes(content)
    try:
        found = write_run(path, parts, {"seed": 3})
    except ValueError as error:
        assert str(path) in str(error) and path.read_bytes() == content
    else: # the truncated start of a line that this run writes
        assert b"\n" not in content and found.count(b"\n") == 1 and found.startswith(content)
