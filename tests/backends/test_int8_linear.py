"""Int8Linear rounds weights to 8 bits, and its inputs so finely that their rounding does not count."""
import pytest
import torch
import torch.nn.functional as F

from cases import cases
from sampling.backends.cpu import int8_linear
from sampling.backends.cpu.int8_linear import Int8Embedding, Int8Linear, Int8Rows, max_digit, round_rows

pytestmark = [pytest.mark.usefixtures("all_threads")]
KERNELS = "FBGEMMProduct", "OneDNNProduct"


@pytest.fixture(autouse=True)
def fresh_check():
    """Let max_digit check the operators again, in this test and after it."""
    max_digit.cache_clear()
    yield
    max_digit.cache_clear()


@pytest.fixture
def kernel(request, monkeypatch):
    """Let Int8Linear use this kernel. Skips the test if it does not work here."""
    monkeypatch.setattr(int8_linear, "is_intel_cpu", lambda: request.param == "FBGEMMProduct")
    try:
        max_digit()
    except ValueError:
        pytest.skip("this torch, or this processor, lacks the operators")


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
    rows = round_rows(weight)
    largest = weight.double().abs().amax(dim=1, keepdim=True)
    assert (dequantized(rows) - weight.double()).abs().le(0.501 * largest / 127).all()
    assert rows.values.dtype == torch.int8 and rows.values.abs().amax(dim=1).tolist() == [127, 127, 127, 0] + [127] * 16


@pytest.mark.parametrize("kernel, digit", cases(KERNELS, [127, 63], quick=lambda kernel, digit: True), indirect=["kernel"])
@pytest.mark.parametrize("num_rows", [1, 2, 40])
def test_the_products_round_digits_and_are_exact(kernel, digit, num_rows):
    rows = Int8Rows(torch.randint(-127, 128, (70, 100), dtype=torch.int8), normal(70).abs())
    digits = torch.randint(-digit, digit + 1, (num_rows, 100)).float()
    digits[0], rows.values[0], rows.values[1] = digit, 127, -127 # the largest sums
    product = int8_linear.FBGEMMProduct if int8_linear.is_intel_cpu() else int8_linear.OneDNNProduct
    expected = (digits.double() @ rows.values.double().T * rows.scales.double()).float()
    for shift in -0.4, 0, 0.4:
        torch.testing.assert_close(product(rows, digit)(digits + shift), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("kernel, shape, bias, gelu, residual", cases(
    KERNELS, [(1, 768), (40, 100), (2, 3, 5)], [True, False], [None, "none", "tanh"], [True, False],
    quick=lambda kernel, shape, bias, gelu, residual: bias == (gelu != "tanh") and residual == (gelu is None)), indirect=["kernel"])
def test_it_gives_the_results_of_a_linear_with_rounded_weights(kernel, shape, bias, gelu, residual, monkeypatch):
    monkeypatch.setattr(int8_linear, "MAX_ACTIVATIONS", 1500) # 40 rows are multiplied in three parts
    rows, x = round_rows(normal(30, shape[-1])), normal(*shape, seed=1)
    bias, residual = normal(30, seed=2) if bias else None, normal(*shape[:-1], 30, seed=3) if residual else None
    expected = F.linear(x.double(), dequantized(rows), None if bias is None else bias.double())
    expected = F.gelu(expected, approximate=gelu) if gelu else expected
    expected = expected if residual is None else expected + residual.double()
    found = Int8Linear(rows, bias)(x, residual, gelu)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_a_row_has_the_same_result_alone_and_beside_any_others(kernel):
    layer = Int8Linear(round_rows(normal(96, 768)), normal(96, seed=1))
    x = torch.cat([normal(20, 768), 1e6 * normal(20, 768, seed=1), torch.zeros(1, 768), 1e-6 * normal(20, 768, seed=2)])
    together = layer(x, gelu="none")
    for i, row in enumerate(x):
        assert torch.equal(layer(row[None], gelu="none")[0], together[i])
    assert torch.equal(layer(x[17:40], gelu="none"), together[17:40])


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize("digit", [127, 63])
def test_large_channels_do_not_cost_the_others_their_precision(kernel, digit, monkeypatch):
    """GPT-2 has such channels. With 8 bits for the inputs, the error is many times larger."""
    monkeypatch.setattr(int8_linear, "max_digit", lambda: digit)
    weight, x = normal(200, 768), normal(10, 768, seed=1)
    x[:, [5, 700]] *= 100
    exact, rows = x.double() @ weight.double().T, round_rows(weight)
    of_weights = (x.double() @ dequantized(rows).T - exact).abs().mean()
    assert (Int8Linear(rows)(x) - exact).abs().mean() < 1.1 * of_weights


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_numbers_that_are_not_finite_stay_in_their_row(kernel, value):
    layer, x = Int8Linear(round_rows(normal(20, 64))), normal(3, 64)
    expected = layer(x)
    x[1, 7] = value
    found = layer(x)
    assert torch.equal(found[[0, 2]], expected[[0, 2]]) and (value == 3e38 or not found[1].isfinite().any())


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_nan_in_a_weight_reaches_the_result(kernel):
    weight = normal(20, 64)
    weight[4, 3] = torch.nan
    assert Int8Linear(round_rows(weight))(normal(2, 64)).isfinite().all(dim=0).tolist() == [i != 4 for i in range(20)]


def test_embeddings_are_the_rounded_rows():
    rows, idx = round_rows(normal(50, 24)), torch.tensor([[3, 49], [0, 3]])
    torch.testing.assert_close(Int8Embedding(rows)(idx).double(), dequantized(rows)[idx])


def test_the_default_dtype_of_the_caller_does_not_matter():
    rows, x = round_rows(normal(20, 64)), normal(3, 64)
    expected = Int8Linear(rows)(x)
    torch.set_default_dtype(torch.float64)
    try:
        max_digit.cache_clear()
        found = Int8Linear(rows)(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


# ---- what torch and the processor can do

@pytest.mark.parametrize("is_intel", [True, False])
def test_digits_are_smaller_where_sums_saturate(is_intel, monkeypatch):
    """Without VNNI, the sum of two products is limited to 16 bits. This stands in for such a processor."""
    def saturating_product(rows, digit):
        def product(digits):
            inputs = (digits.round() + digit + 1).reshape(len(digits), 1, -1, 2) # from 1, as the operators see them
            weights = rows.values.float().reshape(1, len(rows.values), -1, 2)
            sums = (inputs * weights).sum(dim=-1).clamp(-2**15, 2**15 - 1).sum(dim=-1)
            return (sums - (digit + 1) * rows.values.float().sum(dim=1)) * rows.scales
        return product
    monkeypatch.setattr(int8_linear, "is_intel_cpu", lambda: is_intel)
    monkeypatch.setattr(int8_linear, KERNELS[0] if is_intel else KERNELS[1], saturating_product)
    assert max_digit() == 63
    rows, x = round_rows(normal(20, 64)), normal(3, 64)
    torch.testing.assert_close(Int8Linear(rows)(x).double(), x.double() @ dequantized(rows).T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("error", [AttributeError("no such operator"), RuntimeError("not implemented"), None], ids=repr)
def test_without_the_operators_the_error_names_another_dtype(error, monkeypatch):
    def broken_product(rows, digit):
        if error:
            raise error
        return lambda digits: torch.zeros(len(digits), len(rows.values))
    for kernel in KERNELS:
        monkeypatch.setattr(int8_linear, kernel, broken_product)
    with pytest.raises(ValueError, match=r"^dtype=int8 does not work with this torch on this processor: use dtype=float32$"):
        max_digit()
