"""Scores are the losses of the plain model, whatever the backend, the windows and the batch."""
from functools import cache

import pytest
import torch
from torch.nn.functional import cross_entropy

import sampling
from engines import LONG_PROMPT, TOKENIZER, NotingBackend, make_generator
from hf_tokenizers import gpt2_tokenizer_json
from models import make_gpt, make_transformers_gpt2
from sampling.backends.backend import EagerBackend
from sampling.generation import scoring
from sampling.samples import Prompt, Score
from sampling.settings import ScoringParams

QUESTION = "What is it?"
BOOK = 3 * f"{LONG_PROMPT}{QUESTION} Thou art a comfort, and look'd profane word. "


def score(gpt, text):
    return gpt.score(text).cumulative_logprob


def make_score(text, ids, index=0):
    return Score(index, Prompt(text), ids)


def text_of(score):
    return "".join(token.text for token in score.tokens)


@torch.no_grad()
def plain_logprobs(model, ids):
    """The log-probabilities (T, V) of what follows each of ids, at most block_size of them."""
    idx = torch.tensor([ids])
    return model(idx, targets=idx)[0][0].log_softmax(dim=-1)


@cache # for all backends
def plain_score(size, text):
    """Each token after the tokens before it in the first of its windows, which have this size.

    The windows advance by half of their size.
    """
    model = make_gpt(block_size=size)
    ids = TOKENIZER.encode(text)
    half = max(1, size // 2)
    total = 0.0
    for i in range(1, len(ids)):
        start = half * max(0, -(-(i - size) // half))
        total += plain_logprobs(model, ids[start:i])[-1, ids[i]].item()
    return total


@pytest.mark.parametrize("block_size", [16, 15, 2, 1])
def test_a_score_is_that_of_the_plain_model(make_backend, block_size):
    gpt = make_generator(make_backend(make_gpt(block_size=block_size)))
    # Inside the window, at its end, and past it.
    for text in "The ", BOOK[:16], BOOK[:17], BOOK[:18], BOOK[:25], BOOK:
        assert score(gpt, text) == pytest.approx(plain_score(block_size, text), rel=1e-4)


def test_gpt2_has_the_loss_of_transformers(gpt2_folder, gpt2_encoding):
    gpt = sampling.load(gpt2_folder, device="cpu")
    text = "Héllo, I'm a language model 日本"
    ids = torch.tensor([gpt.tokenizer.encode(text)])
    loss = make_transformers_gpt2()(ids, labels=ids).loss.item()
    found = gpt.score(text)
    assert found.nats_per_token == pytest.approx(loss, rel=1e-4)
    assert found.num_tokens == ids.size(1) - 1
    assert text_of(found) == text
    # The last character has two tokens, of which this keeps the first.
    params = ScoringParams(max_tokens=found.num_tokens)
    *_, (cut, _) = gpt.run([make_score(text, ids[0].tolist())], params)
    assert text_of(cut) == f"{text[:-1]}\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("has_file", [False, True])
def test_a_score_counts_the_bytes_of_the_scored_tokens(
        gpt2_folder, gpt2_encoding, tiktoken_cache, tmp_path, has_file):
    """Not those of the first token, which may end inside a character."""
    (tmp_path / "tokenizer.json").write_text(gpt2_tokenizer_json(tiktoken_cache))
    tokenizer = tmp_path if has_file else None
    gpt = sampling.load(gpt2_folder, device="cpu", tokenizer=tokenizer)
    for text, num_first in ("Hello you", 5), ("日本語のテキスト", 2), ("\ufeffMy lord", 1):
        assert gpt.score(text).num_bytes == len(text.encode()) - num_first


def test_a_byte_order_mark_that_no_token_has_does_not_count():
    for text in "\ufeffMy lord", "My lord":
        assert make_generator().score(text).num_bytes == len("y lord")


@pytest.mark.parametrize("max_tokens, num_rows", [(16, 1), (40, 2), (2048, 64)])
def test_no_text_changes_the_score_of_another(max_tokens, num_rows, monkeypatch):
    monkeypatch.setattr(scoring, "MAX_BATCH_TOKENS", max_tokens)
    gpt = make_generator(NotingBackend(make_gpt()))
    texts = ["The ", BOOK, "x", "yes", BOOK[5:], "a" * 16, BOOK[:17], BOOK[:25]]
    scores = [make_score(text, TOKENIZER.encode(text), i) for i, text in enumerate(texts)]
    finished = [found for found, _ in gpt.run(scores, ScoringParams()) if found.finish_reason]
    assert max(gpt.backend.num_rows) == num_rows # windows of 16 tokens
    assert finished == scores # each once
    for found in finished:
        expected = score(gpt, found.prompt.text)
        assert found.cumulative_logprob == pytest.approx(expected, rel=1e-5)


def test_half_precision_is_that_of_the_logits_only():
    class HalfBackend(EagerBackend):
        def logits(self, *arguments):
            return super().logits(*arguments).bfloat16()
    ids = torch.tensor([TOKENIZER.encode(QUESTION)])
    logits = make_gpt()(ids, ids)[0][0, :-1].bfloat16().float()
    expected = -len(logits) * cross_entropy(logits, ids[0, 1:]).item()
    found = score(make_generator(HalfBackend(make_gpt())), QUESTION)
    assert found == pytest.approx(expected, rel=1e-5)


def test_tokens_have_their_alternatives():
    _, *others = make_generator().score(QUESTION, num_logprobs=2).tokens
    logprobs = plain_logprobs(make_gpt(), TOKENIZER.encode(QUESTION))
    for token, row in zip(others, logprobs[:-1], strict=True):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-4)
        assert [top.id for top in token.top_logprobs] == row.topk(2).indices.tolist()


def test_a_long_text_keeps_its_first_tokens(messages):
    book = make_score(BOOK, TOKENIZER.encode(BOOK))
    *_, (found, _) = make_generator().run([book], ScoringParams(max_tokens=20))
    assert text_of(found) == BOOK[:20]
    assert found.num_tokens == len(BOOK) - 1
    assert messages[-1] == (f"a text has {len(BOOK)} tokens: all are scored, but only the first 20 "
                            "are saved or shown")


def test_damaged_weights_are_an_error():
    model = make_gpt()
    torch.nn.init.constant_(model.lm_head.weight[3], torch.nan)
    with pytest.raises(ValueError, match="logits are NaN or infinite"):
        make_generator(EagerBackend(model)).score("The ")
