"""Speculative decoding that keeps the text: a draft proposes tokens, and the target decides each of them.

The draft samples with the random numbers that the target will use at the same positions. So it mostly proposes the
target's own tokens, and one pass of the target computes the logits of several positions. docs/speculation.md explains
why the text stays the same.
"""
from collections.abc import Generator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from model import GPT, window_length
from sampling.backends.backend import Backend, TokenStream
from sampling.backends.draft import Draft, RollbackBackend, prepare_draft
from sampling.backends.prepare import prepare_model
from sampling.generation.draft_length import DraftLength
from sampling.log import Log, warn
from sampling.params import ModelOptions
from sampling.sampler.logits import require_finite
from sampling.sampler.sample_fn import Logits, SampleFn


def prepare_with_draft(gpt: GPT, device: torch.device, dtype: torch.dtype, options: ModelOptions,
                       log: Log = warn) -> Backend:
    """See prepare_model, and prepare_draft if options has a draft. Raises what they raise."""
    if not options.draft:
        return prepare_model(gpt, device, dtype, options, log)
    log = cache(log) # each message once, although both models may have the same problem
    draft = prepare_draft(gpt, device, dtype, options, log) # before gpt loses its layers
    return SpeculativeBackend(prepare_model(gpt, device, dtype, options, log), draft, log)


