"""Generates many samples in batches. Each sample has the same tokens as if it were generated alone."""
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from sampling.backends.backend import Backend
from sampling.backends.process import return_freed_memory
from sampling.checkpoints.checkpoint import Checkpoint
from sampling.generation.decode import Decoder, Step
from sampling.generation.speculation import Speculation
from sampling.inputs.tokenizer import Tokenizer
from sampling.messages import is_out_of_memory
from sampling.params import Sample, SamplingParams, Token, check_exact
from sampling.sampler.row_streams import RowStreams, RunStream
from sampling.sampler.sampler import NOT_FINITE, Sampler

logger = logging.getLogger(__name__)
FLUSH_STEPS, CUDA_STREAM_FLUSH_STEPS = 16, 4 # between two copies of tokens to the host
MIN_ROWS_TO_SHRINK = 32 # on CUDA: idle rows of a smaller batch cost less than the new graphs of a smaller one


@dataclass(eq=False)
class LoadedModel:
    """A model that is ready to generate.

    checkpoint: where the model is from, without its weights. speculation: decodes with a draft, if there is one.
    """
    backend: Backend
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    dtype: torch.dtype
    num_params: int
    speculation: Speculation | None = None

    @property
    def dtype_name(self) -> str:
        """Such as "float32"."""
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> torch.autocast:
        """The context in which the model runs. It turns autocast on for half precision, otherwise off."""
        is_half = self.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self.backend.device.type, self.dtype if is_half else None, enabled=is_half)


