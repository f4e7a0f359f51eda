"""With a draft, the samples are those of a run without one. The draft only decides how many passes of the model they take."""
from dataclasses import replace

import pytest
import torch

from cases import cases
from engines import generate, make_requests, reference_token_ids
from model import GPT
from models import add_noise, make_gpt
from processors import simulate_processor
from project import PROJECT
from sampling.backends.cpu import lm_head
from sampling.backends.draft import Draft, prepare_draft
from sampling.backends.eager import EagerGPT
from sampling.backends.prepare import packed_or_eager
from sampling.checkpoints.nanogpt import load_checkpoint
from sampling.generation.draft_length import DraftLength
from sampling.generation.engine import Engine
from sampling.generation.speculation import SpeculativeBackend
from sampling.inputs.char_tokenizer import CharTokenizer
from sampling.params import ModelOptions, SamplingParams
from sampling.sampler.sample_fn import Logits

PARAMS = SamplingParams(max_new_tokens=28, temperature=0.9, top_k=30, seed=3)
SHAPE = dict(block_size=32, n_embd=24, n_layer=2)
DEMO = PROJECT / "out-shakespeare-char"
SETTINGS = {
    "plain": {}, "greedy": {"temperature": 0.0}, "hot": {"temperature": 1.5, "top_k": None}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.1},
    "penalty": {"repetition_penalty": 1.4}, "greedy_penalty": {"temperature": 0.0, "repetition_penalty": 3.0}, "stop": {"stop": ["O", "a"]},
    "logprobs": {"num_logprobs": 3}, "context_shift": {"max_new_tokens": 70, "context_shift": True}, "past_the_window": {"max_new_tokens": 40},
}


class CountingGPT(EagerGPT):
    """Counts its passes, and notes how many logits each of them is asked for."""
    num_passes, asked = 0, ()

    def next_logits(self, idx, cache, num_logits_needed, *arguments):
        self.num_passes, self.asked = self.num_passes + 1, (*self.asked, num_logits_needed)
        return super().next_logits(idx, cache, num_logits_needed, *arguments)


class SometimesWrongGPT(CountingGPT):
    """A right draft, except that its logits are wrong in every fifth pass."""

    def next_logits(self, *arguments):
        logits = super().next_logits(*arguments)
        return logits if self.num_passes % 5 else Logits(-logits.values)


DRAFTS = {
    "right": lambda **shape: make_gpt(**shape),
    "half_right": lambda **shape: add_noise(make_gpt(**shape), 0.5),
    "wrong": lambda **shape: make_gpt(seed=2, **shape),
}


def prepare(model, backend):
    return EagerGPT(model) if backend == "eager" else packed_or_eager(model, torch.device("cpu"), torch.float32, ModelOptions())


def speculative(draft="right", backend="eager", cost=0.05, log=lambda message: None, draft_shape=SHAPE, **shape):
    """A SpeculativeBackend of small random models whose draft is said to cost this share of a step of the target."""
    target = prepare(make_gpt(**{**SHAPE, **shape}), backend)
    return SpeculativeBackend(target, Draft(prepare(DRAFTS[draft](**draft_shape), backend), cost), log)


def load_demo():
    return GPT.from_checkpoint(load_checkpoint(DEMO))


def run(backend, tokenizer, params=PARAMS, num_samples=2, **settings):
    """The samples of a run, the texts of the most likely tokens, and all log-probabilities."""
    requests = make_requests(tokenizer, ["The "], num_samples)
    samples = generate(Engine(backend, tokenizer, params, log=lambda message: None, **settings), requests)
    tokens = [token for sample in samples for token in sample.tokens]
    logprobs = [[token.logprob, *(value for _, value in token.top_logprobs)] for token in tokens]
    texts = [text for token in tokens for text, _ in token.top_logprobs]
    return [(sample.token_ids, sample.text, sample.finish_reason) for sample in samples], texts, logprobs


def assert_same(found, expected):
    assert found[:2] == expected[:2]
    if expected[2] and expected[2][0][0] is not None:
        torch.testing.assert_close(torch.tensor(found[2]), torch.tensor(expected[2]))


@pytest.fixture
def shortlists(monkeypatch):
    """Let small heads use shortlists."""
    for name in "MIN_PARAMS", "MIN_WIDTH", "MAX_SHORTLIST_FRACTION":
        monkeypatch.setattr(lm_head, name, 1)


@pytest.mark.parametrize("draft, setting, kind", cases(DRAFTS, SETTINGS, ["packed", "eager"], quick=lambda draft, setting, kind: (
    kind == "packed" and (draft == "half_right" or setting == "context_shift" or (draft, setting) == ("right", "greedy_penalty")))))
def test_samples_are_the_same_as_without_a_draft(tokenizer, shortlists, draft, setting, kind):
    params, backend = replace(PARAMS, **SETTINGS[setting]), speculative(draft, kind)
    expected = run(prepare(make_gpt(**SHAPE), kind), tokenizer, params)
    assert_same(run(backend, tokenizer, params), expected)
    rate = backend.num_accepted / backend.num_proposed
    assert {"right": rate > 0.98, "half_right": 0 < rate < 1, "wrong": rate < 0.5}[draft]


