"""CUDABackend on a CPU. generation/test_engine.py compares its text, also on a GPU."""
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sampling.generation.decode import Decoder

from engines import expected_ids, recorded_graphs, static_steps
from models import make_gpt
from recorded_graphs import ON_GPU, record_graphs
from sampling.backends import cuda
from sampling.backends.cuda import CUDABackend
from sampling.sampler.row_streams import RowStreams, RunStream
from sampling.sampler.sampler import Sampler
from streams import decode, random_prompt

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
    backend, barrier, prompts = recorded_graphs(make_gpt()), threading.Barrier(2, timeout=10), IDS[:2, :5].tolist()
    run = RunStream(3, draws_per_sample=30, vocab_size=61)
    streams = [RowStreams(run, [index]) for index in range(2)]

    class WaitingSampler(Sampler):
        def __call__(self, *arguments):
            barrier.wait()
            return super().__call__(*arguments)

    def generate(index):
        steps = Decoder(backend, WaitingSampler()).decode([prompts[index]], streams[index], 30)
        return torch.cat([step.ids for step in steps], dim=1)[0].tolist()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(generate, range(2))) == expected_ids(prompts, 30)


@torch.no_grad()
def test_a_step_never_synchronises_the_gpu(monkeypatch):
    """A capture would fail. On the meta device, tensors have no values, and code that needs one on the host raises."""
    for module in "model", "sampling.backends.cuda":
        monkeypatch.setattr(f"{module}.linear_dtype", lambda model: torch.float32) # autocast does not know "meta"
    backend = CUDABackend(make_gpt().to("meta"))
    assert backend.decode_step(backend.new_cache(2, 16), 8).shape == (2, 61)
    assert backend.forward(IDS.to("meta"))[0].shape == (3, 1, 61)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore") # torch's compiler warns about torch
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_compiled_steps_give_the_same_text(device):
    prompts = IDS[:, :5].tolist()
    with torch._dynamo.config.patch(recompile_limit=8): # restores it
        backend = CUDABackend(make_gpt().to(device), compile=True)
        assert decode(backend, prompts, 20) == expected_ids(prompts, 20, device=device)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
