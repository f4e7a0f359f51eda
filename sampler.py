"""From logits to the next token, and the random stream that the choice draws from.

torch.multinomial(probs, 1) is argmax(probs / q) with q exponential, one number for each entry of the
vocabulary in order of id. nanoGPT draws its samples one after another from one stream, so sample k
starts k * max_new_tokens * V exponentials into it. RowDraws gives every row of a batch its own place
there: all samples at once, each with the tokens it would have had alone.
"""
from functools import cache
from threading import Thread

import numpy as np
import torch
import torch.nn as nn


def multinomial(probs):
    """(B, V) probabilities -> (B, 1) ids drawn from torch's global generator; on MPS from the CPU's.

    MPS's own has returned garbage.
    """
    if probs.device.type == "mps":
        return torch.multinomial(probs.cpu(), num_samples=1).to(probs.device)
    return torch.multinomial(probs, num_samples=1)


def next_token(logits, temperature=1.0, top_k=None, draw=multinomial):
    """(B, V) logits -> (B, 1) ids; the logits stay as they are.

    temperature 0 takes the likeliest token; top_k keeps the k likeliest and all that tie with the last
    of them, None or 0 keeps all; draw turns (B, V) probabilities into (B, 1) ids. ValueError where a logit
    is NaN or infinite.
    """
    logits = logits.float()
    if temperature == 0:
        require_finite(logits)
        return logits.argmax(dim=-1, keepdim=True)
    scaled = logits / temperature
    if not finite(scaled):
        require_finite(logits)
        # So cold that float32 overflows: the limit, where only the likeliest are left.
        scaled = torch.zeros_like(logits).masked_fill(logits < logits.amax(dim=-1, keepdim=True), -torch.inf)
    if top_k:
        kth = scaled.topk(min(top_k, scaled.size(-1))).values[:, -1:]
        scaled.masked_fill_(scaled < kth, -torch.inf)
    return draw(scaled.softmax(dim=-1))


def finite(logits):
    """Whether every logit is a finite number, in one pass over them."""
    low, high = logits.aminmax()
    return bool((high - low).isfinite())


def require_finite(logits):
    """Raise ValueError where a logit is NaN or infinite."""
    if not logits.isfinite().all():
        raise ValueError("the network gave logits that are NaN or infinite: the checkpoint may be damaged or its "
                         "training diverged, or dtype float16 overflows (try dtype=bfloat16 or float32)")


class RowDraws:
    """multinomial for a batch, each row drawing as if the samples before it had been drawn before it.

    The stream starts at seed, past initialisation numbers; a sample spends steps draws over width tokens.
    On a CUDA device it is CUDA's own stream, elsewhere the CPU's.
    """

    def __init__(self, seed, device="cpu", initialisation=0, steps=0, width=0):
        device = torch.device(device)
        self.generator = torch.Generator(device if device.type == "cuda" else "cpu").manual_seed(seed)
        count = 0 if device.type == "cuda" else initialisation # networks are initialised on the CPU
        # Half a second for GPT-2's, while the weights are made ready.
        self.start = Thread(target=skip_numbers, args=(self.generator, count), daemon=True)
        self.start.start()
        self.steps, self.width = steps, width
        self.passed = 0 # exponential_ calls of the latest row, skipped when another follows
        self.rows, self.numbers = [], None

    def next_rows(self, count):
        """Turn to the next count samples of the run; returns self, ready to draw for a batch of them."""
        self.start.join()
        self.rows = []
        for _ in range(count):
            skip_exponentials(self.generator, self.passed, self.width)
            self.passed = self.steps
            row = torch.Generator(self.generator.device)
            self.rows.append(row.set_state(self.generator.get_state()))
        dtype = torch.float64 if self.from_uniforms() else torch.float32
        self.numbers = torch.empty(count, self.width, dtype=dtype, device=self.generator.device)
        return self

    def from_uniforms(self):
        """Whether exponentials are made here, from uniform numbers, and only where they are needed."""
        return self.generator.device.type == "cpu" and exponentials_are_uniforms()

    def __call__(self, probs):
        """(B, V) probabilities -> (B, 1) ids, on the device of probs."""
        home, probs = probs.device, probs.to(self.generator.device)
        if self.from_uniforms():
            for row, generator in zip(self.numbers, self.rows, strict=True):
                row.uniform_(generator=generator)
            at = probs.nonzero(as_tuple=True) # what top-k left can win, the rest needs no logarithm
            scores = torch.zeros_like(probs)
            scores[at] = probs[at] / -torch.log1p(-self.numbers[at]).float()
        else:
            for row, generator in zip(self.numbers, self.rows, strict=True):
                row.exponential_(generator=generator)
            scores = probs / self.numbers
        return scores.argmax(dim=-1, keepdim=True).to(home)


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
    key = words[6:6 + 2 * 624:2]
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": 625 - int(words[2])}}
    for done in range(0, count, 2**26): # in slices, for Ctrl-C to come through
        twister.random_raw(min(2**26, count - done), output=False)
    key[:], place = twister.state["state"].values()
    words[2], words[4] = 625 - place, place
    generator.set_state(state)


def initialisation_numbers(model):
    """How many 32-bit numbers nanoGPT's constructor draws on the CPU for this network before it samples.

    PyTorch initialises every Linear (weight and bias) and Embedding, then nanoGPT draws the weights
    of both again and those of every c_proj a third time; its tied head counts as a Linear of its own.
    normal_ spends one number an entry, and 16 more to redo an end that is no multiple of 16.
    """
    def normal(weight):
        """What normal_ spends on a weight."""
        return weight.numel() + (16 if weight.numel() % 16 else 0)

    count = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            count += module.weight.numel() + (module.bias.numel() if module.bias is not None else 0)
            count += normal(module.weight) * (2 if name.endswith("c_proj") else 1)
        elif isinstance(module, nn.Embedding):
            count += 2 * normal(module.weight)
    return count
