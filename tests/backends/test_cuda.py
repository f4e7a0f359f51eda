"""CUDABackend: whatever fails on a user's GPU, the text stays the same, and one line says so.

Most tests run on a CPU, with Recordings instead of graphs. generation/test_engine.py compares the
text of all settings.
"""
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import pytest
import torch
from torch.testing import assert_close

from engines import ON_GPU, Recording, decode, expected_ids, record_graphs, without_facts
from models import make_gpt, normal, random_prompt
from sampling.backends import cuda
from sampling.backends.backend_choice import cast_linears
from sampling.backends.cuda import CUDABackend, block_step

PROMPTS = random_prompt(5, 3).tolist()
# block_size is 16: inside the window, with graphs for 8, 12 and 16 positions, and past it.
STEPS = 30
OTHER_LOGITS = ("the fast path for GPUs computes other logits than the plain model here "
                "(a difference of ")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(cuda, "BUCKET", 4)


def generates_the_right_text(backend, rows=3, **settings):
    prompts = PROMPTS[:rows]
    expected = expected_ids(prompts, STEPS, device=backend.device, **settings)
    return decode(backend, prompts, STEPS, **settings) == expected


# ---- caches

@torch.no_grad()
def test_a_text_with_nan_does_not_affect_the_next_one_in_the_same_cache(recordings):
    model = make_gpt(tie_word_embeddings=False)
    model.transformer.wte.weight[60] = torch.nan
    backend = CUDABackend(model)
    cache = backend.new_cache(1, 16)
    assert backend.logits(torch.full((1, 16), 60), cache).isnan().all()
    backend.release(cache)
    assert backend.new_cache(1, 16) is cache, "it is used again"
    ids = random_prompt(6).clamp(max=59)
    backend.logits(ids[:, :5], cache)
    assert_close(backend.logits(ids[:, 5:], cache), model(ids)[0][:, -1])


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

def test_graphs_serve_the_next_batch_and_share_no_stream_until_they_are_gone(recordings):
    """torch has only 32 streams: the 33rd would be the first one again."""
    backend = CUDABackend(make_gpt())
    decode(backend, PROMPTS, 1) # its cache is too small for the next batch
    for _ in range(2):
        assert generates_the_right_text(backend)
        assert len(recordings) == 3
    for rows in 5 * [1, 2]:
        assert generates_the_right_text(CUDABackend(make_gpt()), rows)
    kept, *others = [recording.stream for recording in recordings[::3]]
    assert kept not in others
    assert len({*others}) == 1


@torch.no_grad()
def test_the_rows_that_stay_get_new_graphs(recordings):
    backend = CUDABackend(make_gpt())
    ids = random_prompt(8, 4)
    cache = backend.new_cache(4, 16)
    backend.logits(ids[:, :6], cache)
    backend.logits(ids[:, 6:7], cache)
    cache.select_rows([3, 1])
    ids = ids[[3, 1]]
    assert_close(backend.logits(ids[:, 7:], cache), make_gpt()(ids)[0][:, -1])
    first, second = recordings
    assert second.pool != first.pool, "torch refuses a pool whose graphs are gone"


def test_two_threads_get_their_own_texts_if_each_samples_after_both_have_logits(
        recordings, monkeypatch):
    def replay_alone(recording):
        assert is_idle.acquire(blocking=False), "one thread computes logits at a time"
        time.sleep(0.001)
        replay(recording)
        is_idle.release()

    class WaitingBackend(CUDABackend):
        def logits(self, *arguments):
            logits = super().logits(*arguments)
            barrier.wait()
            return logits
    is_idle = threading.Lock()
    replay = Recording.replay
    monkeypatch.setattr(Recording, "replay", replay_alone)
    barrier = threading.Barrier(2, timeout=10)
    backend = WaitingBackend(make_gpt())
    prompts = [[ids] for ids in PROMPTS[:2]]
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda ids: decode(backend, ids, STEPS), prompts)
    assert [*found] == [expected_ids(ids, STEPS) for ids in prompts]


@pytest.mark.usefixtures("recordings")
def test_a_signal_handler_may_sample_during_a_step(monkeypatch):
    def handle(*_):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        found.append(generates_the_right_text(backend, rows=1))

    def replay_after_signal(recording):
        signal.raise_signal(signal.SIGUSR1)
        replay(recording)
    backend = CUDABackend(make_gpt())
    found = []
    replay = Recording.replay
    monkeypatch.setattr(Recording, "replay", replay_after_signal)
    for num_handled in 1, 2: # while a graph is made, and while one is there
        signal.signal(signal.SIGUSR1, handle)
        assert generates_the_right_text(backend)
        assert found == [True] * num_handled
    assert backend.has_graphs


