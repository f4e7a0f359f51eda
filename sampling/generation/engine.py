"""The loop that samples, which is nanoGPT's (logits, a token, append, crop), and its batches.

Axes: B rows, V vocabulary, k proposals of a draft.
"""
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from sampling.backends.backend import Backend, return_freed_memory
from sampling.backends.backend_choice import warm_up
from sampling.checkpoints.checkpoint import Checkpoint
from sampling.generation.batch import Batch, Step
from sampling.generation.detokenizer import Detokenizer
from sampling.inputs.tokenizer import Tokenizer
from sampling.process import is_out_of_memory
from sampling.sampler.row_streams import RunStream, exponential_is_from_bits
from sampling.sampler.sampler import Sampler
from sampling.samples import Sample, Updates
from sampling.settings import SamplingParams

logger = logging.getLogger(__name__)
FLUSH_STEPS = 16 # between two copies of tokens to the host, where nothing depends on the tokens
MAX_PROPOSALS = 12 # how many tokens a draft proposes at once
# The lead of a proposal's score over the next one, as a logarithm: below it, the draft is unsure.
MIN_LEAD = 0.05


class Engine:
    """Generates samples in batches. Each gets the tokens that it would get alone.

    batch_size: how many samples to generate at once; None: as many as the backend likes. stream:
    whether each token is wanted as soon as possible.
    """

    def __init__(self, checkpoint: Checkpoint, tokenizer: Tokenizer, backend: Backend,
                 params: SamplingParams, batch_size: int | None, stream: bool):
        self.tokenizer = tokenizer
        self.backend = backend
        self.params = params
        self.batch_size = batch_size
        row_type = kernel = None
        if backend.has_kernels and exponential_is_from_bits():
            from sampling.sampler import kernels  # numba takes a while
            row_type = kernels.KernelStreams
            kernel = kernels.choose_ids
        self.run_stream = RunStream(params.seed, backend.device, checkpoint.num_init_draws,
                                    draws_per_sample=params.max_new_tokens,
                                    vocab_size=backend.config.vocab_size, row_type=row_type)
        # nanoGPT samples in the dtype of its logits, which on most devices are float32;
        # transformers in float32.
        in_logits_dtype = backend.full_vocabulary and not checkpoint.is_huggingface
        self.sampler = Sampler(params.temperature, params.top_k, params.top_p, params.min_p,
                               params.repetition_penalty, full_vocabulary=backend.full_vocabulary,
                               in_logits_dtype=in_logits_dtype, kernel=kernel)
        self.flush_steps = FLUSH_STEPS
        if stream or params.stop_texts:
            self.flush_steps = backend.min_flush_steps
        # The rows whose samples are yielded next, in order.
        self.waiting: deque[Detokenizer] = deque()

    def generate(self, samples: Iterable[Sample]) -> Updates:
        """Yield the samples in order, except those that are already saved, each with its new text.

        After each flush, the first unfinished sample comes with its pieces since the last time,
        perhaps none. A finished sample comes once, with the rest of its pieces. Raises ValueError
        if logits were NaN or infinite.
        """
        for batch in self.batches(samples):
            rows = [Detokenizer(sample, self.tokenizer, self.params) for sample in batch]
            self.waiting.extend(row for row in rows if not row.sample.already_saved)
            for group in self.group_by_length(rows):
                yield from self.generate_rows(group)
            # With max_new_tokens=0, all rows are finished from the start.
            yield from self.take_pieces()

    def batches(self, samples: Iterable[Sample]) -> Iterator[list[Sample]]:
        """Divide the samples into batches; leave out those in which all are already saved.

        In the others, the saved samples are generated again: then the rest get the same logits as
        in the first run, to the last bit.
        """
        samples = iter(samples)
        waiting = []
        most = self.batch_size or self.backend.max_rows
        while waiting := waiting + list(islice(samples, most - len(waiting))):
            size = self.batch_size or self.count_fitting(waiting)
            batch = waiting[:size]
            waiting = waiting[size:]
            if not all(sample.already_saved for sample in batch):
                yield batch

    def count_fitting(self, samples: list[Sample]) -> int:
        """How many of the first samples make a batch, if each is as long as the longest.

        Past block_size, larger batches may not be faster: then they are small, so that the first
        samples are shown and saved while the others wait.
        """
        backend = self.backend
        longest = 0
        for size, sample in enumerate(samples, 1):
            longest = max(longest, len(sample.prompt_ids) + self.params.max_new_tokens)
            is_past = longest > backend.config.block_size and not self.params.context_shift
            num_window_tokens = size * backend.config.block_size if is_past else 0
            is_too_large = size * backend.bytes_per_row(longest) > backend.max_batch_bytes
            if size > 1 and (is_too_large or num_window_tokens > backend.max_window_tokens):
                return size - 1
        return len(samples)

    def group_by_length(self, rows: list[Detokenizer]) -> list[list[Detokenizer]]:
        """Group rows whose visible prompts differ in length by at most max_new_tokens, in the order
        of the samples: in a batch, a longer prompt takes extra steps.
        """
        block_size = self.backend.config.block_size
        lengths = [min(len(row.sample.prompt_ids), block_size) for row in rows]
        shortest = min(lengths)
        group_of = {}
        groups = {} # a group has the name of its shortest length
        for length in sorted(set(lengths)):
            if length > shortest + self.params.max_new_tokens:
                shortest = length
            group_of[length] = shortest
        for row, length in zip(rows, lengths, strict=True):
            groups.setdefault(group_of[length], []).append(row)
        return list(groups.values())

    def take_pieces(self) -> Updates:
        """Yield the finished samples up to the first unfinished one, and its new pieces."""
        for row in list(self.waiting):
            yield row.sample, row.take_pieces()
            if not row.is_finished:
                break
            self.waiting.popleft()

    def generate_rows(self, rows: list[Detokenizer]) -> Updates:
        """Generate rows together, or half as many at once whenever memory runs out.

        Yields what is new in order.
        """
        while rows := [row for row in rows if not row.is_finished]:
            batch = rows[:self.batch_size]
            try:
                yield from self.generate_batch(batch)
                continue
            except (MemoryError, RuntimeError) as error:
                if len(batch) == 1 or not is_out_of_memory(error):
                    raise
            # outside of the except clause, because the error holds the tensors of the batch
            self.batch_size = len(batch) // 2
            logger.warning(f"out of memory with {len(batch)} samples at once: continuing with "
                           f"{self.batch_size}")
            self.backend.free_buffers()
            return_freed_memory()
            for row in batch:
                if not row.is_finished:
                    row.restart()

    def generate_batch(self, rows: list[Detokenizer]) -> Updates:
        warm_up(self.backend)
        # 1) The first step is the prefill: it reads the prompts.
        with self.backend.inference():
            batch = Batch(rows, self.backend, self.run_stream, self.params)
            num_tokens = self.params.max_new_tokens
            if not self.params.context_shift: # past block_size, a draft has no cache
                num_tokens = min(num_tokens, self.backend.config.block_size - batch.window.size(1))
            draft = None
            if len(rows) == 1:
                draft = self.backend.draft_for(num_tokens)
        try:
            # Nothing is generated yet. A terminal shows the prompt, and the run's clock begins.
            yield from self.take_pieces()
            while batch.rows:
                with self.backend.inference():
                    while not batch.is_due(self.flush_steps):
                        # 2) Logits (B * (k + 1), V). A single row also has those after each of k
                        # proposals of the draft.
                        ids = batch.unread # (B, T)
                        num_proposals = 0
                        if draft:
                            proposals = propose(draft, batch, self.sampler) # (1, k)
                            ids = torch.cat([ids, proposals], dim=1)
                            num_proposals = proposals.size(1)
                        logits = self.backend.logits(ids, batch.cache, 1 + num_proposals)
                        for i, position in enumerate(logits.split(len(ids))):
                            # 3) Tokens: each row has its own random numbers.
                            step = self.sample(position.expand(len(batch.rows), -1), batch)
                            # 4) Append, and crop to block_size.
                            batch.append(step)
                            if i < num_proposals and step.token != proposals[:, i]:
                                break # the other logits follow a wrong token
                    # 5) Flush: copy the tokens to the host, and leave out finished rows.
                    batch.flush()
                    batch.drop_finished()
                yield from self.take_pieces()
        finally:
            batch.release()

    def sample(self, logits: Tensor, batch: Batch) -> Step:
        """Sample the next tokens from logits (B, V), or take those of longer prompts."""
        noise = None if self.sampler.is_greedy else batch.streams.next()
        token = self.sampler(logits, batch.window, noise)
        if batch.num_steps < len(batch.forced):
            forced = batch.forced[batch.num_steps] # (B, 1)
            token = torch.where(forced < 0, token, forced)
        ids = token
        numbers = logits.amax(dim=-1, keepdim=True).float()
        if (n := self.params.num_logprobs) is not None:
            logprobs = logits.float().log_softmax(dim=-1) # (B, V)
            top, top_ids = logprobs.topk(min(n, logits.size(-1)))
            ids = torch.cat([token, top_ids], dim=1)
            numbers = torch.cat([numbers, logprobs.gather(1, token), top], dim=1)
        return Step(token, ids, numbers)


# ---- speculative decoding that keeps the text: docs/reproducibility.md explains why

def propose(draft: Backend, batch: Batch, sampler: Sampler) -> Tensor:
    """The tokens (1, k) that the draft samples after the window of a single row, up to the first of
    which it is unsure.

    draft: an int8 copy of the model. It samples with the random numbers that the model will use at
    the same positions, so it mostly proposes the model's own tokens. It reads and writes the cache
    of the model, whose own keys and values replace those of the draft when the model reads the
    proposals.
    """
    ids = batch.window # (1, S)
    cache = batch.cache
    if cache is None or cache.seq_len == 0: # past the window, or before the prefill
        return ids[:, :0]
    seq_len = cache.seq_len
    room = batch.backend.config.block_size - ids.size(1)
    # The model samples one token more.
    for i in range(min(MAX_PROPOSALS, room, batch.num_steps_left - 1)):
        logits = draft.logits(ids[:, cache.seq_len:], cache)
        noise = None if sampler.is_greedy else batch.streams.peek(i)
        token, lead = sampler.propose(logits, ids, noise)
        ids = torch.cat([ids, token], dim=1)
        if lead < MIN_LEAD:
            break
    cache.seq_len = seq_len
    return ids[:, batch.window.size(1):]
