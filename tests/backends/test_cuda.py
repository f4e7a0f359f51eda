"""CUDABackend: whatever fails on a user's GPU, the text stays the same, and one line says so.

Most tests run on a CPU, with Recordings instead of graphs. generation/test_engine.py compares the text of all settings.
"""
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import pytest
import torch

import engines
from engines import ON_GPU, Recording, decode, expected_ids, make_generator, record_graphs, run
from models import make_gpt, normal, random_prompt
from project import PROJECT
from sampling.backends import cuda
from sampling.backends.cuda import CUDABackend, block_step
from sampling.backends.prepare import cast_linears
from sampling.params import Prompt, Sample, SamplingParams

PROMPTS = random_prompt(5, 3).tolist()
STEPS = 30 # block_size is 16: inside the window, with graphs for 8, 12 and 16 positions, and past it
OTHER_LOGITS = "the fast path for GPUs computes other logits than the plain model here (a difference of "


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(cuda, "BUCKET", 4)


def generates_the_right_text(backend, rows=3, **settings):
    expected = expected_ids(PROMPTS[:rows], STEPS, device=str(backend.device), **settings)
    return decode(backend, PROMPTS[:rows], STEPS, **settings) == expected


# ---- caches

@torch.no_grad()
def test_a_text_with_nan_does_not_affect_the_next_one_in_the_same_cache(recordings):
    model, ids = make_gpt(tie_word_embeddings=False), random_prompt(6).clamp(max=59)
    model.transformer.wte.weight[60] = torch.nan
    backend = CUDABackend(model)
    cache = backend.new_cache(1, 16)
    assert backend.logits(torch.full((1, 16), 60), cache).isnan().all()
    backend.release(cache)
    assert backend.new_cache(1, 16) is cache, "it is used again"
    backend.logits(ids[:, :5], cache)
    torch.testing.assert_close(backend.logits(ids[:, 5:], cache), model(ids)[0][:, -1], rtol=1e-4, atol=1e-4)


def test_no_memory_is_kept_for_a_batch_of_another_size_or_after_out_of_memory(recordings):
    backend = CUDABackend(make_gpt())
    for free in lambda: backend.new_cache(2, 16), backend.free_buffers:
        cache = backend.new_cache(3, 16)
        layer = weakref.ref(cache.layers[0])
        backend.release(cache)
        del cache
        assert layer() is not None, "the next batch may use it"
        free()
        assert layer() is None


# ---- graphs that work

def test_graphs_are_kept_for_the_next_batch_and_share_no_stream_until_they_are_gone(recordings):
    """torch has only 32 streams: the 33rd would be the first one again."""
    backend = CUDABackend(make_gpt())
    decode(backend, PROMPTS, 1) # its cache is too small for the next batch
    for num_batches in 1, 2: # of 11 steps inside the window, with 8, 12 and 16 positions
        assert generates_the_right_text(backend) and len(recordings) == 3
        assert sum(recording.num_replays for recording in recordings) == num_batches * 11
    for rows in 5 * [1, 2]:
        assert generates_the_right_text(CUDABackend(make_gpt()), rows)
    places = [(recording.stream, recording.pool) for recording in recordings]
    kept, others = set(places[:3]), set(places[3:])
    assert len(kept) == 1 and len(others) == 10 and len({stream for stream, _ in others}) == 1 and not kept & others
    decode(CUDABackend(make_gpt(), cuda_graphs=False), PROMPTS, STEPS)
    assert len(recordings) == len(places)


@torch.no_grad()
def test_the_rows_that_stay_get_new_graphs(recordings):
    backend, ids, rows = CUDABackend(make_gpt()), random_prompt(8, 4), [3, 1]
    cache = backend.new_cache(4, 16)
    for tokens in ids[:, :6], ids[:, 6:7]:
        backend.logits(tokens, cache)
    old_pool = recordings[0].pool
    cache.select_rows(rows)
    torch.testing.assert_close(backend.logits(ids[rows, 7:], cache), make_gpt()(ids[rows])[0][:, -1])
    assert recordings[1].pool != old_pool, "torch refuses a pool whose graphs are gone"


def test_two_threads_get_their_own_texts_if_each_samples_after_both_have_computed_logits(recordings):
    class WaitingBackend(CUDABackend):
        def logits(self, *arguments):
            logits = super().logits(*arguments)
            barrier.wait()
            return logits

    def generate(index):
        sample, = run(gpt, [Sample(index, Prompt("a"), PROMPTS[index])], SamplingParams(30, 1.0, None, seed=3))
        return sample.token_ids
    gpt, barrier = make_generator(WaitingBackend(make_gpt())), threading.Barrier(2, timeout=10)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(generate, range(2))) == expected_ids(PROMPTS[:2], 30)