class SpeculativeBackend(Backend):
    """The backend of the target, which samples the same tokens in less time, if the draft's proposals are good.

    The draft is on for a single sample inside the window of block_size tokens, and with context_shift also past it.
    Otherwise the target runs as without a draft, and log gets a message, once for each reason.
    """

    def __init__(self, target: RollbackBackend, draft: Draft, log: Log = warn):
        self.target, self.draft_backend, self.relative_cost = target, draft.backend, draft.relative_cost
        self.log_once = cache(log)
        self.config, self.device = target.config, target.device
        self.compaction_ratio, self.allow_sync = target.compaction_ratio, target.allow_sync
        # An int8 copy of the target reads the target's own keys and values, instead of computing them again.
        self.shares_cache = draft.is_copy and type(target) is type(draft.backend)
        self.is_broken = False # whether the draft's logits were NaN or infinite
        self.num_proposed = self.num_accepted = 0 # of all streams

    @torch.no_grad()
    def generate_stream(self, idx: Tensor, max_new_tokens: int, sample_fn: SampleFn,
                        context_shift: bool = False) -> TokenStream:
        """See Backend.generate_stream. sample_fn must support propose if idx has one row."""
        block_size = self.config.block_size
        reason_off = self.reason_off(idx)
        if reason_off:
            self.log_once(f"the draft is off: {reason_off}")
        if reason_off or idx.size(1) == 0: # without tokens, the target raises ValueError
            yield from self.target.generate_stream(idx, max_new_tokens, sample_fn, context_shift)
            return
        self.log_limits(idx.size(1) + max_new_tokens, context_shift)
        ids, draft_length = idx[:, -block_size:], DraftLength(self.relative_cost)
        while max_new_tokens:
            num_tokens = min(max_new_tokens, block_size + 1 - ids.size(1)) # the last one is sampled from a full window
            ids = yield from self.decode_window(ids, num_tokens, sample_fn, draft_length)
            max_new_tokens -= num_tokens
            if ids is None or not max_new_tokens:
                return
            ids = ids[:, -window_length(ids.size(1), block_size, context_shift):]
            if not context_shift: # the target recomputes the whole window for every token
                yield from self.target.generate_stream(ids, max_new_tokens, sample_fn)
                return

    def decode_window(self, ids: Tensor, num_tokens: int, sample_fn: SampleFn,
                      draft_length: DraftLength) -> Generator[Tensor, list[int] | None, Tensor | None]:
        """Continue ids (1, T) by num_tokens, at most block_size + 1 - T.

        Yields each token (1, 1). Returns all ids, or None if the caller ends the stream.
        """
        end = ids.size(1) + num_tokens
        cache = self.target.new_cache(1, min(end, self.config.block_size))
        draft_capacity = min(end, self.draft_backend.config.block_size)
        draft_cache = cache if self.shares_cache else self.draft_backend.new_cache(1, draft_capacity)
        num_wanted = draft_length.best() # how many tokens the draft should propose; 0: the draft is off
        proposals = ids[:, :0] # none: the first pass is the prefill, as without a draft
        while True:
            k = proposals.size(1)
            unread = torch.cat([ids[:, cache.seq_len:], proposals], dim=1)
            # While the draft is on, passes without proposals are too rare to prepare the LM head's shortlist for.
            logits = self.target.next_logits(unread, cache, None if num_wanted else sample_fn.num_logits_needed, k + 1)
            if not self.allow_sync: # otherwise sample_fn checks
                require_finite(logits.values)
            for num_accepted, row in enumerate(logits.values.split(1)):
                token = sample_fn(Logits(row, logits.candidate_ids), ids)
                if (yield token) == []:
                    return None
                ids = torch.cat([ids, token], dim=1)
                if num_accepted < k and token != proposals[:, num_accepted]: # later logits follow a wrong token
                    break
            cache.seq_len = ids.size(1) - 1 # the keys and values of all tokens but the last one are right
            draft_cache.seq_len = min(draft_cache.seq_len, cache.seq_len)
            self.num_proposed, self.num_accepted = self.num_proposed + k, self.num_accepted + num_accepted
            draft_length.record(k, num_accepted)
            if ids.size(1) == end:
                return ids
            # Each pass samples one token more than it has proposals. The draft reads all proposals but the last.
            draft_room = self.draft_backend.config.block_size + 1 - ids.size(1)
            num_wanted = 0 if self.is_broken or draft_room <= 0 else draft_length.best()
            proposals = self.propose(ids, min(num_wanted, draft_room, end - ids.size(1) - 1), draft_cache, sample_fn)
            cache.seq_len = ids.size(1) - 1 # forget what the draft wrote, if it shares the cache

    def propose(self, ids: Tensor, num_proposals: int, cache: Any, sample_fn: SampleFn) -> Tensor:
        """The tokens (1, num_proposals) that the draft samples after ids (1, T), of which cache may lack some.

        Returns (1, 0), and turns the draft off, if logits are NaN or infinite: the text does not depend on the draft.
        """
        extended, logits_sum = ids, torch.zeros((), device=self.device)
        for ahead in range(num_proposals):
            logits = self.draft_backend.next_logits(extended[:, cache.seq_len:], cache, sample_fn.num_logits_needed)
            try:
                token = sample_fn.propose(logits, extended, ahead)
            except ValueError:
                return self.turn_off(ids)
            if not self.allow_sync: # propose cannot check them, and a check at every step would wait for the GPU
                logits_sum += logits.values.sum(dtype=torch.float32)
            extended = torch.cat([extended, token], dim=1)
        if not self.allow_sync and not logits_sum.isfinite():
            return self.turn_off(ids)
        return extended[:, ids.size(1):]

    def turn_off(self, ids: Tensor) -> Tensor:
        """Let the draft propose nothing more. Returns no proposals, (1, 0)."""
        self.is_broken = True
        self.log_once("the draft is off: its logits are NaN or infinite")
        return ids[:, :0]

    def reason_off(self, idx: Tensor) -> str | None:
        """Why the draft cannot save time with these prompts (B, T); None if it can."""
        if len(idx) > 1:
            return "several samples at once are faster without it; batch_size=1 turns it on"
        if DraftLength(self.relative_cost).best() == 0:
            return "its steps take too long, compared with the model's, to save time"
        return None

    def log_limits(self, num_tokens: int, context_shift: bool) -> None:
        """Say in advance where in a text of num_tokens the draft is off, because a message would interrupt the text."""
        block_size, draft_block_size = self.config.block_size, self.draft_backend.config.block_size
        if num_tokens > draft_block_size and draft_block_size < block_size:
            self.log_once(f"the draft is used only while the window has at most {draft_block_size} tokens, its own "
                          "block_size")
        elif num_tokens > block_size and not context_shift:
            self.log_once(f"the draft is used only up to block_size: {block_size} tokens, including the prompt")

    def summary(self) -> str:
        """How many proposals were accepted so far."""
        if not self.num_proposed:
            return "the draft proposed no tokens"
        return (f"acceptance rate of the draft: {100 * self.num_accepted / self.num_proposed:.0f} % "
                f"({self.num_accepted} of {self.num_proposed} tokens)")

    def logits_are_finite(self) -> Tensor | None:
        """See Backend.logits_are_finite. decode_window checks its own logits."""
        return self.target.logits_are_finite()

    def release_memory(self) -> None:
        """See Backend.release_memory."""
        self.target.release_memory()
        self.draft_backend.release_memory()

    def bytes_per_sample(self, length: int) -> int:
        """See Backend.bytes_per_sample."""
        draft_bytes = 0 if self.shares_cache else self.draft_backend.bytes_per_sample(length)
        return self.target.bytes_per_sample(length) + draft_bytes
