"""PackedLinear gives the same results as Linear, and packs its weight when that saves time."""
import math

import pytest
import torch
import torch.nn.functional as F

from cases import cases
from sampling.backends.cpu import packed_linear
from sampling.backends.cpu.packed_linear import NARROW, PackedLinear, is_supported, pack_thresholds

pytestmark = pytest.mark.usefixtures("all_threads")
needs_operators = pytest.mark.skipif(not is_supported(), reason="this torch lacks the operators")

USES = [ # numbers of rows of consecutive calls, and the call (from 1) that packs the layer: on Intel, elsewhere
    ((5, 1, 1, 1), None, 4), ((5, 3, 3, 3), None, 4), ((5, 4, 4, 4), 4, 4), ((7, 7, 7, 8), 3, 3), ((7, 7, 8, 8), None, None),
    ((9, 8, 7, 1), None, None), ((29, 1, 29, 1), None, None), ((30, 1, 1, 1), None, 1), ((31, 31, 31, 2), 3, 1)]


@needs_operators
@pytest.mark.parametrize("uses, width, pack_eagerly, processor", cases(USES, [NARROW - 1, NARROW], [False, True], ["Intel", "others"],
    quick=lambda uses, width, pack_eagerly, processor: (not pack_eagerly and width == NARROW) or uses == USES[2]),
    indirect=["processor"])
def test_a_layer_is_packed_eagerly_or_for_many_rows_or_for_repeated_row_counts(uses, width, pack_eagerly, processor, monkeypatch):
    monkeypatch.setattr(packed_linear, "INTEL", packed_linear.INTEL._replace(min_rows_once=math.inf))
    monkeypatch.setattr(packed_linear, "OTHERS", packed_linear.OTHERS._replace(min_rows_once=30))
    rows, on_intel, elsewhere = uses
    packing_use = 0 if pack_eagerly else on_intel if processor == "Intel" else elsewhere
    weight, bias = torch.randn(NARROW, width), torch.randn(NARROW)
    layer = PackedLinear(weight, bias, pack_eagerly)
    for use, n in enumerate(rows, 1):
        x, residual = torch.randn(n, width), torch.randn(n, NARROW)
        torch.testing.assert_close(layer(x, residual=residual), F.linear(x, weight, bias) + residual, atol=1e-4, rtol=1e-4)
        is_packed = packing_use is not None and use >= packing_use
        assert (layer.packed is not None) == is_packed
        assert (layer.weight is None) == (is_packed and width >= NARROW), "a packed layer frees the unpacked weight"


@pytest.mark.parametrize("cpuinfo, expected", [("vendor_id\t: GenuineIntel\n", "INTEL"), ("vendor_id\t: AuthenticAMD\n", "AMD"),
                                               ("model name\t: ARMv8\n", "OTHERS"), (None, "AMD")])
def test_thresholds_depend_on_the_processor(cpuinfo, expected, monkeypatch):
    monkeypatch.setattr(packed_linear, "has_fbgemm", lambda: True)
    def read_text(path):
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo
    monkeypatch.setattr(packed_linear.Path, "read_text", read_text)
    monkeypatch.setattr(packed_linear.platform, "processor", lambda: "AMD64 Family 25 Model 80 Stepping 0, AuthenticAMD")
    packed_linear.cpu_info.cache_clear()
    assert pack_thresholds(torch.float32) is getattr(packed_linear, expected)
    assert pack_thresholds(torch.bfloat16) is packed_linear.OTHERS
    packed_linear.cpu_info.cache_clear()
