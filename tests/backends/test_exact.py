"""ExactGPT generates nanoGPT's text in every dtype. Its CUDA graphs are recorded on a CPU."""
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models import make_gpt
from oracles import nanogpt_generate, nanogpt_logits, nanogpt_token, reference_generate
from recorded_graphs import FailingCaptures, Recording
from sampling.backends.cuda.self_check import SelfCheck
from sampling.backends.exact import ExactGPT
from sampling.backends.prepare import cast_linears, prepare_model
from sampling.generation.engine import Engine
from sampling.params import ModelOptions, SamplingParams
from sampling.sampler.nanogpt_sampler import NanoGPTSampler
from sampling.sampler.per_row_rng import PerRowRNG
from sampling.sampler.sample_fn import Logits
from streams import generate, random_prompt

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PROMPT = torch.tensor([[5, 17, 42]])
SEED, TEMPERATURE, TOP_K = 5, 0.8, 20


def autocast(dtype, device="cpu"):
    return torch.autocast(device, dtype, enabled=dtype != torch.float32)


def make_exact(dtype, **changes):
    return ExactGPT(cast_linears(make_gpt(**changes), dtype))


def expected_samples(dtype, num_samples, max_new_tokens, device="cpu", **changes):
    """nanoGPT's samples, one after another from one random stream."""
    model = make_gpt(**changes).to(device)
    torch.manual_seed(SEED)
    with autocast(dtype, device):
        return [nanogpt_generate(model, PROMPT.to(device), max_new_tokens, TEMPERATURE, TOP_K)[0].tolist() for _ in range(num_samples)]


def exact_samples(gpt, dtype, num_samples, max_new_tokens):
    """The samples of an ExactGPT, each from its own place in the random stream."""
    rng = PerRowRNG(SEED, gpt.device, draws_per_sample=max_new_tokens, vocab_size=gpt.config.vocab_size)
    found, idx = [], PROMPT.to(gpt.device)
    with autocast(dtype, gpt.device.type):
        for index in range(num_samples):
            rng.set_rows([rng.state_for_sample(index)])
            found.append(generate(gpt, idx, max_new_tokens, NanoGPTSampler(TEMPERATURE, TOP_K, rng))[0].tolist())
    return found


@pytest.fixture
def make_graphed(recordings):
    """make_graphed(dtype) -> an ExactGPT on a CPU that uses Recordings as CUDA graphs. Its messages are in gpt.messages."""
    def make(dtype):
        gpt = make_exact(dtype)
        gpt.messages = []
        gpt.checks = SelfCheck(gpt.messages.append)
        return gpt
    return make


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 7, 16])
def test_logits_equal_nanogpts_bit_for_bit(dtype, length):
    """ExactGPT casts the weights once. Autocast casts them at every step."""
    window = random_prompt(length, seed=length)
    with torch.no_grad(), autocast(dtype):
        expected, found = nanogpt_logits(make_gpt(), window), make_exact(dtype).window_logits(window)
    assert found.dtype == dtype and torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_equal_nanogpts(dtype):
    expected = expected_samples(dtype, 3, 30) # block_size is 16
    assert exact_samples(make_exact(dtype), dtype, 3, 30) == expected
    assert len({tuple(sample) for sample in expected}) == 3


def test_float32_samples_equal_the_normal_reference():
    model = make_gpt()
    torch.manual_seed(SEED)
    expected = [reference_generate(model, PROMPT, 30, TEMPERATURE, TOP_K)[0].tolist() for _ in range(2)]
    assert exact_samples(make_exact(torch.float32), torch.float32, 2, 30) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_sampled_in_the_dtype_of_the_logits(dtype):
    """These logits are so large that dividing them rounds visibly, and makes some of them equal."""
    logits = (400 + 4 * torch.randn(200, 61, generator=torch.Generator().manual_seed(0))).to(dtype)
    rng = PerRowRNG(SEED, draws_per_sample=1, vocab_size=61)
    rng.set_rows([rng.state_for_sample(0)])
    sampler = NanoGPTSampler(0.7, 5, rng)
    found = [sampler(Logits(row[None]), None).item() for row in logits]
    torch.manual_seed(SEED)
    assert found == [nanogpt_token(row[None], 0.7, 5).item() for row in logits]
    if dtype != torch.float32:
        torch.manual_seed(SEED)
        assert found != [nanogpt_token(row[None].float(), 0.7, 5).item() for row in logits], "the test cannot tell the dtypes apart"


