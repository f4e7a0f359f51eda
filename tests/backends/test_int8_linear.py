"""Int8Linear rounds weights to 8 bits, and its inputs so finely that their rounding does not count."""
import pytest
import torch
import torch.nn.functional as F

from cases import cases
from int8_support import skip_without_int8
from sampling.backends.cpu import int8_linear, int8_matmul
from sampling.backends.cpu.int8_linear import Int8Linear, int8_embedding, quantize_weight
from sampling.backends.cpu.int8_matmul import Int8BagMatmul, OneDNNLimits, onednn_limits
from streams import normal

skip_without_int8()
pytestmark = pytest.mark.usefixtures("all_threads", "eager_two_digits")


def dequantized(rows):
    """The weight that the rows stand for, in float64."""
    return rows.values.double() * rows.scales.double()[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_weights_are_rounded_to_a_scale_of_their_row(dtype, monkeypatch):
    monkeypatch.setattr(int8_linear, "WEIGHTS_PER_CHUNK", 100) # 7 rows are rounded at once
    weight = (normal(20, 14) * torch.logspace(-6, 3, 20)[:, None]).to(dtype)
    weight[3] = 0
    rows = quantize_weight(weight)
    largest = weight.double().abs().amax(dim=1, keepdim=True)
    assert (dequantized(rows) - weight.double()).abs().le(0.501 * largest / 127).all()
    assert rows.values.dtype == torch.int8 and rows.values.abs().amax(dim=1).tolist() == [127, 127, 127, 0] + [127] * 16


@pytest.mark.parametrize("shape, bias, gelu, residual", cases(
    [(1, 768), (40, 100), (2, 3, 5)], [True, False], [None, "none", "tanh"], [True, False],
    quick=lambda shape, bias, gelu, residual: bias == (gelu != "tanh") and residual == (gelu is None)))
def test_it_gives_the_results_of_a_linear_with_rounded_weights(shape, bias, gelu, residual, monkeypatch):
    monkeypatch.setattr(int8_linear, "ACTIVATIONS_PER_CHUNK", 1500) # 40 rows are multiplied in three parts
    rows, x = quantize_weight(normal(30, shape[-1])), normal(*shape, seed=1)
    bias, residual = normal(30, seed=2) if bias else None, normal(*shape[:-1], 30, seed=3) if residual else None
    expected = F.linear(x.double(), dequantized(rows), None if bias is None else bias.double())
    expected = F.gelu(expected, approximate=gelu) if gelu else expected
    expected = expected if residual is None else expected + residual.double()
    found = Int8Linear(rows, bias)(x, residual, gelu)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-3 * 256 / onednn_limits().base * expected.abs().max()


@pytest.mark.parametrize("fbgemm, max_bag_tokens", [(True, 1), (True, 30), (False, 1)])
def test_a_row_has_the_same_result_alone_and_beside_any_others(fbgemm, max_bag_tokens, monkeypatch):
    monkeypatch.setattr(int8_linear, "has_fbgemm", lambda: fbgemm)
    monkeypatch.setattr(int8_linear, "max_bag_tokens", lambda: max_bag_tokens)
    layer = Int8Linear(quantize_weight(normal(96, 768)), normal(96, seed=1))
    assert isinstance(layer.bag_matmul, Int8BagMatmul) == fbgemm
    x = torch.cat([normal(20, 768), 1e6 * normal(20, 768, seed=1), torch.zeros(1, 768), 1e-6 * normal(20, 768, seed=2)])
    together = layer(x, gelu="none")
    for i, row in enumerate(x):
        assert torch.equal(layer(row[None], gelu="none")[0], together[i])
    assert torch.equal(layer(x[17:40], gelu="none"), together[17:40])


@pytest.mark.parametrize("gelu", ["none", "tanh"])
def test_gelu_of_a_row_does_not_depend_on_how_threads_share_the_rows(gelu):
    layer, x = Int8Linear(quantize_weight(normal(512, 64))), normal(57, 64)
    torch.set_num_threads(5) # 57 * 512 / 5 is not a multiple of 32
    assert torch.equal(layer(x, gelu=gelu), torch.cat([layer(row[None], gelu=gelu) for row in x]))


@pytest.mark.parametrize("base", [base for base in (256, 128) if base <= onednn_limits().base])
def test_large_channels_do_not_cost_the_others_their_precision(base, monkeypatch):
    """GPT-2 has such channels. With 8 bits for the inputs, the error is many times larger."""
    monkeypatch.setattr(int8_matmul, "onednn_limits", lambda: OneDNNLimits(base, 512))
    weight, x = normal(200, 768), normal(10, 768, seed=1)
    x[:, [5, 700]] *= 100
    exact, rows = x.double() @ weight.double().T, quantize_weight(weight)
    of_weights = (x.double() @ dequantized(rows).T - exact).abs().mean()
    assert (Int8Linear(rows)(x) - exact).abs().mean() < 1.1 * of_weights


@pytest.mark.parametrize("few", [1, 10])
@pytest.mark.parametrize("num_tokens, num_products", [(11, 3), (127, 3), (128, 1)])
def test_the_weight_is_in_memory_once_until_many_tokens_need_it_twice(few, num_tokens, num_products, monkeypatch):
    monkeypatch.setattr(int8_linear, "max_bag_tokens", lambda: few)
    monkeypatch.setattr(int8_linear, "MIN_PRODUCTS", 3)
    layer, x = Int8Linear(quantize_weight(normal(20, 64))), normal(num_tokens, 64)
    expected = Int8Linear(quantize_weight(normal(20, 64)))(x)
    for i in range(1, 5):
        layer(normal(few, 64))
        assert torch.equal(layer(x), expected)
        assert (layer.two_digit_matmul is not None) == (i >= num_products)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_numbers_that_are_not_finite_stay_in_their_row(value):
    layer, x = Int8Linear(quantize_weight(normal(20, 64))), normal(3, 64)
    expected = layer(x)
    x[1, 7] = value
    found = layer(x)
    assert torch.equal(found[[0, 2]], expected[[0, 2]]) and (value == 3e38 or not found[1].isfinite().any())


def test_nan_in_a_weight_reaches_the_result():
    weight = normal(20, 64)
    weight[4, 3] = torch.nan
    assert Int8Linear(quantize_weight(weight))(normal(2, 64)).isfinite().all(dim=0).tolist() == [i != 4 for i in range(20)]


def test_embeddings_are_the_rounded_rows():
    rows, idx = quantize_weight(normal(50, 24)), torch.tensor([[3, 49], [0, 3]])
    torch.testing.assert_close(int8_embedding(idx, rows).double(), dequantized(rows)[idx])


def test_the_default_dtype_of_the_caller_does_not_matter(fresh_check):
    rows, x = quantize_weight(normal(20, 64)), normal(3, 64)
    expected = Int8Linear(rows)(x)
    torch.set_default_dtype(torch.float64)
    try:
        onednn_limits.cache_clear()
        found = Int8Linear(rows)(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