@dataclass
class Engine:
    """Gives samples their tokens. Raises ValueError if the model is exact and params asks for what nanoGPT lacks.

    batch_size: how many samples to generate at once.
    stream: whether to yield samples before they are finished.
    on_tokens: gets the number of new tokens of samples that are not saved yet; negative if memory ran out and tokens
    are discarded.
    """
    model: LoadedModel
    params: SamplingParams
    batch_size: int = 1
    stream: bool = False
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
        self.flush_steps = FLUSH_STEPS
        # After a flush, rows with a stop text can leave the batch. But each flush waits for a GPU.
        if self.stream or (params.stop_texts and not self.is_cuda):
            self.flush_steps = CUDA_STREAM_FLUSH_STEPS if self.is_cuda else 1

    def generate(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield the finished samples in order, except those that are already saved.

        With stream, also yield the first unfinished sample after each flush.
        Raises ValueError if logits were NaN or infinite.
        """
        samples = iter(samples)
        if self.params.max_new_tokens == 0:
            for sample in samples:
                sample.finish_reason = "length"
                if not sample.already_saved:
                    yield sample
            return
        while batch := next_batch(samples, self.batch_size):
            waiting = deque(sample for sample in batch if not sample.already_saved)
            for group in group_by_length(batch, self.block_size, self.params.max_new_tokens):
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
            logger.warning(f"out of memory with {len(batch)} samples at once: continuing with {self.batch_size}")
            return_freed_memory()
            unfinished = [sample for sample in batch if not sample.finish_reason]
            for sample in unfinished:
                if not sample.already_saved:
                    self.on_tokens(-sample.num_tokens)
                sample.tokens, sample.num_emittable_chars = [], 0
            samples = unfinished + samples

    def run_batch(self, samples: list[Sample]) -> Iterator[None]:
        """Generate the samples of one batch; yields whenever they have new tokens."""
        prompts = [sample.prompt_ids[-self.block_size:] for sample in samples]
        shortest, max_new_tokens = min(map(len, prompts)), self.params.max_new_tokens
        first_steps = [len(prompt) - shortest for prompt in prompts] # in which the rows get their first new tokens
        rows = [IncrementalDetokenizer(sample, self.model.tokenizer, self.params, first_step)
                for sample, first_step in zip(samples, first_steps, strict=True)]
        last_steps = {first_step + max_new_tokens for first_step in first_steps} # after which samples are finished
        streams = RowStreams(self.run_stream, [sample.index for sample in samples], first_steps)
        speculation = self.model.speculation
        if speculation and speculation.should_draft(self.decoder, prompts, max_new_tokens):
            steps = speculation.decode(self.decoder, prompts[0], streams, max_new_tokens)
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
            unfinished = [i for i, row in enumerate(rows) if not row.sample.finish_reason]
            if not unfinished:
                return
            is_small_gain = len(rows) <= MIN_ROWS_TO_SHRINK or 2 * len(unfinished) > len(rows)
            if len(unfinished) < len(rows) and not (self.is_cuda and is_small_gain):
                kept, rows = unfinished, [rows[i] for i in unfinished]

    def flush(self, pending: list[Step], num_before: int, rows: "list[IncrementalDetokenizer]") -> None:
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
            if not row.sample.already_saved:
                self.on_tokens(row.sample.num_tokens - num_tokens)


class IncrementalDetokenizer:
    """Appends tokens to a sample until it has max_new_tokens or a stop text appears, which may span several tokens.

    first_step: the step of the batch in which its first token is sampled, from 0.
    """

    def __init__(self, sample: Sample, tokenizer: Tokenizer, params: SamplingParams, first_step: int = 0):
        self.sample, self.tokenizer, self.params, self.first_step = sample, tokenizer, params, first_step
        self.decode = tokenizer.incremental_decoder(sample.prompt_ids)
        self.withheld = "" # the end of the text, with which a stop text may begin

    def append(self, token_id: int, logprob: float | None = None, top: Sequence[float] = (),
               top_ids: Sequence[int] = ()) -> None:
        """Append the next token, and set the finish reason if it is the last one. top, top_ids: see Step.logprobs."""
        sample = self.sample
        before = sample.prompt_ids[-1:] # some tokenizers leave out the space before the first word of a text
        top_texts = [self.tokenizer.incremental_decoder(before)(top_id, True) for top_id in top_ids]
        is_last = len(sample.tokens) + 1 == self.params.max_new_tokens
        text = self.decode(token_id, is_last)
        sample.tokens.append(Token(token_id, text, logprob, tuple(zip(top_texts, top, strict=True))))
        pending_text = self.withheld + text # not emittable yet
        stop_starts = [start for stop in self.params.stop_texts if (start := pending_text.find(stop)) >= 0]
        if stop_starts:
            sample.finish_reason, end = "stop", min(stop_starts)
            self.truncate(len(pending_text) - end)
        elif is_last:
            sample.finish_reason, end = "length", len(pending_text)
        else: # a stop text may begin at the end of the text
            lengths = [n for stop in self.params.stop_texts for n in range(min(len(stop), len(pending_text) + 1))
                       if pending_text.endswith(stop[:n])]
            end = len(pending_text) - max(lengths, default=0)
        sample.num_emittable_chars += end
        self.withheld = pending_text[end:]

    def truncate(self, num_chars: int) -> None:
        """Remove this many characters from the end of the text. The tokens stay, but their text becomes shorter."""
        tokens, i = self.sample.tokens, len(self.sample.tokens)
        while num_chars > 0:
            i -= 1
            text = tokens[i].text
            tokens[i] = tokens[i]._replace(text=text[:max(0, len(text) - num_chars)])
            num_chars -= len(text)


def next_batch(samples: Iterator[Sample], size: int) -> list[Sample]:
    """Return the next size samples, or fewer at the end. Skips batches in which all samples are already saved.

    In any other batch, the saved samples are generated again. Then the other samples get the same logits as in the
    first run, to the last bit.
    """
    while batch := list(islice(samples, size)):
        if not all(sample.already_saved for sample in batch):
            break
    return batch


def group_by_length(samples: list[Sample], block_size: int, max_new_tokens: int) -> list[list[Sample]]:
    """Group samples whose visible prompts differ in length by at most max_new_tokens, in the order of the samples.

    The rows of a batch decode in lockstep from the end of the shortest prompt, so a longer prompt needs extra steps.
    """
    def length(sample):
        return min(len(sample.prompt_ids), block_size)
    groups, shortest = {}, -math.inf
    for sample in sorted(samples, key=length):
        if length(sample) > shortest + max_new_tokens:
            shortest = length(sample)
        groups.setdefault(shortest, []).append(sample)
    in_order = [sorted(group, key=lambda sample: sample.index) for group in groups.values()]
    return sorted(in_order, key=lambda group: group[0].index)
