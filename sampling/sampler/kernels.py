"""Random numbers and the choice of tokens on a CPU: plain loops, compiled by numba, with a thread
for each row.

Axes: B rows, V vocabulary entries, K candidates.
"""
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from sampling import jit
from sampling.sampler.mt19937 import NUM_WORDS, read_state
from sampling.sampler.row_streams import RowStreams, RunStream

Array = np.ndarray
inner = njit(**jit.OPTIONS) # without fastmath: the numbers are torch's to the last bit
WORK_PER_LOGIT = 8 # multiply-adds that take as long
MINUS_INFINITY = np.float32(-np.inf)


@inner
def mix(word: np.uint32, next_word: np.uint32) -> np.uint32:
    bits = (word & np.uint32(0x80000000)) | (next_word & np.uint32(0x7FFFFFFF))
    low_bit = bits & np.uint32(1)
    return (bits >> np.uint32(1)) ^ ((np.uint32(0) - low_bit) & np.uint32(0x9908B0DF))


@inner
def twist(words: Array) -> None:
    """Replace a block of MT19937 by the next one, in three loops that LLVM can vectorise: a loop
    reads only words that it has not written yet, or wrote at least 227 words before.
    """
    for i in range(227):
        words[i] = words[i + 397] ^ mix(words[i], words[i + 1])
    for i in range(227, 454):
        words[i] = words[i - 227] ^ mix(words[i], words[i + 1])
    for i in range(454, 623):
        words[i] = words[i - 227] ^ mix(words[i], words[i + 1])
    words[623] = words[396] ^ mix(words[623], words[0])


@inner
def temper(word: np.uint32) -> np.uint32:
    word ^= word >> np.uint32(11)
    word ^= (word << np.uint32(7)) & np.uint32(0x9D2C5680)
    word ^= (word << np.uint32(15)) & np.uint32(0xEFC60000)
    return word ^ (word >> np.uint32(18))


@inner
def draw_row(words: Array, place: int, numbers: Array) -> int:
    """Fill numbers (V,) with 64 random bits each.

    words (624,): the generator's block, which the next block replaces when it is used up. place:
    how many of its words are used. Returns the new place.
    """
    halves = np.empty(2 * len(numbers), np.uint32)
    num_done = 0
    while num_done < len(halves):
        if place == NUM_WORDS:
            twist(words)
            place = 0
        source = words[place:]
        target = halves[num_done:num_done + len(source)]
        for i in range(len(target)):
            target[i] = temper(source[i])
        place += len(target)
        num_done += len(target)
    high = halves[::2]
    low = halves[1::2]
    for i in range(len(numbers)):
        numbers[i] = (np.int64(high[i]) << np.int64(32)) | np.int64(low[i])
    return place


@jit.parallel
def draw_noise(words: Array, places: Array, is_drawn: Array, numbers: Array) -> None:
    """Fill numbers (B, V) with 64 random bits each, as torch's random_ does, in the rows for which
    is_drawn (B,) is True.

    words (B, 624), places (B,): the state of each row's generator, which advances.
    """
    for r in prange(len(numbers)):
        if is_drawn[r]:
            places[r] = draw_row(words[r], places[r], numbers[r])


@inner
def kth_largest(values: Array, k: int) -> np.float32:
    """The k-th largest value.

    np.partition would take numba four seconds to compile.
    """
    # A heap of the k largest so far: the one at i is at most those at 2 * i + 1 and 2 * i + 2.
    heap = np.empty(k, np.float32)
    for i in range(k):
        heap[i] = MINUS_INFINITY
    for value in values:
        if value <= heap[0]:
            continue
        place = 0
        child = 1
        while child < k:
            if child + 1 < k and heap[child + 1] < heap[child]:
                child += 1
            if heap[child] >= value:
                break
            heap[place] = heap[child]
            place = child
            child = 2 * place + 1
        heap[place] = value
    return heap[0]


