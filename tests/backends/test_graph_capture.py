"""A capture that fails: the samples stay the same, and torch can be used as before."""
import pytest
import torch

from recorded_graphs import FailingCaptures
from sampling.backends.cuda import decode_state
from sampling.backends.cuda.graph_capture import capture_stream
from sampling.sampler.per_row_rng import PerRowRNG
from small_gpu_backends import generate, make_backend


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(decode_state, "BUCKET", 4)


class DefaultGenerators:
    """torch.cuda.default_generators, whose states count as captured."""
    restored = ()

    def __getitem__(self, index):
        return self

    def clone_state(self):
        return "a copy of the state"

    def graphsafe_set_state(self, state):
        DefaultGenerators.restored += (state,)


@pytest.fixture(params=["begin", "step", "end"])
def captures(request, recordings, monkeypatch):
    """No step can be captured."""
    captures, noise = FailingCaptures(monkeypatch, request.param), PerRowRNG.__call__
    monkeypatch.setattr(DefaultGenerators, "restored", ())
    monkeypatch.setattr(torch.cuda, "default_generators", DefaultGenerators())

    def noise_outside_captures(*arguments):
        if captures.current != "stream" and request.param == "step":
            raise RuntimeError("no graphs here")
        return noise(*arguments)
    monkeypatch.setattr(PerRowRNG, "__call__", noise_outside_captures)
    return captures


@pytest.mark.parametrize("context_shift", [False, True])
def test_without_graphs_the_samples_are_the_same(context_shift, captures):
    gpt = make_backend()
    for _ in range(2):
        found, expected = generate(gpt, context_shift=context_shift, top_k=20)
        assert found == expected
    assert gpt.messages == ["CUDA graphs do not work here (RuntimeError: no graphs here): continuing without them, which is slower"]
    assert captures.current == "stream"
    assert captures.closed == [("_cuda_endAllocateToPool", (0, 1)), ("_cuda_releasePool", (0, 1))]
    assert DefaultGenerators.restored == ("a copy of the state",)


@pytest.mark.parametrize("captures", ["end"], indirect=True)
def test_ctrl_c_in_a_capture_leaves_torch_usable(captures, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(FailingCaptures, "__exit__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(make_backend())
    assert captures.current == "stream" and captures.closed and DefaultGenerators.restored


def test_a_pool_that_is_closed_already_is_not_released_twice(captures, monkeypatch):
    def end(device, pool):
        raise RuntimeError("not currently recording to this pool")
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    found, expected = generate(make_backend())
    assert found == expected and captures.closed == []


def test_each_gpu_has_one_capture_stream(monkeypatch):
    """Captures on another GPU's stream would be empty, and each new stream would cost a workspace of cuBLAS."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: [device])
    capture_stream.cache_clear()
    streams = [capture_stream(torch.device("cuda", index)) for index in (0, 0, 1)]
    capture_stream.cache_clear() # these are no streams
    assert streams[0] is streams[1] and streams == [[torch.device("cuda", index)] for index in (0, 0, 1)]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
class TestCuda:
    def test_a_step_that_cannot_be_captured_runs_without_graphs(self, monkeypatch):
        noise = PerRowRNG.__call__

        def synchronise(self, *arguments):
            q = noise(self, *arguments)
            assert q.sum().item() > 0 # a capture refuses to synchronise
            return q
        monkeypatch.setattr(PerRowRNG, "__call__", synchronise)
        gpt, stream = make_backend("cuda"), torch.cuda.current_stream()
        found, expected = generate(gpt, top_k=20)
        assert found == expected
        message, = gpt.messages
        assert message.startswith("CUDA graphs do not work here (") and message.endswith("): continuing without them, which is slower")
        assert torch.cuda.current_stream() == stream
        assert torch.rand(3, device="cuda").isfinite().all(), "the default generator can be used again"
        monkeypatch.undo()
        other = make_backend("cuda") # a failed capture leaves nothing open that would disturb the next one
        found, expected = generate(other, top_k=20)
        assert found == expected and other.messages == [] and any(other.state.graphs.values())

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_a_second_gpu_has_its_own_graphs(self):
        for device in "cuda:1", "cuda:0", "cuda:1":
            gpt = make_backend(device)
            found, expected = generate(gpt, top_k=20)
            assert found == expected and gpt.messages == [] and any(gpt.state.graphs.values())
