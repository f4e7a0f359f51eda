"""CUDA graphs, and the checks on the user's GPU: whatever fails there, the text stays the same, and one line says so.

Most tests run on a CPU with Recordings instead of graphs, and break one thing.
"""
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import pytest
import torch

from engines import expected_ids
from models import make_gpt
from recorded_graphs import ON_GPU, Recording, record_graphs
from sampling.backends import cuda
from sampling.backends.cuda import CUDABackend, Support, block_step
from sampling.backends.prepare import cast_linears
from sampling.generation import engine
from streams import decode, normal, random_prompt

PROMPTS = random_prompt(5, 3).tolist()
STEPS = 30 # block_size is 16: inside the window, with graphs for 8, 12 and 16 positions, and past it, with another
OTHER_LOGITS = "the fast path for GPUs computes other logits than the plain model here (a difference of "


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(cuda, "BUCKET", 4)


@pytest.fixture
def recordings(monkeypatch):
    return record_graphs(monkeypatch)


def generates_the_right_text(backend, rows=3, **settings):
    expected = expected_ids(PROMPTS[:rows], STEPS, device=str(backend.device), **settings)
    return decode(backend, PROMPTS[:rows], STEPS, **settings) == expected


# ---- graphs that work

# A step has 2 blocks. Before a graph is captured, its step runs once.
@pytest.mark.parametrize("use_graphs, num_blocks", [(True, [3 * 2 * 2, 0]), (False, [11 * 2, 11 * 2])])
def test_each_kind_of_step_is_checked_once_and_is_captured_once_and_then_replayed(use_graphs, num_blocks, recordings,
                                                                                          monkeypatch):
    backend, calls, tokens = CUDABackend(make_gpt(), cuda_graphs=use_graphs), [], random_prompt(16, 3)
    cache, plain_logits = backend.new_cache(3, 16), backend.plain_logits
    backend.plain_logits = lambda *arguments: calls.append("plain") or plain_logits(*arguments)
    monkeypatch.setattr(cuda, "block_step", lambda *arguments: calls.append("block") or block_step(*arguments))
    for num_plain, num in zip([1 + 3, 1], num_blocks, strict=True): # the prompt, and steps with 8, 12 and 16 positions
        calls.clear()
        cache.seq_len = 0
        for ids in tokens.split([5, *[1] * 11], dim=1):
            backend.logits(ids, cache)
        assert calls.count("plain") == num_plain and calls.count("block") == num
        assert len(recordings) == 3 * use_graphs
    for _ in range(3):
        backend.logits(tokens, None)
    assert len(recordings) == 4 * use_graphs, "a window too"


def test_the_next_batch_replays_the_graphs_of_the_last_one_or_has_a_stream_and_a_pool_of_its_own(recordings):
    backend = CUDABackend(make_gpt())
    decode(backend, PROMPTS, 1) # its cache is too small for the next batch
    assert all(generates_the_right_text(backend) for _ in range(2)) and len(recordings) == 4
    decode(backend, PROMPTS[:2], STEPS)
    places = [(recording.stream, recording.pool) for recording in recordings]
    steps, window, later = set(places[:3]), set(places[3:4]), set(places[4:7])
    assert len(steps) == len(later) == 1 and len(steps | window | later) == 3


def test_a_stream_is_used_again_when_its_graphs_are_gone_and_not_before(recordings, monkeypatch):
    """torch has only 32 streams: the 33rd graph would share one with the first."""
    monkeypatch.setattr(cuda, "free_streams", defaultdict(list))
    first = CUDABackend(make_gpt())
    decode(first, PROMPTS, STEPS)
    theirs = {recording.stream for recording in recordings}
    for rows in 5 * [1, 2]:
        decode(CUDABackend(make_gpt()), PROMPTS[:rows], STEPS)
    others = [recording.stream for recording in recordings[4:]]
    assert len(others) == 40 and len(set(others)) == 2 and not theirs & set(others)


