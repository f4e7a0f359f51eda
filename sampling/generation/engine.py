"""Generates many samples at once, each with the tokens that it would have alone.

The prompts of a batch may differ in length. Its rows decode in lockstep from the end of the shortest prompt; the rest
of a longer prompt is teacher-forced while the other rows are sampled. A finished row leaves the batch.
"""
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sampling.backends.backend import Backend
from sampling.backends.memory import release_memory
from sampling.errors import is_out_of_memory
from sampling.generation.batch_sampler import BatchSampler, Logprobs
from sampling.generation.batching import group_by_length, next_batch, visible_prompt
from sampling.generation.detokenizer import IncrementalDetokenizer
from sampling.inputs.tokenizer import Tokenizer
from sampling.params import Sample, SampleRequest, SamplingParams
from sampling.sampler.per_row_rng import PerRowRNG

SYNC_INTERVAL = 16 # steps between two copies of the tokens to the host when not streaming: each one waits for the GPU


class StepOutput(NamedTuple):
    """The tokens of one step, and their log-probabilities."""
    ids: Tensor # (B, 1)
    logprobs: Logprobs | None


@dataclass
class Engine:
    """Turns requests into samples.

    num_init_draws: Checkpoint.num_init_draws; batch_size: how many samples to generate at once; stream: whether to
    yield samples while they grow; log takes messages for the user; on_tokens takes the number of new tokens, which is
    negative if memory ran out and tokens are generated again.
    """
    backend: Backend
    tokenizer: Tokenizer
    params: SamplingParams
    num_init_draws: int = 0
    batch_size: int = 1
    stream: bool = False
    log: Callable[[str], None] = logging.getLogger(__name__).warning
    on_tokens: Callable[[int], None] = lambda num_tokens: None
    rng: PerRowRNG = field(init=False)
    sampler: BatchSampler = field(init=False)

    def __post_init__(self):
        self.rng = PerRowRNG(self.params.seed, self.backend.device, self.num_init_draws,
                             draws_per_sample=self.params.max_new_tokens, vocab_size=self.backend.config.vocab_size)
        self.sampler = self.new_sampler()

    def new_sampler(self) -> BatchSampler:
        """A BatchSampler for the engine's parameters."""
        num_logprobs = self.params.num_logprobs
        if num_logprobs is not None:
            num_logprobs = min(num_logprobs, self.backend.config.vocab_size)
        return BatchSampler(self.params, self.rng, num_logprobs, check_finite=not self.backend.defers_finite_check)

    @property
    def sync_interval(self) -> int:
        """How many steps to run before their tokens are copied to the host."""
        # Without a GPU a copy costs little, and a row that has met its stop text can leave the batch at once.
        every_step = self.stream or (self.params.stop_texts and self.backend.device.type != "cuda")
        return 1 if every_step else SYNC_INTERVAL

    def generate(self, requests: Iterable[SampleRequest]) -> Iterator[Sample]:
        """Yield the sample of every request that is not already saved, in order, once it is finished.

        With stream, also yield the next sample, unfinished, whenever it has grown.
        Raises ValueError if logits were NaN or infinite.
        """
        requests = iter(requests)
        while batch := next_batch(requests, self.batch_size):
            samples = [Sample(request) for request in batch]
            rng_states = {sample: self.rng.state_for_sample(sample.index) for sample in samples}
            waiting = deque(sample for sample in samples if not sample.request.already_saved)
            for group in group_by_length(samples, self.backend.config.block_size, self.params.max_new_tokens):
                for _ in self.run_with_oom_retry(group, rng_states):
                    while waiting and waiting[0].finish_reason:
                        yield waiting.popleft()
                    if waiting and self.stream:
                        yield waiting[0]

    def run_with_oom_retry(self, samples: list[Sample], rng_states: dict[Sample, Tensor]) -> Iterator[None]:
        """Generate the samples; yields whenever some of them have grown. If memory runs out, halves the batch size."""
        while samples:
            batch, samples = samples[:self.batch_size], samples[self.batch_size:]
            try:
                yield from self.decode_batch(batch, rng_states)
                continue
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or len(batch) == 1:
                    raise
                self.batch_size = len(batch) // 2
                self.log(f"out of memory with {len(batch)} samples at once: going on with {self.batch_size}")
            self.sampler = self.new_sampler() # graphs made for the old one hold tensors that it no longer uses
            release_memory() # not in the except clause, where the error still holds the tensors of the batch
            unfinished = [sample for sample in batch if not sample.finish_reason] # the finished ones have been yielded
            for sample in unfinished:
                self.count_tokens(sample, -sample.num_tokens)
                sample.tokens, sample.num_emittable_chars = [], 0
            samples = unfinished + samples

    def decode_batch(self, samples: list[Sample], rng_states: dict[Sample, Tensor]) -> Iterator[None]:
        """Generate the samples of one batch; yields whenever some of them have grown."""
        if self.params.max_new_tokens == 0:
            for sample in samples:
                sample.finish_reason = "length"
            yield
            return
        sampler, block_size = self.sampler, self.backend.config.block_size
        prompts = [visible_prompt(sample, block_size) for sample in samples]
        sampler.start_batch(prompts, [rng_states[sample] for sample in samples], self.backend.device)
        idx = torch.tensor([ids[:sampler.min_prompt_len] for ids in prompts], device=self.backend.device)
        last_steps = {len(remainder) + self.params.max_new_tokens for remainder in sampler.prompt_remainders}
        stream = self.backend.generate_stream(idx, max(last_steps), sampler, self.params.context_shift)
        rows = [IncrementalDetokenizer(sample, self.tokenizer, self.params) for sample in samples]
        sync_interval, pending = self.sync_interval, []
        selected = None # rows to go on with; None: all
        for step in range(1, max(last_steps) + 1):
            sampler.start_step(step - 1)
            ids = stream.send(selected)
            logprobs = sampler.logprobs and Logprobs(*(tensor.clone() for tensor in sampler.logprobs))
            pending.append(StepOutput(ids, logprobs))
            selected = None
            if step in last_steps or len(pending) == sync_interval:
                self.flush_tokens(pending, step, rows)
                pending = []
                yield
                growing = [i for i, row in enumerate(rows) if not row.sample.finish_reason]
                if not growing:
                    break
                if len(growing) < len(rows) and len(growing) <= self.backend.compaction_ratio * len(rows):
                    selected, rows = growing, [rows[i] for i in growing]
                    sampler.select_rows(growing)
        with suppress(StopIteration):
            stream.send([])

    def flush_tokens(self, pending: list[StepOutput], step: int, rows: list[IncrementalDetokenizer]) -> None:
        """Append the tokens of the pending steps, the last of which is this one, to the samples."""
        self.backend.check_finite()
        ids = torch.cat([output.ids for output in pending], dim=1).tolist() # (B, steps)
        logprobs = [output.logprobs and [tensor.tolist() for tensor in output.logprobs] for output in pending]
        for i, (row, remainder) in enumerate(zip(rows, self.sampler.prompt_remainders, strict=True)):
            num_forced = max(0, len(remainder) - (step - len(pending))) # these tokens belong to the prompt
            num_before = row.sample.num_tokens
            for token_id, of_step in zip(ids[i][num_forced:], logprobs[num_forced:], strict=True):
                if row.sample.finish_reason:
                    break
                if of_step:
                    (logprob,), values, top_ids = (tensor[i] for tensor in of_step)
                    texts = [self.tokenizer.decode([top_id]) for top_id in top_ids]
                    row.append(token_id, logprob, tuple(zip(texts, values, strict=True)))
                else:
                    row.append(token_id)
            self.count_tokens(row.sample, row.sample.num_tokens - num_before)

    def count_tokens(self, sample: Sample, num_tokens: int) -> None:
        """Report new tokens, unless the sample is only generated again."""
        if not sample.request.already_saved:
            self.on_tokens(num_tokens)
