"""A packed Linear gives what a plain one gives, and is packed when that pays."""
import math

import pytest
import torch
import torch.nn.functional as F

from cases import cases
from sampling.backends.cpu import packed_linear
from sampling.backends.cpu.packed_linear import NARROW, PackedLinear, is_supported, pack_thresholds

needs_operators = pytest.mark.skipif(not is_supported(), reason="this torch lacks the operators")


@needs_operators
@pytest.mark.parametrize("rows, packed_on_intel, packed_elsewhere, width, pack_eagerly, processor", [
    pytest.param(*uses.values[0], *case.values, marks=case.marks, id=f"{uses.values[0][0]}-{case.id}")
    for uses in cases([
        ((5, 1, 1, 1), None, 3), ((5, 3, 3, 1), None, 3), ((5, 4, 4, 1), 3, 3), ((7, 7, 8, 1), 2, 2), ((9, 8, 7, 1), None, None),
        ((29, 1, 29, 1), None, None), ((30, 1, 1, 1), None, 1), ((1, 31, 31, 2), 3, 2)], quick=lambda uses: True)
    for case in cases([NARROW - 1, NARROW], [False, True], ["Intel", "AMD"], quick=lambda width, eagerly, processor: width == NARROW and not eagerly)],
    indirect=["processor"])
def test_a_layer_is_packed_for_many_rows_or_for_as_many_rows_twice(rows, packed_on_intel, packed_elsewhere, width, pack_eagerly, processor):
    pass
