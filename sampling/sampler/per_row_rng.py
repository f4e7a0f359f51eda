"""A random stream for each row of a batch.

nanoGPT samples its texts one after another from one random stream. Sample k starts where sample k - 1 ended:
k * max_new_tokens * V exponential numbers into the stream. PerRowRNG gives each row of a batch its own generator at
its own offset in that stream. So a batch gets the same tokens as samples that are generated one after another.
"""
from collections import deque
from functools import cache

import torch
from torch import Tensor

from sampling.sampler.mt19937 import advance_mt19937


class PerRowRNG:
    """The Noise of a batch. Each row draws the same numbers as if all earlier samples had been generated before it.

    The stream starts at the seed. On the CPU, nanoGPT first draws num_init_draws 32-bit numbers to initialise its
    model. Then each sample takes draws_per_sample (max_new_tokens) draws of vocab_size exponential numbers.
    A CUDA device has its own stream; all other devices use the CPU's.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu", num_init_draws: int = 0,
                 draws_per_sample: int = 0, vocab_size: int = 0):
        device = torch.device(device)
        self.run_generator = torch.Generator(device if device.type == "cuda" else "cpu").manual_seed(seed)
        if device.type != "cuda": # nanoGPT initialises its model on the CPU
            advance_mt19937(self.run_generator, num_init_draws)
        self.start_state = self.run_generator.get_state() # of sample 0
        self.draws_per_sample, self.vocab_size = draws_per_sample, vocab_size
        self.index = 0 # self.run_generator is at the start of this sample
        self.generators: list[torch.Generator] = [] # one per row
        self.states: list[Tensor] = [] # where the sample of each row starts
        self.numbers: Tensor | None = None # (B, V): the latest draw of each row
        self.is_prefetched = False # whether self.numbers is the next draw
        self.lookahead: deque[Tensor] = deque() # the draws after self.numbers that peek has already made, (1, V) each

    def state_for_sample(self, index: int) -> Tensor:
        """The generator state in which sample number index starts. Increasing indices take the least time."""
        if index < self.index: # the generator cannot go back, so it starts again
            self.run_generator.set_state(self.start_state)
            self.index = 0
        advance_exponential(self.run_generator, (index - self.index) * self.draws_per_sample, self.vocab_size)
        self.index = index
        return self.run_generator.get_state()

    def set_rows(self, states: list[Tensor]) -> None:
        """Begin a batch whose rows start in these states.

        While the number of rows stays the same, their memory stays in place: a CUDA graph may hold it.
        """
        if len(states) != len(self.generators):
            self.generators = [torch.Generator(self.run_generator.device) for _ in states]
            dtype = torch.int64 if self.draws_bits() else torch.float32
            self.numbers = torch.empty(len(states), self.vocab_size, dtype=dtype, device=self.run_generator.device)
        self.states, self.is_prefetched = list(states), False
        for row in range(len(states)):
            self.restart(row)

    def restart(self, row: int) -> None:
        """Reset the generator of this row to the start of its sample."""
        self.generators[row].set_state(self.states[row])
        self.lookahead.clear()

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only."""
        self.generators, self.states = [self.generators[i] for i in rows], [self.states[i] for i in rows]
        self.numbers = self.numbers[:len(rows)]

    def draws_bits(self) -> bool:
        """Whether self.numbers holds 64 random bits for each token. exponentials converts those that are needed."""
        return self.run_generator.device.type == "cpu" and exponential_is_from_bits()

    def prefetch(self) -> None:
        """Draw the numbers that the next __call__ returns.

        A CUDA graph may hold __call__, but prefetch should stay outside, because every generator in a graph costs time.
        """
        if self.lookahead:
            self.numbers.copy_(self.lookahead.popleft())
        else:
            self.draw(self.numbers)
        self.is_prefetched = True

    def draw(self, numbers: Tensor) -> None:
        """Fill numbers (B, V) from the generators of the rows."""
        for row, generator in zip(numbers, self.generators, strict=True):
            if self.draws_bits():
                row.random_(-2**63, None, generator=generator) # all integers of 64 bits
            else:
                row.exponential_(generator=generator)

    def repeat(self) -> None:
        """Let the next __call__ return the numbers of the latest one again."""
        self.is_prefetched = True

    def __call__(self, shape: tuple[int, int], ids: Tensor | None, device: torch.device) -> Tensor:
        """The rows' next exponential numbers (B, V), or those of ids (B, K). shape must be (rows, vocab_size)."""
        if not self.is_prefetched:
            self.prefetch()
        self.is_prefetched = False
        return self.exponentials(self.numbers, ids, device)

    def peek(self, ahead: int, shape: tuple[int, int], ids: Tensor | None, device: torch.device) -> Tensor:
        """The numbers of a later __call__: ahead=0 is the next call, ahead=1 the one after it.

        The batch must have one row. Each number is drawn once: __call__ takes the numbers that peek has drawn.
        """
        if self.is_prefetched: # self.numbers is the first of the upcoming draws
            if ahead == 0:
                return self.exponentials(self.numbers, ids, device)
            ahead -= 1
        while len(self.lookahead) <= ahead:
            self.lookahead.append(torch.empty_like(self.numbers))
            self.draw(self.lookahead[-1])
        return self.exponentials(self.lookahead[ahead], ids, device)

    def exponentials(self, numbers: Tensor, ids: Tensor | None, device: torch.device) -> Tensor:
        """The exponential numbers (B, V) of a draw, or those of ids (B, K)."""
        q = numbers if ids is None else numbers.gather(1, ids.to(numbers.device)) # (B, V) -> (B, K)
        return (exponential_from_bits(q) if self.draws_bits() else q).to(device)


def exponential_from_bits(bits: Tensor) -> Tensor:
    """The exponential numbers that exponential_ computes from the low 53 of each 64 random bits."""
    uniform = (bits & 2**53 - 1).double() * 2.0**-53
    return -torch.log1p(-uniform).float()


@cache
def exponential_is_from_bits() -> bool:
    """Whether exponential_ on this CPU is exponential_from_bits of random_, bit for bit.

    This holds for most builds of torch. random_ takes a quarter of the time of exponential_.
    """
    generator, other = (torch.Generator().manual_seed(1) for _ in range(2))
    drawn = torch.empty(4096, dtype=torch.float32).exponential_(generator=generator)
    bits = torch.empty(4096, dtype=torch.int64).random_(-2**63, None, generator=other)
    return torch.equal(drawn, exponential_from_bits(bits)) and torch.equal(generator.get_state(), other.get_state())


def advance_exponential(generator: torch.Generator, num_calls: int, size: int) -> None:
    """Advance a generator as num_calls calls of exponential_ on size float32 entries would."""
    if num_calls == 0:
        return
    if generator.device.type == "cuda": # its state is a counter: measure one call, then multiply
        start = generator.get_offset()
        torch.empty(size, dtype=torch.float32, device=generator.device).exponential_(generator=generator)
        generator.set_offset(start + num_calls * (generator.get_offset() - start))
    elif exponential_is_from_bits():
        advance_mt19937(generator, 2 * num_calls * size) # 64 bits are two numbers of 32
    else:
        numbers = torch.empty(size, dtype=torch.float32)
        for _ in range(num_calls):
            numbers.exponential_(generator=generator)