# ---- graphs that compute something else

def no_mask(block, x, layer, position, mask, num_keys):
    return block_step(block, x, layer, position, torch.zeros_like(mask), num_keys)


def other_keys_from_the_twelfth_on(block, x, layer, position, mask, num_keys):
    if num_keys >= 12:
        layer = layer.roll(1, dims=3)
    return block_step(block, x, layer, position, mask, num_keys)


@pytest.mark.parametrize("target, name, wrong", [
    (cuda, "block_step", no_mask),
    (cuda, "block_step", other_keys_from_the_twelfth_on),
    (Recording, "replay", lambda recording: None)])
# The rows of batches that were right; then, graphs are new.
@pytest.mark.parametrize("before", [[], [3, 2]])
def test_what_computes_other_logits_never_reaches_the_text(
        target, name, wrong, before, recordings, monkeypatch, messages):
    backend = CUDABackend(make_gpt())
    assert all(generates_the_right_text(backend, rows) for rows in before)
    monkeypatch.setattr(target, name, wrong)
    assert all(generates_the_right_text(backend, rows) for rows in (3, 3, 2))
    message, = without_facts(messages)
    assert message.startswith(OTHER_LOGITS)
    assert message.endswith("continuing with the plain model, which is slower")


def test_the_rounding_of_bfloat16_logits_around_minus_100_is_no_fault_and_more_is():
    """GPT-2's logits lie there. Neighbouring bfloat16 numbers are 0.5 apart."""
    backend = CUDABackend(make_gpt())
    logits = 2.5 * normal(3, 61) - 100
    noise = normal(3, 61, seed=1)
    for size, is_right in (0.2, True), (0.8, False):
        found = (logits + size * noise).bfloat16()
        assert backend.check_logits(found, logits.bfloat16()) == is_right


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_checks_pass_in_half_precision(dtype, device, messages, monkeypatch):
    if device == "cpu":
        record_graphs(monkeypatch)
    decode(CUDABackend(cast_linears(make_gpt(), dtype).to(device)), PROMPTS, STEPS)
    assert without_facts(messages) == []


# ---- captures that fail

@pytest.mark.parametrize("number, context_shift", [(1, False), (3, True)])
def test_a_failing_capture_is_one_line_and_the_text_stays_the_same(
        number, context_shift, messages, monkeypatch):
    error = RuntimeError("operation failed due to a previous error during capture")
    error.__context__ = RuntimeError("no graphs here\nCUDA kernel errors might be reported later")
    record_graphs(monkeypatch, number, error)
    caller = MagicMock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    backend = CUDABackend(make_gpt())
    for _ in range(2):
        assert generates_the_right_text(backend, context_shift=context_shift)
    assert without_facts(messages) == [
        "CUDA graphs do not work here (RuntimeError: no graphs here): "
        "continuing without them, which is slower"]
    caller.wait_stream.assert_called() # for the step before the failed capture


@pytest.mark.parametrize("number", [1, 3])
def test_after_out_of_memory_during_a_capture_a_smaller_batch_has_graphs(
        number, messages, monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory")
    recordings = record_graphs(monkeypatch, number, error)
    assert generates_the_right_text(CUDABackend(make_gpt()))
    assert len(recordings) == number + 3
    line = "out of memory with 3 samples at once: continuing with 1"
    assert without_facts(messages) == [line]


@pytest.mark.parametrize("number", [1, None]) # None: the replay fails
def test_a_gpu_that_cannot_continue_is_an_error_that_says_what_to_do(number, monkeypatch):
    reason = "CUDA error: an illegal memory access was encountered"
    error = RuntimeError(f"{reason}\nCompile with TORCH_USE_CUDA_DSA")
    record_graphs(monkeypatch, number, error)
    monkeypatch.setattr(torch.cuda, "synchronize", MagicMock(side_effect=error))
    message = ("^a CUDA graph failed, .*: run it again, and pass cuda_graphs=False "
               rf"\(RuntimeError: {reason}\)$")
    with pytest.raises(ValueError, match=message):
        decode(CUDABackend(make_gpt()), PROMPTS, STEPS)
