"""Sampling the next token from its logits."""
import pytest
import torch

from oracles import nanogpt_token
from sampling.sampler.sample_fn import Logits
from sampling.sampler.sample_token import TokenSampler, exponential_noise, sample_token

FIVE = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0]])


def sample(values, temperature=1.0, top_k=None, *, candidate_ids=None, noise=exponential_noise, **settings):
    """sample_token without previous tokens."""
    return sample_token(Logits(values, candidate_ids), None, temperature, top_k, noise=noise, **settings)


def frequencies(values, **settings):
    """The relative frequency of each token in 4096 samples."""
    torch.manual_seed(1)
    tokens = sample(values.expand(4096, -1), **settings)
    return tokens.flatten().bincount(minlength=values.size(1)) / 4096


def test_probabilities_are_the_softmax_of_logits_over_temperature():
    assert torch.allclose(frequencies(FIVE, temperature=2.0), (FIVE / 2).softmax(-1), atol=0.03)


@pytest.mark.parametrize("top_k, kept", [(1, [1, 3]), (2, [1, 3]), (3, [1, 2, 3]), (5, [0, 1, 2, 3, 4]), (99, [0, 1, 2, 3, 4]),
                                         (None, [0, 1, 2, 3, 4]), (0, [0, 1, 2, 3, 4])])
@pytest.mark.parametrize("allow_sync", [True, False])
def test_top_k_keeps_the_k_most_likely_tokens_and_ties_with_the_kth(top_k, kept, allow_sync):
    found = frequencies(FIVE, top_k=top_k, allow_sync=allow_sync)
    assert found.nonzero().flatten().tolist() == kept
    masked = torch.full_like(FIVE, -torch.inf)
    masked[:, kept] = FIVE[:, kept]
    assert torch.allclose(found, masked.softmax(-1), atol=0.03)


@pytest.mark.parametrize("top_k", [None, 3, 40, 999, 1000])
@pytest.mark.parametrize("ties", ["few", "hundreds"])
def test_sample_token_equals_multinomial_on_the_masked_probabilities(ties, top_k):
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(4)).mul(3).bfloat16()
    logits = logits if ties == "few" else logits.clamp(max=1)
    scaled = logits.float() / 0.8
    if top_k:
        scaled[scaled < scaled.topk(top_k).values[:, -1:]] = -torch.inf
    for seed in range(20):
        torch.manual_seed(seed)
        expected = torch.multinomial(scaled.softmax(-1), 1)
        torch.manual_seed(seed)
        assert torch.equal(sample(logits, 0.8, top_k), expected)


def test_temperature_0_takes_the_most_likely_token_and_draws_no_random_numbers():
    before = torch.get_rng_state()
    assert sample(torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]]), temperature=0).tolist() == [[1], [0]]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 1e-300])
@pytest.mark.parametrize("allow_sync", [True, False])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature, allow_sync):
    assert sample(torch.tensor([[1.0, 900.0, -3.0]]), temperature, allow_sync=allow_sync).item() == 1


def test_float32_overflow_in_one_row_does_not_change_other_rows():
    """Found by fuzzing: the range of both rows together overflows float32, but the range of each row alone does not."""
    rows, q = torch.tensor([[-2.25, 1e-40, 0.0], [0.0, 0.0, 1.25]]), torch.tensor([[3.5, 1.23, 0.6]])

    def noise(shape, ids, device):
        return q.expand(shape)
    together = sample(rows, 1e-38, noise=noise)
    alone = [sample(row[None], 1e-38, noise=noise) for row in rows]
    assert torch.equal(together, torch.cat(alone)) and together.tolist() == [[2], [2]]


def test_logits_are_not_modified():
    logits = FIVE.clone()
    sample_token(Logits(logits), torch.tensor([[1]]), 0.7, 2, 0.9, 0.1, 1.2, noise=exponential_noise)
    assert torch.equal(logits, FIVE)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_nan_or_infinite_raise(bad, temperature):
    with pytest.raises(ValueError, match="NaN or infinite"):
        sample(torch.tensor([[1.0, 2.0], [0.0, bad]]), temperature=temperature)


@pytest.mark.parametrize("settings", [dict(top_k=20), dict(top_k=1), dict(top_k=20, top_p=0.7), dict(top_k=20, min_p=0.2), dict(top_k=20, temperature=0),
                                      dict(temperature=0), dict(top_k=20, temperature=1e-40), dict(top_k=20, temperature=3.0)], ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_num_logits_needed_logits_give_the_same_tokens(settings, ties):
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(4)).mul(3)
    logits = logits.round() if ties else logits
    kth = logits.topk(TokenSampler(**settings).num_logits_needed).values[:, -1:]
    candidate_ids = (logits >= kth).any(dim=0).nonzero().flatten()

    def tokens(logits, **candidates):
        torch.manual_seed(1)
        return sample(logits, **settings, **candidates)
    for _ in range(10):
        expected = tokens(logits)
        assert torch.equal(tokens(logits, candidate_ids=candidate_ids), expected)
        assert torch.equal(tokens(torch.where(logits < kth, logits - torch.rand_like(logits), logits)), expected)


