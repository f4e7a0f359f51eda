"""Speculation: a draft changes the speed, and nothing else."""
from dataclasses import replace

import pytest
import torch

import sampling
from engines import PARAMS, NotingBackend, make_generator, make_samples, run
from models import make_gpt, normal
from sampling import text_generator
from sampling.backends.backend import EagerBackend
from sampling.generation.engine import MAX_PROPOSALS

NOISE = {"good": 0.0, "imperfect": 0.5, "bad": 3.0, "broken": torch.nan} # of a draft's weights


def generators(tokenizer, draft):
    """A TextGenerator with a draft whose weights have this noise, and one without."""
    noisy = make_gpt(block_size=32)
    with torch.no_grad():
        for weight in noisy.parameters():
            weight.add_(NOISE[draft] * weight.std() * normal(*weight.shape, seed=5))
    draft, target = NotingBackend(noisy), NotingBackend(make_gpt(block_size=32))
    return make_generator(tokenizer, target, draft), make_generator(tokenizer, EagerBackend(make_gpt(block_size=32)))


@pytest.mark.parametrize("settings", [
    dict(temperature=1.5, top_k=None), dict(top_k=1), dict(temperature=0, repetition_penalty=3.0), dict(top_p=0.8),
    dict(stop=["dOZ", "never"]), dict(num_logprobs=3), dict(max_new_tokens=1), dict(max_new_tokens=40),
    dict(max_new_tokens=80, context_shift=True), # block_size is 32
], ids=str)
@pytest.mark.parametrize("draft", NOISE)
def test_text_is_that_of_a_run_without_a_draft(tokenizer, draft, settings):
    params, samples = replace(PARAMS, **settings), make_samples(tokenizer, ["The ", "O", "What is it?"])
    found, expected = (run(gpt, samples, params, batch_size=1) for gpt in generators(tokenizer, draft))
    for sample, other in zip(found, expected, strict=True):
        assert (sample.text, sample.finish_reason) == (other.text, other.finish_reason)
        for token, same in zip(sample.tokens, other.tokens, strict=True):
            assert token.id == same.id and token.logprob == pytest.approx(same.logprob, abs=1e-4)
            top, same_top = ({other.id: other.logprob for other in one.top_logprobs} for one in (token, same))
            assert top == pytest.approx(same_top, abs=1e-4)


@pytest.mark.parametrize("min_lead, num_passes, num_proposals", [
    (0.0, 1 + 2, 2 * MAX_PROPOSALS), # it is never unsure: the prefill gives one token, and then each pass 13
    (1e9, 1 + 13, 13)]) # it is always unsure, and proposes one token: each pass gives two
def test_a_good_draft_saves_passes_of_the_model(tokenizer, monkeypatch, min_lead, num_passes, num_proposals):
    monkeypatch.setattr("sampling.generation.engine.MIN_LEAD", min_lead)
    gpt, _ = generators(tokenizer, "good")
    run(gpt, make_samples(tokenizer, ["The "]), replace(PARAMS, max_new_tokens=27), batch_size=1)
    assert (len(gpt.backend.num_rows), len(gpt.draft.num_rows)) == (num_passes, num_proposals)


def test_the_draft_of_a_large_model_is_made_when_it_pays(char_checkpoint, monkeypatch, messages):
    monkeypatch.setattr(text_generator, "MIN_DRAFT_WEIGHTS", 0)
    monkeypatch.setattr(text_generator, "MIN_DRAFT_TOKENS", 10)
    for settings in dict(dtype="bfloat16"), dict(dtype="int8"), dict(draft=False):
        gpt = sampling.load(char_checkpoint, device="cpu", **settings)
        assert len(gpt.generate("The ", PARAMS)) == 1 and gpt.draft is None
    gpt = sampling.load(char_checkpoint, device="cpu")
    gpt.generate("The ", PARAMS, num_samples=2)
    gpt.generate("The ", replace(PARAMS, max_new_tokens=9))
    gpt.generate("The King ", PARAMS) # 7 tokens are left in the window of 16
    assert gpt.draft is None and not any("draft" in line for line in messages)
    for _ in range(2):
        gpt.generate("The ", PARAMS)
    assert [line for line in messages if "draft" in line] == ["draft: a copy of the model in int8"] # made once
    ids = torch.tensor([[5, 9, 30, 2]])
    expected = gpt.backend.logits(ids, None)
    assert 0.001 < (gpt.draft.logits(ids, None) - expected).norm() / expected.norm() < 0.03


def test_no_draft_is_compiled_where_numba_would_apply_a_file(char_checkpoint, monkeypatch, messages, tmp_path):
    monkeypatch.setattr(text_generator, "MIN_DRAFT_WEIGHTS", 0)
    monkeypatch.setattr(text_generator, "MIN_DRAFT_TOKENS", 10)
    gpt = sampling.load(char_checkpoint, device="cpu")
    (tmp_path / ".numba_config.yaml").write_text("bounds_check: 1")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        gpt.generate("The ", PARAMS)
    assert gpt.draft is None
    assert sum(".numba_config.yaml" in line for line in messages) == 1