def test_the_engine_samples_with_nanogpts_operations():
    engine = Engine(make_exact(torch.bfloat16), None, SamplingParams(temperature=0.7, top_k=5))
    assert engine.sampler.sample_fn == NanoGPTSampler(0.7, 5, engine.rng)


def test_every_model_gets_nanogpts_gelu():
    gpt, model = make_exact(torch.float32, gelu="tanh"), make_gpt()
    assert torch.equal(gpt.window_logits(PROMPT), nanogpt_logits(model, PROMPT))
    assert not torch.equal(make_gpt(gelu="tanh")(PROMPT)[0][:, -1], nanogpt_logits(model, PROMPT))


def test_logits_that_are_nan_or_overflow_raise_value_error():
    sampler = NanoGPTSampler(1e-30, None, PerRowRNG(1))
    with pytest.raises(ValueError, match="NaN or infinite"):
        sampler(Logits(torch.tensor([[1.0, torch.nan]])), None)
    with pytest.raises(ValueError, match="temperature=1e-30 is too low for exact=True"):
        sampler(Logits(torch.tensor([[1e30, 2.0]])), None)


@pytest.mark.parametrize("idx, context_shift, message", [
    (PROMPT[:, :0], False, "nothing to continue"), (PROMPT.expand(2, -1), False, "one sample at a time"), (PROMPT, True, "without context_shift")], ids=["empty", "batch", "shift"])
def test_a_batch_and_context_shift_are_refused(idx, context_shift, message):
    with pytest.raises(ValueError, match=message):
        next(make_exact(torch.float32).generate_stream(idx, 3, None, context_shift))


def test_an_empty_list_ends_the_stream():
    rng = PerRowRNG(1, draws_per_sample=3, vocab_size=61)
    rng.set_rows([rng.state_for_sample(0)])
    stream = make_exact(torch.float32).generate_stream(PROMPT, 3, NanoGPTSampler(1.0, None, rng))
    next(stream)
    with pytest.raises(StopIteration):
        stream.send([])


