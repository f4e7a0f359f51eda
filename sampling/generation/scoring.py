"""Scores texts: how likely the model finds each token after the tokens before it.

Axes: B windows, T tokens that the model reads, n tokens that a window scores, V vocabulary, k most
likely tokens.
"""
import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from sampling.backends.backend import Backend
from sampling.backends.backend_choice import warm_up
from sampling.generation.batch import NOT_FINITE
from sampling.generation.detokenizer import Detokenizer
from sampling.inputs.tokenizer import Tokenizer
from sampling.samples import Score, Updates
from sampling.settings import SamplingParams, ScoringParams

logger = logging.getLogger(__name__)
# The windows that are computed at once have so many tokens: with GPT-2's vocabulary, their logits
# take a gigabyte.
MAX_BATCH_TOKENS = 2048


class Window(NamedTuple):
    """Neighbouring tokens of a text, which the model reads at once."""
    score: Score
    ids: list[int] # T
    num_done: int # after so many of them, the next token is scored already, by the window before
    next_ids: list[int] # n: the tokens to score


def score_texts(backend: Backend, tokenizer: Tokenizer, scores: Iterable[Score],
                params: ScoringParams, batch_size: int | None) -> Updates:
    """Score the texts that are not saved already, in order.

    After each window, yield its text with the new pieces. batch_size: the highest number of windows
    to compute at once.
    Raises ValueError if logits are NaN or infinite.
    """
    new = (score for score in scores if not score.already_saved)
    max_windows = batch_size or backend.max_rows
    for batch in batches(windows(new, backend.config.block_size), max_windows):
        warm_up(backend)
        yield batch[0].score, [] # the run's clock begins
        with backend.inference():
            results = score_windows(backend, batch, params.num_logprobs)
        for window, logprobs, *top in results:
            score = window.score
            if score.num_tokens == 0: # this is its first window
                detokenizer = start_detokenizer(score, tokenizer, params.max_tokens)
            score.num_tokens += len(logprobs)
            score.cumulative_logprob += sum(logprobs)
            num_kept = max(0, params.max_tokens - len(score.tokens))
            for step in islice(zip(window.next_ids, logprobs, *top, strict=True), num_kept):
                detokenizer.append(*step)
            is_complete = score.num_tokens == len(score.ids) - 1
            score.finish_reason = "length" if is_complete else None
            yield score, detokenizer.take_pieces()


def start_detokenizer(score: Score, tokenizer: Tokenizer, max_tokens: int) -> Detokenizer:
    """A detokenizer for at most max_tokens of a text. It has the first token, which is not scored.
    """
    length = len(score.ids)
    score.num_bytes = tokenizer.num_bytes(score.ids) - tokenizer.num_bytes(score.ids[:1])
    if 0 < max_tokens < length:
        logger.info(f"a text has {length} tokens: all are scored, but only the first {max_tokens} "
                    "are saved or shown")
    params = SamplingParams(max_new_tokens=min(length, max_tokens))
    detokenizer = Detokenizer(score, tokenizer, params)
    if max_tokens:
        detokenizer.append(score.ids[0])
    return detokenizer


def windows(scores: Iterable[Score], block_size: int) -> Iterator[Window]:
    """The windows of each text.

    They advance by half a window, so each token is scored after at least block_size / 2 tokens,
    unless the text has fewer before it.
    """
    half = max(1, block_size // 2)
    for score in scores:
        ids = score.ids
        for start in range(0, max(1, len(ids) - 1 - block_size + half), half):
            end = start + block_size
            num_done = block_size - half if start else 0
            yield Window(score, ids[start:end], num_done, ids[start + num_done + 1:end + 1])


def batches(all_windows: Iterator[Window], max_windows: int) -> Iterator[list[Window]]:
    """Divide the windows, in order, into those that are computed at once."""
    while waiting := list(islice(all_windows, max_windows)):
        longest = max(len(window.ids) for window in waiting)
        size = max(1, MAX_BATCH_TOKENS // longest)
        for start in range(0, len(waiting), size):
            yield waiting[start:start + size]


def score_windows(backend: Backend, batch: list[Window], num_top: int) -> list[tuple]:
    """Each window with the log-probabilities of the n tokens that it scores, and in the place of
    each the log-probabilities and the ids of the k = num_top most likely tokens.
    """
    # Shorter windows are padded at their ends: no token sees what follows it.
    rows = [torch.tensor(window.ids) for window in batch]
    ids = pad_sequence(rows, batch_first=True).to(backend.device) # (B, T)
    skipped = min(window.num_done for window in batch) # these positions need no logits
    flat = backend.logits(ids, None, ids.size(1) - skipped)
    logits = flat.unflatten(0, (len(batch), -1)) # (B, T - skipped, V)
    results = []
    for window, row in zip(batch, logits, strict=True):
        next_ids = torch.tensor(window.next_ids, dtype=torch.long, device=ids.device) # (n,)
        first = window.num_done - skipped
        all_logprobs = row[first:first + len(next_ids)].float().log_softmax(dim=-1) # (n, V)
        logprobs = all_logprobs.gather(1, next_ids[:, None])[:, 0] # (n,)
        top = all_logprobs.topk(min(num_top, all_logprobs.size(1))) # (n, k)
        if not logprobs.isfinite().all():
            raise ValueError(NOT_FINITE)
        results.append((window, logprobs.tolist(), top.values.tolist(), top.indices.tolist()))
    return results
