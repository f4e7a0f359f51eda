"""PackedGPT gives the same results as the GPT whose layers it packs."""
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cases import cases
from models import make_gpt
from oracles import reference_generate
from processors import PROCESSORS
from sampling.backends.cpu.packed_gpt import PackedGPT
from sampling.backends.cpu.packed_linear import NARROW, PackedLinear, is_supported
from sampling.backends.eager import EagerBackend
from sampling.backends.prepare import cast_linears
from streams import decode, random_prompt

pytestmark = [pytest.mark.skipif(not is_supported(), reason="this torch lacks the operators"), pytest.mark.usefixtures("all_threads")]

WIDE = dict(n_embd=NARROW, n_head=4, n_layer=2)


def prefill_in_parts(gpt, idx, parts):
    """Logits (B, V) of the last position of idx (B, T), from a PackedGPT that fills its cache part by part."""
    cache = gpt.new_cache(*idx.shape)
    return [gpt.logits(part, cache) for part in idx.split(parts, dim=1)][-1]


def last_logits(model, idx):
    """Logits (B, V) of the last position, from a GPT."""
    with torch.no_grad():
        return model(idx)[0][:, -1]


def assert_near(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# ---- float32

@pytest.mark.parametrize("length, rows, gelu, bias, n_embd, processor", cases(
    [1, 10, 16, 30], [1, 3], ["none", "tanh"], [True, False], [24, NARROW], PROCESSORS, # block_size is 16
    quick=lambda length, rows, gelu, bias, n_embd, processor: (
        (rows == 3) == (length in (10, 30)) and (gelu == "tanh") == bias == (n_embd == NARROW) and (processor == "AMD") == (rows == 1))),
    indirect=["processor"])
def test_it_samples_the_same_tokens_as_gpt(length, rows, gelu, bias, n_embd, processor):
    shape = dict(n_embd=n_embd, n_head=4, bias=bias, gelu=gelu)
    plain, packed, idx = make_gpt(**shape), PackedGPT(make_gpt(**shape)), random_prompt(length, rows)
    assert_near(packed.logits(idx[:, -16:], None), last_logits(plain, idx[:, -16:]))
    torch.manual_seed(3)
    expected = [reference_generate(plain, row[None], 25, temperature=0.8, top_k=20)[0, length:].tolist() for row in idx]
    assert decode(packed, idx.tolist(), 25, temperature=0.8, top_k=20) == expected


@pytest.mark.parametrize("parts, processor", cases([(5, 1, 7), (1, 14), (15,), (3, 12)], PROCESSORS,
                         quick=lambda parts, processor: processor == "Intel"), indirect=["processor"])
def test_a_cache_may_be_filled_in_any_parts(parts, processor):
    plain, packed, idx = make_gpt(**WIDE), PackedGPT(make_gpt(**WIDE)), random_prompt(sum(parts), 2)
    cache, num_cached = packed.new_cache(2, 16), 0
    for length in parts:
        found = packed.logits(idx[:, num_cached:num_cached + length], cache)
        num_cached += length
        assert_near(found, last_logits(plain, idx[:, :num_cached]))


def test_only_filled_positions_of_the_cache_move_when_rows_leave():
    """The memory of the others may never have been used."""
    cache = PackedGPT(make_gpt()).new_cache(3, 16)
    before = cache.keys, cache.values
    for tensor in before:
        tensor[:] = torch.arange(3.0).view(3, 1, 1, 1) # (N, B, H, S, D): every entry is its row's number
    cache.seq_len = 5
    cache.select_rows([1, 2])
    for tensor, whole in zip((cache.keys, cache.values), before, strict=True):
        assert tensor.size(1) == 2 and (tensor[:, 0, :, :5] == 1).all() and (tensor[:, 1, :, :5] == 2).all()
        assert (whole[:, 0, :, 5:] == 0).all() and tensor.data_ptr() == whole.data_ptr()


@pytest.mark.parametrize("processor", PROCESSORS, indirect=True)
def test_a_pass_may_give_the_logits_of_several_positions(processor):
    plain, packed, idx = make_gpt(**WIDE), PackedGPT(make_gpt(**WIDE)), random_prompt(14, 2)
    cache = packed.new_cache(2, 16)
    packed.logits(idx[:, :6], cache)
    expected = torch.cat([last_logits(plain, idx[:, :end]) for end in range(10, 15)], dim=1).view(10, -1)
    assert_near(packed.logits(idx[:, 6:], cache, num_positions=5), expected)
    assert_near(packed.logits(idx, None, num_positions=5), expected)


@pytest.mark.parametrize("processor", PROCESSORS, indirect=True)
def test_passes_can_be_undone(processor):
    packed, idx = PackedGPT(make_gpt(**WIDE)), random_prompt(14, 1)
    cache, other = packed.new_cache(1, 16), packed.new_cache(1, 16)
    packed.logits(idx[:, :6], cache)
    packed.logits(idx[:, :4].flip(1), cache, num_positions=4)
    cache.seq_len = 6
    assert_near(packed.logits(idx[:, 6:7], cache), [packed.logits(part, other) for part in idx[:, :7].split([6, 1], dim=1)][1])


@pytest.mark.parametrize("parts", [(513,), (512, 1, 80)])
def test_a_long_prompt_gives_the_logits_of_gpt(parts):
    shape = dict(WIDE, block_size=600)
    plain, packed, idx = make_gpt(**shape), PackedGPT(make_gpt(**shape)), random_prompt(sum(parts), 3)
    assert_near(prefill_in_parts(packed, idx, parts), last_logits(plain, idx))
    assert_near(packed.logits(idx, None), last_logits(plain, idx))


@pytest.mark.parametrize("length, processor", cases([1, 9], PROCESSORS,
                         quick=lambda length, processor: processor == "Intel"), indirect=["processor"])
def test_rows_that_share_a_prompt_equal_the_reference_loop(length, processor):
    plain, packed, idx = make_gpt(), PackedGPT(make_gpt()), random_prompt(length, 1).repeat(3, 1)
    torch.manual_seed(3)
    expected = [reference_generate(plain, row[None], 25)[0, length:].tolist() for row in idx]
    assert decode(packed, idx.tolist(), 25) == expected


@pytest.mark.parametrize("parts, processor", cases([(17,), (16, 1), (10, 7)], PROCESSORS,
                         quick=lambda parts, processor: processor == "Intel"), indirect=["processor"])
def test_more_than_block_size_tokens_raise(parts, processor):
    with pytest.raises(ValueError, match="cannot process 17 tokens: block_size is 16"):
        prefill_in_parts(PackedGPT(make_gpt()), random_prompt(17, 1), parts)


@pytest.mark.parametrize("processor", PROCESSORS, indirect=True)
def test_packing_works_with_gradients_enabled_and_draws_no_random_numbers(processor):
    plain, model, idx = make_gpt(), make_gpt(), random_prompt(6, 2)
    before = torch.get_rng_state()
    packed = PackedGPT(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert_near(prefill_in_parts(packed, idx, (5, 1)), last_logits(plain, idx))


@pytest.mark.parametrize("rows, processor", cases([1, 3], PROCESSORS, quick=lambda rows, processor: processor == "AMD"), indirect=["processor"])
def test_eagerly_packed_layers_give_the_same_logits_at_every_call(rows, processor):
    packed, idx = PackedGPT(make_gpt(**WIDE), pack_eagerly=True), random_prompt(7, rows)
    first, second = (packed.logits(idx, packed.new_cache(rows, 16)) for _ in range(2))
    assert torch.equal(first, second)


# ---- bfloat16

needs_bfloat16 = pytest.mark.skipif(not is_supported(torch.bfloat16), reason="this processor lacks the operators")


def assert_as_near_as_autocast(logits, make_model):
    """Assert that PackedGPT's mean error in bfloat16 is at most 1.2 times the GPT's error under autocast.

    logits(model) computes the logits with a backend's new_cache and logits.
    """
    with torch.no_grad():
        exact = logits(EagerBackend(make_model()))
        with torch.autocast("cpu", torch.bfloat16):
            autocast = logits(EagerBackend(make_model()))
            packed = logits(PackedGPT(cast_linears(make_model(), torch.bfloat16)))
    assert 0 < (packed - exact).abs().mean() <= 1.2 * (autocast - exact).abs().mean()


@needs_bfloat16
@pytest.mark.parametrize("parts, rows, shape, processor", cases([None, (14, 1), (5, 10)], [1, 2], [{}, WIDE], PROCESSORS,
                         quick=lambda parts, rows, shape, processor: (rows, processor) == (2, "Intel")), indirect=["processor"])
def test_bfloat16_is_as_near_to_float32_as_autocast(parts, rows, shape, processor):
    idx = random_prompt(15, rows)

    def logits(model):
        return (model.logits(idx, None) if parts is None else prefill_in_parts(model, idx, parts)).float()
    assert_as_near_as_autocast(logits, lambda: make_gpt(**shape))


@needs_bfloat16
@pytest.mark.parametrize("rows, processor", cases([1, 3], PROCESSORS, quick=lambda rows, processor: (rows, processor) == (3, "Intel")),
                         indirect=["processor"])
def test_bfloat16_with_large_attention_scores_is_as_near_to_float32_as_autocast(rows, processor):
    idx, shape = random_prompt(60, rows), dict(WIDE, block_size=64)

    def make_model():
        model = make_gpt(**shape)
        with torch.no_grad():
            for block in model.transformer.h:
                q, k, _ = block.attn.c_attn.bias.chunk(3)
                q += 5 # all scores grow by the same amount, so that low precision loses most of their differences
                k += 0.6
        return model

    def logits(model):
        cache = model.new_cache(rows, 64)
        return torch.cat([model.logits(token, cache).float() for token in idx.split(1, dim=1)])
    assert_as_near_as_autocast(logits, make_model)


# ---- memory

def storages(block):
    """Weak references to the memory of a block's weights."""
    return [StorageWeakRef(parameter.untyped_storage()) for parameter in block.parameters() if parameter.dim() > 1]


def test_it_takes_over_the_layers_without_copying(processor):
    model = make_gpt(**WIDE)
    addresses = [block.mlp.c_fc.weight.data_ptr() for block in model.transformer.h]
    packed = PackedGPT(model)
    assert len(model.transformer.h) == 0 and not hasattr(model, "lm_head")
    assert [block.c_fc.weight.data_ptr() for block in packed.blocks] == addresses, "nothing is copied"


def test_an_unpacked_weight_is_freed_after_packing(processor):
    model = make_gpt(**WIDE, tie_word_embeddings=False)
    plain = [*storages(model.transformer.h[0]), StorageWeakRef(model.lm_head.weight.untyped_storage())]
    packed = PackedGPT(model)
    assert not any(storage.expired() for storage in plain)
    packed.logits(random_prompt(5, 2), packed.new_cache(2, 16)) # with this fixture, a layer is packed at its first use
    assert all(storage.expired() for storage in plain)


def test_pack_eagerly_frees_each_block_before_it_packs_the_next(processor, monkeypatch):
    model, num_alive = make_gpt(**{**WIDE, "n_layer": 3}), []
    plain, pack = [storages(block) for block in model.transformer.h], PackedLinear.pack

    def count_blocks_and_pack(layer):
        num_alive.append(sum(not all(storage.expired() for storage in block) for block in plain))
        pack(layer)
    monkeypatch.setattr(PackedLinear, "pack", count_blocks_and_pack)
    packed = PackedGPT(model, pack_eagerly=True)
    assert num_alive[:12] == [3] * 4 + [2] * 4 + [1] * 4, "4 layers a block"
    assert all(storage.expired() for block in plain for storage in block)
    assert packed.lm_head.linear.packed.is_mkldnn
