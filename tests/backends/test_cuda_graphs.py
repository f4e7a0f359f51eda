"""CUDA graphs, and the checks on the user's GPU: whatever fails there, the text stays the same, and one line says so.

Most tests run on a CPU with Recordings instead of graphs, and break one thing.
"""
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

from engines import PARAMS, expected_ids, expected_texts, load, make_requests, on_fake_gpu, run
from models import make_gpt, save_meta
from recorded_graphs import NEEDS_GPU, Recording
from sampling.backends import cuda, cuda_graphs
from sampling.backends.cuda import CUDABackend, block_step
from sampling.backends.cuda_graphs import capture_graph, logits_error, tolerance
from sampling.backends.prepare import cast_linears
from sampling.generation.engine import Engine
from sampling.inputs.char_tokenizer import CharTokenizer
from sampling.messages import is_out_of_memory
from sampling.sampler.row_streams import draws_like_multinomial
from streams import decode, normal, random_prompt

PROMPTS = random_prompt(5, 3).tolist()
STEPS = 30 # block_size is 16: inside the window and past it
OTHER_LOGITS = "the fast path for GPUs computes other logits than the plain model here (a difference of "


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(cuda, "BUCKET", 4)


def make_backend(use_graphs=True, model=None):
    """A CUDABackend. Its messages are the lines that it logs."""
    messages = []
    backend = CUDABackend(model or make_gpt(), log=messages.append)
    backend.messages, backend.checks.use_graphs = messages, use_graphs
    return backend


def generates_the_right_text(backend, rows=3, **settings):
    expected = expected_ids(PROMPTS[:rows], STEPS, device=str(backend.device), **settings)
    return decode(backend, PROMPTS[:rows], STEPS, **settings) == expected


# ---- graphs that work

@pytest.mark.parametrize("use_graphs, num_blocks", [(True, [3 * 2, 0]), (False, [11 * 2, 11 * 2])]) # of 2 layers
def test_each_kind_of_step_is_checked_once_and_is_captured_once_and_then_replayed(use_graphs, num_blocks, recordings):
    backend, calls, tokens = make_backend(use_graphs), [], random_prompt(16, 3)
    cache = backend.new_cache(3, 16)
    backend.model.lm_head.register_forward_hook(lambda *_: calls.append("plain")) # the steps use backend.head
    backend.block_step = lambda *arguments: calls.append("block") or block_step(*arguments)
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


def test_the_next_batch_of_a_run_replays_the_graphs_of_the_last_one(recordings, tmp_path):
    save_meta(tmp_path / "meta.pkl")
    tokenizer = CharTokenizer(tmp_path / "meta.pkl")
    requests, model = make_requests(tokenizer, ["ab", "cd"]), load(tokenizer, on_fake_gpu(make_backend()))
    for _ in range(2):
        found = run(Engine(model, replace(PARAMS, max_new_tokens=9)), requests)
        assert [sample.text for sample in found] == expected_texts(requests, tokenizer, 9)
        assert len(recordings) == 3, "for 4, 8 and 12 positions"


def test_the_graphs_of_a_cache_share_a_stream_and_a_pool_of_their_own(recordings):
    backend = make_backend()
    for _ in range(2):
        decode(backend, PROMPTS, STEPS)
    places = [(recording.stream, recording.pool) for recording in recordings]
    first, window, second = set(places[:3]), set(places[3:4]), set(places[4:])
    assert len(first) == len(second) == 1 and len(first | window | second) == 3


# ---- steps and graphs that compute something else

def no_mask(block, x, layer, position, mask, num_keys):
    return block_step(block, x, layer, position, torch.zeros_like(mask), num_keys)


def other_keys_from_the_twelfth_on(block, x, layer, position, mask, num_keys):
    return block_step(block, x, layer.roll(1, dims=3) if num_keys >= 12 else layer, position, mask, num_keys)


@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("wrong_step", [no_mask, other_keys_from_the_twelfth_on, None]) # None: the window is wrong
def test_wrong_steps_never_reach_the_text(wrong_step, use_graphs, recordings):
    backend = make_backend(use_graphs)
    backend.block_step = wrong_step or block_step
    if wrong_step is None:
        backend.forward = lambda ids: backend.model(ids.flip(1))
    for rows in 3, 2:
        assert generates_the_right_text(backend, rows)
    message, = backend.messages
    assert message.startswith(OTHER_LOGITS) and message.endswith("continuing with the plain model, which is slower")


