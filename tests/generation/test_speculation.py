"""With a draft, the text is that of a run without one. The draft only decides how many passes of the model it takes."""
from dataclasses import replace

import pytest
import torch

from engines import LeastBackend, load, make_samples, run
from models import add_noise, as_checkpoint, make_gpt, save_checkpoint
from sampling.backends.backend import EagerBackend
from sampling.backends.prepare import prepare_backend
from sampling.generation.engine import Engine
from sampling.generation.speculation import Speculation, best_num_proposals, prepare_draft
from sampling.params import ModelOptions, SamplingParams
from sampling.text_generator import assemble

PARAMS = SamplingParams(max_new_tokens=28, temperature=0.9, top_k=30, seed=3) # with "The ", they fill the window
DRAFTS = dict(good={}, imperfect={"noise": 0.5}, bad={"seed": 2}, broken={"noise": torch.nan}, short={"block_size": 20})


def make_model(seed=1, noise=0.0, block_size=32):
    """The model, or a draft: another one, one with noise, or one with fewer positions."""
    model, weights = make_gpt(block_size=block_size), make_gpt(seed, block_size=32).state_dict()
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][:block_size]
    model.load_state_dict(weights)
    return add_noise(model, noise)


def speculate(draft="good", cost=0.05, is_int8_copy=False):
    """Speculation with one of the DRAFTS, whose steps cost this share of the model's."""
    return Speculation(LeastBackend(make_model(**DRAFTS[draft])), cost, is_int8_copy)


def check_text(tokenizer, speculation, params=PARAMS, samples_per_prompt=1, **settings):
    """Run with and without the draft, and compare all that a user sees. Returns which logits the target needed."""
    samples, target = make_samples(tokenizer, ["The "], samples_per_prompt), LeastBackend(make_model())
    with_draft = replace(load(tokenizer, target), speculation=speculation)
    models = with_draft, load(tokenizer, EagerBackend(make_model()))
    found, expected = (run(Engine(model, params, **settings), samples) for model in models)
    for sample, other in zip(found, expected, strict=True):
        assert (sample.text, sample.finish_reason) == (other.text, other.finish_reason)
        for token, same in zip(sample.tokens, other.tokens, strict=True):
            assert token.id == same.id and token.logprob == pytest.approx(same.logprob, abs=1e-4)
            assert dict(token.top_logprobs) == pytest.approx(dict(same.top_logprobs), abs=1e-4)
    return target.needed


@pytest.mark.parametrize("settings", [
    dict(), dict(temperature=0), dict(temperature=1.5, top_k=None), dict(top_p=0.8, min_p=0.1),
    dict(repetition_penalty=1.4), dict(temperature=0, repetition_penalty=3.0), dict(stop=["dOZ", "never"]),
    dict(num_logprobs=3), dict(max_new_tokens=1), dict(max_new_tokens=40), dict(max_new_tokens=80, context_shift=True),
], ids=str)
@pytest.mark.parametrize("draft, lowest_rate, highest_rate", [
    ("good", 1, 1), ("imperfect", 0.05, 0.9), ("bad", 0, 0.7), ("broken", 0, 0.7), ("short", 1, 1)])
def test_text_is_that_of_a_run_without_a_draft(tokenizer, draft, lowest_rate, highest_rate, settings):
    speculation, params = speculate(draft), replace(PARAMS, **settings)
    check_text(tokenizer, speculation, params)
    accepted, proposed = speculation.num_accepted, speculation.num_proposed
    assert accepted <= highest_rate * proposed and (accepted >= lowest_rate * proposed or params.stop)
    assert (proposed > 0) == (params.max_new_tokens > 1)


def test_a_copy_of_the_model_shares_its_cache_and_changes_no_text(tokenizer):
    speculation = speculate("imperfect", is_int8_copy=True)
    speculation.draft.new_cache = None # not called
    for context_shift in False, True:
        check_text(tokenizer, speculation, replace(PARAMS, max_new_tokens=80, context_shift=context_shift))
    assert speculation.num_accepted


