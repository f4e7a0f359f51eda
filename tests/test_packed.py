"""Packed layers give what plain ones give."""
import math

import onednn
import packed
import pytest
import torch
import torch.nn.functional as F
import window
from packed import PackedBlock, pack

from conftest import make_gpt, plain_generate

WIDE = dict(n_embd=onednn.NARROW, n_head=4, n_layer=2)

needs_operators = pytest.mark.skipif(not onednn.available(), reason="this torch has not the operators")


@pytest.fixture(autouse=True, params=[True, False], ids=["an-Intel", "another"])
def intel(request, monkeypatch):
    """Every test as on either kind of processor, layers packed at once."""
    monkeypatch.setattr(onednn, "made_by_intel", lambda: request.param)
    for name in "INTEL", "OTHERS":
        monkeypatch.setattr(onednn, name, getattr(onednn, name)._replace(once=1))
    return request.param


def prompt_of(length, rows):
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(0))


@needs_operators
@pytest.mark.parametrize("n_embd", [24, onednn.NARROW], ids=["narrow", "wide"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("gelu", ["none", "tanh"])
@pytest.mark.parametrize("rows", [1, 3], ids=["1-row", "3-rows"])
@pytest.mark.parametrize("length", [1, 10, 16, 30], ids=lambda n: f"{n}-tokens") # its block_size is 16
def test_the_same_tokens_in_float32(length, rows, gelu, bias, n_embd):
    shape = dict(n_embd=n_embd, n_head=4, bias=bias, gelu=gelu)
    plain, packed_model = make_gpt(**shape), pack(make_gpt(**shape))
    assert isinstance(packed_model.transformer.h[0], PackedBlock)
    idx = prompt_of(length, rows)
    with torch.no_grad():
        torch.testing.assert_close(packed_model(idx[:, -16:])[0], plain(idx[:, -16:])[0], atol=1e-5, rtol=1e-5)
    torch.manual_seed(3)
    expected = plain_generate(plain, idx, 25, temperature=0.8, top_k=20)
    torch.manual_seed(3)
    assert torch.equal(packed_model.generate(idx, 25, temperature=0.8, top_k=20), expected)


@needs_operators
@pytest.mark.parametrize("parts", [(5, 1, 7), (1, 14), (15,), (3, 12)], ids=str)
def test_a_cache_may_be_filled_in_any_parts(parts):
    plain, packed_model, idx = make_gpt(**WIDE), pack(make_gpt(**WIDE)), prompt_of(sum(parts), 2)
    cache, read = packed_model.new_cache(2, 16), 0
    with torch.no_grad():
        for length in parts:
            logits, _ = packed_model(idx[:, read:read + length], cache=cache)
            read += length
            torch.testing.assert_close(logits, plain(idx[:, :read])[0], atol=1e-5, rtol=1e-5)


@needs_operators
@pytest.mark.parametrize("length", [1, 9])
def test_rows_that_share_a_prompt(length):
    plain, packed_model, idx = make_gpt(), pack(make_gpt()), prompt_of(length, 1).repeat(3, 1)
    torch.manual_seed(3)
    expected = plain_generate(plain, idx, 25)
    torch.manual_seed(3)
    assert torch.equal(packed_model.generate(idx, 25), expected)


@needs_operators
@pytest.mark.parametrize("parts", [(17,), (16, 1), (10, 7)], ids=str)
def test_more_than_block_size_is_refused(parts):
    model, idx = pack(make_gpt()), prompt_of(17, 1)
    cache = model.new_cache(1, 32)
    with torch.no_grad(), pytest.raises(ValueError, match="cannot read 17 tokens: block_size is 16"):
        for part in idx.split(parts, dim=1):
            model(part, cache=cache)


@needs_operators
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("parts", [(1,), (63,), (64,), (65,), (150,), (64, 1, 70), (1, 129), (100, 50), (512, 1, 80), (513,)], ids=str)
def test_windows_longer_than_what_attends_at_once(parts, bias):
    shape = dict(WIDE, block_size=600, bias=bias)
    plain, packed_model, idx = make_gpt(**shape), pack(make_gpt(**shape)), prompt_of(sum(parts), 3)
    cache, read = packed_model.new_cache(3, 600), 0
    with torch.no_grad():
        expected = plain(idx)[0]
        for length in parts:
            logits, _ = packed_model(idx[:, read:read + length], cache=cache)
            read += length
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed_model(idx)[0], expected, atol=1e-5, rtol=1e-5)


@needs_operators
@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("length", [5, 16])
def test_the_first_layer_is_looked_up_once_that_pays(length, dtype, near):
    plain, packed_model, idx = make_gpt(**WIDE), pack(make_gpt(**WIDE).cast_linears(dtype)), prompt_of(length, 7)
    with torch.no_grad():
        expected = plain(idx)[0]
        for i in range(61 * 16 // idx.numel() + 2): # its vocab_size and block_size
            torch.testing.assert_close(packed_model(idx)[0].float(), expected, atol=near, rtol=near)
            assert (packed_model.first_qkv.table is None) == ((i + 1) * idx.numel() < 61 * 16)


@needs_operators
def test_a_table_that_memory_does_not_hold_is_tried_once(monkeypatch):
    model, idx = pack(make_gpt(**WIDE)), prompt_of(16, 61)

    def fail(self):
        raise MemoryError
    monkeypatch.setattr(window.FirstQKV, "make", fail)
    with torch.no_grad():
        with pytest.raises(MemoryError):
            model(idx)
        torch.testing.assert_close(model(idx)[0], make_gpt(**WIDE)(idx)[0], atol=1e-5, rtol=1e-5)


@needs_operators
def test_a_table_that_takes_too_much_is_not_made(monkeypatch):
    idx = prompt_of(16, 7)
    monkeypatch.setattr(window, "TABLE", 61 * 16 * 3 * WIDE["n_embd"] * 4 - 1)
    model = pack(make_gpt(**WIDE))
    with torch.no_grad():
        for _ in range(20):
            model(idx)
    assert model.first_qkv.table is None


@needs_operators
@pytest.mark.parametrize("shape", [{}, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("rows", [1, 2], ids=["1-row", "2-rows"])
@pytest.mark.parametrize("parts", [(), (14, 1), (5, 10)], ids=["no-cache", "a-token", "several"])
def test_bfloat16_is_as_near_to_float32_as_autocast(parts, rows, shape):
    idx = prompt_of(15, rows)

    def logits(model):
        if not parts:
            return model(idx)[0].float()
        cache = model.new_cache(rows, 16)
        return [model(part, cache=cache)[0].float() for part in idx.split(parts, dim=1)][-1]

    with torch.no_grad():
        exact = logits(make_gpt(**shape))
        with torch.autocast("cpu", torch.bfloat16):
            autocast = logits(make_gpt(**shape))
            ours = logits(pack(make_gpt(**shape).cast_linears(torch.bfloat16)))
    assert 0 < (ours - exact).abs().mean() <= 1.2 * (autocast - exact).abs().mean()


@needs_operators
@pytest.mark.parametrize("rows", [1, 3], ids=["1-row", "3-rows"])
def test_bfloat16_of_large_scores_is_as_near_too(rows):
    idx, shape = prompt_of(60, rows), dict(WIDE, block_size=64)

    def network():
        model = make_gpt(**shape)
        with torch.no_grad():
            for block in model.transformer.h:
                q, k, _ = block.attn.c_attn.bias.chunk(3)
                q += 5 # and all scores by the same: of coarse numbers little is left after that
                k += 0.6
        return model

    def logits(model):
        cache = model.new_cache(rows, 64)
        return torch.cat([model(token, cache=cache)[0].float() for token in idx.split(1, dim=1)])

    with torch.no_grad():
        exact = logits(network())
        with torch.autocast("cpu", torch.bfloat16):
            autocast = logits(network())
            ours = logits(pack(network().cast_linears(torch.bfloat16)))
    assert 0 < (ours - exact).abs().mean() <= 1.2 * (autocast - exact).abs().mean()


@needs_operators
def test_gradients_may_be_on_and_random_numbers_stay_where_they_are():
    plain, model, idx = make_gpt(), make_gpt(), prompt_of(6, 2)
    before = torch.get_rng_state()
    pack(model)
    assert torch.equal(torch.get_rng_state(), before)
    cache = model.new_cache(2, 16)
    model(idx[:, :5], cache=cache)
    torch.testing.assert_close(model(idx[:, 5:], cache=cache)[0], plain(idx)[0].detach(), atol=1e-5, rtol=1e-5)


def test_the_plain_path_stays_where_the_operators_are_missing(monkeypatch):
    monkeypatch.setattr(packed, "available", lambda dtype: False)
    model = make_gpt()
    layers = list(model.modules())
    assert list(pack(model).modules()) == layers


def test_float16_generates_whether_or_not_it_can_be_packed():
    with torch.autocast("cpu", torch.float16):
        assert pack(make_gpt().cast_linears(torch.float16)).generate(prompt_of(5, 2), 20, temperature=0).shape == (2, 25)


@needs_operators
@pytest.mark.parametrize("now", [False, True])
@pytest.mark.parametrize("width", [onednn.NARROW - 1, onednn.NARROW])
@pytest.mark.parametrize("rows, on_intel, on_others", [
    ((5, 1, 1, 1), None, 3), ((5, 3, 3, 1), None, 3), ((5, 4, 4, 1), 3, 3), ((7, 7, 8, 1), 2, 2), ((9, 8, 7, 1), None, None),
    ((29, 1, 29, 1), None, None), ((30, 1, 1, 1), None, 1), ((1, 31, 31, 2), 3, 2)], ids=str)
def test_a_layer_is_packed_now_or_for_many_rows_or_once_as_many_came_twice(rows, on_intel, on_others, width, now, intel, monkeypatch):
    monkeypatch.setattr(onednn, "INTEL", onednn.INTEL._replace(once=math.inf))
    monkeypatch.setattr(onednn, "OTHERS", onednn.OTHERS._replace(once=30))
    packed_at = 0 if now else on_intel if intel else on_others
    weight, bias = torch.randn(onednn.NARROW, width), torch.randn(onednn.NARROW)
    layer = onednn.PackedLinear(weight, bias, now)
    for use, n in enumerate(rows, 1):
        x, add = torch.randn(n, width), torch.randn(n, onednn.NARROW)
        torch.testing.assert_close(layer(x, add=add), F.linear(x, weight, bias) + add, atol=1e-4, rtol=1e-4)
        packed = packed_at is not None and use >= packed_at
        assert layer.weight.is_mkldnn == packed
        assert (layer.plain is None) == (packed and width >= onednn.NARROW), "memory that is wanted"


@pytest.mark.parametrize("told, expected", [("vendor_id\t: GenuineIntel\n", True), ("vendor_id\t: AuthenticAMD\n", False), (None, False)])
def test_whose_processor_it_is(told, expected, monkeypatch):
    def read_text(path):
        if told is None:
            raise FileNotFoundError(path)
        return told
    monkeypatch.undo() # which says whose it is
    monkeypatch.setattr(onednn.Path, "read_text", read_text)
    monkeypatch.setattr(onednn.platform, "processor", lambda: "AMD64 Family 25 Model 80 Stepping 0, AuthenticAMD")
    onednn.made_by_intel.cache_clear()
    assert (onednn.limits(torch.float32) is onednn.INTEL) == expected
    assert onednn.limits(torch.bfloat16) is onednn.OTHERS
    onednn.made_by_intel.cache_clear()


@needs_operators
@pytest.mark.parametrize("rows", [1, 3])
def test_logits_that_are_packed_for_now_are_the_same_whenever_they_are_made(rows):
    model, idx = pack(make_gpt(**WIDE), now=True), prompt_of(7, rows)
    with torch.no_grad():
        first, second = (model(idx, cache=model.new_cache(rows, 16))[0] for _ in range(2))
    assert torch.equal(first, second)
