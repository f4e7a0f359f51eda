"""A capture that fails: the samples stay the same, and torch can be used as before."""
import pytest
import torch

from sampling.backends.cuda import decode_state
from sampling.backends.cuda.graph_capture import capture_stream
from sampling.sampler.per_row_rng import PerRowRNG
from small_gpu_backends import generate, make_backend


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(decode_state, "BUCKET", 4)


class FailingCapture:
    """A torch.cuda.graph that fails when it begins, when a step runs, or when it ends. As in torch, its stream then stays current."""
    current, closed = "stream", []

    def __init__(self, fails_at):
        self.fails_at = fails_at

    def __call__(self, graph, pool, stream):
        self.stream = stream
        return self

    def __enter__(self):
        FailingCapture.current = self.stream
        if self.fails_at == "begin":
            raise RuntimeError("no graphs here\nCUDA kernel errors might be reported later")

    def __exit__(self, *error):
        raise RuntimeError("no graphs here" if self.fails_at == "end" else "operation failed due to a previous error during capture")


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
def failing_capture(request, recordings, monkeypatch):
    """No step can be captured."""
    FailingCapture.current, FailingCapture.closed, DefaultGenerators.restored = "stream", [], ()
    monkeypatch.setattr(torch.cuda, "graph", FailingCapture(request.param))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FailingCapture.current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(FailingCapture, "current", stream))
    for name in "_cuda_endAllocateToPool", "_cuda_releasePool":
        monkeypatch.setattr(torch._C, name, lambda device, pool, name=name: FailingCapture.closed.append((name, pool)), raising=False)
    monkeypatch.setattr(torch.cuda, "default_generators", DefaultGenerators())
    noise = PerRowRNG.__call__

    def noise_outside_captures(*arguments):
        if FailingCapture.current != "stream" and request.param == "step":
            raise RuntimeError("no graphs here")
        return noise(*arguments)
    monkeypatch.setattr(PerRowRNG, "__call__", noise_outside_captures)


@pytest.mark.parametrize("context_shift", [False, True])
@pytest.mark.usefixtures("failing_capture")
def test_without_graphs_the_samples_are_the_same(context_shift):
    gpt = make_backend()
    for _ in range(2):
        found, expected = generate(gpt, context_shift=context_shift, top_k=20)
        assert found == expected
    assert gpt.messages == ["CUDA graphs do not work here (RuntimeError: no graphs here): going on without them, slower"]
    assert FailingCapture.current == "stream"
    assert FailingCapture.closed == [("_cuda_endAllocateToPool", (0, 1)), ("_cuda_releasePool", (0, 1))]
    assert DefaultGenerators.restored == ("a copy of the state",)


@pytest.mark.parametrize("failing_capture", ["end"], indirect=True)
def test_ctrl_c_in_a_capture_leaves_torch_usable(failing_capture, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(FailingCapture, "__exit__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(make_backend())
    assert FailingCapture.current == "stream" and FailingCapture.closed and DefaultGenerators.restored


@pytest.mark.usefixtures("failing_capture")
def test_a_pool_that_is_closed_already_is_not_released_twice(monkeypatch):
    def end(device, pool):
        raise RuntimeError("not currently recording to this pool")
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    found, expected = generate(make_backend())
    assert found == expected and FailingCapture.closed == []


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
        assert message.startswith("CUDA graphs do not work here (") and message.endswith("): going on without them, slower")
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