def test_two_models_in_two_threads_capture_one_after_the_other(recordings, monkeypatch):
    """torch allows one capture at a time in a process."""
    enter, leave, under_way, counts = Recording.__enter__, Recording.__exit__, [], []

    def slow_enter(recording):
        under_way.append(recording)
        time.sleep(0.05)
        counts.append(len(under_way))
        return enter(recording)
    monkeypatch.setattr(Recording, "__enter__", slow_enter)
    monkeypatch.setattr(Recording, "__exit__", lambda *arguments: under_way.pop() and leave(*arguments))
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(generates_the_right_text, [CUDABackend(make_gpt()), CUDABackend(make_gpt())]))
    assert counts == 8 * [1]


# ---- steps and graphs that compute something else

def no_mask(block, x, layer, position, mask, num_keys):
    return block_step(block, x, layer, position, torch.zeros_like(mask), num_keys)


def other_keys_from_the_twelfth_on(block, x, layer, position, mask, num_keys):
    return block_step(block, x, layer.roll(1, dims=3) if num_keys >= 12 else layer, position, mask, num_keys)


@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("wrong_step", [no_mask, other_keys_from_the_twelfth_on, None]) # None: the window is wrong
def test_wrong_steps_never_reach_the_text(wrong_step, use_graphs, recordings, messages, monkeypatch):
    backend = CUDABackend(make_gpt(), cuda_graphs=use_graphs)
    if wrong_step:
        monkeypatch.setattr(cuda, "block_step", wrong_step)
    else:
        backend.forward, forward = make_gpt(), backend.model.forward
        backend.model.forward = lambda ids: forward(ids.flip(1))
    assert generates_the_right_text(backend) and generates_the_right_text(backend, rows=2)
    message, = messages
    assert message.startswith(OTHER_LOGITS) and message.endswith("continuing with the plain model, which is slower")


def replay_with_other_logits(recording, replay=Recording.replay):
    replay(recording)
    recording.logits.copy_(recording.logits.roll(1, dims=1))


@pytest.mark.parametrize("before", [[], [3, 2]], ids=str) # the rows of batches that were right; then, graphs are new
@pytest.mark.parametrize("wrong_replay", [lambda recording: None, replay_with_other_logits], ids=["nothing", "other"])
def test_a_wrong_replay_never_reaches_the_text(wrong_replay, before, recordings, monkeypatch, messages):
    backend = CUDABackend(make_gpt())
    assert all(generates_the_right_text(backend, rows) for rows in before)
    monkeypatch.setattr(Recording, "replay", wrong_replay)
    assert generates_the_right_text(backend) and generates_the_right_text(backend)
    assert len(recordings) == 4 * len(before) + 1, "no step is captured after the failure"
    assert len(messages) == 1 and messages[0].startswith(OTHER_LOGITS)


def make_gpt_with_logits_around_minus_100():
    """As in GPT-2, the rows of the head share a component, and the last LayerNorm's bias lies along it."""
    model, shared = make_gpt(tie_word_embeddings=False), normal(24)
    shared /= shared.norm()
    with torch.no_grad():
        head = model.lm_head.weight
        head.copy_(6 * (head - (head @ shared)[:, None] * shared) + shared)
        model.transformer.ln_f.bias -= 100 * shared
    return model


@torch.no_grad()
def test_the_tolerance_allows_for_the_rounding_of_bfloat16_logits_around_minus_100_but_for_no_fault():
    model, ids = make_gpt_with_logits_around_minus_100(), random_prompt(15, 3)
    expected = model(ids)[0][:, -1].bfloat16()
    assert -103 < expected.mean() < -97 and 1 < expected.float().std() < 4, "as in GPT-2"
    support = Support(graphs=True, steps=True)
    assert support.check_logits((expected.float() + 0.3 * normal(3, 61)).bfloat16(), expected), "it is rounded twice"
    with_wrong_positions, with_an_unmasked_key = ids[:, 1:], torch.cat([random_prompt(1, 3), ids], dim=1)
    for wrong in with_wrong_positions, with_an_unmasked_key:
        for found, row in zip(model(wrong)[0][:, -1:].bfloat16(), expected, strict=True):
            assert not support.check_logits(found, row[None])


# ---- captures that fail

@pytest.fixture
def fail_capture(recordings, monkeypatch):
    """fail_capture(error, number): this capture raises the error. Returns the list of captures."""
    capture, captures = torch.cuda.graph, []

    def fail(error, number):
        def failing(graph, **settings):
            captures.append(graph)
            if len(captures) == number:
                raise error
            return capture(graph, **settings)
        monkeypatch.setattr(torch.cuda, "graph", failing)
        return captures
    return fail


