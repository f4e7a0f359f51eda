"""From logits to the next token, and the random stream that the choice draws from.

torch.multinomial(probs, 1) is argmax(probs / q) with q exponential, one number for each entry of the
vocabulary in order of id; so is the choice here, and only where q comes from differs. nanoGPT draws its
samples one after another from one stream, so sample k starts k * max_new_tokens * V exponentials into it.
RowDraws gives every row of a batch its own place there: all samples at once, each with the tokens it would
have had alone.
"""
import math
from functools import cache

import numpy as np
import torch
import torch.nn as nn


def exponentials(shape, ids, device):
    """Exponential numbers for shape (B, V) from torch's global generator, of which (B, K) ids pick; None: all.

    On MPS from the CPU's: its own has returned garbage.
    """
    q = torch.empty(shape, device="cpu" if device.type == "mps" else device).exponential_().to(device)
    return q if ids is None else q.gather(1, ids)


def next_token(logits, temperature=1.0, top_k=None, draw=exponentials, *, top_p=None, min_p=None,
               repetition_penalty=1.0, ids=None, among=None, checked=True):
    """(B, V) logits -> (B, 1) ids; the logits stay as they are.

    In the order and with the meaning of transformers: repetition_penalty makes what ids (B, S), the text so far,
    holds less likely; temperature 0 takes the likeliest token; top_k keeps the k likeliest and all that tie
    with the last of them, None or 0 keeps all; top_p the fewest that reach this probability together; min_p those that
    have this share of the likeliest one's. draw gives the exponential numbers. among (K,) are ids that hold the enough
    largest logits of every row, where they are known: the others are not looked at. ValueError where a logit is NaN
    or infinite, unless that is not to be checked: on a GPU it would have to be waited for.
    """
    logits, shape, candidates = logits.float(), logits.shape, None
    if repetition_penalty != 1:
        logits = penalise(logits, ids, repetition_penalty)
    if among is not None:
        logits, candidates = logits[:, among], among.expand(len(logits), -1)
    if temperature == 0:
        if checked:
            require_finite(logits)
        won = logits.argmax(dim=-1, keepdim=True)
        return won if candidates is None else candidates.gather(1, won)
    scaled = logits / temperature
    if checked and not finite(scaled):
        require_finite(logits)
        # Rows so cold that float32 overflows: the limit, where only the likeliest are left.
        limit = torch.zeros_like(logits).masked_fill(logits < logits.amax(dim=-1, keepdim=True), -torch.inf)
        scaled = torch.where(scaled.isfinite().all(dim=-1, keepdim=True), scaled, limit)
    if top_k and top_k < logits.size(-1):
        if checked:
            scaled, found = likeliest(scaled, top_k)
            candidates = found if candidates is None else candidates.gather(1, found)
        else:
            scaled = keep_top_k(scaled, top_k)
    scaled = keep_min_p(keep_top_p(scaled, top_p), min_p)
    won = (scaled.softmax(dim=-1) / draw(shape, candidates, logits.device)).argmax(dim=-1, keepdim=True)
    return won if candidates is None else candidates.gather(1, won)


def enough(temperature=1.0, top_k=None, repetition_penalty=1.0, **more):
    """How many of the largest logits next_token needs for such a choice; None: all."""
    if repetition_penalty != 1:
        return None # it may bring up what was small
    return 1 if temperature == 0 else top_k


def penalise(logits, ids, penalty):
    """Logits (B, V) in which those of ids (B, S) are divided by penalty, or multiplied where negative (CTRL, 2019)."""
    found = logits.gather(1, ids)
    return logits.scatter(1, ids, torch.where(found < 0, found * penalty, found / penalty))


def keep_top_k(logits, k):
    """Logits with -inf for all below the k-th largest."""
    return logits.masked_fill(logits < logits.topk(k).values[:, -1:], -torch.inf)


def keep_top_p(logits, top_p):
    """Logits with -inf for all but the fewest that reach top_p together (nucleus sampling, Holtzman et al., 2019)."""
    if top_p is None or top_p >= 1:
        return logits
    rising, order = logits.sort(dim=-1)
    out = rising.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    out[:, -1] = False # the likeliest stays
    return logits.masked_fill(torch.empty_like(out).scatter_(1, order, out), -torch.inf)


def keep_min_p(logits, min_p):
    """Logits with -inf for what has less than min_p of the likeliest one's probability (Nguyen et al., 2024)."""
    if not min_p:
        return logits
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), -torch.inf)