def replay_with_other_logits(recording, replay=Recording.replay):
    replay(recording)
    recording.logits.copy_(recording.logits.roll(1, dims=1))


@pytest.mark.parametrize("num_before", [0, 1]) # batches that were right: a new cache has new graphs
@pytest.mark.parametrize("wrong_replay", [lambda recording: None, replay_with_other_logits], ids=["nothing", "other"])
def test_a_wrong_replay_never_reaches_the_text(wrong_replay, num_before, recordings, monkeypatch):
    backend = make_backend()
    assert all(generates_the_right_text(backend) for _ in range(num_before))
    monkeypatch.setattr(Recording, "replay", wrong_replay)
    assert generates_the_right_text(backend) and generates_the_right_text(backend)
    assert len(recordings) == 4 * num_before + 1, "no step is captured after the failure"
    assert len(backend.messages) == 1 and backend.messages[0].startswith(OTHER_LOGITS)


def test_logits_that_are_not_finite_are_not_reported_as_wrong_steps(recordings):
    backend = make_backend()
    with torch.no_grad():
        backend.model.lm_head.weight[7] = torch.nan
    cache = backend.new_cache(3, 16)
    for ids in random_prompt(7, 3).split([5, 1, 1], dim=1):
        assert backend.logits(ids, cache).isnan().any()
    assert backend.messages == [] and backend.checks.use_graphs


def test_logits_error_is_relative_to_the_standard_deviation_and_ignores_a_constant():
    expected, noise = 7 * normal(2, 1000), 7 * normal(2, 1000, seed=1)
    assert (logits_error(expected + 3, expected) < 1e-6).all() and (logits_error(noise, expected) > 1).all()
    assert logits_error(expected + 0.1 * noise, expected).tolist() == pytest.approx([0.1, 0.1], rel=0.1)
    assert logits_error(torch.ones(1, 1), torch.ones(1, 1)) == 0


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
    error = logits_error((expected.float() + 0.3 * normal(3, 61)).bfloat16(), expected) # rounded twice
    assert (error > cuda_graphs.TOLERANCE_HALF).all() and (error < tolerance(expected)).all()
    with_wrong_positions, with_an_unmasked_key = ids[:, 1:], torch.cat([random_prompt(1, 3), ids], dim=1)
    for wrong in with_wrong_positions, with_an_unmasked_key:
        assert (logits_error(model(wrong)[0][:, -1].bfloat16(), expected) > tolerance(expected)).all()


# ---- captures that fail

@pytest.fixture
def fail_capture(recordings, monkeypatch):
    """fail_capture(error, number): this capture raises the error. Returns the list of captures."""
    capture, captures = cuda_graphs.capture_graph, []

    def fail(error, number):
        def failing(*arguments):
            captures.append(arguments)
            if len(captures) == number:
                raise error
            return capture(*arguments)
        monkeypatch.setattr(cuda_graphs, "capture_graph", failing)
        return captures
    return fail


@pytest.mark.parametrize("number, context_shift", [(1, False), (3, True), (4, False)]) # 4 is the window
def test_a_failing_capture_is_one_line_and_the_text_stays_the_same(number, context_shift, fail_capture):
    backend, error = make_backend(), RuntimeError("operation failed due to a previous error during capture")
    error.__context__ = RuntimeError("no graphs here\nCUDA kernel errors might be reported later")
    captures = fail_capture(error, number)
    for _ in range(2):
        assert generates_the_right_text(backend, context_shift=context_shift)
    assert backend.messages == ["CUDA graphs do not work here (RuntimeError: no graphs here): continuing without them, "
                                "which is slower"]
    assert len(captures) == number, "none is tried after the failure"


@pytest.mark.parametrize("number", [1, 3, 4])
def test_out_of_memory_during_a_capture_is_raised_and_the_next_call_captures_again(number, fail_capture):
    backend, captures = make_backend(), fail_capture(torch.OutOfMemoryError("CUDA out of memory"), number)
    with pytest.raises(torch.OutOfMemoryError):
        decode(backend, PROMPTS, STEPS)
    assert backend.window is None, "its memory is free"
    assert generates_the_right_text(backend) and len(captures) == number + 4 and backend.messages == []


