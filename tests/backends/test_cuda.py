"""CUDABackend on a CPU. generation/test_engine.py compares its text, also on a GPU."""
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from engines import Generator, expected_ids, run, static_steps
from models import make_gpt
from recorded_graphs import record_graphs
from sampling.backends import cuda
from sampling.backends.cuda import CUDABackend
from sampling.params import Prompt, Sample, SamplingParams
from sampling.sampler.sampler import Sampler
from streams import IdTokenizer, decode, random_prompt

IDS = random_prompt(16, 3) # block_size is 16


@torch.no_grad()
def test_a_text_with_nan_does_not_affect_the_next_one_in_the_same_cache():
    model = make_gpt(tie_word_embeddings=False)
    model.transformer.wte.weight[60] = torch.nan
    backend, ids = static_steps(model), IDS[:1].clamp(max=59)
    bad = torch.tensor([[1, 60, 2, 3, 4, 5, 6, 7]])
    first = backend.new_cache(1, 16)
    assert backend.logits(bad, first).isnan().all()
    backend.release(first)
    cache = backend.new_cache(1, 16)
    assert cache is first, "it is used again"
    backend.logits(ids[:, :5], cache)
    found, expected = backend.logits(ids[:, 5:6], cache), model(ids[:, :6])[0][:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_after_a_short_text_a_longer_one_gets_a_larger_cache(monkeypatch):
    monkeypatch.setattr(cuda, "BUCKET", 4)
    backend = static_steps(make_gpt())
    for length, num_tokens in (1, 3), (5, 11):
        prompts = IDS[:2, :length].tolist()
        assert decode(backend, prompts, num_tokens) == expected_ids(prompts, num_tokens)


def test_two_threads_get_their_own_texts_if_each_samples_after_both_have_computed_logits(monkeypatch):
    record_graphs(monkeypatch)
    gpt, barrier = Generator(IdTokenizer(), CUDABackend(make_gpt())), threading.Barrier(2, timeout=10)
    sample, prompts = Sampler.__call__, IDS[:2, :5].tolist()

    def wait_and_sample(*arguments):
        barrier.wait()
        return sample(*arguments)
    monkeypatch.setattr(Sampler, "__call__", wait_and_sample)

    def generate(index):
        sample, = run(gpt, [Sample(index, Prompt("a"), prompts[index])], SamplingParams(30, 1.0, None, seed=3))
        return sample.token_ids
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(generate, range(2))) == expected_ids(prompts, 30)


@torch.no_grad()
def test_a_step_never_synchronises_the_gpu(monkeypatch):
    """A capture would fail. On the meta device, tensors have no values, and code that needs one on the host raises."""
    for module in "model", "sampling.backends.cuda":
        monkeypatch.setattr(f"{module}.linear_dtype", lambda model: torch.float32) # autocast does not know "meta"
    backend = CUDABackend(make_gpt().to("meta"))
    assert backend.decode_step(backend.new_cache(2, 16), 8).shape == (2, 61)
    assert backend.model(IDS.to("meta"))[0].shape == (3, 1, 61)
