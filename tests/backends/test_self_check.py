"""CUDAGraphGPT checks itself on the user's GPU: if something does not work there, the samples stay the same.

Most tests run on a CPU with recorded graphs, in which they break one thing.
"""
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models import make_gpt
from recorded_graphs import Recording
from sampling.backends.cuda import decode_state
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.backends.cuda.self_check import draws_like_multinomial, logits_error
from sampling.backends.cuda.static_forward import StaticForward
from sampling.backends.prepare import cast_linears
from sampling.sampler.per_row_rng import PerRowRNG
from sampling.sampler.sample_token import TokenSampler
from small_gpu_backends import PROMPT, STEPS, generate, make_backend

CPU = torch.device("cpu")
OTHER_LOGITS = "a replayed step computed other logits than the step itself"


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(decode_state, "BUCKET", 4)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_no_message_is_logged_if_every_check_passes(cuda_graphs, recordings):
    gpt = make_backend(cuda_graphs=cuda_graphs)
    found, expected = generate(gpt, top_k=20)
    assert found == expected and gpt.messages == [] and bool(recordings) == cuda_graphs
    assert gpt.checks.use_static_forward and gpt.checks.use_graphs == cuda_graphs
    assert any(gpt.state.graphs.values()) == cuda_graphs


def test_each_batch_size_and_number_of_keys_is_checked_once(monkeypatch):
    gpt, shapes = make_backend(), []
    check_logits = gpt.checks.check_logits
    monkeypatch.setattr(gpt.checks, "check_logits", lambda shape, *logits: shapes.append(shape) or check_logits(shape, *logits))
    for rows in 3, 2, 3:
        generate(gpt, rows)
    assert shapes == [(rows, key) for rows in (3, 2) for key in (8, 12, 16, "window")]


def test_logits_that_are_not_finite_are_not_reported_as_a_wrong_fast_path(recordings):
    gpt = make_backend()
    with torch.no_grad():
        gpt.model.lm_head.weight[7] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        generate(gpt)
    assert gpt.messages == []


# ---- the random stream

@pytest.mark.parametrize("vocab_size", [1, 61, 50304])
def test_the_random_stream_is_that_of_multinomial(vocab_size):
    assert draws_like_multinomial(CPU, vocab_size)


def draw_too_much(rng, prefetch):
    prefetch(rng)
    torch.empty(3).uniform_(generator=rng.generators[1])


def draw_other_numbers(rng, prefetch):
    prefetch(rng)
    rng.numbers.copy_(rng.numbers.flip(1))


@pytest.mark.parametrize("draw", [draw_too_much, draw_other_numbers])
def test_other_random_numbers_are_reported(draw, monkeypatch):
    prefetch = PerRowRNG.prefetch
    monkeypatch.setattr(PerRowRNG, "prefetch", lambda rng: draw(rng, prefetch))
    gpt = make_backend()
    assert gpt.messages == ["the random numbers are not those of torch.multinomial here: the samples are good, but not the ones "
                            "that nanoGPT generates with this seed"]
    assert gpt.checks.use_graphs and gpt.checks.use_static_forward


def test_a_wrong_skip_is_reported(monkeypatch):
    state_for_sample = PerRowRNG.state_for_sample
    monkeypatch.setattr(PerRowRNG, "state_for_sample", lambda rng, index: state_for_sample(rng, 2 * index))
    assert not draws_like_multinomial(CPU, 61)


# ---- the logits of a step

def test_logits_error_is_relative_to_the_standard_deviation_and_ignores_a_constant():
    expected, noise = torch.randn(2, 1, 1000, generator=torch.Generator().manual_seed(1)).mul(7)
    assert logits_error(expected + 3, expected) < 1e-6
    assert logits_error(expected + 0.1 * noise, expected) == pytest.approx(0.1, rel=0.1)
    assert logits_error(noise, expected) > 1
    assert logits_error(torch.ones(1, 1), torch.ones(1, 1)) == 0


def attend_to_wrong_keys(monkeypatch, first_key):
    """From this number of keys on, StaticForward attends to keys that are not those of the tokens."""
    decode_step = StaticForward.decode_step

    def wrong(self, token, position, layers, num_keys):
        if num_keys >= first_key:
            layers = [layer.roll(1, dims=3) for layer in layers]
        return decode_step(self, token, position, layers, num_keys)
    monkeypatch.setattr(StaticForward, "decode_step", wrong)


