"""Advance torch's CPU generator past many random numbers without drawing them.

The generator is MT19937, the Mersenne Twister (Matsumoto and Nishimura, 1998). It is an endless sequence of 32-bit
words, in which the last 624 words determine the next one. Each random number is one word after tempering.

A walk computes every word on the way. numpy's MT19937 needs 1.4 to 3 ns per word.

A jump computes the 624 words at the destination from words near the start. Each word is computed from earlier words
with shifts, masks and xor only. So the sequence is linear over GF(2), where addition is xor. Let x mean "one word
further". Then a polynomial has a meaning too: x**5 + x**2 is "the xor of the words 5 further and 2 further".
The sequence has a characteristic polynomial P of degree 19937: at every word of the sequence, P gives 0. So adding
multiples of P to a polynomial changes nothing, and "n words further", x**n, is the same as the remainder
x**n mod P. For any n, this remainder has at most 19937 terms, all near the start:

    words at the destination = xor of the words i further, over all terms x**i of x**n mod P

The remainder takes log2(n) squarings, and the result is exact.
(Haramoto et al., Efficient Jump Ahead for F2-Linear Random Number Generators, 2008.)

A polynomial over GF(2) is stored as an int: bit i is the coefficient of x**i, addition is ^, and multiplication by
x**k is << k.
"""
from functools import cache

import numpy as np
import torch

NUM_WORDS = 624 # that determine the next one
DEGREE = 19937 # of the characteristic polynomial: 624 * 32 bits without the 31 that the recurrence ignores
JUMP_THRESHOLD = 2**23 # a jump past this many random numbers, or more, is faster than a walk

# The layout of torch's CPU generator state (CPUGeneratorImpl), in units of 32 bits. Each word takes 64 bits.
NUM_LEFT, NEXT, WORDS = 2, 4, slice(6, 6 + 2 * NUM_WORDS, 2)


def advance_mt19937(generator: torch.Generator, count: int) -> None:
    """Advance a CPU generator of torch past count 32-bit random numbers."""
    if count == 0:
        return
    state = generator.get_state()
    fields = state.numpy().view(np.uint32) # shares state's memory
    position = NUM_WORDS + 1 - int(fields[NUM_LEFT]) # of the next number in its block of 624 words
    twister = make_twister(fields[WORDS], position)
    if count >= JUMP_THRESHOLD:
        rest_of_block = NUM_WORDS - position
        twister.random_raw(rest_of_block, output=False)
        num_blocks, count = divmod(count - rest_of_block, NUM_WORDS)
        twister = jump_ahead(twister, num_blocks)
    twister.random_raw(count, output=False)
    end = twister.state["state"]
    fields[WORDS] = end["key"]
    fields[NUM_LEFT], fields[NEXT] = NUM_WORDS + 1 - end["pos"], end["pos"]
    generator.set_state(state)


def make_twister(words: np.ndarray, position: int) -> np.random.MT19937:
    """numpy's generator with these 624 words. The next number is words[position]."""
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": position}}
    return twister


def jump_ahead(twister: np.random.MT19937, num_blocks: int) -> np.random.MT19937:
    """A generator that is num_blocks (1 or more) blocks of 624 words after twister, which is at the end of its block.

    This also advances twister, but only by a few blocks.
    """
    # The next block, and all words that the highest term can reach from it. The jump starts at the next block, because
    # 31 bits of the current block may come from the seed and not from the recurrence.
    words = np.concatenate([next_block(twister) for _ in range(1 + DEGREE // NUM_WORDS + 1)])
    destination = np.zeros(NUM_WORDS, np.uint32)
    for i in exponents(x_pow_mod(NUM_WORDS * (num_blocks - 1))):
        destination ^= words[i:i + NUM_WORDS]
    return make_twister(destination, NUM_WORDS)


def next_block(twister: np.random.MT19937) -> np.ndarray:
    """Advance twister from the end of its block to the end of the next one. Returns the 624 words of that block."""
    twister.random_raw(NUM_WORDS, output=False)
    return twister.state["state"]["key"]


@cache
def x_pow_mod(n: int) -> int:
    """The polynomial x**n mod P, where P is MT19937's characteristic polynomial."""
    *low_exponents, _ = exponents(characteristic_polynomial())
    power = 1
    for bit in f"{n:b}": # square and multiply, from the highest bit of n down
        power = square(power) << (bit == "1")
        while power >> DEGREE: # P counts as 0, so x**DEGREE can be replaced by the lower terms of P
            high, power = power >> DEGREE, power & ((1 << DEGREE) - 1)
            for i in low_exponents:
                power ^= high << i
    return power


def square(polynomial: int) -> int:
    """The square: each x**i becomes x**(2 * i), because mixed terms occur twice and cancel.

    So a 0 is inserted between any two bits. Reading the binary digits in base 4 does the same.
    """
    return int(f"{polynomial:b}", 4)


def exponents(polynomial: int) -> list[int]:
    """The exponents of a polynomial's terms, in ascending order."""
    data = np.frombuffer(polynomial.to_bytes(DEGREE // 8 + 1, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(data, bitorder="little")).tolist()


def characteristic_polynomial() -> int:
    """MT19937's characteristic polynomial P, of degree 19937, in closed form (Matsumoto and Nishimura, 1998)."""
    a = 0x9908B0DF # the constant of the recurrence
    p = 1
    for i in range(31):
        p = (p << 623) ^ (p << 396) ^ (a >> i & 1)
    return (p << 624) ^ (p << 397) ^ (a >> 31)