def likeliest(logits, k):
    """(B, V) logits -> the k largest of each row and all that tie with the last of them, and their ids: two (B, K).

    Where a row has fewer than others it is filled up with -inf.
    """
    values, ids = logits.topk(min(k + 64, logits.size(-1))) # some more: in bfloat16 there are always ties
    if (values[:, -1] == values[:, k - 1]).any():
        most = (logits >= values[:, k - 1:k]).sum(dim=-1).max()
        values, ids = logits.topk(int(most))
    return values.masked_fill(values < values[:, k - 1:k], -torch.inf), ids


def finite(logits):
    """Whether every logit is finite and none too far from another for float32, in one pass over them."""
    low, high = logits.aminmax()
    return math.isfinite(high - low)


def require_finite(logits):
    """Raise ValueError where a logit is NaN or infinite."""
    if not logits.isfinite().all():
        raise ValueError("the network gave logits that are NaN or infinite: the checkpoint may be damaged or its "
                         "training diverged, or dtype float16 overflows (try dtype=bfloat16 or float32)")


class RowDraws:
    """exponentials for a batch, each row drawing as if the samples before it had been drawn before it.

    The stream starts at seed, past initialisation numbers; a sample spends steps draws over width tokens.
    On a CUDA device it is CUDA's own stream, elsewhere the CPU's.
    """

    def __init__(self, seed, device="cpu", initialisation=0, steps=0, width=0):
        device = torch.device(device)
        self.stream = torch.Generator(device if device.type == "cuda" else "cpu").manual_seed(seed)
        if device.type != "cuda": # networks are initialised on the CPU
            skip_numbers(self.stream, initialisation)
        self.steps, self.width = steps, width
        self.sample = 0 # that the generator has come to
        self.generators, self.starts, self.numbers, self.drawn = [], [], None, False

    def place_of(self, sample):
        """Where in the stream this sample of the run starts: for for_rows. Samples are asked for in order."""
        skip_exponentials(self.stream, (sample - self.sample) * self.steps, self.width)
        self.sample = sample
        return self.stream.get_state()

    def for_rows(self, places):
        """Turn to a batch whose rows start at these places; returns self.

        As long as their number stays, the rows keep their memory: a CUDA graph may hold it.
        """
        if len(places) != len(self.generators):
            self.generators = [torch.Generator(self.stream.device) for _ in places]
            dtype = torch.float64 if self.from_uniforms() else torch.float32
            self.numbers = torch.empty(len(places), self.width, dtype=dtype, device=self.stream.device)
        self.starts, self.drawn = list(places), False
        for row in range(len(places)):
            self.restart(row)
        return self

    def restart(self, row):
        """Back to where the row's sample starts."""
        self.generators[row].set_state(self.starts[row])

    def keep(self, rows):
        """Go on with these rows alone."""
        self.generators, self.starts = [self.generators[i] for i in rows], [self.starts[i] for i in rows]
        self.numbers = self.numbers[:len(rows)]

    def from_uniforms(self):
        """Whether exponentials are made here, from uniform numbers, and only where they are needed."""
        return self.stream.device.type == "cpu" and exponentials_are_uniforms()

    def ahead(self):
        """Draw what the next call gives. A CUDA graph may hold that call, but every generator in it costs time."""
        draw = torch.Tensor.uniform_ if self.from_uniforms() else torch.Tensor.exponential_
        for row, generator in zip(self.numbers, self.generators, strict=True):
            draw(row, generator=generator)
        self.drawn = True

    def __call__(self, shape, ids, device):
        """exponentials from the rows' own streams; shape is (count, width)."""
        if not self.drawn:
            self.ahead()
        self.drawn = False
        q = self.numbers if ids is None else self.numbers.gather(1, ids.to(self.numbers.device))
        if self.from_uniforms():
            q = -torch.log1p(-q).float() # for what top-k left alone
        return q.to(device)


@cache
def exponentials_are_uniforms():
    """Whether exponential_ on this CPU is -log1p(-u) of a float64 uniform_, bit for bit."""
    one, other = (torch.Generator().manual_seed(1) for _ in range(2))
    drawn = torch.empty(4096).exponential_(generator=one)
    made = -torch.log1p(-torch.empty(4096, dtype=torch.float64).uniform_(generator=other)).float()
    return torch.equal(drawn, made) and torch.equal(one.get_state(), other.get_state())