@pytest.mark.parametrize("number, context_shift", [(1, False), (3, True), (4, False)]) # 4 is the window
def test_a_failing_capture_is_one_line_and_the_text_stays_the_same(number, context_shift, fail_capture, messages,
                                                                   monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    caller = MagicMock()
    backend, error = CUDABackend(make_gpt()), RuntimeError("operation failed due to a previous error during capture")
    error.__context__ = RuntimeError("no graphs here\nCUDA kernel errors might be reported later")
    captures = fail_capture(error, number)
    assert all(generates_the_right_text(backend, context_shift=context_shift) for _ in range(2))
    assert messages == ["CUDA graphs do not work here (RuntimeError: no graphs here): continuing without them, "
                                "which is slower"]
    assert len(captures) == number, "none is tried after the failure"
    assert caller.wait_stream.call_count == number, "also for the step before the failed capture"


@pytest.mark.parametrize("number", [1, 3, 4])
def test_after_out_of_memory_during_a_capture_a_smaller_batch_has_graphs(number, fail_capture, messages):
    backend, captures = CUDABackend(make_gpt()), fail_capture(torch.OutOfMemoryError("CUDA out of memory"), number)
    assert generates_the_right_text(backend) and len(captures) == number + 4
    assert messages == ["out of memory with 3 samples at once: continuing with 1"]


def test_nothing_is_kept_for_a_batch_of_another_size_or_after_out_of_memory(recordings, monkeypatch):
    backend = CUDABackend(make_gpt())
    for rows in 3, 2:
        cache = backend.new_cache(rows, 16)
        assert backend.window is None, "it was that of three rows"
        backend.logits(random_prompt(16, rows), None)
        backend.release(cache)
    kept = []
    monkeypatch.setattr(engine, "return_freed_memory", lambda: kept.append((backend.idle, backend.window)))
    monkeypatch.setattr(backend, "plain_logits", MagicMock(side_effect=[MemoryError(), *9 * [torch.zeros(1, 61)]]))
    decode(backend, PROMPTS[:2], 1)
    assert kept == [(None, None)]


@pytest.mark.parametrize("number", [1, None]) # None: the replay fails
def test_a_gpu_that_cannot_continue_is_an_error_that_says_what_to_do(number, fail_capture, monkeypatch):
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")
    fail_capture(error, number)
    monkeypatch.setattr(torch.cuda, "synchronize", MagicMock(side_effect=error))
    with pytest.raises(ValueError, match=r"^a CUDA graph failed, .*: run it again with --cuda_graphs=False "
                                         r"\(RuntimeError: CUDA error: an illegal memory access was encountered\)$"):
        decode(CUDABackend(make_gpt()), PROMPTS, STEPS)


# ---- on a GPU

@pytest.mark.parametrize("device", [ON_GPU])
def test_a_step_that_cannot_be_captured_runs_without_graphs(device, messages, monkeypatch):
    backend, stream = CUDABackend(make_gpt().to(device)), torch.cuda.current_stream()

    def step(block, *arguments):
        if torch.cuda.is_current_stream_capturing() and arguments[-1] == 12: # positions
            torch.cuda.synchronize()
        return block_step(block, *arguments)
    monkeypatch.setattr(cuda, "block_step", step)
    assert generates_the_right_text(backend) and torch.cuda.current_stream() == stream
    assert len(messages) == 1 and messages[0].startswith("CUDA graphs do not work here (")
    monkeypatch.undo()
    other = CUDABackend(make_gpt().to(device)) # a failed capture leaves nothing that would disturb the next one
    assert generates_the_right_text(other) and len(messages) == 1 and other.support.graphs


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make_model", [make_gpt, make_gpt_with_logits_around_minus_100])
def test_the_checks_pass_in_half_precision(make_model, dtype, device, messages):
    backend = CUDABackend(cast_linears(make_model(), dtype).to(device), cuda_graphs=device == "cuda")
    decode(backend, PROMPTS, STEPS, dtype=dtype)
    assert messages == [] and backend.support.steps
