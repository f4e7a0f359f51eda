"""The public API: load a model, generate text from text."""
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

import sampling
from engines import on_fake_gpu
from models import make_gpt
from project import PROJECT
from sampling.backends.eager import ExactBackend
from sampling.text_generator import TextGenerator

PARAMS = sampling.SamplingParams(max_new_tokens=12, temperature=0.9, stop="zzz")


@pytest.fixture(scope="module")
def generator():
    return sampling.load(str(PROJECT / "out-shakespeare-char"), device="cpu")


def test_samples_are_those_of_the_script(generator, run_script):
    done = run_script("--out_dir=out-shakespeare-char", "--device=cpu", "--start=ROMEO:", "--num_samples=3",
                      "--max_new_tokens=12", "--temperature=0.9")
    samples = generator.generate("ROMEO:", PARAMS, num_samples=3)
    assert "".join(f"ROMEO:{sample.text}\n---------------\n" for sample in samples) == done.stdout


def test_streamed_text_is_the_text_of_the_sample(generator):
    assert "".join(generator.stream("ROMEO:", PARAMS)) == generator.generate("ROMEO:", PARAMS)[0].text


def test_a_stream_takes_one_prompt(generator):
    with pytest.raises(TypeError, match="stream takes one prompt, a str; got"):
        next(generator.stream(["A", "B"], PARAMS))


def test_a_prompt_is_a_text(generator):
    with pytest.raises(TypeError, match=r"^a prompt must be a str; got \[1, 2\]$"):
        generator.generate(["A", [1, 2]], PARAMS)
    for prompts in None, 5, b"A":
        with pytest.raises(TypeError, match=r"^prompts must be a str or a list of str; got "):
            generator.generate(prompts, PARAMS)


def test_prompts_may_be_any_iterable(generator):
    samples = generator.generate(iter(["A", "B"]), PARAMS, num_samples=2)
    assert [sample.prompt.text for sample in samples] == ["A", "A", "B", "B"]


def test_a_path_may_be_a_path_object(gpt2_folder, tiktoken_cache, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tiktoken_cache))
    names = Path(gpt2_folder), str(gpt2_folder)
    one, other = (sampling.load(name, device="cpu").generate("A", PARAMS)[0].text for name in names)
    assert one == other


def test_the_default_dtype_of_the_caller_does_not_matter(generator):
    expected = generator.generate("ROMEO:", PARAMS)[0].text
    torch.set_default_dtype(torch.float64)
    try:
        assert generator.generate("ROMEO:", PARAMS)[0].text == expected
        reloaded = sampling.load(str(PROJECT / "out-shakespeare-char"), device="cpu")
        assert reloaded.generate("ROMEO:", PARAMS)[0].text == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_inference_mode_of_the_caller_does_not_matter(generator):
    expected = generator.generate("ROMEO:", PARAMS)[0].text
    with torch.inference_mode():
        reloaded = sampling.load(str(PROJECT / "out-shakespeare-char"), device="cpu")
        texts = [generator.generate("ROMEO:", PARAMS)[0].text, reloaded.generate("ROMEO:", PARAMS)[0].text]
    texts += [generator.generate("ROMEO:", PARAMS)[0].text, reloaded.generate("ROMEO:", PARAMS)[0].text]
    assert texts == 4 * [expected]


def test_interleaved_and_abandoned_streams_do_not_disturb_each_other(generator):
    prompts = "ROMEO:", "A", "ROMEO:"
    expected = ["".join(generator.stream(prompt, PARAMS)) for prompt in prompts]
    parts = zip_longest(*(generator.stream(prompt, PARAMS) for prompt in prompts), fillvalue="")
    assert ["".join(texts) for texts in zip(*parts, strict=True)] == expected
    next(generator.stream("B", PARAMS))
    assert "".join(generator.stream(prompts[0], PARAMS)) == expected[0]


def test_threads_that_share_a_generator_do_not_disturb_each_other(generator):
    def texts(prompt):
        return [sample.text for sample in generator.generate(prompt, PARAMS, num_samples=4, batch_size=2)]
    prompts = "ROMEO:", "What say you"
    expected = [texts(prompt) for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(texts, prompts)) == expected


@pytest.mark.parametrize("arguments", [
    dict(num_samples=0), dict(num_samples=2.0), dict(batch_size=0), dict(batch_size="2"), dict(batch_size=10**30),
    dict(prompts=""), dict(prompts=["A", ""])], ids=str)
def test_invalid_arguments_raise_value_error(generator, arguments):
    with pytest.raises(ValueError):
        generator.generate(**{"prompts": "A", "params": PARAMS, **arguments})


@pytest.mark.parametrize("settings", [
    dict(dtype="int4"), dict(dtype="int8", compile=True), dict(device="tpu"), dict(device=None), dict(draft=5),
    dict(draft=""), dict(exact="no"), dict(name="no-such-folder/x/y")], ids=str)
def test_invalid_options_and_names_raise_value_error(settings, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError):
        sampling.load(**{"name": str(PROJECT / "out-shakespeare-char"), **settings})


def test_samples_with_a_draft_are_the_same(generator):
    name = str(PROJECT / "out-shakespeare-char")
    expected = [sample.text for sample in generator.generate("ROMEO:", PARAMS, num_samples=2)]
    gpt = sampling.load(name, device="cpu", draft=name)
    speculation = gpt.model.speculation
    speculation.draft = speculation.draft._replace(relative_cost=0.1) # it costs as much as the model: it would be off
    assert [sample.text for sample in gpt.generate("ROMEO:", PARAMS, num_samples=2, batch_size=1)] == expected
    assert "".join(gpt.stream("ROMEO:", PARAMS)) == expected[0] and speculation.num_accepted > 10
    with pytest.raises(ValueError, match="leave out draft="):
        sampling.load(name, device="cpu", draft=name, exact=True)


def test_exact_samples_are_the_same_in_float32_and_need_a_batch_of_one(generator):
    exact = sampling.load(str(PROJECT / "out-shakespeare-char"), device="cpu", exact=True)
    expected = [sample.text for sample in generator.generate("ROMEO:", PARAMS, num_samples=2)]
    assert [sample.text for sample in exact.generate("ROMEO:", PARAMS, num_samples=2)] == expected
    with pytest.raises(ValueError, match="leave out batch_size=2, or exact"):
        exact.generate("ROMEO:", PARAMS, batch_size=2)
    with pytest.raises(ValueError, match=r"leave out top_p=0\.5, or exact"):
        exact.generate("ROMEO:", sampling.SamplingParams(top_p=0.5))
    with pytest.raises(ValueError, match="leave out compile=True, or exact"):
        sampling.load(str(PROJECT / "out-shakespeare-char"), device="cpu", exact=True, compile=True)


def test_exact_samples_past_the_window_are_the_same_on_a_gpu(generator):
    def texts(backend):
        model = replace(generator.model, backend=backend, is_exact=True)
        return [sample.text for sample in TextGenerator(model).generate("The ", PARAMS, num_samples=3, batch_size=1)]
    gpt = make_gpt(vocab_size=65, block_size=8)
    assert texts(on_fake_gpu(ExactBackend(gpt))) == texts(ExactBackend(gpt))
