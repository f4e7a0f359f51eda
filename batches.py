"""Samples drawn many at once, each with the tokens that it would have had alone.

The prompts of a batch may differ in length: its rows march in step from the end of the shortest prompt on, and a
longer one is read on, token by token, while the others are drawn. A row that has ended leaves the batch.
"""
import math
from collections import deque
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from itertools import islice

import torch

from devices import out_of_memory, return_memory
from prompts import Prompt
from sampler import enough

PAUSE = 16 # steps, after which what was drawn is looked at where nobody looks on: a GPU is waited for


@dataclass(eq=False)
class Sample:
    """One continuation of a prompt: what is to be drawn, and what has been so far."""
    number: int # of the run, from 0
    prompt: Prompt
    ids: list[int] # the prompt's
    new: list[int] = field(default_factory=list) # the tokens drawn
    pieces: list[str] = field(default_factory=list) # what they say: a text for each, or, if nobody looks on, for all
    looks: list[tuple] = field(default_factory=list) # for each its log-probability and the likeliest: (text, theirs)
    ended: str | None = None # "length" or "stop"
    ready: int = 0 # so many characters of the text are certain: in the rest a stop text may begin
    kept: bool = False # it was saved by the run that this one takes up

    @property
    def text(self):
        """What has been drawn, up to where a stop text begins."""
        return "".join(self.pieces)

    @property
    def logprob(self):
        """The logarithm of the probability that the network gave to all that has been drawn."""
        return sum(look[0] for look in self.looks)


class Reader:
    """Adds tokens to a sample until it is long enough or, if read piecewise, a stop text appears."""

    def __init__(self, sample, tokenizer, max_new_tokens, stops, piecewise):
        self.sample, self.tokenizer, self.max_new_tokens, self.stops = sample, tokenizer, max_new_tokens, stops
        self.decode = tokenizer.decoder() if piecewise else None
        self.reach = max(map(len, stops), default=1) - 1 # a stop text may have begun that far back
        self.tail, self.length = "", 0

    def take(self, tokens, looks):
        """The next tokens, of which only those count that come before the end."""
        sample = self.sample
        if self.decode:
            for token, look in zip(tokens, looks, strict=True):
                if not sample.ended:
                    self.take_one(token, look)
        elif not sample.ended:
            sample.new += tokens
            if len(sample.new) == self.max_new_tokens:
                sample.pieces, sample.ended = [self.tokenizer.decode(sample.new)], "length"
                sample.ready = len(sample.text)

    def take_one(self, token, look):
        """The next token, its text and what was seen of its choice."""
        sample = self.sample
        sample.new.append(token)
        if look:
            (logprob,), likeliest, ids = look
            others = [(self.tokenizer.decode([i]), value) for i, value in zip(ids, likeliest, strict=True)]
            sample.looks.append((logprob, others))
        full = len(sample.new) == self.max_new_tokens
        piece = self.decode(token, full)
        sample.pieces.append(piece)
        self.length += len(piece)
        held = self.search(self.tail + piece) if self.stops else 0
        if full and not sample.ended:
            sample.ended = "length"
        sample.ready = self.length if sample.ended else self.length - held

    def search(self, text):
        """End the sample where a stop text begins in its latest text, or say how much of it may be one's beginning."""
        begins = [begin for stop in self.stops if (begin := text.find(stop)) >= 0]
        if begins:
            self.sample.ended = "stop"
            self.cut(len(text) - min(begins))
        self.tail = text[max(0, len(text) - self.reach):]
        return max(begun(text, stop) for stop in self.stops)

    def cut(self, surplus):
        """Take so many characters off the end."""
        self.length -= surplus
        pieces, i = self.sample.pieces, len(self.sample.pieces)
        while surplus > 0:
            i -= 1
            piece, pieces[i] = pieces[i], pieces[i][:max(0, len(pieces[i]) - surplus)]
            surplus -= len(piece)