@pytest.mark.parametrize("number", [1, None]) # None: the replay fails
def test_a_gpu_that_cannot_continue_is_an_error_that_says_what_to_do(number, fail_capture, monkeypatch):
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    def lost(device):
        raise error
    fail_capture(error, number)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(ValueError, match=r"^a CUDA graph failed, .*: run it again with --cuda_graphs=False "
                                         r"\(RuntimeError: CUDA error: an illegal memory access was encountered\)$"):
        decode(make_backend(), PROMPTS, STEPS)


@pytest.fixture
def gpu(monkeypatch):
    """Stands in for what capture_graph uses of torch.cuda, and notes the calls."""
    gpu = MagicMock()
    for name in "CUDAGraph", "current_stream", "device", "graph", "set_stream", "stream":
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    return gpu


def test_a_step_is_warmed_up_and_captured_on_its_own_stream(gpu):
    graph, logits = capture_graph(gpu.step, gpu.own, (0, 7), "a device")
    assert (graph, logits) == (gpu.CUDAGraph.return_value, gpu.step.return_value)
    assert [name for name, *_ in gpu.mock_calls if "wait" in name or name.startswith(("stream", "step", "graph"))] == [
        "own.wait_stream", "stream", "stream().__enter__", "step", "stream().__exit__", "current_stream().wait_stream",
        "graph", "graph().__enter__", "step", "graph().__exit__"]
    gpu.stream.assert_called_once_with(gpu.own)
    gpu.graph.assert_called_once_with(graph, pool=(0, 7), stream=gpu.own, capture_error_mode="thread_local")


@pytest.mark.parametrize("error", [RuntimeError("no graphs here"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("place", ["warm-up", "begin", "step", "end"])
def test_after_a_failed_capture_the_stream_of_the_caller_is_current(place, error, gpu):
    """torch.cuda.graph leaves its own stream current."""
    gpu.step.side_effect = {"warm-up": error, "step": [None, error]}.get(place)
    gpu.graph().__enter__.side_effect = error if place == "begin" else None
    gpu.graph().__exit__.side_effect = error if place == "end" else None
    with pytest.raises(type(error)):
        capture_graph(gpu.step, gpu.own, (0, 7), "a device")
    gpu.set_stream.assert_called_once_with(gpu.current_stream())


class TestCuda:
    pytestmark = NEEDS_GPU

    def break_captures(self, backend, action):
        """Let the action happen while the step with 12 positions is captured."""
        def step(block, *arguments):
            if torch.cuda.is_current_stream_capturing() and arguments[-1] == 12:
                action()
            return block_step(block, *arguments)
        backend.block_step = step

    def test_a_step_that_cannot_be_captured_runs_without_graphs(self):
        backend, stream = make_backend(model=make_gpt().cuda()), torch.cuda.current_stream()
        self.break_captures(backend, torch.cuda.synchronize)
        assert generates_the_right_text(backend) and torch.cuda.current_stream() == stream
        assert len(backend.messages) == 1 and backend.messages[0].startswith("CUDA graphs do not work here (")
        other = make_backend(model=make_gpt().cuda()) # a failed capture leaves nothing that would disturb the next one
        assert generates_the_right_text(other) and other.messages == [] and other.checks.use_graphs

    def test_out_of_memory_during_a_capture_is_raised_and_the_next_call_captures_again(self):
        backend = make_backend(model=make_gpt().cuda())
        self.break_captures(backend, lambda: torch.empty(2**46, dtype=torch.uint8, device="cuda"))
        with pytest.raises(RuntimeError) as raised:
            decode(backend, PROMPTS, STEPS)
        assert is_out_of_memory(raised.value)
        backend.block_step = block_step
        assert generates_the_right_text(backend) and backend.messages == [] and backend.checks.use_graphs

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("make_model", [make_gpt, make_gpt_with_logits_around_minus_100])
    def test_the_checks_pass_in_half_precision(self, make_model, dtype):
        backend = make_backend(model=cast_linears(make_model(), dtype).cuda())
        with torch.autocast("cuda", dtype):
            decode(backend, PROMPTS, STEPS)
        assert backend.messages == [] and backend.checks.use_graphs

    @pytest.mark.parametrize("vocab_size", [1, 61, 50257, 50304])
    def test_the_random_stream_is_that_of_multinomial(self, vocab_size):
        assert draws_like_multinomial(torch.device("cuda"), vocab_size)
