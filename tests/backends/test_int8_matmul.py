"""Products with whole numbers are exact, with the operators for one token and for many, and on every processor."""
import pytest
import torch
import torch.nn.functional as F

from int8_support import skip_without_int8
from sampling.backends.cpu import int8_matmul
from sampling.backends.cpu.int8_linear import Int8Linear, quantize_weight
from sampling.backends.cpu.int8_matmul import (
    Int8BagMatmul,
    OneDNNMatmul,
    TwoDigitMatmul,
    max_activation,
    max_norm,
    onednn_limits,
    split_digits,
)
from streams import normal

skip_without_int8()
pytestmark = pytest.mark.usefixtures("all_threads", "eager_two_digits")


def largest_activations(values):
    """Inputs (N, in) with the largest norm. All are odd after rounding, because even sums may be exact beyond 2**24 too."""
    in_features = values.size(1)
    x = torch.cat([values.double(), normal(20, in_features).double(), F.one_hot(torch.arange(0, in_features, in_features // 20), in_features)])
    x *= (max_norm(values) - in_features**0.5) / x.norm(dim=1, keepdim=True)
    odd = (max_norm(values) / in_features**0.5 - 0.51) // 2 * 2 + 1
    rounded_up = values[:1].double().sign() * (odd - 0.49)
    return torch.cat([(x - 1).div(2).round() * 2 + 1, rounded_up])


@pytest.mark.parametrize("kind", ["random", "largest", "one row"])
@pytest.mark.parametrize("out_features, in_features, width", [(70, 100, 96), (31, 20001, 384)])
def test_the_products_of_one_and_of_many_tokens_are_exact(out_features, in_features, width, kind, monkeypatch):
    monkeypatch.setattr(int8_matmul, "max_bag_width", lambda: width)
    values = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8)
    if kind == "largest":
        values = values.sign() * 127
    elif kind == "one row": # the others have small norms, so that a bound by their mean would be too large
        values[1:] //= 50
    x, one = largest_activations(values), torch.ones(1, 1)
    expected = x.round() @ values.double().T
    few, many = Int8BagMatmul(values), TwoDigitMatmul(values)
    assert expected.abs().max() <= 2**24
    for matmul in few, many:
        assert torch.equal(matmul(x.float(), one.expand(len(x), 1)).double(), expected)
        assert torch.equal(matmul(x[:1].float(), one).double(), expected[:1])
    assert torch.equal(few.values(), values)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_number_of_threads_does_not_matter(num_threads):
    values, x = torch.randint(-127, 128, (1000, 20), dtype=torch.int8), normal(4, 20)
    expected, before = Int8BagMatmul(values)(x, x.new_full((4, 1), 1e-3)), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        matmul = Int8BagMatmul(values)
    finally:
        torch.set_num_threads(before)
    assert matmul.layout.num_parts % num_threads == 0 and torch.equal(matmul(x, x.new_full((4, 1), 1e-3)), expected)


@pytest.mark.parametrize("base", [256, 128])
def test_two_digits_stand_for_a_whole_number(base):
    largest = max_activation(base)
    x = torch.arange(-largest, largest + 1, dtype=torch.float32)[None]
    high, low = split_digits(x.clone(), base).double().chunk(2)
    assert torch.equal((high - base // 2) * base + low - base // 2, x.double())
    assert max(high.max(), low.max()) == base - 1


def test_digits_are_smaller_where_sums_saturate(fresh_check, monkeypatch):
    """Without VNNI, the sum of two products is limited to 16 bits. This stands in for such a processor."""
    class SaturatingProduct:
        def __init__(self, values):
            self.values = values.float()

        def __call__(self, digits, zero_point):
            inputs, weights = (F.pad(tensor.float(), (0, tensor.size(1) % 2)) for tensor in (digits, self.values))
            inputs, weights = inputs.view(len(inputs), 1, -1, 2), weights.view(1, len(weights), -1, 2)
            sums = (inputs * weights).sum(dim=-1).clamp(-2**15, 2**15 - 1).double().sum(dim=-1)
            return (sums - zero_point * self.values.double().sum(dim=1)).float()
    monkeypatch.setattr(int8_matmul, "OneDNNMatmul", SaturatingProduct)
    assert onednn_limits() == (128, 2**20)
    rows, x = quantize_weight(normal(20, 64)), normal(3, 64)
    expected = x.double() @ (rows.values.double() * rows.scales[:, None]).T
    assert (Int8Linear(rows)(x) - expected).norm() < 1e-3 * expected.norm()


def test_products_have_fewer_inputs_where_large_sums_are_rounded(fresh_check, monkeypatch):
    """With AMX, the share of the zero point is subtracted from a float32 number."""
    class RoundingProduct:
        def __init__(self, values):
            self.values = values.double()

        def __call__(self, digits, zero_point):
            return (digits.double() @ self.values.T).float() - zero_point * self.values.sum(dim=1).float()
    monkeypatch.setattr(int8_matmul, "OneDNNMatmul", RoundingProduct)
    assert onednn_limits() == (256, 512)
    rows, x = quantize_weight(normal(20, 3000).abs()), normal(9, 3000)
    layer = Int8Linear(rows)
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))
    assert len(layer.two_digit_matmul.matmuls) == 6


@pytest.mark.parametrize("error", [AttributeError("no such operator"), RuntimeError("not implemented"), None], ids=repr)
def test_without_the_operators_the_error_names_another_dtype(error, fresh_check, monkeypatch):
    def multiply(matmul, digits, zero_point):
        if error:
            raise error
        return torch.zeros(len(digits), 64)
    monkeypatch.setattr(OneDNNMatmul, "__call__", multiply)
    with pytest.raises(ValueError, match=r"^int8 does not work with this torch on this processor: use dtype=float32, without draft=int8$"):
        onednn_limits()
