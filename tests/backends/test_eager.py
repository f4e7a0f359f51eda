"""EagerBackend, which runs the plain model, with and without torch.compile."""
import pytest
import torch

from engines import expected_ids
from models import make_gpt
from sampling.backends.eager import EagerBackend
from sampling.backends.prepare import compile_steps
from streams import decode, num_compiled_graphs, random_prompt


@pytest.mark.parametrize("context_shift", [False, True])
def test_it_generates_the_text_of_the_model_inside_the_window_and_past_it(context_shift):
    prompts = [random_prompt(length)[0].tolist() for length in (3, 5, 16, 30)] # block_size is 16
    expected = expected_ids(prompts, 30, context_shift=context_shift, temperature=0.8, top_k=20)
    found = decode(EagerBackend(make_gpt()), prompts, 30, context_shift=context_shift, temperature=0.8, top_k=20)
    assert found == expected


def test_it_computes_the_logits_of_several_positions_and_undoes_steps():
    backend, ids = EagerBackend(make_gpt()), random_prompt(12, 2)
    cache, expected = backend.new_cache(2, 16), backend.model(ids, ids)[0].detach()
    for start, end in (0, 5), (5, 9), (5, 6), (6, 12): # the second one is undone
        cache.seq_len = start
        found = backend.logits(ids[:, start:end], cache, num_positions=end - start)
        torch.testing.assert_close(found, expected[:, start:end].flatten(0, 1))


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
