"""A random stream for each row of a batch.

nanoGPT samples its texts one after another from one random stream: sample k starts k *
max_new_tokens * V exponential numbers into it. RowStreams gives each row of a batch a generator of
its own at this place. So a batch gets the same tokens as samples that are generated one after
another.
"""
import math
from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sampling.sampler.mt19937 import advance_mt19937

VECTOR_SIZE = 16 # normal_ uses another algorithm for smaller tensors


class RunStream:
    """The random stream of a run, from the seed on.

    A CUDA device has its own; all other devices use the CPU's.

    On the CPU, nanoGPT first draws num_init_draws 32-bit numbers to initialise its model. Then each
    sample takes draws_per_sample (max_new_tokens) draws of vocab_size exponential numbers.

    row_type: the class of what for_rows returns; None: RowStreams.
    """

    def __init__(self, seed: int, device: torch.device | str, num_init_draws: int,
                 draws_per_sample: int, vocab_size: int,
                 row_type: "type[RowStreams] | None" = None):
        self.row_type = row_type or RowStreams
        self.device = torch.device(device)
        self.draws_per_sample = draws_per_sample
        self.vocab_size = vocab_size
        is_cuda = self.device.type == "cuda"
        self.generator = torch.Generator(self.device if is_cuda else "cpu").manual_seed(seed)
        if not is_cuda:
            advance_mt19937(self.generator, num_init_draws)
        self.start = self.generator.clone_state()
        self.index = 0 # the index of the sample at whose start the generator is

    def generator_for_sample(self, index: int) -> torch.Generator:
        """A generator at the start of sample number index. Increasing indices take the least time.
        """
        if index < self.index: # the generator cannot go back, so it starts again
            self.generator = self.start.clone_state()
            self.index = 0
        num_draws = (index - self.index) * self.draws_per_sample
        self.index = index
        numbers = torch.empty(self.vocab_size, dtype=torch.float32, device=self.generator.device)
        if self.device.type == "cuda": # the state is a counter: measure one draw, then multiply
            start = self.generator.get_offset()
            draw(numbers, self.generator)
            self.generator.set_offset(start + num_draws * (self.generator.get_offset() - start))
        elif exponential_is_from_bits():
            # 64 bits are two numbers of 32.
            advance_mt19937(self.generator, 2 * num_draws * self.vocab_size)
        else:
            for _ in range(num_draws):
                draw(numbers, self.generator)
        return self.generator.clone_state()

    def for_rows(self, samples: list[int], first_steps: list[int]) -> "RowStreams":
        """The random numbers of a batch, whose rows are samples with these indices."""
        return self.row_type(self, samples, first_steps)


class RowStreams:
    """The random numbers of a batch, whose rows are these samples of the run.

    first_steps: the step of the batch in which each row needs numbers for the first time.
    """

    def __init__(self, run: RunStream, samples: list[int], first_steps: list[int]):
        self.generators = [run.generator_for_sample(index) for index in samples] # one per row
        self.first_steps = first_steps
        self.step = 0 # the step of the next draw
        self.device = run.device
        is_bits = self.device.type == "cpu" and exponential_is_from_bits()
        dtype = torch.int64 if is_bits else torch.float32
        self.numbers = torch.empty(len(samples), run.vocab_size, dtype=dtype, # (B, V)
                                   device=run.generator.device)
        self.ahead: deque[Tensor] = deque() # the numbers of the next steps that were peeked at

    def select_rows(self, rows: list[int]) -> None:
        self.generators = [self.generators[i] for i in rows]
        self.first_steps = [self.first_steps[i] for i in rows]
        self.numbers = self.numbers[:len(rows)]

    def next(self) -> Tensor:
        """The numbers (B, V) of the next step: see exponentials. The next call may overwrite them.
        """
        return self.ahead.popleft() if self.ahead else self.draw_step()

    def peek(self, num_steps: int) -> Tensor:
        """The numbers that next will return after so many other calls. A draft uses them first."""
        while len(self.ahead) <= num_steps:
            self.ahead.append(self.draw_step().clone())
        return self.ahead[num_steps]

    def draw_step(self) -> Tensor:
        self.draw_rows()
        self.step += 1
        return self.numbers.to(self.device)

    def draw_rows(self) -> None:
        """Draw the numbers of the next step for the rows that need them."""
        rows = zip(self.numbers, self.generators, self.first_steps, strict=True)
        for row, generator, first_step in rows:
            if self.step >= first_step:
                draw(row, generator)


def draw(numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Fill a tensor: float32 with exponential numbers, int64 with 64 random bits each."""
    if numbers.dtype == torch.int64:
        return numbers.random_(-2**63, None, generator=generator)
    return numbers.exponential_(generator=generator)


def exponentials(noise: Tensor) -> Tensor:
    """The exponential numbers of the noise that draw has made.

    exponential_ makes the same from 53 of each 64 bits.
    """
    if noise.dtype != torch.int64:
        return noise
    uniform = (noise & 2**53 - 1).double() * 2.0**-53
    return -torch.log1p(-uniform).float()


@cache
def exponential_is_from_bits() -> bool:
    """Whether bits, which are drawn four times as fast, give the numbers of exponential_ here."""
    found = []
    for dtype in torch.float32, torch.int64:
        generator = torch.Generator().manual_seed(1)
        noise = draw(torch.empty(4096, dtype=dtype, device="cpu"), generator)
        found.append([exponentials(noise), generator.get_state()])
    return all(map(torch.equal, *found))


def count_init_draws(tensors: Mapping[str, Any]) -> int:
    """How many 32-bit random numbers nanoGPT's GPT(config) draws on the CPU for a model with these
    tensors, which may be QuantizedWeights.

    It builds the model after it sets the seed. PyTorch initialises every Linear (weight and bias,
    uniform_) and Embedding (normal_). nanoGPT then initialises the weights of both with normal_,
    and every c_proj.weight once more.
    """
    draws = 0
    num_small = 0
    for name, tensor in tensors.items():
        if len(tensor.shape) != 2: # a norm, or a bias
            continue
        size = math.prod(tensor.shape)
        is_embedding = name.endswith(("wte.weight", "wpe.weight"))
        num_normal = 1
        if is_embedding or name.endswith("c_proj.weight"):
            num_normal = 2
        if not is_embedding:
            draws += size
            if name.removesuffix("weight") + "bias" in tensors:
                draws += tensor.shape[0]
        if size < VECTOR_SIZE:
            num_small += num_normal * size
            continue
        draws += num_normal * size
        if size % VECTOR_SIZE: # a partial last vector is drawn again, as a whole one
            draws += num_normal * VECTOR_SIZE
    # For small tensors, normal_ makes two numbers from four draws, and keeps the second number for
    # its next call.
    return draws + 4 * -(-num_small // 2)