@pytest.mark.parametrize("context_shift", [False, True])
@pytest.mark.parametrize("first_key", [8, 12])
def test_wrong_logits_never_reach_the_text(first_key, context_shift, recordings, monkeypatch):
    attend_to_wrong_keys(monkeypatch, first_key)
    gpt = make_backend()
    for rows in 3, 2:
        found, expected = generate(gpt, rows, context_shift, top_k=20)
        assert found == expected
    message, = gpt.messages
    assert message.startswith("the fast path for GPUs computes other logits than the plain model here") and "batch size 3" in message
    assert not any(gpt.state.graphs.values())


def test_a_wrong_window_never_reaches_the_text(monkeypatch):
    forward_window = StaticForward.forward_window
    monkeypatch.setattr(StaticForward, "forward_window", lambda self, idx: forward_window(self, idx.flip(1)))
    gpt = make_backend()
    found, expected = generate(gpt)
    assert found == expected and len(gpt.messages) == 1


# ---- CUDA graphs

replay = Recording.replay


def replay_nothing(recording):
    """Stands in for Recording.replay."""


def replay_without_the_last_write(recording):
    recording.calls.pop() # copies the new tokens to DecodeState.token
    replay(recording)


@pytest.mark.parametrize("wrong_replay", [replay_nothing, replay_without_the_last_write])
def test_a_graph_that_computes_something_else_never_reaches_the_text(wrong_replay, recordings, monkeypatch):
    monkeypatch.setattr(Recording, "replay", wrong_replay)
    gpt = make_backend()
    for _ in range(2):
        found, expected = generate(gpt, top_k=20)
        assert found == expected
    assert gpt.messages == [f"CUDA graphs do not work here ({OTHER_LOGITS}): continuing without them, which is slower"]
    assert len(recordings) == 1 and not any(gpt.state.graphs.values())


def test_an_empty_graph_never_passes_for_a_good_one(recordings, monkeypatch):
    """On another stream than that of the capture, the step runs at once, and the graph stays empty."""
    monkeypatch.setattr(Recording, "replay", replay_nothing)
    monkeypatch.setattr(Recording, "__exit__", TorchDispatchMode.__exit__) # keeps what the step wrote
    gpt = make_backend()
    found, expected = generate(gpt, top_k=20)
    assert found == expected and gpt.messages == [f"CUDA graphs do not work here ({OTHER_LOGITS}): continuing without them, which is slower"]


@pytest.mark.parametrize("fails_in", ["capture", "replay"])
def test_a_gpu_that_cannot_continue_gives_an_error_that_says_what_to_do(fails_in, recordings, monkeypatch):
    def lost(*_, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")
    if fails_in == "capture":
        monkeypatch.setattr(torch.cuda, "graph", lost)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(ValueError, match=r"^a CUDA graph failed, .* run it again with --cuda_graphs=False "
                                         r"\(RuntimeError: CUDA error: an illegal memory access was encountered\)$"):
        generate(make_backend())


# ---- on a GPU

@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
class TestCuda:
    @pytest.mark.parametrize("vocab_size", [61, 50304])
    def test_the_random_stream_is_that_of_multinomial(self, vocab_size):
        assert draws_like_multinomial(torch.device("cuda", 0), vocab_size)

    @pytest.mark.parametrize("cuda_graphs", [True, False])
    def test_no_message_is_logged_if_every_check_passes(self, cuda_graphs):
        gpt = make_backend("cuda", cuda_graphs=cuda_graphs)
        found, expected = generate(gpt, top_k=20)
        assert found == expected and gpt.messages == []
        assert gpt.checks.use_static_forward and any(gpt.state.graphs.values()) == cuda_graphs

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_the_checks_pass_in_each_dtype(self, dtype):
        messages, idx = [], PROMPT.cuda()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            gpt = CUDAGraphGPT(cast_linears(make_gpt(), dtype).cuda(), log=messages.append)
            list(gpt.generate_stream(idx.expand(3, -1), STEPS, TokenSampler(temperature=0, allow_sync=False)))
        assert messages == [] and any(gpt.state.graphs.values())

    def test_wrong_logits_never_reach_the_text(self, monkeypatch):
        attend_to_wrong_keys(monkeypatch, 12)
        gpt = make_backend("cuda")
        found, expected = generate(gpt, top_k=20)
        assert found == expected and len(gpt.messages) == 1

    def test_a_graph_that_computes_something_else_never_reaches_the_text(self, monkeypatch):
        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay_nothing)
        gpt = make_backend("cuda")
        found, expected = generate(gpt, top_k=20)
        assert found == expected and gpt.messages == [f"CUDA graphs do not work here ({OTHER_LOGITS}): continuing without them, which is slower"]
