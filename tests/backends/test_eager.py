"""EagerBackend with torch.compile, and ExactBackend, which computes nanoGPT's logits bit for bit."""
import pytest
import torch

import sampling
from engines import expected_ids
from model import GPT
from models import CHARS, as_checkpoint, make_gpt, save_checkpoint
from oracles import nanogpt_generate, nanogpt_logits
from recorded_graphs import ON_GPU
from sampling.backends.eager import EagerBackend, ExactBackend
from sampling.backends.prepare import compile_steps, prepare_backend
from sampling.params import ModelOptions, SamplingParams
from streams import decode, num_compiled_graphs, random_prompt

SHAPE = dict(n_embd=128, n_head=4, block_size=64)
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.mark.slow # torch.compile takes ten seconds
@pytest.mark.usefixtures("compile_settings")
@pytest.mark.filterwarnings("ignore") # torch's compiler warns about torch
@pytest.mark.parametrize("num_tokens, context_shift", [(20, False), (20, True)]) # block_size is 16
def test_a_compiled_model_generates_the_same_text(num_tokens, context_shift):
    backend, prompts, messages = EagerBackend(make_gpt(), compile=True), 2 * random_prompt(5).tolist(), []
    compile_steps(backend, 2, messages.append)
    assert messages[0] == "compiling ..." and messages[1].startswith("compiled in ") and num_compiled_graphs() > 0
    found = decode(backend, prompts, num_tokens, context_shift=context_shift)
    assert found == expected_ids(prompts, num_tokens, context_shift=context_shift)


def autocast(device, dtype):
    return torch.autocast(device, dtype, enabled=dtype != torch.float32)


@EACH_DTYPE
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_exact_logits_and_text_are_nanogpts_bit_for_bit_inside_the_window_and_past_it(device, dtype):
    """Also for a model with another GELU: nanoGPT has only the exact one. nanoGPT's autocast casts at every step."""
    checkpoint, model = as_checkpoint(make_gpt(**SHAPE, gelu="tanh")), make_gpt(**SHAPE).to(device)
    backend = prepare_backend(checkpoint, torch.device(device), dtype, ModelOptions(exact=True))
    assert backend.model.lm_head.weight.dtype == dtype, "it is cast once"
    cache, prompt = backend.new_cache(1, 64), random_prompt(54).to(device)
    with autocast(device, dtype):
        for ids in random_prompt(64).to(device).split([5, 1, 1, 56, 1], dim=1):
            found, expected = backend.logits(ids, cache), nanogpt_logits(model, cache.ids)
            assert found.dtype == dtype and torch.equal(found, expected)
        torch.manual_seed(5)
        expected = [nanogpt_generate(model, prompt, 20, 0.8, top_k=20)[0, 54:].tolist() for _ in range(3)]
        settings = dict(temperature=0.8, top_k=20, all_columns=True, in_logits_dtype=True)
        assert decode(backend, 3 * prompt.tolist(), 20, seed=5, **settings) == expected


@EACH_DTYPE
def test_a_model_that_is_loaded_in_inference_mode_generates_nanogpts_text_inside_of_it_and_outside(dtype, tmp_path):
    """Through sampling.load. nanoGPT initialises its model, which draws random numbers, before it loads the weights."""
    model, prompt = make_gpt(), "The "
    with torch.no_grad(): # logits around -100, as GPT-2's: half precision also rounds them visibly in the sampler
        model.lm_head.weight += 1
        model.transformer.ln_f.bias -= 4
    save_checkpoint(tmp_path, model)
    params = SamplingParams(max_new_tokens=60, temperature=0.7, top_k=5)
    torch.manual_seed(params.seed)
    GPT(model.config)
    with autocast("cpu", dtype):
        idx = torch.tensor([[CHARS.index(char) for char in prompt]])
        expected = [nanogpt_generate(model, idx, 60, 0.7, top_k=5)[0, len(prompt):].tolist() for _ in range(2)]
    with torch.inference_mode():
        generator = sampling.load(tmp_path, device="cpu", dtype=str(dtype).removeprefix("torch."), exact=True)
        samples = generator.generate(prompt, params, num_samples=2, batch_size=1)
        stream = generator.stream(prompt, params)
        text = next(stream)
    assert [sample.token_ids for sample in samples] == expected
    assert not any(weight.is_inference() for weight in generator.model.backend.model.parameters())
    assert text + "".join(stream) == "".join(CHARS[i] for i in expected[0])


def test_exact_on_a_device_with_other_random_numbers_is_refused():
    with pytest.raises(ValueError, match="exact=True needs CUDA or a CPU; got device=meta"):
        ExactBackend(make_gpt().to("meta"))
