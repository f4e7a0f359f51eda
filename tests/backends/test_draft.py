"""prepare_draft loads a draft, or makes one from the model itself, and estimates what it costs."""
import pytest
import torch

from model import GPTConfig
from models import make_gpt, save_checkpoint
from sampling.backends.cpu.int8_linear import Int8Linear
from sampling.backends.draft import prepare_draft, step_cost
from sampling.params import ModelOptions

CPU = torch.device("cpu")


def test_the_draft_int8_is_the_model_in_8_bits_and_leaves_the_model_as_it_is():
    model, idx = make_gpt(n_embd=64), torch.tensor([[5, 9, 30, 2]])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    draft = prepare_draft(model, CPU, torch.float32, ModelOptions(draft="int8"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    expected = model.next_logits(idx, None).values.detach()
    error = (draft.backend.next_logits(idx, None).values - expected).norm() / expected.norm()
    assert 0 < error < 0.05


def test_a_draft_from_a_file_has_the_weights_of_the_file(tmp_path):
    other, idx = make_gpt(seed=2, n_layer=1), torch.tensor([[5, 9, 30, 2]])
    path = save_checkpoint(tmp_path, other)
    for name in tmp_path, path:
        draft = prepare_draft(make_gpt(), CPU, torch.float32, ModelOptions(draft=str(name)))
        torch.testing.assert_close(draft.backend.next_logits(idx, None).values, other.next_logits(idx, None).values.detach())


def test_a_draft_may_share_the_dtype_int8_with_the_model(tmp_path):
    save_checkpoint(tmp_path, make_gpt(seed=2))
    draft = prepare_draft(make_gpt(), CPU, torch.int8, ModelOptions(draft=str(tmp_path)))
    assert isinstance(draft.backend.blocks[0].c_fc, Int8Linear) and draft.relative_cost == 1


def test_the_draft_int8_needs_a_cpu():
    with pytest.raises(ValueError, match="draft=int8 runs only on a CPU; got device=cuda: use a smaller model as the draft"):
        prepare_draft(make_gpt(), torch.device("cuda"), torch.bfloat16, ModelOptions(draft="int8"))


def test_the_cost_of_a_draft_grows_with_its_weights_and_layers():
    xl = GPTConfig(n_layer=48, n_head=25, n_embd=1600)
    assert 0.25 < step_cost(xl, 1) / step_cost(xl, 4) < 0.35
    assert step_cost(GPTConfig(), 4) / step_cost(xl, 4) < 0.12
    small = GPTConfig(n_layer=6, n_head=6, n_embd=384, vocab_size=65)
    assert step_cost(small, 1) / step_cost(small, 4) > 0.6, "most of the time of a small model is not for weights"
