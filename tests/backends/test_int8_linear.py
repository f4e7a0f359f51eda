"""Int8Linear rounds weights to 8 bits, and its inputs so finely that their rounding does not count."""
import pytest
import torch
import torch.nn.functional as F

from cases import cases
from sampling.backends.cpu import int8_linear
from sampling.backends.cpu.int8_linear import (
    Int8Embedding,
    Int8Linear,
    Int8Product,
    QuantizedWeight,
    max_digit,
    quantize_weight,
    scalar,
    split_digits,
)

try:
    max_digit()
except ValueError:
    pytest.skip("this torch, or this processor, lacks the operators", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("all_threads")


@pytest.fixture
def fresh_check():
    """Let max_digit check the operators again, in this test and after it."""
    max_digit.cache_clear()
    yield
    max_digit.cache_clear()


def normal(*shape, seed=0):
    """Normally distributed numbers."""
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def dequantized(rows):
    """The weight that the rows stand for, in float64."""
    return rows.values.double() * rows.scales.double()[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_weights_are_rounded_to_a_scale_of_their_row(dtype, monkeypatch):
    monkeypatch.setattr(int8_linear, "MAX_WEIGHTS", 100) # 7 rows are rounded at once
    weight = (normal(20, 14) * torch.logspace(-6, 3, 20)[:, None]).to(dtype)
    weight[3] = 0
    rows = quantize_weight(weight)
    largest = weight.double().abs().amax(dim=1, keepdim=True)
    assert (dequantized(rows) - weight.double()).abs().le(0.501 * largest / 127).all()
    assert rows.values.dtype == torch.int8 and rows.values.abs().amax(dim=1).tolist() == [127, 127, 127, 0] + [127] * 16


@pytest.mark.parametrize("num_rows", [1, 2, 40])
def test_products_are_exact(num_rows):
    digit = max_digit()
    rows = QuantizedWeight(torch.randint(-127, 128, (70, 100), dtype=torch.int8), normal(70).abs())
    digits = torch.randint(-digit, digit + 1, (num_rows, 100))
    digits[0], rows.values[0], rows.values[1] = digit, 127, -127 # the largest sums
    found = Int8Product(rows)((digits + digit + 1).to(torch.uint8), digit + 1)
    expected = (digits.double() @ rows.values.double().T * rows.scales.double()).float()
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("digit", [127, 63])
def test_two_digits_stand_for_the_activations(digit):
    x = torch.cat([normal(20, 64), 1e6 * normal(20, 64, seed=1), torch.zeros(1, 64), torch.linspace(-1, 1, 64)[None]])
    digits, scale = split_digits(x, digit)
    high, low = digits.double().sub(digit + 1).chunk(2)
    assert max(high.abs().max(), low.abs().max()) <= digit
    assert (scale * (high + low / (2 * digit)) - x).abs().le(0.51 * scale / (2 * digit)).all()


@pytest.mark.parametrize("shape, bias, gelu, residual", cases(
    [(1, 768), (40, 100), (2, 3, 5)], [True, False], [None, "none", "tanh"], [True, False],
    quick=lambda shape, bias, gelu, residual: bias == (gelu != "tanh") and residual == (gelu is None)))
def test_it_gives_the_results_of_a_linear_with_rounded_weights(shape, bias, gelu, residual, monkeypatch):
    monkeypatch.setattr(int8_linear, "MAX_ACTIVATIONS", 1500) # 40 rows are multiplied in three parts
    rows, x = quantize_weight(normal(30, shape[-1])), normal(*shape, seed=1)
    bias, residual = normal(30, seed=2) if bias else None, normal(*shape[:-1], 30, seed=3) if residual else None
    expected = F.linear(x.double(), dequantized(rows), None if bias is None else bias.double())
    expected = F.gelu(expected, approximate=gelu) if gelu else expected
    expected = expected if residual is None else expected + residual.double()
    found = Int8Linear(rows, bias)(x, residual, gelu)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


def test_a_row_has_the_same_result_alone_and_beside_any_others():
    layer = Int8Linear(quantize_weight(normal(96, 768)), normal(96, seed=1))
    x = torch.cat([normal(20, 768), 1e6 * normal(20, 768, seed=1), torch.zeros(1, 768), 1e-6 * normal(20, 768, seed=2)])
    together = layer(x, gelu="none")
    for i, row in enumerate(x):
        assert torch.equal(layer(row[None], gelu="none")[0], together[i])
    assert torch.equal(layer(x[17:40], gelu="none"), together[17:40])


@pytest.mark.parametrize("digit", [127, 63])
def test_large_channels_do_not_cost_the_others_their_precision(digit, monkeypatch):
    """GPT-2 has such channels. With 8 bits for the inputs, the error is many times larger."""
    monkeypatch.setattr(int8_linear, "max_digit", lambda: digit)
    weight, x = normal(200, 768), normal(10, 768, seed=1)
    x[:, [5, 700]] *= 100
    exact, rows = x.double() @ weight.double().T, quantize_weight(weight)
    of_weights = (x.double() @ dequantized(rows).T - exact).abs().mean()
    assert (Int8Linear(rows)(x) - exact).abs().mean() < 1.1 * of_weights


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
    torch.testing.assert_close(Int8Embedding(rows)(idx).double(), dequantized(rows)[idx])


def test_the_default_dtype_of_the_caller_does_not_matter(fresh_check):
    rows, x = quantize_weight(normal(20, 64)), normal(3, 64)
    expected = Int8Linear(rows)(x)
    torch.set_default_dtype(torch.float64)
    try:
        max_digit.cache_clear()
        scalar.cache_clear()
        found = Int8Linear(rows)(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


# ---- what torch and the processor can do

def test_digits_are_smaller_where_sums_saturate(fresh_check, monkeypatch):
    """Without VNNI, the sum of two products is limited to 16 bits. This stands in for such a processor."""
    class SaturatingProduct:
        def __init__(self, rows):
            self.rows = rows

        def __call__(self, digits, zero_point):
            inputs = digits.float().reshape(len(digits), 1, -1, 2)
            weights = self.rows.values.float().reshape(1, len(self.rows.values), -1, 2)
            sums = (inputs * weights).sum(dim=-1).clamp(-2**15, 2**15 - 1).sum(dim=-1)
            return (sums - zero_point * self.rows.values.float().sum(dim=1)) * self.rows.scales
    monkeypatch.setattr(int8_linear, "Int8Product", SaturatingProduct)
    assert max_digit() == 63
    rows, x = quantize_weight(normal(20, 64)), normal(3, 64)
    torch.testing.assert_close(Int8Linear(rows)(x).double(), x.double() @ dequantized(rows).T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("error", [AttributeError("no such operator"), RuntimeError("not implemented"), None], ids=repr)
def test_without_the_operators_the_error_names_another_dtype(error, fresh_check, monkeypatch):
    def broken_product(rows):
        if error:
            raise error
        return lambda digits, zero_point: torch.zeros(len(digits), len(rows.values))
    monkeypatch.setattr(int8_linear, "Int8Product", broken_product)
    with pytest.raises(ValueError, match=r"^dtype=int8 does not work with this torch on this processor: use dtype=float32$"):
        max_digit()