def begun(text, stop):
    """How many characters at the end of text are the beginning of stop."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class Chooser:
    """How the next tokens of a batch come about: drawn, or given where a prompt is still read.

    Its tensors stay where they are from batch to batch of one size, since CUDA graphs may hold them.
    watch: how many of the likeliest tokens to keep with each; None: keep no probabilities either.
    """

    def __init__(self, next_token, draws, how, watch=None):
        self.next_token, self.draws, self.how, self.watch = next_token, draws, how, watch
        self.given, self.table, self.look = None, None, None

    @property
    def enough(self):
        """As GPT.stream wants it."""
        return None if self.watch is not None else enough(**self.how) # probabilities are of all

    def ahead(self):
        """Draw the random numbers of the next choice, outside of its graph."""
        if self.how.get("temperature", 1):
            self.draws.ahead()

    def begin(self, prompts, places, device, ragged):
        """Turn to a batch of prompts (lists of ids) whose samples start at these places in the random stream."""
        self.draws.for_rows(places)
        B, self.shortest = len(prompts), min(map(len, prompts))
        self.rests = [ids[self.shortest:] for ids in prompts]
        if ragged and (self.given is None or len(self.given) != B):
            self.given = torch.empty(B, 1, dtype=torch.long, device=device)
        if ragged: # all steps at once, since a GPU is waited for
            self.table = torch.tensor([[rest[step:step + 1] or [-1] for rest in self.rests]
                                       for step in range(max(map(len, self.rests)) + 1)], device=device) # (steps, B, 1)
        if self.watch is not None and (self.look is None or len(self.look[0]) != B):
            self.look = (torch.zeros(B, 1, device=device), torch.zeros(B, self.watch, device=device),
                         torch.zeros(B, self.watch, dtype=torch.long, device=device))

    def prepare(self, step):
        """Say which step is next, counted from 0 at the end of the shortest prompt."""
        if self.given is None or step >= len(self.table):
            return
        self.given.copy_(self.table[step])
        for row, rest in enumerate(self.rests):
            if step == len(rest):
                self.draws.restart(row) # until now its draws were for nothing

    def __call__(self, logits, ids, among=None):
        """Logits (B, V) -> (B, 1) ids; ids (B, S) are what the network has seen, among as next_token's."""
        token = self.next_token(logits, **self.how, draw=self.draws, ids=ids, among=among)
        if self.given is not None:
            token = torch.where(self.given < 0, token, self.given)
        if self.watch is not None:
            logprobs = logits.float().log_softmax(dim=-1)
            likeliest = logprobs.topk(self.watch)
            for kept, found in zip(self.look, (logprobs.gather(1, token), *likeliest), strict=True):
                kept.copy_(found)
        return token

    def keep(self, rows):
        """Go on with these rows alone."""
        self.draws.keep(rows)
        self.rests = [self.rests[i] for i in rows]
        if self.given is not None:
            self.given, self.table = self.given[rows], self.table[:, rows]
        if self.look is not None:
            self.look = tuple(kept[rows] for kept in self.look)