def skip_exponentials(generator, calls, width):
    """Move the generator on as calls times exponential_ over width float32 entries would."""
    if calls == 0:
        return
    if generator.device.type == "cuda":
        start = generator.get_offset()
        torch.empty(width, device=generator.device).exponential_(generator=generator)
        generator.set_offset(start + calls * (generator.get_offset() - start))
    elif exponentials_are_uniforms():
        skip_numbers(generator, 2 * calls * width)
    else:
        drawn = torch.empty(width)
        for _ in range(calls):
            drawn.exponential_(generator=generator)


def skip_numbers(generator, count):
    """Move a CPU generator past count 32-bit numbers.

    numpy's MT19937 is the same algorithm and runs through a number in 1.4 ns. The places in torch's state
    are those of its CPUGeneratorImpl: how many numbers are left and which is next (both 32 bits wide,
    at bytes 8 and 16), then 624 words of 64 bits that hold 32 each.
    """
    if count == 0:
        return
    state = generator.get_state()
    words = state.numpy().view(np.uint32)
    key, place = words[6:6 + 2 * 624:2], 625 - int(words[2])
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": place}}
    if count >= FAR:
        twister.random_raw(624 - place, output=False)
        blocks, count = divmod(count - (624 - place), 624)
        jump(twister, blocks)
    twister.random_raw(count, output=False)
    key[:], place = twister.state["state"].values()
    words[2], words[4] = 625 - place, place
    generator.set_state(state)


# From here on a jump is quicker than a run.
FAR = 2**24


def jump(twister, blocks):
    """Move an MT19937 that stands at a block's end on by so many blocks, one or more, of 624 numbers.

    Every word is a sum over GF(2) of earlier ones, so the words n further on are the sum of those near
    by that the polynomial t**n mod P names (Haramoto et al., Efficient jump ahead for F2-linear random
    number generators, 2008).
    """
    near = []
    for _ in range(1 + DEGREE // 624 + 1):
        twister.random_raw(624, output=False)
        near.append(twister.state["state"]["key"])
    polynomial = power_of_t(624 * (blocks - 1)).to_bytes(DEGREE // 8 + 1, "little")
    named = np.flatnonzero(np.unpackbits(np.frombuffer(polynomial, np.uint8), bitorder="little"))
    words, key = np.concatenate(near), np.zeros(624, np.uint32)
    for i in named.tolist():
        key ^= words[i:i + 624]
    twister.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": 624}}


# Polynomials over GF(2) are whole numbers here, bit i standing for t**i.
DEGREE = 19937


@cache
def power_of_t(n):
    """t**n mod MT19937's characteristic polynomial."""
    tail = [i for i, bit in enumerate(reversed(f"{characteristic():b}")) if bit == "1"][:-1]
    power = 1
    for bit in f"{n:b}":
        power = int(f"{power:b}", 4) << (bit == "1") # the square: its bits with a 0 between each two
        while power >> DEGREE: # t**DEGREE is the sum of the tail
            high, power = power >> DEGREE, power & ((1 << DEGREE) - 1)
            for i in tail:
                power ^= high << i
    return power


def characteristic():
    """MT19937's characteristic polynomial, in Matsumoto and Nishimura's closed form (Mersenne Twister, 1998)."""
    a = 0x9908B0DF
    p = 1
    for i in range(31):
        p = (p << 623) ^ (p << 396) ^ (a >> i & 1)
    return (p << 624) ^ (p << 397) ^ (a >> 31)


def initialisation_numbers(model):
    """How many 32-bit numbers nanoGPT's constructor draws on the CPU for this network before it samples.

    PyTorch initialises every Linear (weight and bias) and Embedding, then nanoGPT draws the weights
    of both again and those of every c_proj a third time; its tied head counts as a Linear of its own.
    normal_ spends one number an entry, and 16 more to redo an end that is no multiple of 16. Of fewer
    than 16 entries it makes two at a time, from four numbers, and keeps what is left over for the next.
    """
    count = few = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        size, linear = module.weight.numel(), isinstance(module, nn.Linear)
        if linear: # its own initialisation is uniform
            count += size + (module.bias.numel() if module.bias is not None else 0)
        times = 2 if not linear or name.endswith("c_proj") else 1
        if size < 16:
            few += times * size
        else:
            count += times * (size + (16 if size % 16 else 0))
    return count + 4 * -(-few // 2)
