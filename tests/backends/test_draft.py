"""prepare_draft loads a draft, or makes one from the model itself, and estimates what it costs."""
import pytest
import torch

from model import GPTConfig
from models import make_gpt, save_checkpoint
from sampling.backends.cpu import draft_int8_linear
from sampling.backends.cpu.draft_int8_linear import PerTensorInt8Linear
from sampling.backends.cpu.int8_linear import Int8Linear, quantize_weight
from sampling.backends.cpu.packed_gpt import PackedGPT
from sampling.backends.draft import prepare_draft, share_weights, step_bytes
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
    assert 0.25 < step_bytes(xl, 1) / step_bytes(xl, 4) < 0.35
    assert step_bytes(GPTConfig(), 4) / step_bytes(xl, 4) < 0.12
    small = GPTConfig(n_layer=6, n_head=6, n_embd=384, vocab_size=65)
    assert step_bytes(small, 1) / step_bytes(small, 4) > 0.6, "most of the time of a small model is not for weights"


@pytest.mark.parametrize("is_intel, digit, is_per_tensor", [(True, 127, True), (True, 63, False), (False, 127, False)])
def test_activations_are_quantized_per_tensor_only_where_that_is_quick_and_right(is_intel, digit, is_per_tensor, monkeypatch):
    monkeypatch.setattr(draft_int8_linear, "is_intel_cpu", lambda: is_intel)
    monkeypatch.setattr(draft_int8_linear, "max_digit", lambda: digit)
    monkeypatch.setattr(draft_int8_linear, "PerTensorInt8Linear", lambda *arguments: "per tensor")
    layer = draft_int8_linear.draft_int8_linear(quantize_weight(torch.ones(16, 16)))
    assert (layer == "per tensor") == is_per_tensor


def test_without_these_operators_activations_are_quantized_per_token(monkeypatch):
    def missing(*arguments):
        raise AttributeError("no such operator")
    monkeypatch.setattr(draft_int8_linear, "is_intel_cpu", lambda: True)
    monkeypatch.setattr(draft_int8_linear, "PerTensorInt8Linear", missing)
    assert isinstance(draft_int8_linear.draft_int8_linear(quantize_weight(torch.ones(16, 16))), Int8Linear)


@pytest.mark.skipif(not isinstance(draft_int8_linear.draft_int8_linear(quantize_weight(torch.ones(16, 16))), PerTensorInt8Linear), reason="this processor has no such layers")
def test_activations_have_8_bits_and_the_tokens_of_a_prompt_are_scaled():
    generator = torch.Generator().manual_seed(1)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((96, 64), (96,), (5, 64)))
    rows = quantize_weight(weight)
    per_tensor, exact = PerTensorInt8Linear(rows, bias), Int8Linear(rows, bias)
    x[3] *= 1000
    for num_rows in 1, 2, 5:
        expected = exact(x[:num_rows], gelu="tanh", residual=torch.ones(num_rows, 96))
        found = per_tensor(x[:num_rows], gelu="tanh", residual=torch.ones(num_rows, 96))
        errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert errors.min() > 1e-4 and errors.max() < 0.02


def test_a_draft_keeps_its_logits_near_those_of_dtype_int8():
    model, idx = make_gpt(n_embd=64), torch.tensor([[5, 9, 30, 2]])
    logits = []
    for int8_linear in Int8Linear, draft_int8_linear.draft_int8_linear:
        gpt = PackedGPT(share_weights(model), int8_linear=int8_linear)
        cache = gpt.new_cache(1, 16)
        gpt.next_logits(idx, cache)
        logits.append(gpt.next_logits(idx[:, :1], cache).values)
    assert (logits[1] - logits[0]).norm() < 0.1 * logits[0].norm()