@pytest.mark.parametrize("std", [0.0, 0.1, pytest.param(0.3, marks=pytest.mark.slow)])
def test_samples_of_a_trained_model_are_the_same_as_without_a_draft(std):
    params, tokenizer = SamplingParams(max_new_tokens=120), CharTokenizer(DEMO / "meta.pkl")
    backend = SpeculativeBackend(prepare(load_demo(), "packed"), Draft(prepare(add_noise(load_demo(), std), "packed"), 0.1))
    assert_same(run(backend, tokenizer, params, num_samples=1), run(prepare(load_demo(), "packed"), tokenizer, params, num_samples=1))
    assert backend.num_accepted > 20


@pytest.mark.parametrize("draft", DRAFTS)
def test_streamed_samples_are_the_same(tokenizer, draft):
    def texts(backend):
        return [(sample.index, sample.num_tokens, sample.text) for sample in Engine(backend, tokenizer, PARAMS, stream=True).generate(
            make_requests(tokenizer, ["O"], 2))]
    found, expected = texts(speculative(draft)), texts(EagerGPT(make_gpt(**SHAPE)))
    assert found[-1] == expected[-1] and found == expected


def test_a_run_may_start_at_any_sample(tokenizer):
    requests = make_requests(tokenizer, ["The ", "O"], 3)
    expected = [sample.token_ids for sample in generate(Engine(speculative("half_right"), tokenizer, PARAMS), requests)]
    found = [sample.token_ids for sample in generate(Engine(speculative("half_right"), tokenizer, PARAMS), requests[4:])]
    assert found == expected[4:]


def test_a_right_draft_saves_passes(tokenizer):
    backend = speculative()
    backend.target = CountingGPT(make_gpt(**SHAPE))
    run(backend, tokenizer, num_samples=1)
    assert backend.num_accepted == backend.num_proposed >= 16
    assert backend.target.num_passes <= 4, "28 tokens, at most 9 in a pass"
    assert set(backend.target.asked) == {None}, "a shortlist would be prepared for the first pass alone"


def test_after_a_rejected_token_a_right_draft_is_right_again(tokenizer, monkeypatch):
    rounds, record = [], DraftLength.record
    monkeypatch.setattr(DraftLength, "record", lambda self, k, accepted: rounds.append((k, accepted)) or record(self, k, accepted))
    backend = speculative(cost=0.02)
    backend.draft_backend = SometimesWrongGPT(make_gpt(**SHAPE))
    run(backend, tokenizer, num_samples=4)
    num_rejected = sum(accepted < k for k, accepted in rounds)
    assert 3 <= num_rejected <= backend.draft_backend.num_passes // 5 and backend.num_accepted > num_rejected


def test_a_draft_whose_logits_are_nan_changes_no_sample(tokenizer):
    messages = []
    draft = CountingGPT(add_noise(make_gpt(**SHAPE), torch.nan))
    backend = SpeculativeBackend(prepare(make_gpt(**SHAPE), "eager"), Draft(draft, 0.05), messages.append)
    assert_same(run(backend, tokenizer), run(prepare(make_gpt(**SHAPE), "eager"), tokenizer))
    assert messages == ["the draft is off: its logits are NaN or infinite"] and backend.num_proposed == 0
    assert draft.num_passes == 1


def test_a_wrong_draft_is_turned_off_after_a_few_rounds(tokenizer):
    backend = speculative("wrong", cost=0.4)
    backend.target, backend.draft_backend = CountingGPT(make_gpt(**SHAPE)), CountingGPT(DRAFTS["wrong"](**SHAPE))
    run(backend, tokenizer, replace(PARAMS, temperature=1.5), num_samples=1)
    assert 0 < backend.num_proposed <= 20 and backend.draft_backend.num_passes <= 20
    assert backend.target.num_passes <= 28
    assert backend.target.asked[0] is None and backend.target.asked[-1] == PARAMS.top_k, "without proposals, a shortlist saves time"


def test_past_the_draft_s_window_the_model_may_use_a_shortlist(tokenizer):
    backend = speculative()
    backend.target = CountingGPT(make_gpt(**SHAPE))
    backend.draft_backend.config = replace(backend.draft_backend.config, block_size=20) # with its weights as they are, its proposals stay right
    run(backend, tokenizer, num_samples=1)
    assert backend.target.asked[-10:] == (PARAMS.top_k,) * 10


@pytest.mark.parametrize("num_tokens, is_packed", [(10, False), (60, True)])
def test_on_intel_the_model_is_packed_once_the_number_of_proposals_repeats(tokenizer, monkeypatch, num_tokens, is_packed):
    simulate_processor(monkeypatch, "Intel")
    backend = speculative("right", "packed", cost=0.3, block_size=64, draft_shape={**SHAPE, "block_size": 64})
    run(backend, tokenizer, replace(PARAMS, max_new_tokens=num_tokens), num_samples=1)
    assert (backend.target.blocks[0].c_attn.packed is not None) == is_packed


