"""prepare_model chooses the backend for a GPT, and warm_up_compile compiles it."""
from types import SimpleNamespace

import pytest
import torch

from models import make_gpt
from oracles import reference_generate
from sampling.backends import prepare
from sampling.backends.cpu import packed_linear
from sampling.backends.cpu.packed_gpt import PackedGPT
from sampling.backends.cpu.packed_linear import is_supported
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.backends.eager import EagerGPT
from sampling.backends.prepare import cast_linears, prepare_model, warm_up_compile
from sampling.params import ModelOptions, SamplingParams
from streams import generate, random_prompt

CPU = torch.device("cpu")
IDX = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])


@pytest.fixture(autouse=True)
def trim_calls(monkeypatch):
    """Leave the heap settings of the test process unchanged. Returns the list of calls that would have changed them."""
    calls = []
    monkeypatch.setattr(prepare, "disable_malloc_trim", lambda: calls.append("disable_malloc_trim"))
    return calls


@pytest.mark.skipif(not is_supported(), reason="this torch lacks the operators")
@pytest.mark.parametrize("pack_eagerly", [False, True])
def test_a_cpu_gets_packed_gpt(pack_eagerly, trim_calls):
    backend = prepare_model(make_gpt(), CPU, torch.float32, ModelOptions(pack_eagerly=pack_eagerly))
    assert isinstance(backend, PackedGPT) and backend.device == CPU
    assert (backend.blocks[0].c_attn.packed is not None) == pack_eagerly
    assert torch.equal(generate(backend, IDX, 20, temperature=0), make_gpt().generate(IDX, 20, temperature=0))
    assert trim_calls == ["disable_malloc_trim"]


def test_a_cpu_without_the_operators_gets_eager_gpt(monkeypatch, trim_calls):
    monkeypatch.setattr(packed_linear, "is_supported", lambda dtype: False)
    model = make_gpt()
    layers = list(model.modules())
    backend = prepare_model(model, CPU, torch.float32)
    assert isinstance(backend, EagerGPT) and list(backend.model.modules()) == layers
    assert trim_calls == ["disable_malloc_trim"]


@pytest.mark.usefixtures("compile_settings")
@pytest.mark.filterwarnings("ignore") # torch's compiler warns about torch
def test_a_cpu_with_compile_gets_eager_gpt():
    """Inductor cannot optimise operators on packed weights."""
    assert isinstance(prepare_model(make_gpt(), CPU, torch.float32, ModelOptions(compile=True)), EagerGPT)


@pytest.mark.parametrize("has_operators", [True, False])
def test_float16_generates_whether_or_not_it_can_be_packed(has_operators, monkeypatch):
    if not has_operators:
        monkeypatch.setattr(packed_linear, "is_supported", lambda dtype: False)
    with torch.autocast("cpu", torch.float16):
        assert generate(prepare_model(make_gpt(), CPU, torch.float16), IDX, 20, temperature=0).shape == (2, 25)


def test_cast_linears_give_the_logits_of_autocast():
    """Autocast would cast the same weights again at every step."""
    idx = random_prompt(14, 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = make_gpt()(idx)[0]
        model = cast_linears(make_gpt(), torch.bfloat16)
        assert torch.equal(model(idx)[0], expected)
        assert model.new_cache(1, 1).layers[0].dtype == torch.bfloat16
        torch.testing.assert_close(model.generate(idx, 10, top_k=1)[:, :15], reference_generate(make_gpt(), idx, 1, top_k=1))
    assert cast_linears(make_gpt(), torch.float32).lm_head.weight.dtype == torch.float32


def test_in_float32_the_head_stays_tied():
    """Two parameters would be copied to a GPU separately, and take twice the memory."""
    model = cast_linears(make_gpt(), torch.float32)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("prompt_length, expected", [(None, 1), (5, 5), (99, 16)]) # block_size is 16
def test_each_batch_size_is_compiled_for_the_prompt_length(prompt_length, expected):
    calls, messages = [], []

    class Backend(EagerGPT):
        def warm_up_compile(self, idx, *arguments):
            calls.append((tuple(idx.shape), *arguments))
    warm_up_compile(Backend(make_gpt()), prompt_length, [4, 3], SamplingParams(20, context_shift=True), messages.append)
    assert calls == [((4, expected), 20, True), ((3, expected), 20, True)]
    assert messages[0] == "compiling ..." and messages[1].startswith("compiled in ")


def test_the_error_of_a_failing_compiler_says_what_to_do():
    def warm_up(idx, max_new_tokens, context_shift):
        raise RuntimeError("no C++ compiler")
    backend = SimpleNamespace(config=make_gpt().config, device=CPU, warm_up_compile=warm_up)
    with pytest.raises(ValueError, match=r"^compile=True does not work here \(RuntimeError: no C\+\+ compiler\): leave it out$"):
        warm_up_compile(backend, 5, [1], SamplingParams(), print)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")], ids=repr)
def test_out_of_memory_while_compiling_is_not_reported_as_a_failing_compiler(error):
    def warm_up(idx, max_new_tokens, context_shift):
        raise error
    backend = SimpleNamespace(config=make_gpt().config, device=CPU, warm_up_compile=warm_up)
    with pytest.raises(type(error)) as raised:
        warm_up_compile(backend, 5, [1], SamplingParams(), print)
    assert raised.value is error


@pytest.mark.parametrize("options", [dict(), dict(cuda_graphs=False), dict(draft="name")], ids=str)
def test_a_gpu_gets_cuda_graph_gpt(options, simulated_gpu):
    messages, gpu = [], torch.device("cuda", 1)
    backend = prepare_model(make_gpt(), gpu, torch.float32, ModelOptions(**options), log=messages.append)
    assert isinstance(backend, CUDAGraphGPT) and backend.checks.use_graphs == options.get("cuda_graphs", True)
    backend.checks.log("hello")
    assert messages == ["hello"]
    assert simulated_gpu[:2] == [("set_device", gpu), ("to", gpu)], "nothing is allocated on another GPU"
    assert ("set_float32_matmul_precision", "highest") in simulated_gpu, "with TF32, another batch size could change a token"


def test_without_a_number_the_current_gpu_is_used(simulated_gpu):
    prepare_model(make_gpt(), torch.device("cuda"), torch.float32)
    assert simulated_gpu[0] == ("to", torch.device("cuda"))


@pytest.mark.parametrize("dtype, vocab_size, rows", [(torch.bfloat16, 61, 64), (torch.float16, 130, 192), (torch.bfloat16, 128, 128), (torch.float32, 61, 61)], ids=str)
def test_in_half_precision_a_gpu_gets_a_padded_head(dtype, vocab_size, rows, simulated_gpu):
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        plain = cast_linears(make_gpt(vocab_size=vocab_size), dtype)
        backend = prepare_model(make_gpt(vocab_size=vocab_size), torch.device("cuda"), dtype)
        assert backend.model.lm_head.weight.shape == (rows, 24)
        torch.testing.assert_close(backend.model(IDX)[0], plain(IDX)[0])
        assert generate(backend, IDX, 20, temperature=0, allow_sync=False).max() < vocab_size
