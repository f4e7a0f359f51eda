"""Speculative decoding that keeps the text: a draft proposes tokens, and the target checks each of them.

The draft samples with the random numbers that the target will use at the same positions. So it mostly proposes the
target's own tokens, and one pass of the target computes the logits of several positions. docs/speculation.md explains
why the text stays the same.
"""
import functools
import logging
from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from model import GPTConfig
from sampling.backends.backend import Backend, Cache, num_step_weights
from sampling.backends.prepare import prepare_backend
from sampling.checkpoints.checkpoint import Checkpoint, named_errors
from sampling.checkpoints.nanogpt import load_by_name
from sampling.generation.decode import Decoder, Step, crop
from sampling.sampler.row_streams import RowStreams

logger = logging.getLogger(__name__)
# The counts of proposals begin with these. After each round, the counts of earlier rounds are multiplied by DECAY.
NUM_CHECKED, NUM_ACCEPTED, DECAY = 8.0, 7.0, 0.95
# The time of a pass of the target over k + 1 positions, in steps of the target: PASS_COST + k * PASS_COST_PER_PROPOSAL.
PASS_COST, PASS_COST_PER_PROPOSAL = 1.4, 0.045 # for GPT-2 in float32; two Intel processors had a PASS_COST of 1.1, 1.5
OVERHEAD_BYTES_PER_LAYER = 7_000_000 # norms, attention and operator calls take as long as reading so many bytes


def prepare_draft(name: str, target: Checkpoint, target_dtype: torch.dtype) -> "Speculation":
    """Load the draft of a target, on a CPU. Call this before prepare_backend takes the target's weights.

    name: "int8" is the target itself in int8, otherwise a model's name, folder or file. Raises ValueError or OSError if
    that cannot be the draft.
    """
    with named_errors(f"draft={name}"):
        if name == "int8":
            checkpoint, dtype = replace(target, state_dict=dict(target.state_dict)), torch.int8
        else:
            checkpoint, dtype = load_by_name(name, log=logger.info), target_dtype
        size, target_size = checkpoint.config.vocab_size, target.config.vocab_size
        if size != target_size:
            raise ValueError(f"it has a vocabulary of {size} tokens, but the model has {target_size}: the two must be "
                             "equal; choose another draft, or leave it out")
        draft = prepare_backend(checkpoint, torch.device("cpu"), dtype)
    relative_cost = step_cost(draft.config, dtype.itemsize) / step_cost(target.config, target_dtype.itemsize)
    return Speculation(draft, relative_cost, name == "int8")


def step_cost(config: GPTConfig, bytes_per_weight: int) -> float:
    """The cost of a step of one row, which mostly waits for memory: the bytes that it reads, and the overhead."""
    return num_step_weights(config) * bytes_per_weight + config.n_layer * OVERHEAD_BYTES_PER_LAYER


def best_num_proposals(rate: float, relative_cost: float) -> int:
    """How many tokens the draft should propose in a round: from 2 to 8, with the largest speedup; 0 if none is faster.

    rate: the acceptance rate. A round of k proposals gives 1 + rate + ... + rate**k tokens (Leviathan et al., 2023).
    relative_cost: see Speculation. No time is measured, so the same command always takes the same passes.
    """
    def speedup(k):
        num_tokens = sum(rate**i for i in range(k + 1))
        return num_tokens / (PASS_COST + k * (PASS_COST_PER_PROPOSAL + relative_cost))
    best = max(range(2, 9), key=speedup)
    return best if speedup(best) > 1 else 0