class Drawer:
    """Draws samples with a generator, GPT or its like; draws is a RowDraws, how next_token's other arguments.

    live: whether somebody looks on; at_once: the size of a batch; watch: as Chooser's; ragged: whether prompts differ;
    say is told what the user should know, tick how many tokens more there are.
    """

    def __init__(self, generator, tokenizer, draws, how, max_new_tokens, *, at_once=1, context_shift=False, stops=(),
                 watch=None, live=False, ragged=False, say=print, tick=lambda tokens: None):
        self.generator, self.tokenizer, self.draws, self.max_new_tokens = generator, tokenizer, draws, max_new_tokens
        self.at_once, self.context_shift, self.stops, self.live = at_once, context_shift, stops, live
        self.ragged, self.say, self.tick = ragged, say, tick
        self.model = getattr(generator, "model", generator)
        watch = watch and min(watch, self.model.config.vocab_size)
        self.chooser = Chooser(generator.next_token, draws, how, watch)
        self.device = self.model.lm_head.weight.device
        self.patience = PAUSE if self.device.type == "cuda" and not live else 1

    def draw(self, samples):
        """Yield every sample of an iterable, in order, once it has ended; live: also the next, as it grows."""
        samples = iter(samples)
        while batch := list(islice(samples, self.at_once)):
            # What is kept takes part where others of its batch are drawn: the same sums as before, to the last bit.
            waiting = deque(sample for sample in batch if not sample.kept)
            if not waiting:
                continue
            places = {sample: self.draws.place_of(sample.number) for sample in batch}
            for part in self.alike(batch):
                for _ in self.run(part, places):
                    while waiting and waiting[0].ended:
                        yield waiting.popleft()
                    if waiting and self.live:
                        yield waiting[0]

    def alike(self, batch):
        """Parts of a batch, each of prompts whose lengths differ by no more than a sample's own."""
        parts, shortest = [], -math.inf
        for sample in sorted(batch, key=lambda sample: len(self.seen(sample))):
            if len(self.seen(sample)) > shortest + self.max_new_tokens:
                parts.append([])
                shortest = len(self.seen(sample))
            parts[-1].append(sample)
        return sorted(parts, key=lambda part: min(sample.number for sample in part))

    def seen(self, sample):
        """What the network can see of a sample's prompt."""
        return sample.ids[-self.model.config.block_size:]

    def run(self, batch, places):
        """Draw a batch, pausing whenever something may be shown. Where memory runs out, half as many at once."""
        while batch:
            now, batch = batch[:self.at_once], batch[self.at_once:]
            try:
                yield from self.march(now, places)
                continue
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error) or len(now) == 1:
                    raise
                self.at_once = len(now) // 2
                self.say(f"out of memory with {len(now)} samples at once: going on with {self.at_once}")
            self.chooser = copy(self.chooser) # graphs that were made for it may hold tensors that it has no longer
            return_memory() # not above, where the error still holds what was drawn
            now = [sample for sample in now if not sample.ended] # those have been handed out
            for sample in now:
                self.tick(0 if sample.kept else -len(sample.new))
                sample.new, sample.pieces, sample.looks, sample.ended, sample.ready = [], [], [], None, 0
            batch = now + batch

    def march(self, batch, places):
        """run, if memory suffices."""
        if self.max_new_tokens == 0:
            for sample in batch:
                sample.ended = "length"
            yield
            return
        chooser, prompts = self.chooser, [self.seen(sample) for sample in batch]
        chooser.begin(prompts, [places[sample] for sample in batch], self.device, self.ragged)
        idx = torch.tensor([ids[:chooser.shortest] for ids in prompts], device=self.device)
        ends = {len(rest) + self.max_new_tokens for rest in chooser.rests}
        stream = self.generator.stream(idx, max(ends), chooser, self.context_shift)
        piecewise = self.live or bool(self.stops) or chooser.watch is not None
        readers = [Reader(sample, self.tokenizer, self.max_new_tokens, self.stops, piecewise) for sample in batch]
        pause = self.patience if piecewise else PAUSE
        pending, rows = [], None
        for step in range(1, max(ends) + 1):
            chooser.prepare(step - 1)
            pending.append((stream.send(rows), chooser.look and [tensor.clone() for tensor in chooser.look]))
            rows = None
            if step in ends or len(pending) == pause:
                self.hand_out(pending, step, readers)
                pending, running = [], [i for i, reader in enumerate(readers) if not reader.sample.ended]
                yield
                if not running:
                    break
                if len(running) < len(readers) and len(running) <= self.generator.shrink_at * len(readers):
                    rows, readers = running, [readers[i] for i in running]
                    chooser.keep(running)
        with suppress(StopIteration):
            stream.send([])

    def hand_out(self, pending, step, readers):
        """Give the readers what the latest steps have drawn, the last of which was this one."""
        self.generator.check()
        tokens = torch.cat([token for token, _ in pending], dim=1).tolist()
        looks = [look and list(zip(*(kept.tolist() for kept in look), strict=True)) for _, look in pending]
        for row, (reader, rest) in enumerate(zip(readers, self.chooser.rests, strict=True)):
            given = max(0, len(rest) - (step - len(pending))) # that were no draws, but its prompt
            before = len(reader.sample.new)
            reader.take(tokens[row][given:], [look and look[row] for look in looks[given:]])
            if not reader.sample.kept:
                self.tick(len(reader.sample.new) - before)
