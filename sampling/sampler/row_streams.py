"""A random stream for each row of a batch.

nanoGPT samples its texts one after another from one random stream. Sample k starts where sample k - 1 ended:
k * max_new_tokens * V exponential numbers into the stream. RowStreams gives each row of a batch its own generator at
its own offset in that stream. So a batch gets the same tokens as samples that are generated one after another.
"""
from copy import copy
from functools import cache

import torch
from torch import Tensor

from sampling.sampler.mt19937 import advance_mt19937


class RunStream:
    """The random stream of a run.

    It starts at the seed. On the CPU, nanoGPT first draws num_init_draws 32-bit numbers to initialise its model. Then
    each sample takes draws_per_sample (max_new_tokens) draws of vocab_size exponential numbers.
    A CUDA device has its own stream; all other devices use the CPU's.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu", num_init_draws: int = 0,
                 draws_per_sample: int = 0, vocab_size: int = 0):
        self.device, self.draws_per_sample, self.vocab_size = torch.device(device), draws_per_sample, vocab_size
        is_cuda = self.device.type == "cuda"
        self.generator = torch.Generator(self.device if is_cuda else "cpu").manual_seed(seed)
        if not is_cuda:
            advance_mt19937(self.generator, num_init_draws)
        self.start, self.index = self.generator.clone_state(), 0 # the generator is at the start of this sample

    def generator_for_sample(self, index: int) -> torch.Generator:
        """A generator at the start of sample number index. Increasing indices take the least time."""
        if index < self.index: # the generator cannot go back, so it starts again
            self.generator, self.index = self.start.clone_state(), 0
        advance_exponential(self.generator, (index - self.index) * self.draws_per_sample, self.vocab_size)
        self.index = index
        return self.generator.clone_state()


class RowStreams:
    """The random numbers of a batch, whose rows are these samples of the run.

    first_steps: the step of the batch in which each row needs numbers for the first time; None: all in step 0.
    """

    def __init__(self, run: RunStream, samples: list[int], first_steps: list[int] | None = None):
        self.generators = [run.generator_for_sample(index) for index in samples] # one per row
        self.first_steps, self.step = first_steps or [0] * len(samples), 0 # the step of the next draw
        self.device, source = run.device, run.generator.device
        dtype = torch.int64 if self.device.type == "cpu" and exponential_is_from_bits() else torch.float32
        self.numbers = torch.empty(len(samples), run.vocab_size, dtype=dtype, device=source) # (B, V): the latest draw

    def select_rows(self, rows: list[int]) -> None:
        self.generators, self.first_steps = [self.generators[i] for i in rows], [self.first_steps[i] for i in rows]
        self.numbers = self.numbers[:len(rows)]

    def copy(self) -> "RowStreams":
        """Streams that draw the numbers of the next steps, but leave these streams where they are."""
        other = copy(self)
        other.generators = [generator.clone_state() for generator in self.generators]
        return other

    def next(self) -> Tensor:
        """The numbers (B, V) of the next step: see exponentials. The next call may overwrite them."""
        for row, generator, first_step in zip(self.numbers, self.generators, self.first_steps, strict=True):
            if self.step < first_step: # the row needs none yet
                continue
            if row.dtype == torch.int64:
                row.random_(-2**63, None, generator=generator) # all integers of 64 bits
            else:
                row.exponential_(generator=generator)
        self.step += 1
        return self.numbers.to(self.device)


def exponentials(noise: Tensor, ids: Tensor | None) -> Tensor:
    """The exponential numbers of the ids (B, K), or of all entries if ids is None.

    noise (B, V): exponential numbers, or 64 random bits for each, of which only those of the ids are converted.
    """
    noise = noise if ids is None else noise.gather(1, ids) # (B, V) -> (B, K)
    return exponential_from_bits(noise) if noise.dtype == torch.int64 else noise


def exponential_from_bits(bits: Tensor) -> Tensor:
    """The exponential numbers that exponential_ computes from the low 53 of each 64 random bits."""
    uniform = (bits & 2**53 - 1).double() * 2.0**-53
    return -torch.log1p(-uniform).float()


@cache
def exponential_is_from_bits() -> bool:
    """Whether random_, which is four times as fast, and exponential_from_bits give the numbers of exponential_ here."""
    generator, other = (torch.Generator().manual_seed(1) for _ in range(2))
    drawn = torch.empty(4096, dtype=torch.float32).exponential_(generator=generator)
    bits = torch.empty(4096, dtype=torch.int64).random_(-2**63, None, generator=other)
    return torch.equal(drawn, exponential_from_bits(bits)) and torch.equal(generator.get_state(), other.get_state())


def advance_exponential(generator: torch.Generator, num_calls: int, size: int) -> None:
    """Advance a generator as num_calls calls of exponential_ on size float32 entries would."""
    numbers = torch.empty(size, dtype=torch.float32, device=generator.device)
    if generator.device.type == "cuda": # its state is a counter: measure one call, then multiply
        start = generator.get_offset()
        numbers.exponential_(generator=generator)
        generator.set_offset(start + num_calls * (generator.get_offset() - start))
    elif exponential_is_from_bits():
        advance_mt19937(generator, 2 * num_calls * size) # 64 bits are two numbers of 32
    else:
        for _ in range(num_calls):
            numbers.exponential_(generator=generator)