HANDLER = """
import signal
import pytest
from engines import Recording, record_graphs
from models import make_gpt
from sampling.backends.cuda import CUDABackend
from test_cuda import generates_the_right_text
def handle(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    found.append(generates_the_right_text(backend, rows=1))
def replay_after_signal(recording):
    signal.raise_signal(signal.SIGUSR1)
    replay(recording)
record_graphs(pytest.MonkeyPatch())
backend, found, replay = CUDABackend(make_gpt()), [], Recording.replay
Recording.replay = replay_after_signal
for num_handled in 1, 2: # while a graph is made, and while one is there
    signal.signal(signal.SIGUSR1, handle)
    assert generates_the_right_text(backend) and found == [True] * num_handled
assert backend.has_graphs
"""


def test_a_signal_handler_may_sample_during_a_step():
    env = {**os.environ, "PYTHONPATH": f"{PROJECT}:{PROJECT}/tests:{PROJECT}/tests/backends"}
    subprocess.run([sys.executable, "-c", HANDLER], env=env, check=True, timeout=100)


# ---- graphs that compute something else

def no_mask(block, x, layer, position, mask, num_keys):
    return block_step(block, x, layer, position, torch.zeros_like(mask), num_keys)


def other_keys_from_the_twelfth_on(block, x, layer, position, mask, num_keys):
    return block_step(block, x, layer.roll(1, dims=3) if num_keys >= 12 else layer, position, mask, num_keys)


@pytest.mark.parametrize("target, name, wrong", [
    (cuda, "block_step", no_mask), (cuda, "block_step", other_keys_from_the_twelfth_on),
    (Recording, "replay", lambda recording: None)])
@pytest.mark.parametrize("before", [[], [3, 2]], ids=str) # the rows of batches that were right; then, graphs are new
def test_what_computes_other_logits_never_reaches_the_text(target, name, wrong, before, recordings, monkeypatch,
                                                           messages):
    backend = CUDABackend(make_gpt())
    assert all(generates_the_right_text(backend, rows) for rows in before)
    monkeypatch.setattr(target, name, wrong)
    assert all(generates_the_right_text(backend, rows) for rows in (3, 3, 2))
    assert len(recordings) <= 3 * len(before) + 3, "no step is captured after the failure"
    message, = engines.without_facts(messages)
    assert message.startswith(OTHER_LOGITS) and message.endswith("continuing with the plain model, which is slower")


def test_the_tolerance_allows_for_the_rounding_of_bfloat16_logits_around_minus_100_but_for_no_fault():
    """GPT-2's logits lie there. Neighbouring bfloat16 numbers are 0.5 apart."""
    logits, noise, backend = 2.5 * normal(3, 61) - 100, normal(3, 61, seed=1), CUDABackend(make_gpt())
    assert backend.check_logits((logits + 0.2 * noise).bfloat16(), logits.bfloat16())
    assert not backend.check_logits((logits + 0.8 * noise).bfloat16(), logits.bfloat16())


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_checks_pass_in_half_precision(dtype, device, messages, monkeypatch):
    if device == "cpu":
        record_graphs(monkeypatch)
    decode(CUDABackend(cast_linears(make_gpt(), dtype).to(device)), PROMPTS, STEPS)
    assert engines.without_facts(messages) == []


# ---- captures that fail

@pytest.mark.parametrize("number, context_shift", [(1, False), (3, True)])
def test_a_failing_capture_is_one_line_and_the_text_stays_the_same(number, context_shift, messages, monkeypatch):
    error, caller = RuntimeError("operation failed due to a previous error during capture"), MagicMock()
    error.__context__ = RuntimeError("no graphs here\nCUDA kernel errors might be reported later")
    backend, recordings = CUDABackend(make_gpt()), record_graphs(monkeypatch, number, error)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    assert all(generates_the_right_text(backend, context_shift=context_shift) for _ in range(2))
    assert engines.without_facts(messages) == [
        "CUDA graphs do not work here (RuntimeError: no graphs here): continuing without them, which is slower"]
    assert len(recordings) == number, "none is tried after the failure"
    assert caller.wait_stream.call_count == number, "also for the step before the failed capture"


@pytest.mark.parametrize("number", [1, 3])
def test_after_out_of_memory_during_a_capture_a_smaller_batch_has_graphs(number, messages, monkeypatch):
    recordings = record_graphs(monkeypatch, number, torch.OutOfMemoryError("CUDA out of memory"))
    assert generates_the_right_text(CUDABackend(make_gpt())) and len(recordings) == number + 3
    assert engines.without_facts(messages) == ["out of memory with 3 samples at once: continuing with 1"]


@pytest.mark.parametrize("number", [1, None]) # None: the replay fails
def test_a_gpu_that_cannot_continue_is_an_error_that_says_what_to_do(number, monkeypatch):
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")
    record_graphs(monkeypatch, number, error)
    monkeypatch.setattr(torch.cuda, "synchronize", MagicMock(side_effect=error))
    with pytest.raises(ValueError, match=r"^a CUDA graph failed, .*: run it again with --cuda_graphs=False "
                                         r"\(RuntimeError: CUDA error: an illegal memory access was encountered\)$"):
        decode(CUDABackend(make_gpt()), PROMPTS, STEPS)