def test_prepare_model_chooses_it_only_where_it_works(monkeypatch):
    monkeypatch.setattr("sampling.backends.prepare.disable_malloc_trim", lambda: None)
    assert isinstance(prepare_model(make_gpt(), torch.device("cpu"), torch.float32, ModelOptions(exact=True)), ExactGPT)
    with pytest.raises(ValueError, match="exact=True needs CUDA or a CPU; got device=meta"):
        prepare_model(make_gpt(), torch.device("meta"), torch.float32, ModelOptions(exact=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_replayed_graphs_give_the_same_samples(dtype, make_graphed, recordings):
    gpt, forward_passes = make_graphed(dtype), []
    gpt.model.transformer.ln_f.register_forward_hook(lambda *_: forward_passes.append(True))
    assert exact_samples(gpt, dtype, 4, 9) == expected_samples(dtype, 4, 9)
    assert list(gpt.graphs.values()) == recordings and list(gpt.graphs) == list(range(3, 12))
    assert len(forward_passes) == 3 * 9, "directly in two samples, captured in the second, and only replayed in the others"


def test_a_full_window_is_replayed_within_the_first_sample(make_graphed, recordings):
    gpt = make_graphed(torch.bfloat16)
    assert exact_samples(gpt, torch.bfloat16, 1, 30) == expected_samples(torch.bfloat16, 1, 30)
    assert [length for length, graph in gpt.graphs.items() if graph] == [16] and len(recordings) == 1


@pytest.mark.parametrize("spoil", [lambda logits: logits[0, 7].mul_(1.01), lambda logits: logits[0, 7].fill_(torch.nan)], ids=["another-bit", "not-written"])
def test_a_graph_with_other_logits_is_not_used(spoil, make_graphed, monkeypatch):
    gpt, replay = make_graphed(torch.bfloat16), Recording.replay
    monkeypatch.setattr(Recording, "replay", lambda recording: replay(recording) or spoil(gpt.logits))
    assert exact_samples(gpt, torch.bfloat16, 4, 20) == expected_samples(torch.bfloat16, 4, 20)
    assert not any(gpt.graphs.values()) and gpt.pool is None
    assert gpt.messages == ["CUDA graphs do not work here (a replayed step computed other logits than the step itself): continuing without them, which is slower"]


def test_a_replay_that_writes_nothing_is_not_used(make_graphed, monkeypatch):
    """The logits of the capture itself must not pass for those of the replay."""
    gpt = make_graphed(torch.bfloat16)
    monkeypatch.setattr(Recording, "replay", lambda recording: None)
    monkeypatch.setattr(Recording, "__exit__", TorchDispatchMode.__exit__) # keeps what the step wrote
    assert exact_samples(gpt, torch.bfloat16, 3, 5) == expected_samples(torch.bfloat16, 3, 5)
    assert len(gpt.messages) == 1 and not any(gpt.graphs.values())


def test_a_failing_capture_is_one_message_and_the_samples_stay_the_same(make_graphed, monkeypatch):
    gpt, captures = make_graphed(torch.bfloat16), FailingCaptures(monkeypatch, number=3)
    assert exact_samples(gpt, torch.bfloat16, 3, 20) == expected_samples(torch.bfloat16, 3, 20)
    assert gpt.messages == ["CUDA graphs do not work here (RuntimeError: no graphs here): continuing without them, which is slower"]
    assert captures.num_captures == 3 and captures.current == "stream"
    assert captures.closed == [("_cuda_endAllocateToPool", (0, 1)), ("_cuda_releasePool", (0, 1))]
    assert not any(gpt.graphs.values()) and gpt.pool is None


def test_a_gpu_that_cannot_continue_gives_an_error_that_says_what_to_do(make_graphed, monkeypatch):
    def lost(*_, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(torch.cuda, "graph", lost)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(ValueError, match="run it again with --cuda_graphs=False"):
        exact_samples(make_graphed(torch.bfloat16), torch.bfloat16, 2, 5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
class TestCuda:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("max_new_tokens", [20, 90]) # block_size is 64
    def test_samples_equal_nanogpts_and_graphs_are_used(self, dtype, max_new_tokens):
        shape = dict(n_embd=128, n_head=4, block_size=64)
        gpt = prepare_model(make_gpt(**shape), torch.device("cuda"), dtype, ModelOptions(exact=True))
        expected = expected_samples(dtype, 4, max_new_tokens, "cuda", **shape)
        assert exact_samples(gpt, dtype, 4, max_new_tokens) == expected
        graphs = list(gpt.graphs.values())
        assert graphs and None not in graphs

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("length", [1, 7, 64])
    def test_logits_equal_nanogpts_bit_for_bit(self, dtype, length):
        shape = dict(n_embd=128, n_head=4, block_size=64)
        gpt, window = prepare_model(make_gpt(**shape), torch.device("cuda"), dtype, ModelOptions(exact=True)), torch.arange(length, device="cuda")[None] % 61
        with torch.no_grad(), autocast(dtype, "cuda"):
            expected = nanogpt_logits(make_gpt(**shape).cuda(), window)
            for _ in range(3): # directly, captured, replayed
                assert torch.equal(gpt.window_logits(window), expected)

    def test_a_capture_that_fails_changes_no_text_and_leaves_torch_usable(self, monkeypatch):
        forward = ExactGPT.forward

        def synchronise(self, idx):
            logits = forward(self, idx)
            assert logits.isfinite().all().item() # a capture refuses to synchronise
            return logits
        monkeypatch.setattr(ExactGPT, "forward", synchronise)
        messages, stream = [], torch.cuda.current_stream()
        gpt = prepare_model(make_gpt(), torch.device("cuda"), torch.bfloat16, ModelOptions(exact=True), log=messages.append)
        found = exact_samples(gpt, torch.bfloat16, 3, 20)
        assert found == expected_samples(torch.bfloat16, 3, 20, "cuda"), "this also draws from the default generator"
        assert len(messages) == 1 and not any(gpt.graphs.values()) and torch.cuda.current_stream() == stream
