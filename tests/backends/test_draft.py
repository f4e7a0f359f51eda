"""prepare_draft loads a draft, or makes one from the model itself, and estimates what it costs."""
import pytest
import torch

from model import GPTConfig
from models import as_checkpoint, make_gpt, save_checkpoint
from sampling.backends.draft import prepare_draft, step_cost
from sampling.backends.prepare import prepare_backend
from sampling.generation.assembly import assemble
from sampling.params import ModelOptions

IDS, FLOAT32 = torch.tensor([[5, 9, 30, 2]]), torch.float32


@torch.no_grad()
def test_the_draft_int8_is_the_model_in_8_bits_and_leaves_the_model_as_it_is():
    target, expected = as_checkpoint(make_gpt(n_embd=64)), make_gpt(n_embd=64)(IDS)[0][:, -1]
    draft = prepare_draft("int8", target, FLOAT32)
    backend = prepare_backend(target, torch.device("cpu"), FLOAT32)
    torch.testing.assert_close(backend.logits(IDS, None), expected, atol=2e-5, rtol=1e-4)
    assert 0.001 < (draft.backend.logits(IDS, None) - expected).norm() / expected.norm() < 0.05
    assert draft.is_copy and 0.2 < draft.relative_cost < 1


@pytest.mark.parametrize("dtype, tolerance", [(FLOAT32, 1e-5), (torch.int8, 0.05)])
@torch.no_grad()
def test_a_draft_from_a_file_has_the_weights_of_the_file_in_the_dtype_of_the_model(dtype, tolerance, tmp_path):
    other, lines = make_gpt(seed=2, n_embd=64), []
    path, expected = save_checkpoint(tmp_path, other), other(IDS)[0][:, -1]
    for name in tmp_path, path:
        draft = prepare_draft(str(name), as_checkpoint(make_gpt(n_embd=64)), dtype, lines.append)
        assert (draft.backend.logits(IDS, None) - expected).norm() / expected.norm() < tolerance
        assert draft.relative_cost == 1 and not draft.is_copy
    assert lines == 2 * [f"{path}: iteration 100, validation loss 1.5000"]


def test_a_draft_with_another_vocabulary_or_on_another_device_is_refused(tmp_path):
    save_checkpoint(tmp_path, make_gpt(vocab_size=60))
    with pytest.raises(ValueError, match=r"has a vocabulary of 60 tokens, but the model has 61: the two must be equal; "
                                         r"choose another draft, or leave it out$"):
        prepare_draft(str(tmp_path), as_checkpoint(make_gpt()), FLOAT32)
    for device in "cuda", "cuda:1", "mps":
        with pytest.raises(ValueError, match="^draft works only on a CPU, because no gain was measured on other "
                                             f"devices; got {device}: leave out draft, or use device=cpu$"):
            assemble(None, None, torch.device(device), torch.bfloat16, ModelOptions(draft="int8"))


def test_the_cost_of_a_step_grows_with_its_weights_and_its_layers():
    xl, small = GPTConfig(n_layer=48, n_head=25, n_embd=1600), GPTConfig(n_layer=6, n_head=6, n_embd=384, vocab_size=65)
    assert 0.25 < step_cost(xl, 1) / step_cost(xl, 4) < 0.35 and step_cost(GPTConfig(), 4) / step_cost(xl, 4) < 0.12
    assert step_cost(small, 1) / step_cost(small, 4) > 0.6, "most of the time of a small model is not for weights"
