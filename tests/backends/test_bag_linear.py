"""BagLinear gives the same results as Linear, and embedding bags the same as a matrix product."""
import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from cases import cases
from processors import simulate_processor
from sampling.backends.cpu.bag_linear import BagLinear, make_linear
from sampling.backends.cpu.embedding_bag import BagLayout, EmbeddingBagMatmul, has_fbgemm
from sampling.backends.cpu.packed_linear import NARROW, PackedLinear, is_supported
from streams import normal

pytestmark = [pytest.mark.skipif(not (has_fbgemm() and is_supported()), reason="this torch lacks the operators"),
              pytest.mark.usefixtures("all_threads")]

USES = [ # numbers of rows of consecutive calls, and the call (from 1) that makes the table: by default, eagerly
    ((5, 1, 1, 1, 1, 6, 1, 6), 4, 2), ((1, 1, 2, 1, 1, 1), 6, 1), ((5, 1, 3, 1, 1), None, 2), ((3, 3, 3, 1, 1, 1, 3), 6, 4)]


@pytest.mark.parametrize("uses, gelu, eagerly", cases(USES, [None, "tanh", "none"], [False, True],
    quick=lambda uses, gelu, eagerly: gelu == "tanh" or uses == USES[0]))
def test_the_table_is_made_for_repeated_single_rows_and_frees_the_weight(uses, gelu, eagerly, monkeypatch):
    simulate_processor(monkeypatch, "AMD")
    rows, repeated, first = uses
    making_use = (first if eagerly else repeated) or len(rows) + 1
    weight, bias = normal(300, NARROW) * 0.1, normal(300)
    layer = BagLinear(weight.clone(), bias, eagerly)
    plain = StorageWeakRef(layer.packed_linear.plain_weight().untyped_storage())
    for use, n in enumerate(rows, 1):
        x = normal(n, 1, NARROW, seed=use)
        expected = F.linear(x, weight, bias)
        expected = F.gelu(expected, approximate=gelu) if gelu else expected + x[..., :1]
        found = layer(x, gelu=gelu) if gelu else layer(x, residual=x[..., :1].expand(-1, -1, 300).contiguous())
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        is_packed = eagerly or (use >= 3 and rows[:3] == (3, 3, 3))
        assert (layer.bag_matmul is not None) == (use >= making_use)
        assert (layer.packed_linear is None) == (use >= making_use and not is_packed and max(rows[making_use - 1:use]) == 1)
        assert plain.expired() == (is_packed or use >= making_use)


@pytest.mark.parametrize("out_features, in_features", [(1, 1), (47, 100), (97, 7), (1000, 513)])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_the_product_of_one_token(out_features, in_features, dtype, error):
    weight, x = normal(out_features, in_features).to(dtype), normal(1, in_features, seed=1).to(dtype)
    expected = x.double() @ weight.double().T
    found = EmbeddingBagMatmul(weight)(x.float())
    assert found.dtype == dtype and found.shape == (1, out_features)
    assert (found - expected).abs().max() < error * x.float().norm() * weight.float().norm(dim=1).max()


def test_a_long_sum_is_as_exact_as_a_matrix_product():
    weight, x = normal(NARROW, 8192), normal(1, 8192, seed=1)
    expected = x.double() @ weight.double().T
    found_error, error = ((product - expected).norm() for product in (EmbeddingBagMatmul(weight)(x), x @ weight.T))
    assert found_error < 1.5 * error


@pytest.mark.parametrize("num_streams", [1, 4, 8])
def test_a_table_holds_the_weight(num_streams):
    weight = normal(70, 21)
    layout = BagLayout.of(weight, 16, num_streams)
    table = torch.zeros(layout.num_parts * 21, layout.width)
    layout.fill(table, weight)
    assert torch.equal(layout.weight_of(table), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_plain_weight_comes_back_from_a_table_and_from_a_packed_weight(dtype):
    if not is_supported(dtype):
        pytest.skip("this torch lacks the operators")
    weight = normal(300, NARROW + 7).to(dtype)
    packed = PackedLinear(weight, pack_eagerly=True)
    assert packed.weight is None and torch.equal(packed.plain_weight(), weight)
    assert torch.equal(EmbeddingBagMatmul(weight).weight(), weight)


@pytest.mark.parametrize("processor, shape, expected", [
    ("AMD", (NARROW, NARROW), BagLinear), ("AMD", (NARROW, NARROW - 1), PackedLinear),
    ("Intel", (NARROW, NARROW), PackedLinear), ("others", (NARROW, NARROW), PackedLinear)])
def test_the_processor_and_the_shape_decide_which_layer_is_used(processor, shape, expected, monkeypatch):
    simulate_processor(monkeypatch, processor)
    assert type(make_linear(torch.ones(shape))) is expected
