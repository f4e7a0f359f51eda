"""prepare_backend chooses the backend for a GPT, and warm_up_compile compiles it."""
import pytest
import torch

from engines import expected_ids
from models import make_gpt
from sampling.backends import prepare
from sampling.backends.cuda import CUDABackend
from sampling.backends.eager import EagerBackend
from sampling.backends.exact import ExactBackend
from sampling.backends.prepare import cast_linears, prepare_backend, warm_up_compile
from sampling.params import ModelOptions, SamplingParams
from streams import decode, random_prompt

CPU = torch.device("cpu")
PROMPTS = random_prompt(5, 2).tolist()


@pytest.fixture(autouse=True)
def trim_calls(monkeypatch):
    """Leave the heap settings of the test process unchanged. Returns the list of calls that would have changed them."""
    calls = []
    monkeypatch.setattr(prepare, "disable_malloc_trim", lambda: calls.append("disable_malloc_trim"))
    return calls


def test_a_cpu_gets_a_backend_with_the_text_of_the_model(trim_calls):
    backend = prepare_backend(make_gpt(), CPU, torch.float32)
    assert decode(backend, PROMPTS, 20) == expected_ids(PROMPTS, 20)
    assert backend.device == CPU and trim_calls == ["disable_malloc_trim"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cpu_generates_in_half_precision(dtype):
    with torch.autocast("cpu", dtype):
        backend = prepare_backend(make_gpt(), CPU, dtype)
        assert [len(ids) for ids in decode(backend, PROMPTS, 20)] == [20, 20]


@pytest.mark.usefixtures("compile_settings")
@pytest.mark.filterwarnings("ignore") # torch's compiler warns about torch
@pytest.mark.parametrize("options, expected", [(dict(compile=True), EagerBackend), (dict(exact=True), ExactBackend)])
def test_an_option_chooses_the_backend(options, expected):
    assert type(prepare_backend(make_gpt(), CPU, torch.float32, ModelOptions(**options))) is expected


@pytest.mark.parametrize("index, expected", [(1, ["set_device", "to"]), (None, ["to"])])
def test_a_gpu_gets_a_cuda_backend_and_nothing_is_allocated_on_another_gpu(index, expected, monkeypatch):
    calls, messages, gpu = [], [], torch.device("cuda", index)
    monkeypatch.setattr(type(make_gpt()), "to", lambda gpt, device: calls.append(("to", device)) or gpt)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    torch.set_float32_matmul_precision("high")
    backend = prepare_backend(make_gpt(), gpu, torch.float32, log=messages.append)
    assert type(backend) is CUDABackend and calls == [(name, gpu) for name in expected]
    assert torch.get_float32_matmul_precision() == "highest", "with TF32, another batch size could change a token"
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    backend.checks.log("hello")
    assert messages == ["hello"]


def test_cast_linears_give_the_logits_of_autocast():
    """Autocast would cast the same weights again at every step."""
    ids, model = random_prompt(14, 2), cast_linears(make_gpt(), torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(ids)[0], make_gpt()(ids)[0])
        assert model.new_cache(1, 1).layers[0].dtype == torch.bfloat16
    assert model.transformer.wte.weight.dtype == torch.float32


def test_in_float32_the_head_stays_tied():
    """Two parameters would be copied to a GPU separately, and take twice the memory."""
    model = cast_linears(make_gpt(), torch.float32)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("prompt_length, expected", [(None, 1), (5, 5), (99, 16)]) # block_size is 16
def test_the_warm_up_is_for_each_batch_size_and_for_the_prompt_length(prompt_length, expected):
    backend, shapes, messages = EagerBackend(make_gpt()), [], []
    backend.model.register_forward_pre_hook(lambda model, args: shapes.append(tuple(args[0].shape)))
    warm_up_compile(backend, prompt_length, [4, 3], SamplingParams(20), messages.append)
    assert shapes.count((1, expected)) >= 2 and {(4, 16), (3, 16)} < set(shapes)
    assert messages[0] == "compiling ..." and messages[1].startswith("compiled in ")


@pytest.mark.parametrize("error, message", [
    (RuntimeError("no C++ compiler"), "compile=True does not work here (RuntimeError: no C++ compiler): leave it out"),
    (MemoryError("full"), "full"), (RuntimeError("CUDA out of memory"), "CUDA out of memory")], ids=repr)
def test_a_failing_compiler_is_an_error_that_says_what_to_do_but_out_of_memory_is_raised(error, message, monkeypatch):
    def fail(*arguments, **settings):
        raise error
    backend = EagerBackend(make_gpt())
    monkeypatch.setattr(backend.model, "forward", fail)
    with pytest.raises(ValueError if message.startswith("compile") else type(error)) as raised:
        warm_up_compile(backend, 5, [1], SamplingParams(), lambda message: None)
    assert str(raised.value) == message
