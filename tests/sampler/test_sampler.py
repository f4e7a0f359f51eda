"""Sampler: logits and random numbers in, token ids out."""
import pytest
import torch

from engines import ON_GPU
from models import normal
from oracles import reference_token
from sampling import jit
from sampling.sampler import kernels, mt19937, row_streams
from sampling.sampler.kernels import KernelStreams
from sampling.sampler.mt19937 import advance_mt19937
from sampling.sampler.row_streams import RowStreams, RunStream, draw, exponentials
from sampling.sampler.sampler import Sampler

EVERYWHERE = pytest.mark.parametrize("full_vocabulary", [False, True])
NO_IDS = torch.zeros(256, 0)


def sample(logits, seed=1, ids=None, **settings):
    """The ids that a Sampler chooses with the random numbers that torch.multinomial would draw."""
    torch.manual_seed(seed)
    noise = torch.empty(logits.shape).exponential_()
    return Sampler(**settings)(logits, ids, noise)


@EVERYWHERE
@pytest.mark.parametrize("settings", [
    dict(temperature=3.0, top_k=3),
    dict(temperature=0, top_k=20),
    dict(top_k=1000), # all that there are
    dict(top_k=0),
    dict(top_k=20, min_p=0.2),
    dict(repetition_penalty=1.4),
    dict(top_p=0.9, min_p=0.01),
    dict(temperature=3.0, top_p=1e-9),
    dict(temperature=3.0, min_p=1),
    dict(temperature=3.0, top_k=6, top_p=0.6),
    dict(temperature=1.3, top_k=12, top_p=0.8, min_p=0.05, repetition_penalty=1.5),
])
def test_tokens_are_those_of_torch_multinomial_after_each_setting(settings, full_vocabulary):
    logits = 3 * normal(64, 1000)
    ids = torch.arange(640).view(64, 10) // 2 # each token twice
    cases = [logits]
    if "top_p" not in settings: # which keeps any of several equal logits
        cases += [logits.clamp(max=2).round(), logits.bfloat16()] # hundreds of ties, and a few
    for values in cases:
        torch.manual_seed(1)
        expected = reference_token(values, ids, **settings)
        found = sample(values, ids=ids, **settings, full_vocabulary=full_vocabulary)
        assert torch.equal(found, expected)


@EVERYWHERE
def test_a_row_gets_the_same_token_whatever_the_others_are(full_vocabulary):
    sampler = Sampler(top_k=20, top_p=0.5, full_vocabulary=full_vocabulary)
    for seed in range(20):
        logits = normal(8, 300, seed=seed).mul(3).round()
        logits[0].clamp_(max=1) # more ties than in the others
        noise = torch.empty(8, 300).exponential_()
        alone = [sampler(logits[[i]], None, noise[[i]]) for i in range(8)]
        assert torch.equal(sampler(logits, None, noise), torch.cat(alone))


def test_top_p_keeps_no_more_equal_tokens_than_the_sum_needs():
    assert len(sample(torch.zeros(2000, 4), top_p=0.5).unique()) == 2


@pytest.mark.parametrize("device", [ON_GPU])
def test_top_p_gives_one_row_the_same_token_every_time(device):
    """In float32, sums of a single row vary there."""
    logits = normal(1, 50304).to(device)
    noise = normal(1, 50304, seed=1).exp().to(device)
    sampler = Sampler(top_p=0.9)
    assert len({int(sampler(logits, None, noise)) for _ in range(1000)}) == 1