class Speculation:
    """Decodes one sample with a draft, up to block_size tokens, and with context_shift also past it.

    The target is the backend of the decoder that each call gets. relative_cost: the time of a step of the draft, in
    steps of the target. is_int8_copy: whether the draft is the target itself, in int8.
    Logs once why the draft is not used.
    """

    def __init__(self, draft: Backend, relative_cost: float, is_int8_copy: bool):
        self.draft, self.relative_cost, self.is_int8_copy = draft, relative_cost, is_int8_copy
        self.log_once = functools.cache(logger.info) # the cache has the result of a message that was logged before
        self.num_proposed = self.num_accepted = 0 # of all samples

    def should_draft(self, decoder: Decoder, prompts: list[list[int]], num_steps: int) -> bool:
        """Whether to use the draft for these prompts. Logs why not, or where in the text it will be off."""
        block_size, draft_block_size = decoder.backend.config.block_size, self.draft.config.block_size
        if len(prompts) > 1:
            self.log_once("the draft is off: several samples at once are faster without it; batch_size=1 turns it on")
            return False
        if best_num_proposals(NUM_ACCEPTED / NUM_CHECKED, self.relative_cost) == 0:
            self.log_once("the draft is off: its steps take too long, compared with the model's, to save time")
            return False
        limit = min(block_size, draft_block_size)
        if len(prompts[0]) + num_steps > limit and not (decoder.context_shift and limit == block_size):
            self.log_once(f"the draft is used only for the first {limit} tokens of the window, including the prompt")
        return True

    def decode(self, decoder: Decoder, prompt: list[int], streams: RowStreams,
               num_steps: int) -> Generator[Step, None, None]:
        """Continue a prompt, of at most block_size tokens, by num_steps: the steps of Decoder.decode."""
        target, draft, cost = decoder.backend, self.draft, self.relative_cost
        block_size, capacity = target.config.block_size, len(prompt) + num_steps
        cache = draft_cache = target.new_cache(1, min(capacity, block_size))
        # An int8 copy of the target reads the target's own keys and values, instead of computing them again.
        if not (self.is_int8_copy and type(target) is type(draft)):
            draft_cache = draft.new_cache(1, min(capacity, draft.config.block_size))
        ids = torch.tensor([prompt]) # (1, S)
        proposals = ids[:, :0] # none: the first pass is the prefill
        checked, accepted = NUM_CHECKED, NUM_ACCEPTED # proposals, up to the first that was rejected in each round
        num_wanted = best_num_proposals(accepted / checked, cost) # how many tokens to propose; 0: the draft is off
        while True:
            k, unread = proposals.size(1), torch.cat([ids[:, cache.seq_len:], proposals], dim=1)
            # Without proposals, a few logits are enough; but while the draft is on, such passes are too rare to prepare
            # the LM head's shortlist for.
            all_logits = target.logits(unread, cache, k + 1, None if num_wanted else decoder.num_needed)
            num_accepted, self.num_proposed = 0, self.num_proposed + k
            for logits in all_logits.split(1):
                step = decoder.sample(logits, ids, streams)
                is_accepted = num_accepted < k and bool(step.ids == proposals[:, num_accepted])
                self.num_accepted += is_accepted
                yield step
                ids, num_steps = torch.cat([ids, step.ids], dim=1), num_steps - 1
                if not is_accepted: # later logits, if any, follow a wrong token
                    break
                num_accepted += 1
            if num_steps == 0:
                return
            if k:
                checked, accepted = DECAY * checked + min(num_accepted + 1, k), DECAY * accepted + num_accepted
            num_right = ids.size(1) - 1 # the keys and values of all tokens but the last one are right
            if num_right == block_size: # the window moves
                ids, num_right = crop(ids, block_size, decoder.context_shift), 0
                if not decoder.context_shift: # the target recomputes the whole window for every token
                    yield from decoder.decode(ids.tolist(), streams, num_steps)
                    return
            draft_cache.seq_len = min(draft_cache.seq_len, num_right)
            # Each pass samples one token more than it has proposals. The draft reads all proposals but the last.
            draft_room = draft.config.block_size + 1 - ids.size(1)
            num_wanted = 0 if draft_room <= 0 else best_num_proposals(accepted / checked, cost)
            room = min(draft_room, block_size - ids.size(1), num_steps - 1) if num_right else 0
            proposals = self.propose(ids, min(num_wanted, room), draft_cache, decoder, streams)
            cache.seq_len = num_right # the draft has written more if it shares the cache

    def propose(self, ids: Tensor, num_proposals: int, cache: Cache, decoder: Decoder, streams: RowStreams) -> Tensor:
        """The tokens (1, num_proposals) that the draft samples after ids (1, T), of which cache may lack some."""
        sampler, streams, extended = decoder.sampler, streams.copy(), ids
        for _ in range(num_proposals):
            logits = self.draft.logits(extended[:, cache.seq_len:], cache, num_needed=sampler.num_needed)
            token = sampler(logits, extended, None if sampler.is_greedy else streams.next())
            extended = torch.cat([extended, token], dim=1)
        return extended[:, ids.size(1):]

    def summary(self) -> str:
        """How many proposals were accepted so far."""
        if not self.num_proposed:
            return "the draft proposed no tokens"
        return (f"acceptance rate of the draft: {100 * self.num_accepted / self.num_proposed:.0f} % "
                f"({self.num_accepted} of {self.num_proposed} tokens)")
