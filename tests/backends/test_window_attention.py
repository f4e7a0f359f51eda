"""Chunked attention and the QKV table of the first layer do not change the logits."""
import pytest
import torch

from cases import cases
from models import make_gpt
from sampling.backends.cpu import window_attention
from sampling.backends.cpu.packed_gpt import PackedGPT
from sampling.backends.cpu.packed_linear import NARROW, is_supported
from sampling.backends.cpu.window_attention import FirstLayerQKVTable
from sampling.backends.prepare import cast_linears

pytestmark = pytest.mark.skipif(not is_supported(), reason="this torch lacks the operators")

WIDE = dict(n_embd=NARROW, n_head=4, n_layer=2)


def random_prompt(length, rows):
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(0))


def assert_same_logits(packed, model, idx, tolerance=1e-5):
    """Assert that a PackedGPT without a cache gives the same logits of the last position of idx (B, T) as a GPT."""
    with torch.no_grad():
        expected = model(idx)[0][:, -1]
    torch.testing.assert_close(packed.next_logits(idx, None).values.float(), expected, atol=tolerance, rtol=tolerance)


PARTS = [(1,), (63,), (64,), (65,), (150,), (64, 1, 70), (1, 129), (100, 50), (512, 1, 80), (513,)]


@pytest.mark.parametrize("parts, bias, processor", cases(PARTS, [True, False], ["Intel", "AMD"],
                         quick=lambda parts, bias, processor: (bias, processor) == (True, "Intel") or parts == (512, 1, 80)), indirect=["processor"])
def test_a_window_may_be_longer_than_a_chunk_of_queries(parts, bias, processor):
    shape = dict(WIDE, block_size=600, bias=bias)
    plain, packed, idx = make_gpt(**shape), PackedGPT(make_gpt(**shape)), random_prompt(sum(parts), 3)
    cache = packed.new_cache(3, 600)
    with torch.no_grad():
        expected = plain(idx)[0][:, -1]
    found = [packed.next_logits(part, cache).values for part in idx.split(parts, dim=1)][-1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert_same_logits(packed, plain, idx)


@pytest.mark.parametrize("dtype, length, processor", cases([torch.float32, torch.bfloat16], [5, 16], ["Intel", "AMD"],
                         quick=lambda dtype, length, processor: length == 16 and processor == "AMD"), indirect=["processor"])
def test_the_qkv_table_is_built_after_as_many_tokens_as_it_has_rows(dtype, length, processor):
    plain, packed, idx = make_gpt(**WIDE), PackedGPT(cast_linears(make_gpt(**WIDE), dtype)), random_prompt(length, 7)
    table_size = 61 * 16 # vocab_size * block_size
    for i in range(table_size // idx.numel() + 2):
        assert_same_logits(packed, plain, idx, tolerance=1e-5 if dtype == torch.float32 else 0.05)
        assert (packed.first_qkv.table is None) == ((i + 1) * idx.numel() < table_size)


@pytest.mark.parametrize("processor", [pytest.param("Intel", marks=pytest.mark.slow), "AMD"], indirect=True)
def test_building_the_table_is_tried_only_once_if_memory_runs_out(processor, monkeypatch):
    packed, idx = PackedGPT(make_gpt(**WIDE)), random_prompt(16, 61)

    def run_out_of_memory(table):
        raise MemoryError
    monkeypatch.setattr(FirstLayerQKVTable, "make_table", run_out_of_memory)
    with pytest.raises(MemoryError):
        packed.next_logits(idx, None)
    assert_same_logits(packed, make_gpt(**WIDE), idx)


@pytest.mark.parametrize("processor", [pytest.param("Intel", marks=pytest.mark.slow), "AMD"], indirect=True)
def test_a_too_large_table_is_not_built(processor, monkeypatch):
    monkeypatch.setattr(window_attention, "MAX_TABLE_BYTES", 61 * 16 * 3 * WIDE["n_embd"] * 4 - 1)
    packed = PackedGPT(make_gpt(**WIDE))
    for _ in range(20):
        packed.next_logits(random_prompt(16, 7), None)
    assert packed.first_qkv.table is None