@EVERYWHERE
@pytest.mark.parametrize("temperature", [1e-6, 1e-45, 1e-300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tiny_temperature_takes_the_most_likely_token(dtype, temperature, full_vocabulary):
    logits = torch.tensor([[50, 51, 49], [-50, -49, -51]], dtype=dtype)
    for in_own in False, True:
        found = sample(logits, temperature=temperature, top_k=2, in_logits_dtype=in_own,
                       full_vocabulary=full_vocabulary)
        assert found.tolist() == [[1], [1]]


@pytest.mark.parametrize("temperature", [1e-38, 10**300]) # a large int is a temperature too
def test_a_temperature_that_overflows_one_row_leaves_the_others_as_they_are(temperature):
    """Found by fuzzing. In the second row, one token is only a little likelier than the others."""
    logits = torch.tensor([[-2, 0, 9], [0, 1e-40, 0]])
    noise = torch.tensor([[3.5, 1.2, 0.6], [3.5, 99, 0.6]])
    assert Sampler(temperature)(logits, None, noise).tolist() == [[2], [2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_in_their_own_dtype_logits_give_nanogpts_tokens(dtype):
    logits = normal(256, 1000, seed=4).mul(3).to(dtype)
    settings = dict(temperature=0.8, top_k=200)
    torch.manual_seed(1)
    expected = reference_token(logits, NO_IDS, **settings, in_own_dtype=True)
    found = sample(logits, **settings, full_vocabulary=True, in_logits_dtype=True)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("settings", [
    dict(repetition_penalty=1.3), dict(top_p=0.9), dict(min_p=0.1)])
def test_settings_that_nanogpt_lacks_are_computed_in_float32(settings):
    logits = normal(256, 1000, seed=4).mul(3).bfloat16()
    settings["ids"] = torch.arange(1000).expand(256, -1)
    found = sample(logits, **settings, in_logits_dtype=True)
    assert torch.equal(found, sample(logits.float(), **settings))


def test_with_all_columns_the_host_does_not_wait_for_a_gpu():
    """Tensors on the meta device have no values, so a read raises."""
    sampler = Sampler(0.8, 20, 0.9, 0.1, 1.2, full_vocabulary=True, in_logits_dtype=True)
    with torch.device("meta"):
        logits = torch.empty(2, 50, dtype=torch.bfloat16)
        ids = torch.zeros(2, 3, dtype=torch.long)
        noise = torch.empty(2, 50)
    assert sampler(logits, ids, noise).shape == (2, 1)


# ---- each row of a batch draws the random numbers of its own place in nanoGPT's stream

@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("vocab_size", [2, 65, 1000])
# False: a build of torch may make other numbers of the random bits.
@pytest.mark.parametrize("from_bits", [True, False])
def test_rows_draw_what_consecutive_samples_draw(vocab_size, device, from_bits, monkeypatch):
    if not from_bits:
        monkeypatch.setattr(row_streams, "exponential_is_from_bits", lambda: False)
    generator = torch.Generator(device).manual_seed(11)
    if device == "cpu":
        torch.empty(123).uniform_(generator=generator) # nanoGPT initialises its model
    expected = torch.empty(5, 8, vocab_size, device=device)
    for numbers in expected.view(-1, vocab_size):
        numbers.exponential_(generator=generator)
    run = RunStream(11, device, num_init_draws=123, draws_per_sample=8, vocab_size=vocab_size)
    for rows in [0, 1, 2], [4], [4, 2, 3], [0]: # in any order, and some of them not at all
        streams = run.for_rows(rows, [0] * len(rows))
        steps = [exponentials(streams.next().clone()) for _ in range(8)]
        assert torch.equal(torch.stack(steps, dim=1), expected[rows])


# ---- the kernels of a CPU

@pytest.mark.parametrize("top_k", [1, 40, 200, 1500, None])
@pytest.mark.parametrize("vocab_size", [1, 65, 1000, 5000])
@pytest.mark.parametrize("with_ties", [False, True])
def test_a_kernel_chooses_the_token_of_torch_multinomial(top_k, vocab_size, with_ties):
    """How far a token is ahead is the same as without the kernel."""
    jit.load_kernels(kernels.example_calls())
    logits = 3 * normal(20, vocab_size) - 100 # as high as those of GPT-2
    if with_ties:
        logits = logits.round()
    generator = torch.Generator().manual_seed(3)
    bits = draw(torch.empty(20, vocab_size, dtype=torch.int64), generator)
    torch.manual_seed(3)
    expected = reference_token(logits, NO_IDS[:20], temperature=0.8, top_k=top_k)
    found, leads = kernels.choose_ids(logits, 0.8, top_k, bits)
    assert torch.equal(found, expected)
    plain = Sampler(0.8, top_k)
    for row in range(20):
        token, lead = plain.propose(logits[[row]], None, bits[[row]])
        assert token == found[row]
        assert lead == pytest.approx(float(leads[row]), abs=1e-4)


def test_of_equal_scores_the_first_one_wins_as_in_torch():
    found, lead = kernels.choose_ids(torch.zeros(1, 3), 1.0, None, torch.full((1, 3), 2**40))
    assert (found.item(), lead.item()) == (0, 0.0)


def test_the_lead_of_the_most_likely_token_is_a_difference_of_logits():
    _, lead = Sampler(temperature=0).propose(torch.tensor([[1.0, 4.0, 2.5]]), None, None)
    assert lead == 1.5


@pytest.mark.parametrize("num_init_draws", [0, 1, 623, 624])
def test_kernels_draw_for_rows_that_start_late_and_rows_that_stay(num_init_draws):
    """What generators of torch draw for the same rows."""
    streams = []
    for row_type in RowStreams, KernelStreams:
        run = RunStream(5, "cpu", num_init_draws, 4, vocab_size=1001, row_type=row_type)
        streams.append(run.for_rows([2, 0, 1], [0, 3, 1]))
    jit.load_kernels(kernels.example_calls())
    for rows in [0, 1, 2], [0, 1, 2], [1, 2], [0, 1], [1]:
        for stream in streams:
            stream.select_rows(rows)
        plain, found = [stream.next() for stream in streams]
        is_drawn = [first_step < stream.step for first_step in stream.first_steps]
        assert torch.equal(found[is_drawn], plain[is_drawn])


@pytest.mark.parametrize("before", [0, 1, 623, 624])
@pytest.mark.parametrize("count", [0, 1, 624, 5000, 1234567])
@pytest.mark.parametrize("threshold", [mt19937.JUMP_THRESHOLD, 2000]) # walk, jump
def test_advancing_equals_drawing(before, count, threshold, monkeypatch):
    monkeypatch.setattr(mt19937, "JUMP_THRESHOLD", threshold)
    drawn = torch.Generator().manual_seed(3)
    torch.empty(before).uniform_(generator=drawn)
    advanced = drawn.clone_state()
    torch.empty(count).uniform_(generator=drawn)
    advance_mt19937(advanced, count)
    assert torch.equal(drawn.get_state(), advanced.get_state())
