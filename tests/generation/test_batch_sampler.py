"""BatchSampler samples the tokens of a batch, and teacher-forces the rest of longer prompts."""
import pytest
import torch

from sampling.generation.batch_sampler import BatchSampler
from sampling.params import SamplingParams
from sampling.sampler.per_row_rng import PerRowRNG
from sampling.sampler.sample_fn import Logits

CPU, V = torch.device("cpu"), 9
LOGITS = torch.randn(6, 3, V, generator=torch.Generator().manual_seed(1)) # 6 steps, 3 rows


def make_sampler(num_logprobs=None, **params):
    rng = PerRowRNG(3, draws_per_sample=6, vocab_size=V)
    return BatchSampler(SamplingParams(**{"top_k": None, **params}), rng, num_logprobs, allow_sync=True)


def start_batch(sampler, prompts):
    """Start a batch whose row i is sample i of a run."""
    stream = PerRowRNG(3, draws_per_sample=6, vocab_size=V)
    sampler.start_batch(prompts, [stream.state_for_sample(index) for index in range(len(prompts))], CPU)


def run_steps(sampler, first=0, rows=(0, 1, 2)):
    """The tokens of all steps from first on, as one list per row."""
    tokens = []
    for step in range(first, len(LOGITS)):
        sampler.start_step(step)
        tokens.append(sampler(Logits(LOGITS[step, list(rows)]), torch.zeros(len(rows), 1, dtype=torch.long)))
    return torch.cat(tokens, dim=1).tolist()


def test_longer_prompts_are_teacher_forced_and_then_sample_from_the_start_of_their_random_streams():
    sampler = make_sampler()
    start_batch(sampler, [[1, 2], [1, 2, 7], [1, 2, 4, 5, 6]])
    assert sampler.min_prompt_len == 2 and sampler.prompt_remainders == [[], [7], [4, 5, 6]]
    found = run_steps(sampler)
    assert found[1][:1] == [7] and found[2][:3] == [4, 5, 6]
    for row, num_forced in enumerate([0, 1, 3]):
        alone = PerRowRNG(3, draws_per_sample=6, vocab_size=V)
        alone.set_rows([alone.state_for_sample(row)])
        expected = [int((LOGITS[step, row] / 0.8).softmax(-1).div(alone((1, V), None, CPU)).argmax()) for step in range(num_forced, 6)]
        assert found[row][num_forced:] == expected


def test_dropping_rows_does_not_change_the_remaining_rows():
    sampler, other = make_sampler(), make_sampler()
    prompts = [[1], [1, 2, 7], [1, 4, 5, 6, 3]]
    start_batch(sampler, prompts)
    expected = run_steps(sampler)
    start_batch(other, prompts)
    for step in range(2):
        other.start_step(step)
        other(Logits(LOGITS[step]), None)
    other.select_rows([2, 0])
    assert other.prompt_remainders == [[4, 5, 6, 3], []]
    assert run_steps(other, first=2, rows=(2, 0)) == [expected[2][2:], expected[0][2:]]


def test_tensors_are_reused_while_the_batch_size_stays_the_same():
    """CUDA graphs may refer to their memory."""
    def addresses():
        return [tensor.data_ptr() for tensor in (sampler.forced_tokens, *sampler.logprobs, sampler.rng.numbers)]
    sampler = make_sampler(num_logprobs=2)
    start_batch(sampler, [[1], [1, 2], [3]])
    before = addresses()
    run_steps(sampler)
    start_batch(sampler, [[1, 2, 3], [1, 2], [3]])
    run_steps(sampler)
    assert addresses() == before


@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_logprobs_ignore_temperature_top_k_and_repetition_penalty(num_logprobs):
    sampler = make_sampler(num_logprobs, temperature=0.3, top_k=1, repetition_penalty=1.5)
    start_batch(sampler, [[1], [1, 2], [3]])
    sampler.start_step(0)
    ids = sampler(Logits(LOGITS[0]), torch.ones(3, 1, dtype=torch.long))
    expected = LOGITS[0].log_softmax(-1)
    assert ids[1] == 2, "a teacher-forced token has a logprob too"
    torch.testing.assert_close(sampler.logprobs.sampled, expected.gather(1, ids))
    torch.testing.assert_close(sampler.logprobs.top, expected.topk(num_logprobs).values)
    torch.testing.assert_close(expected.gather(1, sampler.logprobs.top_ids), sampler.logprobs.top)


@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_logprobs_need_all_logits(num_logprobs):
    assert make_sampler(temperature=0.8, top_k=20).num_logits_needed == 20
    assert make_sampler(num_logprobs, temperature=0.8, top_k=20).num_logits_needed is None
