"""Advance torch's CPU generator past many random numbers without drawing them.

The generator is MT19937, the Mersenne Twister (Matsumoto and Nishimura, 1998): an endless sequence
of 32-bit words, in which the last 624 words determine the next one. Each random number is one word
after tempering. A walk computes every word on the way, which takes 2 to 4 ns for each.

A jump computes the 624 words at the destination from words near the start. Each word is computed
from earlier ones with shifts, masks and xor only, so the sequence is linear over GF(2), where
addition is xor. Let x mean "one word further". Then the polynomial x**5 + x**2 means "the xor of
the words 5 further and 2 further". One polynomial P, of degree 19937, gives 0 at every word of the
sequence. So "n words further", x**n, is the same as the remainder x**n mod P, which has at most
19937 terms, all near the start:

    words at the destination = xor of the words i further, over all terms x**i of x**n mod P

The remainder takes log2(n) squarings (Haramoto et al., Efficient Jump Ahead for F2-Linear Random
Number Generators, 2008). A polynomial over GF(2) is an int: bit i is the coefficient of x**i,
addition is ^, times x**k is << k.
"""
from functools import cache

import numpy as np
import torch

NUM_WORDS = 624 # so many determine the next one
DEGREE = 19937 # P's degree: 624 * 32 bits without the 31 that the recurrence ignores
JUMP_THRESHOLD = 2**23 # a jump past this many random numbers, or more, is faster than a walk

# Where the state of torch's CPU generator (CPUGeneratorImpl) has the current block of 624 words, in
# units of 32 bits. Each word takes two of them. Another field says how many words of the block are
# left, plus one.
WORDS = slice(6, 6 + 2 * NUM_WORDS, 2)
LEFT = 2


def advance_mt19937(generator: torch.Generator, count: int) -> None:
    """Advance a CPU generator of torch past count 32-bit random numbers."""
    if count >= JUMP_THRESHOLD:
        jump(generator, count // NUM_WORDS)
        count %= NUM_WORDS
    walk(generator, count)


def walk(generator: torch.Generator, count: int) -> None:
    # They stay in the processor's cache.
    numbers = torch.empty(min(count, 2**16), dtype=torch.int32, device="cpu")
    for start in range(0, count, 2**16):
        numbers[:count - start].random_(generator=generator)


def jump(generator: torch.Generator, num_blocks: int) -> None:
    """Advance a generator to the same place in the block num_blocks (1 or more) later."""
    # The next block, and all words that the highest term can reach from it. The jump starts at the
    # next block, because 31 bits of the current one may come from the seed and not from the
    # recurrence.
    blocks = []
    for _ in range(1 + DEGREE // NUM_WORDS + 1):
        walk(generator, NUM_WORDS)
        fields = generator.get_state().numpy().view(np.uint32)
        blocks.append(fields[WORDS])
    words = np.concatenate(blocks)
    destination = np.zeros(NUM_WORDS, np.uint32)
    for i in exponents(x_pow_mod(NUM_WORDS * (num_blocks - 1))):
        destination ^= words[i:i + NUM_WORDS]
    fields[WORDS] = destination # the other fields are those of this place in any block
    generator.set_state(torch.from_numpy(fields.view(np.uint8)))


@cache
def x_pow_mod(n: int) -> int:
    *low_exponents, _ = exponents(characteristic_polynomial())
    power = 1
    for bit in f"{n:b}": # square and multiply, from the highest bit of n down
        # In a square over GF(2), each x**i becomes x**(2 * i): reading the binary digits in base 4
        # does this.
        power = int(f"{power:b}", 4) << (bit == "1")
        while power >> DEGREE: # P counts as 0, so x**DEGREE can be replaced by the lower terms of P
            high = power >> DEGREE
            power &= (1 << DEGREE) - 1
            for i in low_exponents:
                power ^= high << i
    return power


def read_state(generator: torch.Generator) -> tuple[np.ndarray, int]:
    """The current block of a CPU generator (624,), and how many of its words are used."""
    fields = generator.get_state().numpy().view(np.uint32)
    return fields[WORDS], NUM_WORDS + 1 - int(fields[LEFT])


def exponents(polynomial: int) -> list[int]:
    """The exponents of a polynomial's terms, in ascending order."""
    return [i for i, bit in enumerate(reversed(f"{polynomial:b}")) if bit == "1"]


def characteristic_polynomial() -> int:
    """MT19937's P in closed form (Matsumoto and Nishimura, 1998)."""
    a = 0x9908B0DF # the constant of the recurrence
    p = 1
    for i in range(31):
        p = (p << 623) ^ (p << 396) ^ (a >> i & 1)
    return (p << 624) ^ (p << 397) ^ (a >> 31)
