"""Generates many samples at once. Each sample has the same tokens as if it were generated alone.

The prompts of a batch may differ in length. Its rows decode in lockstep from the end of the shortest prompt; the rest
of a longer prompt is teacher-forced while the other rows are sampled. Finished rows leave the batch if that saves time.
"""
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sampling.backends.backend import Backend, TokenStream
from sampling.backends.memory import return_freed_memory
from sampling.generation.batch_sampler import BatchSampler, Logprobs
from sampling.generation.batching import group_by_length, next_batch, visible_prompt
from sampling.generation.detokenizer import IncrementalDetokenizer
from sampling.generation.flush_schedule import MAX_FLUSH_INTERVAL, FlushSchedule
from sampling.inputs.tokenizer import Tokenizer
from sampling.log import Log, warn
from sampling.out_of_memory import is_out_of_memory
from sampling.params import Sample, SampleRequest, SamplingParams
from sampling.sampler.logits import NOT_FINITE
from sampling.sampler.per_row_rng import PerRowRNG
from sampling.validation import check_exact


class StepOutput(NamedTuple):
    """The tokens of one step, and their log-probabilities."""
    ids: Tensor # (B, 1)
    logprobs: Logprobs | None


@dataclass
class Engine:
    """Turns requests into samples. Raises ValueError if the backend is exact and params asks for what nanoGPT lacks.

    num_init_draws, is_huggingface: those of the Checkpoint.
    batch_size: how many samples to generate at once.
    stream: whether to yield samples before they are finished.
    log: gets messages for the user.
    on_tokens: gets the number of new tokens; it is negative if memory ran out and tokens are discarded.
    """
    backend: Backend
    tokenizer: Tokenizer
    params: SamplingParams
    num_init_draws: int = 0
    batch_size: int = 1
    stream: bool = False
    log: Log = warn
    on_tokens: Callable[[int], None] = lambda num_tokens: None
    is_huggingface: bool = False
    rng: PerRowRNG = field(init=False)
    sampler: BatchSampler = field(init=False)

    def __post_init__(self):
        if self.backend.is_exact:
            check_exact({**vars(self.params), "batch_size": self.batch_size})
        self.rng = PerRowRNG(self.params.seed, self.backend.device, self.num_init_draws,
                             draws_per_sample=self.params.max_new_tokens, vocab_size=self.backend.config.vocab_size)
        self.sampler = self.new_sampler()

    def new_sampler(self) -> BatchSampler:
        """A BatchSampler for the engine's parameters."""
        num_logprobs = self.params.num_logprobs
        if num_logprobs is not None:
            num_logprobs = min(num_logprobs, self.backend.config.vocab_size)
        # On CUDA, nanoGPT computes in the dtype of the logits. On other devices it has no autocast: they are float32.
        in_logits_dtype = self.backend.device.type == "cuda" and not self.is_huggingface
        return BatchSampler(self.params, self.rng, num_logprobs, allow_sync=self.backend.allow_sync,
                            in_logits_dtype=in_logits_dtype, is_exact=self.backend.is_exact)

    @property
    def max_flush_interval(self) -> int:
        """How many steps to run, at most, before the tokens are copied to the host."""
        # Except on CUDA, a flush costs little. After each flush, rows with a stop text can leave the batch.
        flushes_every_step = self.backend.device.type != "cuda" and (self.stream or self.params.stop_texts)
        return 1 if flushes_every_step else MAX_FLUSH_INTERVAL

    def generate(self, requests: Iterable[SampleRequest]) -> Iterator[Sample]:
        """Yield the finished samples in order, except those that are already saved.

        With stream, also yield the first unfinished sample after each flush (see FlushSchedule).
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
        """Generate the samples; yields whenever they have new tokens. If memory runs out, halves the batch size."""
        while samples:
            batch, samples = samples[:self.batch_size], samples[self.batch_size:]
            try:
                yield from self.decode_batch(batch, rng_states)
                continue
            except (MemoryError, RuntimeError) as error:
                if len(batch) == 1 or not is_out_of_memory(error):
                    raise
            # This is not in the except clause, where the error still holds the tensors of the batch.
            samples = self.recover_from_oom(batch) + samples

    def recover_from_oom(self, batch: list[Sample]) -> list[Sample]:
        """Halve the batch size after this batch ran out of memory. Returns its unfinished samples, without tokens."""
        self.batch_size = len(batch) // 2
        self.log(f"out of memory with {len(batch)} samples at once: continuing with {self.batch_size}")
        self.sampler = self.new_sampler() # CUDA graphs of the old sampler hold tensors that it no longer uses
        self.backend.release_memory()
        return_freed_memory()
        unfinished = [sample for sample in batch if not sample.finish_reason]
        for sample in unfinished:
            self.report_tokens(sample, -sample.num_tokens)
            sample.tokens, sample.num_emittable_chars = [], 0
        return unfinished

    def decode_batch(self, samples: list[Sample], rng_states: dict[Sample, Tensor]) -> Iterator[None]:
        """Generate the samples of one batch; yields whenever they have new tokens."""
        if self.params.max_new_tokens == 0:
            for sample in samples:
                sample.finish_reason = "length"
            yield
            return
        detokenizers = [IncrementalDetokenizer(sample, self.tokenizer, self.params) for sample in samples]
        stream, last_steps = self.start_stream(samples, rng_states)
        schedule, pending = FlushSchedule(self.max_flush_interval, self.stream), []
        selected = None # the rows to keep; None: all
        for step in range(1, max(last_steps) + 1):
            self.sampler.start_step(step - 1)
            pending.append(StepOutput(stream.send(selected), self.sampler.copy_logprobs()))
            selected = None
            if step in last_steps or len(pending) >= schedule.num_steps:
                self.flush_tokens(pending, step, detokenizers)
                schedule.record_flush(len(pending))
                pending = []
                yield
                selected = self.rows_to_keep(detokenizers)
                if selected == []:
                    break
                if selected is not None:
                    detokenizers = [detokenizers[i] for i in selected]
                    self.sampler.select_rows(selected)
        with suppress(StopIteration):
            stream.send([])

    def start_stream(self, samples: list[Sample], rng_states: dict[Sample, Tensor]) -> tuple[TokenStream, set[int]]:
        """The token stream of a batch, and the steps, counted from 1, after which samples reach max_new_tokens."""
        prompts = [visible_prompt(sample, self.backend.config.block_size) for sample in samples]
        device = self.backend.device
        self.sampler.start_batch(prompts, [rng_states[sample] for sample in samples], device)
        idx = torch.tensor([ids[:self.sampler.min_prompt_len] for ids in prompts], device=device)
        last_steps = {len(remainder) + self.params.max_new_tokens for remainder in self.sampler.prompt_remainders}
        return self.backend.generate_stream(idx, max(last_steps), self.sampler, self.params.context_shift), last_steps

    def rows_to_keep(self, detokenizers: list[IncrementalDetokenizer]) -> list[int] | None:
        """The indices of the unfinished rows; None: keep all rows, because too few have finished."""
        unfinished = [i for i, detokenizer in enumerate(detokenizers) if not detokenizer.sample.finish_reason]
        B = len(detokenizers)
        is_worthwhile = len(unfinished) < B and len(unfinished) <= self.backend.compaction_ratio * B
        return unfinished if is_worthwhile else None

    def flush_tokens(self, pending: list[StepOutput], step: int, detokenizers: list[IncrementalDetokenizer]) -> None:
        """Append the tokens of the pending steps to the samples. step is the number of the last pending step."""
        ids = torch.cat([output.ids for output in pending], dim=1) # (B, steps)
        is_finite = self.backend.logits_are_finite()
        if is_finite is not None: # as one more column, because each copy to the host waits for the GPU
            ids = torch.cat([ids, is_finite.to(ids).expand(len(ids), 1)], dim=1)
        ids = ids.tolist()
        if is_finite is not None and not ids[0][-1]:
            raise ValueError(NOT_FINITE)
        logprobs = copy_to_host([output.logprobs for output in pending])
        first_step = step - len(pending) # of the pending steps, counted from 0
        rows = zip(detokenizers, self.sampler.prompt_remainders, strict=True)
        for i, (detokenizer, remainder) in enumerate(rows):
            sample, num_before = detokenizer.sample, detokenizer.sample.num_tokens
            for s in range(max(0, len(remainder) - first_step), len(pending)): # the steps before these read the prompt
                if sample.finish_reason:
                    break
                detokenizer.append(ids[i][s], *self.logprobs_of_row(logprobs[s], i, sample))
            self.report_tokens(sample, sample.num_tokens - num_before)

    def logprobs_of_row(self, step_logprobs: list[list] | None, i: int,
                        sample: Sample) -> tuple[float | None, tuple[tuple[str, float], ...]]:
        """Token.logprob and Token.top_logprobs of row i. step_logprobs: the tensors of Logprobs as lists, if any."""
        if step_logprobs is None:
            return None, ()
        sampled, top, top_ids = step_logprobs
        before = sample.request.prompt_ids[-1:] # some tokenizers leave out the space before the first word of a text
        texts = [self.tokenizer.incremental_decoder(before)(top_id, True) for top_id in top_ids[i]]
        return sampled[i][0], tuple(zip(texts, top[i], strict=True))

    def report_tokens(self, sample: Sample, num_tokens: int) -> None:
        """Tell on_tokens the number of new tokens, unless the sample is already saved."""
        if not sample.request.already_saved:
            self.on_tokens(num_tokens)


def copy_to_host(logprobs: list[Logprobs | None]) -> list[list[list] | None]:
    """The tensors of each step as lists. All steps are copied together, because each copy waits for the GPU."""
    if logprobs[0] is None:
        return logprobs
    stacked = [torch.stack(tensors).tolist() for tensors in zip(*logprobs, strict=True)]
    return [list(step) for step in zip(*stacked, strict=True)]