@inner
def find_candidates(logits: Array, k: int) -> Array:
    """The ids of the k largest logits (V,), and of all that equal the k-th, in order."""
    bound = kth_largest(logits, k) if k < len(logits) else MINUS_INFINITY
    ids = np.empty(len(logits), np.int32)
    num_found = 0
    for i in range(len(logits)):
        if logits[i] >= bound:
            ids[num_found] = i
            num_found += 1
    return ids[:num_found]


@inner
def choose_from_row(logits: Array, temperature: np.float32, k: int,
                    numbers: Array) -> tuple[int, np.float32]:
    """The id with the largest score, and how far this score is ahead of the next one, as the
    difference of their logarithms. A score is probability / -log(1 - u); u is 53 random bits.
    """
    scaled = np.empty(len(logits), np.float32)
    for i in range(len(logits)):
        scaled[i] = logits[i] / temperature
    ids = find_candidates(scaled, k)
    largest = MINUS_INFINITY
    for i in ids:
        largest = max(largest, scaled[i])
    best_id = 0
    best = second = np.float32(0)
    for i in ids:
        probability = np.exp(scaled[i] - largest) # times a constant, which changes no order
        u = np.float64(numbers[i] & np.int64(2**53 - 1)) * 2.0**-53
        # -log(1 - u) >= u, so a score is at most probability / u. Most scores are too small by this
        # alone, and need no logarithm, which takes longest. 0.999999 allows for rounding.
        if probability < second * u * 0.999999:
            continue
        score = probability / np.float32(-np.log1p(-u))
        if score > best:
            second = best
            best = score
            best_id = i
        elif score > second:
            second = score
    return best_id, np.log(best) - np.log(second)


@jit.parallel
def choose(logits: Array, temperature: np.float32, k: int, numbers: Array, ids: Array,
           leads: Array) -> None:
    """Choose an id for each row of logits (B, V) with the numbers (B, V) of draw_noise.

    Sets ids and leads, (B,) each.
    """
    for r in prange(len(logits)):
        ids[r], leads[r] = choose_from_row(logits[r], temperature, k, numbers[r])


def example_calls() -> dict[jit.Kernel, tuple]:
    """The kernels, with arguments of the types that they get."""
    numbers = np.zeros((1, 1), np.int64)
    words = np.zeros((1, NUM_WORDS), np.uint32)
    logits = np.zeros((1, 1), np.float32)
    return {draw_noise: (words, numbers[0], np.ones(1, np.bool_), numbers),
            choose: (logits, logits[0, 0], 1, numbers, numbers[0], logits[0])}


class KernelStreams(RowStreams):
    """RowStreams of a CPU, which draw with a kernel."""

    def __init__(self, run: RunStream, samples: list[int], first_steps: list[int]):
        super().__init__(run, samples, first_steps)
        words, places = zip(*map(read_state, self.generators), strict=True)
        self.words = np.stack(words) # (B, 624)
        self.places = np.array(places) # (B,)

    def select_rows(self, rows: list[int]) -> None:
        super().select_rows(rows)
        self.words = self.words[rows]
        self.places = self.places[rows]

    def draw_rows(self) -> None:
        work = WORK_PER_LOGIT * self.numbers.numel()
        is_drawn = self.step >= np.array(self.first_steps)
        jit.launch(draw_noise, work, self.words, self.places, is_drawn, self.numbers.numpy())


def choose_ids(logits: Tensor, temperature: float, top_k: int | None,
               noise: Tensor) -> tuple[Tensor, Tensor]:
    """The ids (B, 1) for logits and noise (B, V), and how far the score of each is ahead (B,): see
    choose_from_row.
    """
    ids = torch.empty(len(logits), 1, dtype=torch.int64)
    leads = torch.empty(len(logits), dtype=torch.float32)
    work = WORK_PER_LOGIT * logits.numel()
    k = top_k or logits.size(1)
    jit.launch(choose, work, logits.contiguous().numpy(), np.float32(temperature), k,
               noise.numpy(), ids[:, 0].numpy(), leads.numpy())
    return ids, leads