def test_a_bad_draft_is_turned_off_and_then_the_model_computes_only_the_logits_that_it_must(tokenizer):
    needed = check_text(tokenizer, speculation := speculate("bad", cost=0.4), replace(PARAMS, temperature=1.5))
    assert 0 < speculation.num_proposed <= 20 and len(speculation.draft.needed) <= 20
    assert needed[0] is None and needed[-1] == PARAMS.top_k


def test_a_good_draft_saves_passes_and_the_summary_counts_its_proposals(tokenizer):
    speculation = speculate()
    assert speculation.summary() == "the draft proposed no tokens"
    assert check_text(tokenizer, speculation) == 4 * [None], "28 tokens: 1, and then 9 in each pass"
    assert speculation.summary() == "acceptance rate of the draft: 100 % (24 of 24 tokens)"


SEVERAL = "the draft is off: several samples at once are faster without it; batch_size=1 turns it on"
SLOW = "the draft is off: its steps take too long, compared with the model's, to save time"
PAST, SHORT = (f"the draft is used only for the first {limit} tokens of the window, including the prompt"
               for limit in (32, 20))


@pytest.mark.parametrize("draft, cost, batch_size, settings, lines", [
    ("good", 0.1, 1, {}, []), ("good", 0.1, 1, dict(max_new_tokens=40, context_shift=True), []),
    ("good", 0.1, 4, {}, [SEVERAL]), ("good", 1.0, 1, {}, [SLOW]),
    ("good", 0.1, 1, dict(max_new_tokens=29), [PAST]), ("short", 0.1, 1, dict(max_new_tokens=17), [SHORT]),
    ("short", 0.1, 1, dict(max_new_tokens=16), []),
])
def test_one_line_says_where_the_draft_is_off(tokenizer, draft, cost, batch_size, settings, lines, messages):
    speculation = speculate(draft, cost)
    check_text(tokenizer, speculation, replace(PARAMS, **settings), samples_per_prompt=2, batch_size=batch_size)
    assert messages == lines and (speculation.num_proposed == 0) == ("is off" in str(lines))


@pytest.mark.parametrize("cost, rate, expected", [(0.05, 1.0, 8), (0.35, 0.99, 8), (0.05, 0.75, 6), (0.02, 0.2, 0)])
def test_the_number_of_proposals_follows_the_share_that_is_accepted(cost, rate, expected):
    assert best_num_proposals(rate, cost) == expected


# ---- preparing a draft

IDS, FLOAT32 = torch.tensor([[5, 9, 30, 2]]), torch.float32


@torch.no_grad()
def test_the_draft_int8_is_the_model_in_8_bits_and_leaves_the_model_as_it_is():
    target, expected = as_checkpoint(make_gpt(n_embd=64)), make_gpt(n_embd=64)(IDS)[0][:, -1]
    speculation = prepare_draft("int8", target, FLOAT32)
    backend = prepare_backend(target, torch.device("cpu"), FLOAT32)
    torch.testing.assert_close(backend.logits(IDS, None), expected, atol=2e-5, rtol=1e-4)
    assert 0.001 < (speculation.draft.logits(IDS, None) - expected).norm() / expected.norm() < 0.05
    assert 0.2 < speculation.relative_cost < 1 and speculation.is_int8_copy


def test_a_draft_with_another_vocabulary_or_on_another_device_is_refused(tmp_path):
    save_checkpoint(tmp_path, make_gpt(vocab_size=60))
    with pytest.raises(ValueError, match="has a vocabulary of 60 tokens, but the model has 61: the two must be equal"):
        prepare_draft(str(tmp_path), as_checkpoint(make_gpt()), FLOAT32)
    with pytest.raises(ValueError, match=r"^draft works only on a CPU, .*; got cuda:1: leave out draft, or use"):
        assemble(None, None, torch.device("cuda:1"), torch.bfloat16, ModelOptions(draft="int8"))
