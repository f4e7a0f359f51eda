"""CUDABackend computes the logits of the plain model: on a CPU directly and as recorded graphs, and on a GPU.

generation/test_decode.py compares its text.
"""
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engines import BACKENDS, expected_ids
from models import make_gpt
from recorded_graphs import NEEDS_GPU, ON_GPU
from sampling.backends import cuda
from sampling.backends.cuda import CUDABackend
from sampling.generation.decode import Decoder
from sampling.sampler.row_streams import RowStreams, RunStream
from sampling.sampler.sampler import Sampler
from streams import decode, num_compiled_graphs, random_prompt

IDS = random_prompt(16, 3) # block_size is 16


@pytest.fixture(params=["static steps", "recorded graphs", ON_GPU])
def make_backend(request, monkeypatch):
    """make_backend(model) -> a CUDABackend whose steps attend to 4, 8, 12 or 16 positions. A message is a failure."""
    monkeypatch.setattr(cuda, "BUCKET", 4)
    if request.param == "recorded graphs":
        request.getfixturevalue("recordings")
    return BACKENDS[request.param]


@torch.no_grad()
def test_a_text_with_nan_does_not_affect_the_next_one_in_the_same_cache(make_backend):
    model = make_gpt(tie_word_embeddings=False)
    model.transformer.wte.weight[60] = torch.nan
    backend = make_backend(model)
    cache, ids = backend.new_cache(1, 16), IDS[:1].clamp(max=59).to(backend.device)
    bad = torch.tensor([[1, 60, 2, 3, 4, 5, 6, 7]], device=backend.device)
    assert backend.logits(bad, cache).isnan().all()
    cache.seq_len = 0
    backend.logits(ids[:, :5], cache)
    found, expected = backend.logits(ids[:, 5:6], cache), model(ids[:, :6])[0][:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_several_tokens_may_follow_others_and_setting_seq_len_back_undoes_them(make_backend):
    backend = make_backend(make_gpt())
    cache, ids = backend.new_cache(3, 16), IDS.clone().to(backend.device)
    for start, end in (0, 9), (9, 10), (5, 8), (8, 9), (9, 16):
        ids[:, start:], cache.seq_len = random_prompt(16 - start, 3, seed=end), start
        found = backend.logits(ids[:, start:end], cache, num_positions=end - start)
        expected = backend.model(ids[:, :end], num_positions=end - start)[0].flatten(0, 1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert cache.seq_len == end


def test_two_threads_get_their_own_texts_if_each_samples_after_both_have_computed_logits(make_backend):
    backend, barrier, prompts = make_backend(make_gpt()), threading.Barrier(2, timeout=10), IDS[:2, :5].tolist()
    run = RunStream(3, backend.device, draws_per_sample=30, vocab_size=61)
    streams = [RowStreams(run, [index]) for index in range(2)]

    class WaitingSampler(Sampler):
        def __call__(self, *arguments):
            barrier.wait()
            return super().__call__(*arguments)

    def generate(index):
        steps = Decoder(backend, WaitingSampler()).decode([prompts[index]], streams[index], 30)
        return torch.cat([step.ids for step in steps], dim=1)[0].tolist()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(generate, range(2))) == expected_ids(prompts, 30, device=str(backend.device))


@torch.no_grad()
def test_a_step_never_synchronises_the_gpu(monkeypatch):
    """A capture would fail. On the meta device, tensors have no values, and code that needs one on the host raises."""
    for module in "model", "sampling.backends.cuda":
        monkeypatch.setattr(f"{module}.linear_dtype", lambda model: torch.float32) # autocast does not know "meta"
    backend = CUDABackend(make_gpt().to("meta"))
    assert backend.decode_step(backend.new_cache(2, 16), 8).shape == (2, 61)
    assert backend.forward(IDS.to("meta"))[0].shape == (3, 1, 61)


@pytest.mark.slow
@pytest.mark.usefixtures("compile_settings")
@pytest.mark.filterwarnings("ignore") # torch's compiler warns about torch
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_compiled_steps_give_the_same_text(device):
    backend = CUDABackend(make_gpt().to(device), compile=True, log=pytest.fail)
    prompts = IDS[:, :5].tolist()
    assert decode(backend, prompts, 20) == expected_ids(prompts, 20, device=device)
    assert num_compiled_graphs() > 0


@pytest.mark.parametrize("rows", [pytest.param(rows, marks=NEEDS_GPU) for rows in (1, 3)])
def test_on_a_gpu_graphs_with_128_positions_or_more_give_the_text_of_the_plain_model(rows):
    prompts, backend = random_prompt(5, rows).tolist(), CUDABackend(make_gpt(block_size=300).cuda(), log=pytest.fail)
    assert decode(backend, prompts, 330) == expected_ids(prompts, 330, block_size=300, device="cuda")
    assert backend.checks.use_graphs and backend.window[1].graphs
