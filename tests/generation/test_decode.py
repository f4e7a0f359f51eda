"""The loop that samples: with every backend, each row of a batch gets the text of the slow plain loop."""
import pytest
import torch

from engines import expected_ids, static_steps_on_fake_gpu
from model import GPT
from models import make_gpt, make_transformers_gpt2
from sampling.backends.eager import EagerBackend
from sampling.generation.decode import Decoder
from sampling.sampler.row_streams import RowStreams, RunStream
from sampling.sampler.sampler import Sampler
from streams import decode, random_prompt

PROMPTS = { # block_size is 16
    "equal": 3 * random_prompt(5).tolist(),
    "different lengths": [random_prompt(length, seed=length)[0].tolist() for length in (9, 1, 16, 4)],
    "longer than block_size": [random_prompt(length, seed=length)[0].tolist() for length in (40, 17)],
}


@pytest.mark.parametrize("settings", [
    dict(temperature=0.8, top_k=20), dict(temperature=0), dict(temperature=0, repetition_penalty=1.5),
    dict(top_k=None), dict(top_k=1000), dict(top_p=0.7), dict(min_p=0.2), dict(repetition_penalty=1.4, top_k=9),
    dict(temperature=1.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=0.8), dict(context_shift=True, top_k=20),
], ids=str)
def test_text_inside_and_past_the_window_is_that_of_the_plain_loop(make_backend, settings):
    for name, prompts in PROMPTS.items():
        gpt = make_backend(make_gpt())
        assert decode(gpt, prompts, 20, **settings) == expected_ids(prompts, device=gpt.device, **settings), name


@pytest.mark.parametrize("block_size", [7, 1])
def test_context_shift_with_an_odd_block_size(make_backend, block_size):
    prompts, gpt = PROMPTS["different lengths"], make_backend(make_gpt(block_size=block_size))
    expected = expected_ids(prompts, 40, block_size=block_size, device=gpt.device, top_k=20, context_shift=True)
    assert decode(gpt, prompts, 40, top_k=20, context_shift=True) == expected


def steps_of(gpt, prompts, num_tokens, keep=None, context_shift=False):
    """The tokens of each step of a batch. keep: the rows that stay after some steps."""
    run, keep = RunStream(3, gpt.device, draws_per_sample=num_tokens, vocab_size=61), keep or {}
    streams = RowStreams(run, list(range(len(prompts))))
    num_steps = num_tokens + max(map(len, prompts)) - min(map(len, prompts))
    steps = Decoder(gpt, Sampler(top_k=20), None, context_shift).decode(prompts, streams, num_steps)
    found = [steps.send(keep.get(step)).ids.flatten().tolist() for step in range(num_steps)]
    steps.close()
    return found


@pytest.mark.parametrize("leave_at", [1, 3, 14, 25], ids=["while row 2 is forced", "inside", "at the end", "past it"])
def test_rows_that_leave_do_not_change_the_text_of_the_others(make_backend, leave_at):
    prompts = [random_prompt(length, seed=length)[0].tolist() for length in (4, 2, 6, 3)]
    for context_shift in False, True:
        gpt = make_backend(make_gpt())
        steps = steps_of(gpt, prompts, 30, {leave_at: [2, 0], leave_at + 3: [0]}, context_shift)
        assert [len(step) for step in steps] == leave_at * [4] + 3 * [2] + (31 - leave_at) * [1]
        expected = expected_ids(prompts, 30, device=gpt.device, context_shift=context_shift, top_k=20)[2]
        assert [step[2 if len(step) == 4 else 0] for step in steps] == [*prompts[2][2:], *expected]


def test_on_a_gpu_the_next_batch_uses_the_released_cache_again_if_it_fits():
    """It holds CUDA graphs."""
    gpt, caches = static_steps_on_fake_gpu(make_gpt(block_size=150)), []
    for rows, num_tokens in (2, 9), (2, 30), (3, 9), (3, 140), (3, 150):
        prompts = rows * random_prompt(5, seed=num_tokens).tolist()
        expected = expected_ids(prompts, num_tokens, block_size=150, top_k=20)
        assert [list(ids) for ids in zip(*steps_of(gpt, prompts, num_tokens), strict=True)] == expected
        caches.append(gpt.idle)
    assert [caches.index(cache) for cache in caches] == [0, 0, 2, 3, 3]


@pytest.mark.parametrize("settings", [
    dict(temperature=0.9, top_k=30), dict(top_p=0.3, top_k=50), dict(min_p=0.9), dict(repetition_penalty=0.7),
    dict(temperature=1.7, top_k=60, top_p=0.8, min_p=0.1, repetition_penalty=1.2)], ids=str)
def test_text_of_gpt2_is_that_of_transformers(settings, tmp_path):
    theirs, idx = make_transformers_gpt2(vocab_size=300), torch.tensor([[5, 290, 1, 77, 131]])
    theirs.save_pretrained(tmp_path)
    theirs.generation_config.update(do_sample=True, max_new_tokens=40, eos_token_id=None, pad_token_id=0, top_k=0)
    torch.manual_seed(3)
    expected = [theirs.generate(idx, **settings)[0, 5:].tolist() for _ in range(3)]
    assert decode(EagerBackend(GPT.from_pretrained(str(tmp_path))), 3 * idx.tolist(), 40, **settings) == expected
