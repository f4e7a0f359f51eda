"""The public API: load a model, generate text from text."""
import os
import pickle
import subprocess
import sys
from dataclasses import asdict
from itertools import zip_longest

import pytest
import torch

import sampling
from models import make_gpt, save_checkpoint
from project import PROJECT
from sampling.backends.cpu_kernels import LINEAR

DEMO = PROJECT / "demo"
PARAMS = sampling.SamplingParams(max_new_tokens=12, temperature=0.9, stop="zzz")


def texts(generator, *arguments, **settings):
    return [sample.text for sample in generator.generate(*arguments, **settings)]


@pytest.fixture(scope="module")
def generator():
    return sampling.load(DEMO, device="cpu")


def test_samples_are_those_of_the_script(generator, run_script):
    done = run_script(f"--out_dir={DEMO}", "--device=cpu", "--start=ROMEO:", "--num_samples=3", "--max_new_tokens=12",
                      "--temperature=0.9")
    samples = generator.generate("ROMEO:", num_samples=3, max_new_tokens=12, temperature=0.9)
    assert "".join(f"ROMEO:{sample.text}\n---------------\n" for sample in samples) == done.stdout
    assert "".join(generator.stream("ROMEO:", PARAMS)) == samples[0].text
    assert texts(generator, iter(["ROMEO:", "A"]), PARAMS, num_samples=2)[:2] == [samples[0].text, samples[1].text]


@pytest.mark.parametrize("arguments, error, message", [
    (dict(prompts=["A", [1, 2]]), TypeError, r"^prompts\[1\]: a prompt must be a str; got \[1, 2\]$"),
    (dict(prompts=5), TypeError, "^a prompt must be a str; got 5$"),
    (dict(prompts=["A", ""]), ValueError, r"^prompts\[1\]: a prompt is empty"),
    (dict(prompts=[""]), ValueError, "^a prompt is empty"),
    (dict(prompts=["A"] * 5000 + ["é"] + ["A"] * 5000), ValueError, r"^prompts\[5000\]: .*'é'"),
    (dict(params={"seed": 1}), TypeError, r"^params must be a SamplingParams; got \{'seed': 1\}$"),
    (dict(num_samples=0), ValueError, "^num_samples must"), (dict(batch_size="2"), ValueError, "^batch_size must"),
], ids=str)
def test_invalid_arguments_raise(generator, arguments, error, message):
    with pytest.raises(error, match=message):
        generator.generate(**{"prompts": "A", "params": PARAMS, **arguments})
    with pytest.raises(TypeError, match="must be a str"):
        generator.stream(5) # at once
    assert repr(generator) == f"<{DEMO}/ckpt.pt: 2.77M parameters on cpu in float32>"


@pytest.mark.parametrize("settings", [dict(dtype="int8", compile=True), dict(name="a/b"), dict(name="")], ids=str)
def test_invalid_options_and_names_raise_value_error(settings):
    with pytest.raises(ValueError):
        sampling.load(**{"name": DEMO, **settings})


def test_a_sample_as_a_dict_has_its_text(generator):
    sample, = generator.generate("ROMEO:", PARAMS)
    fields = asdict(sample)
    assert fields["text"] == sample.text == "".join(token.text for token in sample.tokens) != ""
    assert fields["prompt"]["text"] == "ROMEO:" and fields["finish_reason"] == "length"


def test_pickling_a_model_says_to_load_it_in_each_process(generator):
    with pytest.raises(TypeError, match=r"call sampling\.load in each process$"):
        pickle.dumps(generator.generate) # as multiprocessing does


def test_load_prefers_a_ckpt_pt_to_a_hugging_face_model_and_asks_no_hub_for_a_pt_file(tmp_path):
    save_checkpoint(tmp_path, make_gpt(vocab_size=50257))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert not sampling.load(tmp_path, device="cpu").checkpoint.is_huggingface
    with pytest.raises(FileNotFoundError, match=rf"there is no checkpoint at .*; pass name={tmp_path}/"):
        sampling.load(tmp_path / "other.pt") # a program has no flags
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at /nope/.*; pass name=demo"):
        sampling.load("/nope") # no id of the hub


def test_the_default_dtype_device_and_inference_mode_of_the_caller_do_not_matter(generator):
    expected = texts(generator, "ROMEO:", PARAMS)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"):
            reloaded = sampling.load(DEMO, device="cpu")
            assert texts(generator, "ROMEO:", PARAMS) == texts(reloaded, "ROMEO:", PARAMS) == expected
        assert len(LINEAR["float32"].signatures) == 1, "it is compiled once"
    finally:
        torch.set_default_dtype(torch.float32)
    assert texts(generator, "ROMEO:", PARAMS) == texts(reloaded, "ROMEO:", PARAMS) == expected


HANDLER = """
import signal, sampling
from sampling.backends import cpu
cpu.MIN_DRAFT_WEIGHTS = cpu.MIN_DRAFT_TOKENS = 0
gpt = sampling.load("demo", "cpu", draft=False)
def sample():
    return gpt.generate("ROMEO:", max_new_tokens=30)[0].text
found, expected = [], sample()
signal.signal(signal.SIGALRM, lambda *_: found.append(sample()))
for i in range(5):
    signal.setitimer(signal.ITIMER_REAL, 0.004 * i + 0.001)
    assert sample() == expected
gpt = sampling.load("demo", "cpu")
make_draft = cpu.CPUBackend
def make_interrupted(*arguments, **options):
    signal.raise_signal(signal.SIGALRM)
    return make_draft(*arguments, **options)
cpu.CPUBackend = make_interrupted
assert sample() == expected and gpt.backend.draft is not None
assert len(found) > 3 and {*found} == {expected}, len(found)
"""


@pytest.mark.parametrize("layer", ["default", "workqueue"]) # the latter is numba's own
def test_a_signal_handler_may_sample_while_the_model_samples(layer):
    env = {**os.environ, "NUMBA_THREADING_LAYER": layer}
    subprocess.run([sys.executable, "-c", HANDLER], cwd=PROJECT, env=env, check=True, timeout=100)


def test_interleaved_and_abandoned_streams_do_not_disturb_each_other(generator):
    prompts = "ROMEO:", "A", "ROMEO:"
    expected = ["".join(generator.stream(prompt, PARAMS)) for prompt in prompts]
    parts = zip_longest(*(generator.stream(prompt, PARAMS) for prompt in prompts), fillvalue="")
    assert ["".join(texts) for texts in zip(*parts, strict=True)] == expected
    next(generator.stream("B", PARAMS))
    assert "".join(generator.stream(prompts[0], PARAMS)) == expected[0]
