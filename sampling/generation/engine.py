"""Generates many samples in batches. Each sample has the same tokens as if it were generated alone."""
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from sampling.backends.process import return_freed_memory
from sampling.generation.assembly import LoadedModel
from sampling.generation.decode import Decoder, Step
from sampling.generation.detokenizer import IncrementalDetokenizer
from sampling.messages import Log, is_out_of_memory, warn
from sampling.params import Sample, SampleRequest, SamplingParams, check_exact
from sampling.sampler.row_streams import RowStreams, RunStream
from sampling.sampler.sampler import NOT_FINITE, Sampler

FLUSH_STEPS, CUDA_STREAM_FLUSH_STEPS = 16, 4 # between two copies of tokens to the host
MIN_ROWS_TO_SHRINK = 32 # on CUDA: idle rows of a smaller batch cost less than the new graphs of a smaller one


@dataclass
class Engine:
    """Turns requests into samples. Raises ValueError if the model is exact and params asks for what nanoGPT lacks.

    batch_size: how many samples to generate at once.
    stream: whether to yield samples before they are finished.
    log: gets messages for the user.
    on_tokens: gets the number of new tokens of samples that are not saved yet; negative if memory ran out and tokens
    are discarded.
    """
    model: LoadedModel
    params: SamplingParams
    batch_size: int = 1
    stream: bool = False
    log: Log = warn
    on_tokens: Callable[[int], None] = lambda num_tokens: None

    def __post_init__(self):
        model, params, backend = self.model, self.params, self.model.backend
        if backend.is_exact:
            check_exact({**vars(params), "batch_size": self.batch_size})
        self.is_cuda, self.block_size = backend.device.type == "cuda", backend.config.block_size
        self.run_stream = RunStream(params.seed, backend.device, model.checkpoint.num_init_draws,
                                    draws_per_sample=params.max_new_tokens, vocab_size=backend.config.vocab_size)
        # On CUDA, nanoGPT samples in the dtype of the logits, and transformers in float32. On other devices, nanoGPT's
        # logits are float32.
        in_logits_dtype = backend.is_exact or (self.is_cuda and not model.checkpoint.is_huggingface)
        all_columns = backend.is_exact or self.is_cuda # nanoGPT's own operation, for which no GPU waits
        sampler = Sampler(params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty,
                          all_columns=all_columns, in_logits_dtype=in_logits_dtype)
        self.decoder = Decoder(backend, sampler, params.num_logprobs, params.context_shift)
        # After a flush, rows with a stop text can leave the batch. But each flush waits for a GPU.
        if self.is_cuda:
            self.flush_steps = CUDA_STREAM_FLUSH_STEPS if self.stream else FLUSH_STEPS
        else:
            self.flush_steps = 1 if self.stream or params.stop_texts else FLUSH_STEPS

    def generate(self, requests: Iterable[SampleRequest]) -> Iterator[Sample]:
        """Yield the finished samples in order, except those that are already saved.

        With stream, also yield the first unfinished sample after each flush.
        Raises ValueError if logits were NaN or infinite.
        """
        requests = iter(requests)
        if self.params.max_new_tokens == 0:
            yield from (Sample(request, finish_reason="length") for request in requests if not request.already_saved)
            return
        while batch := next_batch(requests, self.batch_size):
            samples = [Sample(request) for request in batch]
            waiting = deque(sample for sample in samples if not sample.request.already_saved)
            for group in group_by_length(samples, self.block_size, self.params.max_new_tokens):
                for _ in self.run_with_oom_retry(group):
                    while waiting and waiting[0].finish_reason:
                        yield waiting.popleft()
                    if waiting and self.stream:
                        yield waiting[0]

    def run_with_oom_retry(self, samples: list[Sample]) -> Iterator[None]:
        """Generate the samples; yields whenever they have new tokens. If memory runs out, halves the batch size."""
        while samples:
            batch, samples = samples[:self.batch_size], samples[self.batch_size:]
            try:
                yield from self.run_batch(batch)
                continue
            except (MemoryError, RuntimeError) as error:
                if len(batch) == 1 or not is_out_of_memory(error):
                    raise
            # outside of the except clause, because the error holds the tensors of the batch
            self.batch_size = len(batch) // 2
            self.log(f"out of memory with {len(batch)} samples at once: continuing with {self.batch_size}")
            return_freed_memory()
            unfinished = [sample for sample in batch if not sample.finish_reason]
            for sample in unfinished:
                if not sample.request.already_saved:
                    self.on_tokens(-sample.num_tokens)
                sample.tokens, sample.num_emittable_chars = [], 0
            samples = unfinished + samples

    def run_batch(self, samples: list[Sample]) -> Iterator[None]:
        """Generate the samples of one batch; yields whenever they have new tokens."""
        prompts = [sample.request.prompt_ids[-self.block_size:] for sample in samples]
        shortest = min(map(len, prompts))
        rows = [IncrementalDetokenizer(sample, self.model.tokenizer, self.params, first_step=len(prompt) - shortest)
                for sample, prompt in zip(samples, prompts, strict=True)]
        last_steps = {row.first_step + self.params.max_new_tokens for row in rows} # after which samples are finished
        streams = RowStreams(self.run_stream, [sample.index for sample in samples])
        speculation = self.model.speculation
        if speculation and speculation.should_draft(prompts, max(last_steps), self.params.context_shift):
            steps = speculation.decode(self.decoder, prompts[0], streams, max(last_steps))
        else:
            steps = self.decoder.decode(prompts, streams, max(last_steps))
        pending, kept = [], None
        for num_steps in range(1, max(last_steps) + 1):
            pending.append(steps.send(kept))
            kept = None
            if num_steps not in last_steps and len(pending) < self.flush_steps:
                continue
            self.flush(pending, num_steps - len(pending), rows)
            pending = []
            yield
            if all(row.sample.finish_reason for row in rows):
                break
            kept = self.rows_to_keep(rows)
            if kept is not None:
                rows = [rows[i] for i in kept]
        steps.close()

    def rows_to_keep(self, rows: list[IncrementalDetokenizer]) -> list[int] | None:
        """The indices of the unfinished rows; None: keep all rows, because too few have finished."""
        unfinished = [i for i, row in enumerate(rows) if not row.sample.finish_reason]
        is_small_gain = len(rows) <= MIN_ROWS_TO_SHRINK or 2 * len(unfinished) > len(rows)
        return None if len(unfinished) == len(rows) or (self.is_cuda and is_small_gain) else unfinished

    def flush(self, pending: list[Step], num_before: int, rows: list[IncrementalDetokenizer]) -> None:
        """Append the tokens of the pending steps, which follow num_before steps of the batch, to the samples."""
        is_valid = torch.stack([step.is_valid for step in pending]).all().expand(len(rows), 1)
        # In one tensor, because each copy to the host waits for the GPU.
        ids = torch.cat([*(step.ids for step in pending), is_valid], dim=1).tolist() # (B, steps + 1)
        if not ids[0].pop():
            raise ValueError(NOT_FINITE)
        logprobs = [[tensor.tolist() for tensor in step.logprobs or ()] for step in pending]
        for i, row in enumerate(rows):
            num_tokens = row.sample.num_tokens
            for step in range(max(0, row.first_step - num_before), len(pending)):
                if row.sample.finish_reason:
                    break
                row.append(ids[i][step], *(values[i] for values in logprobs[step]))
            if not row.sample.request.already_saved:
                self.on_tokens(row.sample.num_tokens - num_tokens)


def next_batch(requests: Iterator[SampleRequest], size: int) -> list[SampleRequest]:
    """Return the next size requests, or fewer at the end. Skips batches in which all samples are already saved.

    In any other batch, the saved samples are generated again. Then the other samples get the same logits as in the
    first run, to the last bit.
    """
    while batch := list(islice(requests, size)):
        if not all(request.already_saved for request in batch):
            break
    return batch


def group_by_length(samples: list[Sample], block_size: int, max_new_tokens: int) -> list[list[Sample]]:
    """Group samples whose visible prompts differ in length by at most max_new_tokens, in the order of the samples.

    The rows of a batch decode in lockstep from the end of the shortest prompt, so a longer prompt needs extra steps.
    """
    def length(sample):
        return min(len(sample.request.prompt_ids), block_size)
    groups, shortest = [], -math.inf
    for sample in sorted(samples, key=length):
        if length(sample) > shortest + max_new_tokens:
            groups.append([])
            shortest = length(sample)
        groups[-1].append(sample)
    groups = [sorted(group, key=lambda sample: sample.index) for group in groups]
    return sorted(groups, key=lambda group: group[0].index)
