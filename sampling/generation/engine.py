"""Generates many samples in batches. Each sample has the same tokens as if it were generated alone."""
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sampling.backends.process import return_freed_memory
from sampling.generation.assembly import LoadedModel
from sampling.generation.batching import group_by_length, next_batch, visible_prompt
from sampling.generation.decode import Decoder, Step
from sampling.generation.detokenizer import IncrementalDetokenizer
from sampling.messages import Log, is_out_of_memory, warn
from sampling.params import Sample, SampleRequest, SamplingParams, check_exact
from sampling.sampler.row_streams import RunStream
from sampling.sampler.sampler import NOT_FINITE, Sampler

MAX_FLUSH_STEPS = 16 # between two copies of tokens to the host
MAX_FLUSH_SECONDS = 0.03 # the same while streaming: text that comes sooner does not look smoother
MIN_ROWS_TO_SHRINK = 32 # on CUDA: idle rows of a smaller batch cost less than the new graphs of a smaller one


@dataclass
class Engine:
    """Turns requests into samples. Raises ValueError if the model is exact and params asks for what nanoGPT lacks.

    batch_size: how many samples to generate at once.
    stream: whether to yield samples before they are finished.
    log: gets messages for the user.
    on_tokens: gets the number of new tokens; it is negative if memory ran out and tokens are discarded.
    """
    model: LoadedModel
    params: SamplingParams
    batch_size: int = 1
    stream: bool = False
    log: Log = warn
    on_tokens: Callable[[int], None] = lambda num_tokens: None

    def __post_init__(self):
        model, params, backend = self.model, self.params, self.model.backend
        if model.is_exact:
            check_exact({**vars(params), "batch_size": self.batch_size})
        self.is_cuda, self.block_size = backend.device.type == "cuda", backend.config.block_size
        self.run_stream = RunStream(params.seed, backend.device, model.checkpoint.num_init_draws,
                                    draws_per_sample=params.max_new_tokens, vocab_size=backend.config.vocab_size)
        # On CUDA, nanoGPT computes in the dtype of the logits. On other devices it has no autocast: they are float32.
        as_nanogpt = model.is_exact or (self.is_cuda and not model.checkpoint.is_huggingface)
        sampler = Sampler(params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty,
                          all_columns=self.is_cuda or model.is_exact, in_logits_dtype=as_nanogpt)
        self.decoder = Decoder(backend, sampler, params.num_logprobs, params.context_shift, model.idle_caches)
        # Except on CUDA, a flush costs little. After each flush, rows with a stop text can leave the batch.
        flushes_every_step = not self.is_cuda and (self.stream or params.stop_texts)
        self.max_flush_steps = 1 if flushes_every_step else MAX_FLUSH_STEPS

    def generate(self, requests: Iterable[SampleRequest]) -> Iterator[Sample]:
        """Yield the finished samples in order, except those that are already saved.

        With stream, also yield the first unfinished sample after each flush.
        Raises ValueError if logits were NaN or infinite.
        """
        requests = iter(requests)
        while batch := next_batch(requests, self.batch_size):
            samples = [Sample(request) for request in batch]
            starts = {sample: self.run_stream.state_for_sample(sample.index) for sample in samples}
            waiting = deque(sample for sample in samples if not sample.request.already_saved)
            for group in group_by_length(samples, self.block_size, self.params.max_new_tokens):
                for _ in self.run_with_oom_retry(group, starts):
                    while waiting and waiting[0].finish_reason:
                        yield waiting.popleft()
                    if waiting and self.stream:
                        yield waiting[0]

    def run_with_oom_retry(self, samples: list[Sample], starts: dict[Sample, Tensor]) -> Iterator[None]:
        """Generate the samples; yields whenever they have new tokens. If memory runs out, halves the batch size."""
        while samples:
            batch, samples = samples[:self.batch_size], samples[self.batch_size:]
            try:
                yield from self.run_batch(batch, starts)
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
        self.model.idle_caches.clear()
        return_freed_memory()
        unfinished = [sample for sample in batch if not sample.finish_reason]
        for sample in unfinished:
            self.report_tokens(sample, -sample.num_tokens)
            sample.tokens, sample.num_emittable_chars = [], 0
        return unfinished

    def run_batch(self, samples: list[Sample], starts: dict[Sample, Tensor]) -> Iterator[None]:
        """Generate the samples of one batch; yields whenever they have new tokens."""
        max_new_tokens = self.params.max_new_tokens
        if max_new_tokens == 0:
            for sample in samples:
                sample.finish_reason = "length"
            yield
            return
        rows = [IncrementalDetokenizer(sample, self.model.tokenizer, self.params) for sample in samples]
        prompts = [visible_prompt(sample, self.block_size) for sample in samples]
        shortest = min(map(len, prompts))
        first_steps = [len(prompt) - shortest for prompt in prompts] # whose token is the first of each sample, from 0
        last_steps = {first + max_new_tokens for first in first_steps} # after which samples are finished
        steps = self.start(prompts, [starts[sample] for sample in samples], max(last_steps))
        pending, kept, last_flush = [], None, time.perf_counter()
        flush_steps = 1 if self.stream else self.max_flush_steps
        for num_steps in range(1, max(last_steps) + 1):
            pending.append(steps.send(kept))
            kept = None
            if num_steps not in last_steps and len(pending) < flush_steps:
                continue
            self.flush(pending, [first - num_steps + len(pending) for first in first_steps], rows)
            if self.stream: # a step cannot be timed: the host only launches it, and a flush waits for all of them
                seconds = max(time.perf_counter() - last_flush, 1e-9) / len(pending)
                flush_steps = max(1, min(self.max_flush_steps, int(MAX_FLUSH_SECONDS / seconds)))
                last_flush = time.perf_counter()
            pending = []
            yield
            kept = self.rows_to_keep(rows)
            if kept == []:
                break
            if kept is not None:
                rows, first_steps = [rows[i] for i in kept], [first_steps[i] for i in kept]
        steps.close()

    def start(self, prompts: list[list[int]], starts: list[Tensor], num_steps: int) -> Iterator[Step]:
        """The steps of a batch, whose samples start in these states of the random stream."""
        streams = self.run_stream.rows(starts)
        speculation = self.model.speculation
        if speculation and speculation.is_on(prompts, num_steps, self.params.context_shift):
            return speculation.decode(self.decoder, prompts[0], streams, num_steps)
        return self.decoder.decode(prompts, streams, num_steps)

    def rows_to_keep(self, rows: list[IncrementalDetokenizer]) -> list[int] | None:
        """The indices of the unfinished rows; None: keep all rows, because too few have finished."""
        unfinished = [i for i, row in enumerate(rows) if not row.sample.finish_reason]
        if len(unfinished) == len(rows):
            return None
        is_small_gain = len(rows) <= MIN_ROWS_TO_SHRINK or 2 * len(unfinished) > len(rows)
        return None if unfinished and self.is_cuda and is_small_gain else unfinished

    def flush(self, pending: list[Step], first_steps: list[int], rows: list[IncrementalDetokenizer]) -> None:
        """Append the tokens of the pending steps to the samples.

        first_steps: the step in pending that has the first token of each row; below 0 if it was an earlier one.
        """
        is_valid = torch.stack([step.is_valid for step in pending]).all().expand(len(rows), 1)
        # In one tensor, because each copy to the host waits for the GPU.
        ids = torch.cat([*(step.ids for step in pending), is_valid], dim=1).tolist() # (B, steps + 1)
        if not ids[0].pop():
            raise ValueError(NOT_FINITE)
        logprobs = copy_to_host(pending)
        for i, (row, first) in enumerate(zip(rows, first_steps, strict=True)):
            num_before = row.sample.num_tokens
            for step in range(max(0, first), len(pending)):
                if row.sample.finish_reason:
                    break
                row.append(ids[i][step], *self.logprobs_of_row(logprobs[step], i, row.sample))
            self.report_tokens(row.sample, row.sample.num_tokens - num_before)

    def logprobs_of_row(self, logprobs: list[list] | None, i: int,
                        sample: Sample) -> tuple[float | None, tuple[tuple[str, float], ...]]:
        """Token.logprob and Token.top_logprobs of row i. logprobs: the tensors of Logprobs as lists, if any."""
        if logprobs is None:
            return None, ()
        sampled, top, top_ids = logprobs
        before = sample.request.prompt_ids[-1:] # some tokenizers leave out the space before the first word of a text
        texts = [self.model.tokenizer.incremental_decoder(before)(top_id, True) for top_id in top_ids[i]]
        return sampled[i][0], tuple(zip(texts, top[i], strict=True))

    def report_tokens(self, sample: Sample, num_tokens: int) -> None:
        """Tell on_tokens the number of new tokens, unless the sample is already saved."""
        if not sample.request.already_saved:
            self.on_tokens(num_tokens)


def copy_to_host(steps: list[Step]) -> list[list[list] | None]:
    """The log-probabilities of each step as lists. All steps are copied together, because each copy waits for a GPU."""
    if steps[0].logprobs is None:
        return [None] * len(steps)
    stacked = [torch.stack(tensors).tolist() for tensors in zip(*(step.logprobs for step in steps), strict=True)]
    return [list(step) for step in zip(*stacked, strict=True)]