@pytest.mark.parametrize("settings", [dict(), dict(top_k=None), dict(top_k=0), dict(top_p=0.5), dict(top_k=20, repetition_penalty=1.1),
                                      dict(temperature=0, repetition_penalty=0.9)], ids=str)
def test_other_settings_need_all_logits(settings):
    assert TokenSampler(**settings).num_logits_needed is None


def test_num_logits_needed_depends_on_temperature_and_top_k():
    assert TokenSampler(0, 20).num_logits_needed == 1
    assert TokenSampler(0.8, 20).num_logits_needed == 20


def test_a_negative_top_k_is_refused():
    with pytest.raises(ValueError, match="top_k must be at least 1, or None or 0 for every token; got -1"):
        TokenSampler(top_k=-1)


def test_a_token_sampler_applies_every_setting():
    logits, ids = Logits(torch.randn(64, 50, generator=torch.Generator().manual_seed(2)).mul(2)), torch.arange(640).view(64, 10) % 50
    settings = dict(temperature=1.3, top_k=12, top_p=0.8, min_p=0.3, repetition_penalty=1.5)
    for left_out in settings:
        torch.manual_seed(3)
        plain = sample_token(logits, ids, **settings, noise=exponential_noise)
        torch.manual_seed(3)
        assert torch.equal(TokenSampler(**settings)(logits, ids), plain)
        torch.manual_seed(3)
        fewer = TokenSampler(**{name: value for name, value in settings.items() if name != left_out})(logits, ids)
        assert not torch.equal(fewer, plain), left_out


HALF_LOGITS = torch.randn(256, 1000, generator=torch.Generator().manual_seed(4)).mul(3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("temperature, top_k", [(0.8, 200), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(0.8, None), (0.3, 5), (1.7, 2000)])])
def test_in_their_own_dtype_logits_give_nanogpts_tokens(temperature, top_k, dtype):
    logits, others = HALF_LOGITS.to(dtype), 0
    for seed in range(10):
        torch.manual_seed(seed)
        expected = nanogpt_token(logits, temperature, top_k, softmax_dtype=torch.float32) # as under autocast on CUDA
        torch.manual_seed(seed)
        assert torch.equal(sample(logits, temperature, top_k, allow_sync=False, in_logits_dtype=True), expected)
        torch.manual_seed(seed)
        others += (sample(logits, temperature, top_k, allow_sync=False) != expected).sum().item()
    assert others == 0 if dtype == torch.float32 else others > 0 or dtype == torch.float16, "division in float32 gives other tokens"


@pytest.mark.parametrize("dtype, temperature", [(torch.float16, 1e-4), (torch.float16, 1e-20), (torch.bfloat16, 1e-37)], ids=str)
@pytest.mark.parametrize("value", [50.0, -50.0])
def test_half_precision_logits_do_not_overflow_at_a_low_temperature(dtype, temperature, value):
    logits = torch.tensor([[value, value + 1, value - 1]], dtype=dtype)
    for allow_sync in False, True:
        assert sample(logits, temperature, 2, allow_sync=allow_sync, in_logits_dtype=True).item() == 1


def test_settings_that_nanogpt_lacks_are_computed_in_float32():
    logits, ids = HALF_LOGITS.bfloat16(), torch.arange(1000).expand(256, 1000)
    for settings in dict(repetition_penalty=1.3), dict(top_p=0.9), dict(min_p=0.1):
        found = []
        for values in logits, logits.float():
            torch.manual_seed(1)
            found.append(sample_token(Logits(values), ids, **settings, noise=exponential_noise, allow_sync=False, in_logits_dtype=True))
        assert torch.equal(*found), settings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_in_their_own_dtype_logits_are_never_read_by_the_host(dtype):
    """A CUDA graph cannot hold such a read. Tensors on the meta device have no values, so a read raises."""
    def noise(shape, ids, device):
        return torch.empty(shape, device=device)
    logits, ids = torch.empty(2, 50, dtype=dtype, device="meta"), torch.zeros(2, 3, dtype=torch.long, device="meta")
    tokens = sample_token(Logits(logits), ids, 0.8, 20, 0.9, 0.1, 1.2, noise=noise, allow_sync=False, in_logits_dtype=True)
    assert tokens.shape == (2, 1) and tokens.is_meta


@pytest.mark.parametrize("temperature", [0.8, 1e-35])
def test_in_their_own_dtype_logits_are_checked_if_a_sync_is_allowed(temperature):
    values = torch.tensor([[0.0, 3.0, -2.0, 1.0]], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="NaN or infinite"):
        sample(values * torch.inf, temperature, 2, in_logits_dtype=True)
