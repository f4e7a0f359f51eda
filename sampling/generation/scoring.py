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
from sampling.generation.batch import NOT_FINITE
from sampling.generation.detokenizer import Detokenizer
from sampling.inputs.tokenizer import Tokenizer
from sampling.params import Piece, SamplingParams, Score, ScoringParams

logger = logging.getLogger(__name__)
# The tokens of the windows that are computed at once: with GPT-2's vocabulary, a gigabyte of
# logits.
MAX_BATCH_TOKENS = 2048


class Window(NamedTuple):
    """Neighbouring tokens of a text, which the model reads at once."""
    score: Score
    ids: list[int] # T
    next_ids: list[int] # after each of them; at the end of the text, one fewer
    num_done: int # how many of these the window before has scored
    is_first: bool
    is_last: bool


def score_texts(backend: Backend, tokenizer: Tokenizer, scores: Iterable[Score],
                params: ScoringParams,
                batch_size: int | None = None) -> Iterator[tuple[Score, list[Piece]]]:
    """Score the texts that are not saved already. Yields them in order, each after each of its
    windows, with its new pieces. batch_size: of windows, at most. Raises ValueError if logits were
    NaN or infinite.
    """
    new = (score for score in scores if not score.already_saved)
    most = batch_size or backend.max_rows
    for batch in batches(windows(new, backend.config.block_size), most):
        with backend.inference():
            results = score_windows(backend, batch, params.num_logprobs)
        for window, (logprobs, top, top_ids) in zip(batch, results, strict=True):
            score = window.score
            if window.is_first:
                detokenizer = start_detokenizer(score, tokenizer, params.max_tokens)
            score.num_tokens += len(logprobs)
            score.cumulative_logprob += sum(logprobs)
            steps = zip(window.next_ids[window.num_done:], logprobs, top, top_ids, strict=True)
            for step in islice(steps, max(0, params.max_tokens - len(score.tokens))):
                detokenizer.append(*step)
            score.finish_reason = "length" if window.is_last else None
            yield score, detokenizer.take_pieces()


def start_detokenizer(score: Score, tokenizer: Tokenizer, max_tokens: int) -> Detokenizer:
    """What makes the tokens of a text, at most max_tokens. It has the first one already, which is
    not scored.
    """
    score.num_bytes = tokenizer.num_bytes(score.ids) - tokenizer.num_bytes(score.ids[:1])
    if 0 < max_tokens < len(score.ids):
        logger.info(f"a text has {len(score.ids)} tokens: all are scored, but only the first "
                    f"{max_tokens} are saved or shown")
    params = SamplingParams(max_new_tokens=min(len(score.ids), max_tokens))
    detokenizer = Detokenizer(score, tokenizer, params)
    if max_tokens:
        detokenizer.append(score.ids[0])
    return detokenizer


def windows(scores: Iterable[Score], block_size: int) -> Iterator[Window]:
    """The windows of each text. They advance by half a window, so that at least block_size / 2
    tokens come before each token that is scored, if there are so many.
    """
    half = max(1, block_size // 2)
    for score in scores:
        for start in range(0, max(1, len(score.ids) - 1 - block_size + half), half):
            end = start + block_size
            num_done = 0
            if start:
                num_done = block_size - half
            yield Window(score, score.ids[start:end], score.ids[start + 1:end + 1], num_done,
                         is_first=start == 0, is_last=end >= len(score.ids) - 1)


def batches(all_windows: Iterator[Window], most: int) -> Iterator[list[Window]]:
    """Divide the windows, in order, into those that are computed at once, at most so many."""
    while waiting := list(islice(all_windows, most)):
        size = max(1, MAX_BATCH_TOKENS // max(len(window.ids) for window in waiting))
        yield from (waiting[i:i + size] for i in range(0, len(waiting), size))


def score_windows(backend: Backend, batch: list[Window],
                  num_top: int) -> list[tuple[list, list, list]]:
    """For each window: the log-probabilities of the n tokens that it scores, and those and the ids
    of the k = num_top most likely tokens in their places.
    """
    # Shorter windows are padded at their ends: no token sees what follows it.
    # (B, T)
    rows = [torch.tensor(window.ids) for window in batch]
    ids = pad_sequence(rows, batch_first=True).to(backend.device)
    skipped = min(window.num_done for window in batch) # of these positions, no logits are needed
    # (B, T - skipped, V)
    logits = backend.text_logits(ids, ids.size(1) - skipped).unflatten(0, (len(batch), -1))
    results = []
    for window, rows in zip(batch, logits, strict=True):
        # (n,)
        next_ids = window.next_ids[window.num_done:]
        next_ids = torch.tensor(next_ids, dtype=torch.long, device=ids.device)
        first = window.num_done - skipped
        logprobs = rows[first:first + len(next_ids)].float().log_softmax(dim=-1) # (n, V)
        of_tokens = logprobs.gather(1, next_ids[:, None])[:, 0]
        top = logprobs.topk(min(num_top, logprobs.size(1)))
        if not of_tokens.isfinite().all():
            raise ValueError(NOT_FINITE)
        results.append((of_tokens.tolist(), top.values.tolist(), top.indices.tolist()))
    return results
