"""The public API: load a model, generate text from text."""
import pickle
from itertools import zip_longest

import pytest
import torch

import sampling
from models import make_gpt, save_checkpoint
from project import PROJECT
from sampling.backends.cpu_kernels import LINEAR
from script_process import run_forked

DEMO = PROJECT / "demo"
SETTINGS = dict(max_new_tokens=12, temperature=0.9)
PARAMS = sampling.SamplingParams(**SETTINGS, stop="zzz")


@pytest.fixture(scope="module")
def generator():
    return sampling.load(DEMO, device="cpu")


def texts(generator, *arguments, **settings):
    return [sample.text for sample in generator.generate(*arguments, **settings)]


def text(generator, prompt="ROMEO:"):
    return "".join(generator.stream(prompt, PARAMS))


def test_samples_are_those_of_the_script(generator, run_script):
    done = run_script(f"--out_dir={DEMO}", "--device=cpu", "--start=ROMEO:", "--num_samples=3",
                      "--max_new_tokens=12", "--temperature=0.9")
    found = texts(generator, "ROMEO:", num_samples=3, **SETTINGS)
    assert "".join(f"ROMEO:{text}\n---------------\n" for text in found) == done.stdout
    assert text(generator) == found[0]
    first, second, *_ = texts(generator, iter(["ROMEO:", "A"]), PARAMS, num_samples=2)
    assert [first, second] == found[:2]


@pytest.mark.parametrize("arguments, error, message", [
    (dict(prompts=["A", [1, 2]]), TypeError,
     r"prompts\[1\]: a prompt must be a str; got \[1, 2\]$"),
    (dict(prompts=5), TypeError, "a prompt must be a str; got 5$"),
    (dict(prompts=b"A"), TypeError, "a prompt must be a str; got b'A'$"),
    (dict(prompts=["A", ""]), ValueError, r"prompts\[1\]: a prompt is empty"),
    (dict(prompts=["A"] * 5000 + ["é"]), ValueError, r"prompts\[5000\]: .*'é'"),
    (dict(params={"seed": 1}), TypeError, r"params must be a SamplingParams; got \{'seed': 1\}$"),
    (dict(max_length=5), TypeError,
     "max_length is no field of SamplingParams; did you mean max_new_tokens"),
    (dict(num_samples=0), ValueError, "num_samples must"),
    (dict(batch_size="2"), ValueError, "batch_size must"),
])
def test_invalid_arguments_raise(generator, arguments, error, message):
    with pytest.raises(error, match=f"^{message}"):
        generator.generate(**{"prompts": "A", "params": PARAMS, **arguments})


def test_an_invalid_prompt_of_a_stream_raises_at_once(generator):
    with pytest.raises(TypeError, match="must be a str"):
        generator.stream(5)


def test_several_texts_get_the_list_of_their_scores(generator):
    texts = "ROMEO:", "My lord"
    found = generator.score(texts, num_logprobs=1)
    for score, expected in zip(found, map(generator.score, texts), strict=True):
        assert score.prompt.text == expected.prompt.text
        assert score.nats_per_token == pytest.approx(expected.nats_per_token, rel=1e-4)
        assert len(score.tokens[-1].top_logprobs) == 1
    assert len(generator.score(texts[:1])) == 1
    with pytest.raises(ValueError, match=r"^prompts\[1\]: a prompt is empty"):
        generator.score(["A", ""])


@pytest.mark.parametrize("settings", [
    dict(dtype="int8", compile=True), dict(name="a/b"), dict(name="")])
def test_invalid_options_and_names_raise_value_error(settings):
    with pytest.raises(ValueError):
        sampling.load(**{"name": DEMO, **settings})


def test_the_repr_of_a_generator_describes_its_model(generator):
    assert repr(generator) == f"<{DEMO}/ckpt.pt: 2.77M parameters on cpu in float32>"


def test_pickling_a_model_says_to_load_it_in_each_process(generator):
    with pytest.raises(TypeError, match=r"call sampling\.load in each process$"):
        pickle.dumps(generator.generate) # as multiprocessing does


def test_load_prefers_a_ckpt_pt_to_a_hugging_face_model_and_asks_no_hub_for_a_path(tmp_path):
    save_checkpoint(tmp_path, make_gpt(vocab_size=50257))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert not sampling.load(tmp_path, device="cpu").checkpoint.is_huggingface
    # A program has no flags.
    for name, advice in (tmp_path / "other.pt", f"name={tmp_path}/"), ("/nope", "name=demo"):
        with pytest.raises(FileNotFoundError, match=f"no checkpoint at {name}.*; pass {advice}"):
            sampling.load(name)


def test_the_default_dtype_device_and_inference_mode_of_the_caller_do_not_matter(generator):
    expected = text(generator)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"):
            reloaded = sampling.load(DEMO, device="cpu")
            assert text(generator) == text(reloaded) == expected
    finally:
        torch.set_default_dtype(torch.float32)
    assert text(generator) == text(reloaded) == expected
    assert len(LINEAR["float32"].signatures) == 1, "other types would be compiled again"


# numba's own threads, workqueue, are the ones that serve one thread at a time. They would abort the
# process.
SHARED = """
import numba, signal, torch, sampling
from concurrent.futures import ThreadPoolExecutor
from sampling.backends import cpu
numba.config.THREADING_LAYER = "workqueue"
torch.set_num_threads(2)
cpu.MIN_DRAFT_PARAMS = cpu.MIN_DRAFT_TOKENS = 0
gpt = sampling.load("demo", "cpu", draft=False)
def sample(num_samples=1):
    return gpt.generate("ROMEO:", max_new_tokens=30, num_samples=num_samples)[0].text
found = []
expected = sample()
assert {*ThreadPoolExecutor(3).map(sample, range(1, 4))} == {expected}
assert numba.threading_layer() == "workqueue"
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


def test_threads_and_a_signal_handler_may_sample_while_the_model_samples():
    run_forked(SHARED, script="-c")


def test_interleaved_and_abandoned_streams_do_not_disturb_each_other(generator):
    prompts = "ROMEO:", "A", "ROMEO:"
    expected = [text(generator, prompt) for prompt in prompts]
    streams = [generator.stream(prompt, PARAMS) for prompt in prompts]
    parts = zip_longest(*streams, fillvalue="")
    assert [*map("".join, zip(*parts, strict=True))] == expected
    next(generator.stream("B", PARAMS))
    closed = generator.stream("B", PARAMS)
    next(closed)
    closed.close() # as servers do
    assert next(closed, None) is None
    assert text(generator) == expected[0]