@pytest.mark.parametrize("settings, draft_shape, cost, message", [
    ({"batch_size": 4}, SHAPE, 0.1, "the draft is off: several samples at once are faster without it; batch_size=1 turns it on"),
    ({"params": replace(PARAMS, max_new_tokens=40)}, SHAPE, 0.1, "the draft is used only up to block_size: 32 tokens, including the prompt"),
    ({}, {**SHAPE, "block_size": 20}, 0.1, "the draft is used only while the window has at most 20 tokens, its own block_size"),
    ({}, SHAPE, 1.0, "the draft is off: its steps take too long, compared with the model's, to save time"),
], ids=["several samples", "past the window", "past the draft's window", "a slow draft"])
def test_one_line_says_when_the_draft_is_off_and_the_samples_are_the_same(tokenizer, settings, draft_shape, cost, message):
    lines = []
    backend = speculative(log=lines.append, draft_shape=draft_shape, cost=cost)
    found = run(backend, tokenizer, **settings)
    assert lines == [message]
    assert_same(found, run(EagerGPT(make_gpt(**SHAPE)), tokenizer, **settings))
    assert (backend.num_proposed == 0) == ("is off" in message)


def test_within_the_window_there_is_no_line(tokenizer):
    run(speculative(log=pytest.fail), tokenizer)


@pytest.mark.parametrize("prompt_length", [1, 15, 16, 20])
def test_long_prompts_and_few_tokens(tokenizer, prompt_length):
    for max_new_tokens in 1, 2, 20:
        requests = make_requests(tokenizer, [("What is it to you? " * 2)[:prompt_length]])
        shape = dict(block_size=16, n_layer=2, n_embd=24)
        backend = speculative(draft_shape=shape, **shape)
        params = replace(PARAMS, max_new_tokens=max_new_tokens)
        assert [sample.token_ids for sample in generate(Engine(backend, tokenizer, params), requests)] == reference_token_ids(requests, max_new_tokens)


def test_a_stream_yields_what_was_asked_for_and_ends_when_told():
    backend = speculative()
    engine_sampler = Engine(backend, None, PARAMS).sampler
    with pytest.raises(ValueError, match="nothing to continue"):
        next(backend.generate_stream(torch.zeros(1, 0, dtype=torch.long), 3, engine_sampler))
    assert list(backend.generate_stream(torch.zeros(1, 1, dtype=torch.long), 0, engine_sampler)) == []


def test_the_summary_counts_proposals(tokenizer):
    backend = speculative()
    assert backend.summary() == "the draft proposed no tokens"
    run(backend, tokenizer)
    n = backend.num_proposed
    assert backend.summary() == f"acceptance rate of the draft: 100 % ({n} of {n} tokens)"


def record(length, rounds, share):
    """Let the target accept this share of each round's proposals, and refuse the next one."""
    for _ in range(rounds):
        k = length.best()
        length.record(k, int(k * share))
    return length.best()


@pytest.mark.parametrize("cost, share, expected", [(0.05, 1, 8), (0.35, 1, 8), (0.35, 0, 0), (0.05, 0.5, 6), (0.1, 0, 0), (0.02, 0, 0)])
def test_the_number_of_proposals_follows_what_is_accepted(cost, share, expected):
    assert 2 <= DraftLength(cost).best() <= 8
    assert record(DraftLength(cost), 40, share) == expected


def test_a_draft_that_is_off_stays_off():
    length = DraftLength(0.35)
    assert record(length, 6, 0) == 0
    assert record(length, 100, 1) == 0


@pytest.mark.parametrize("backend", ["packed", "eager"])
def test_a_model_in_8_bits_is_a_good_draft_of_itself(backend, monkeypatch):
    """It shares the keys and values of a packed model, so it never reads the prompt, nor proposals that were accepted."""
    params, tokenizer, model, lengths = SamplingParams(max_new_tokens=120), CharTokenizer(DEMO / "meta.pkl"), load_demo(), set()
    draft = prepare_draft(model, torch.device("cpu"), torch.float32, ModelOptions(draft="int8"))
    next_logits = draft.backend.next_logits
    monkeypatch.setattr(draft.backend, "next_logits", lambda idx, *arguments: lengths.add(idx.size(1)) or next_logits(idx, *arguments))
    speculative_backend = SpeculativeBackend(prepare(model, backend), draft._replace(relative_cost=0.1))
    found = run(speculative_backend, tokenizer, params, num_samples=1)
    assert_same(found, run(prepare(load_demo(), backend), tokenizer, params, num_samples=1))
    assert speculative_backend.num_accepted > 0.7 * speculative_backend.num_proposed > 60
    assert (lengths == {1}) == (backend == "packed")


def test_only_logits_that_are_not_finite_turn_the_draft_off(tokenizer, monkeypatch):
    backend = speculative()

    def fail(*arguments):
        raise ValueError("another error")
    monkeypatch.setattr(backend.draft_backend, "next_logits", fail)
    with pytest.raises(ValueError, match="another error"):
        run(backend, tokenizer)
