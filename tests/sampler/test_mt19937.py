"""Advancing torch's CPU generator without drawing random numbers."""
import numpy as np
import pytest
import torch

from sampling.sampler import mt19937
from sampling.sampler.mt19937 import advance_mt19937, characteristic_polynomial, exponents, next_block, x_pow_mod

slow = pytest.mark.slow


@pytest.mark.parametrize("before", [1, 624, *(pytest.param(n, marks=slow) for n in (0, 623, 625, 1000))])
@pytest.mark.parametrize("count", [0, 1, 623, 123456, *(pytest.param(n, marks=slow) for n in (622, 624, 625, 5000, 624 * 50))])
@pytest.mark.parametrize("threshold", [mt19937.JUMP_THRESHOLD, 2000], ids=["walk", "jump"])
def test_advancing_equals_drawing(before, count, threshold, monkeypatch):
    monkeypatch.setattr(mt19937, "JUMP_THRESHOLD", threshold)
    drawn, advanced = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for generator in drawn, advanced:
        torch.empty(before).uniform_(generator=generator)
    torch.empty(count).uniform_(generator=drawn)
    advance_mt19937(advanced, count)
    assert torch.equal(drawn.get_state(), advanced.get_state())


def test_a_jump_equals_several_short_advances():
    walked, jumped = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for _ in range(4):
        advance_mt19937(walked, mt19937.JUMP_THRESHOLD - 1)
    advance_mt19937(jumped, 4 * (mt19937.JUMP_THRESHOLD - 1))
    assert torch.equal(walked.get_state(), jumped.get_state())


def test_the_characteristic_polynomial_annihilates_the_sequence():
    twister = np.random.MT19937(5)
    twister.random_raw(624, output=False)
    words = np.concatenate([next_block(twister) for _ in range(33)])
    terms = exponents(characteristic_polynomial())
    assert terms[-1] == mt19937.DEGREE
    assert not np.bitwise_xor.reduce([words[i:i + 600] for i in terms]).any()


@pytest.mark.parametrize("n, terms", [(0, [0]), (1, [1]), (624, [624]), (19936, [19936])], ids=str)
def test_powers_below_the_degree_are_their_own_remainder(n, terms):
    assert exponents(x_pow_mod(n)) == terms


def test_x_to_the_degree_reduces_to_the_lower_terms_of_the_polynomial():
    assert exponents(x_pow_mod(mt19937.DEGREE)) == exponents(characteristic_polynomial())[:-1]
