"""Speculation: a draft changes the speed, and nothing else."""
from dataclasses import replace

import pytest
import torch

import sampling
from engines import PARAMS, NotingBackend, make_generator, make_samples, run
from models import make_gpt, normal
from sampling.backends import cpu
from sampling.backends.backend import EagerBackend

NOISE = {"good": 0.0, "imperfect": 0.5, "bad": 3.0, "broken": torch.nan} # of a draft's weights


@torch.no_grad()
def make_drafting(noise):
    """A TextGenerator with a draft whose weights have this noise."""
    draft = make_gpt(block_size=32)
    for weight in draft.parameters():
        weight.add_(NOISE[noise] * weight.std() * normal(*weight.shape, seed=5))
    return make_generator(NotingBackend(make_gpt(block_size=32)), NotingBackend(draft))


@pytest.mark.parametrize("noises, settings", [
    ([*NOISE], dict(max_new_tokens=40)), # block_size is 32
    *((["imperfect"], settings) for settings in [
        dict(temperature=1.5, top_k=None),
        dict(top_k=1),
        dict(temperature=0, repetition_penalty=3.0),
        dict(top_p=0.8),
        dict(stop=["dOZ", "never"]),
        dict(num_logprobs=3),
        dict(max_new_tokens=1),
        dict(max_new_tokens=60, context_shift=True),
    ]),
])
def test_text_is_that_of_a_run_without_a_draft(noises, settings):
    params = replace(PARAMS, **settings)
    plain = make_generator(EagerBackend(make_gpt(block_size=32)))
    expected, = run(plain, make_samples(["The "]), params)
    for noise in noises:
        sample, = run(make_drafting(noise), make_samples(["The "]), params)
        assert sample.text == expected.text, noise
        assert sample.finish_reason == expected.finish_reason
        assert logprobs(sample) == pytest.approx(logprobs(expected), abs=1e-4)


def logprobs(sample):
    """Those of its tokens and their alternatives, by place and id."""
    return {(i, other.id): other.logprob
            for i, token in enumerate(sample.tokens) for other in (*token.top_logprobs, token)}


def test_a_good_draft_saves_passes_of_the_model():
    gpt = make_drafting("good")
    run(gpt, make_samples(["The "]), replace(PARAMS, max_new_tokens=27), batch_size=1)
    assert len(gpt.backend.num_rows) < 27 / 2


@pytest.fixture(autouse=True)
def for_small_models(monkeypatch):
    monkeypatch.setattr(cpu, "MIN_DRAFT_PARAMS", 16_344) # as many as make_gpt() has
    monkeypatch.setattr(cpu, "MIN_DRAFT_TOKENS", 10)


def test_the_draft_of_a_large_model_is_made_when_it_pays(char_checkpoint, messages):
    for settings in dict(dtype="bfloat16"), dict(dtype="int8"), dict(draft=False):
        gpt = sampling.load(char_checkpoint, device="cpu", **settings)
        assert gpt.backend.draft_for(100) is None
    gpt = sampling.load(char_checkpoint, device="cpu")
    gpt.generate("The ", PARAMS, num_samples=2)
    gpt.generate("The ", PARAMS, max_new_tokens=9)
    gpt.generate("The King ", PARAMS) # 7 tokens are left in the window of 16
    assert gpt.backend.draft is None
    for _ in range(2):
        gpt.generate("The ", PARAMS)
    assert messages.count("draft: a copy of the model in int8") == 1
    ids = torch.tensor([[5, 9, 30, 2]])
    expected = gpt.backend.logits(ids, None)
    torch.testing.assert_close(gpt.backend.draft.logits(ids, None), expected, atol=0.1, rtol=0.1)


def test_no_draft_is_compiled_where_numba_would_apply_a_file(
        char_checkpoint, monkeypatch, messages, tmp_path):
    gpt = sampling.load(char_checkpoint, device="cpu")
    (tmp_path / ".numba_config.yaml").write_text("bounds_check: 1")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        gpt.generate("The ", PARAMS)
    assert gpt.backend.draft is None
    assert sum(".numba_config.yaml" in line for line in messages) == 1
