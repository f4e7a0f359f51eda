"""The plain backends: EagerBackend, also compiled, and ExactBackend; and what differs by device."""
import pytest
import torch

from engines import expected_ids
from models import as_checkpoint, make_gpt
from oracles import nanogpt_generate, nanogpt_logits
from recorded_graphs import ON_GPU
from sampling.backends.backend import EagerBackend, ExactBackend
from sampling.backends.cuda import CUDABackend
from sampling.backends.prepare import prepare_backend
from sampling.params import ModelOptions
from streams import decode, random_prompt

SHAPE = dict(n_embd=128, n_head=4, block_size=64)
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
PROMPTS = random_prompt(5, 2).tolist()


# ---- what differs by device

def test_bytes_per_row_grow_with_the_cache_and_for_the_window():
    backend, cache_bytes = EagerBackend(make_gpt()), sum(layer.nbytes for layer in make_gpt().new_cache(1, 16).layers)
    assert backend.bytes_per_row(16) - backend.bytes_per_row(8) == cache_bytes / 2 # block_size is 16
    assert backend.bytes_per_row(16) < backend.bytes_per_row(17) == backend.bytes_per_row(1000)


def test_finished_rows_leave_a_batch_but_on_cuda_only_if_the_new_graphs_are_worth_it():
    eager, cuda = EagerBackend(make_gpt()), CUDABackend(make_gpt())
    for num_rows, num_unfinished, on_cuda in (32, 1, False), (33, 17, False), (33, 16, True), (128, 64, True):
        assert eager.should_drop(num_rows, num_unfinished)
        assert cuda.should_drop(num_rows, num_unfinished) == on_cuda
    assert not eager.should_drop(33, 33) and not cuda.should_drop(33, 33)


# ---- compile

@pytest.fixture
def fake_compiler(monkeypatch):
    """fake_compiler(error): torch.compile changes nothing, or raises the error. Returns the calls of the model."""
    def install(error=None):
        def compile(model, dynamic):
            def forward(*args, **kwargs):
                calls.append(args)
                if error:
                    raise error
                return model(*args, **kwargs)
            return forward
        monkeypatch.setattr(torch, "compile", compile)
        return calls
    calls = []
    with torch._dynamo.config.patch(recompile_limit=8), torch._inductor.config.patch(freezing=False): # restores them
        yield install


@pytest.mark.parametrize("kind", [EagerBackend, CUDABackend])
def test_a_compiled_model_computes_all_logits_and_a_line_says_how_long_it_takes(kind, fake_compiler, messages):
    calls, backend = fake_compiler(), kind(make_gpt(), compile=True)
    assert decode(backend, PROMPTS, 20) == expected_ids(PROMPTS, 20) and len(calls) == 20
    assert messages == ["the model is compiled at its first tokens, which takes about a minute"]


@pytest.mark.parametrize("kind", [EagerBackend, CUDABackend])
@pytest.mark.parametrize("error, message", [
    (RuntimeError("no C++ compiler"), "compile=True does not work here (RuntimeError: no C++ compiler): leave it out"),
    (MemoryError("full"), "full"), (RuntimeError("CUDA out of memory"), "CUDA out of memory")], ids=repr)
def test_a_failing_compiler_is_one_line_but_out_of_memory_is_raised(kind, error, message, fake_compiler):
    fake_compiler(error)
    backend = kind(make_gpt(), compile=True)
    with pytest.raises(ValueError if message.startswith("compile") else type(error)) as raised:
        backend.logits(random_prompt(5), None)
    assert str(raised.value) == message


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore") # torch's compiler warns about torch
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("kind", [EagerBackend, CUDABackend])
def test_a_compiled_model_gives_the_same_text(kind, device, fake_compiler): # which is not installed
    backend = kind(make_gpt().to(device), compile=True)
    assert decode(backend, PROMPTS, 20) == expected_ids(PROMPTS, 20, device=device)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


# ---- exact

@EACH_DTYPE
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_exact_logits_and_text_are_nanogpts_bit_for_bit_inside_the_window_and_past_it(device, dtype):
    """Also for a model with another GELU: nanoGPT has only the exact one. nanoGPT's autocast casts at every step."""
    checkpoint, model = as_checkpoint(make_gpt(**SHAPE, gelu="tanh")), make_gpt(**SHAPE).to(device)
    backend = prepare_backend(checkpoint, torch.device(device), dtype, ModelOptions(exact=True))
    assert backend.model.lm_head.weight.dtype == dtype, "it is cast once"
    prompt = random_prompt(54).to(device)
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        for length in 1, 5, 6, 54:
            found, expected = backend.logits(prompt[:, :length], None), nanogpt_logits(model, prompt[:, :length])
            assert found.dtype == dtype and torch.equal(found, expected)
        torch.manual_seed(5)
        expected = [nanogpt_generate(model, prompt, 20, 0.8, top_k=20)[0, 54:].tolist() for _ in range(3)]
        found = decode(backend, 3 * prompt.tolist(), 20, dtype=dtype, seed=5, temperature=0.8, top_k=20)
        assert found == expected


def test_exact_on_a_device_with_other_random_numbers_is_refused():
    with pytest.raises(ValueError, match="exact=True needs CUDA or a CPU; got device=meta"):
        ExactBackend(make_gpt().to("meta"))
