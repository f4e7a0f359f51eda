"""Traced blocks give the same bits as blocks that Python runs."""
import weakref

import pytest
import torch

from cases import cases
from int8_support import skip_without_int8
from models import make_gpt
from processors import PROCESSORS, simulate_processor
from sampling.backends.cpu import traced_blocks
from sampling.backends.cpu.packed_gpt import PackedGPT
from sampling.backends.cpu.packed_linear import NARROW, is_supported
from sampling.backends.prepare import cast_linears
from streams import random_prompt

pytestmark = pytest.mark.skipif(not is_supported(), reason="this torch lacks the operators")

SHAPES = dict(narrow={}, wide=dict(n_embd=NARROW, n_head=4, n_layer=3, bias=False, gelu="tanh"),
              odd_heads=dict(n_embd=144, n_head=2)) # the root of 72 is not the same in float32


@pytest.fixture(autouse=True)
def traced_at_once(monkeypatch):
    """Trace the blocks as soon as possible: after MIN_STEPS."""
    monkeypatch.setattr(traced_blocks, "MIN_SECONDS", 0)


def packed_gpt(dtype="float32", **shape):
    """A PackedGPT with the layers of this dtype."""
    model = make_gpt(**shape)
    if dtype == "int8":
        skip_without_int8()
    return PackedGPT(cast_linears(model, torch.bfloat16) if dtype == "bfloat16" else model, use_int8=dtype == "int8")


def decode(gpt, idx, cache, first=0):
    """The logits (steps, B, V) after each token of idx (B, T), from the first of them on, one token at a time."""
    return torch.stack([gpt.logits(idx[:, i:i + 1], cache) for i in range(first, idx.size(1))])


def in_python(gpt):
    """The same model, which never traces."""
    gpt.decode_step.is_traceable = False
    return gpt


@pytest.mark.parametrize("dtype, rows, shape, processor", cases(
    ["float32", "bfloat16", "int8"], [1, 3, 8], SHAPES, PROCESSORS,
    quick=lambda dtype, rows, shape, processor: (rows == 8) == (processor == "Intel") and (shape != "narrow" or rows == 1)),
    indirect=["processor"])
def test_every_logit_is_the_same(dtype, rows, shape, processor):
    if dtype == "bfloat16" and not is_supported(torch.bfloat16):
        pytest.skip("this torch lacks the operators")
    gpt, other, idx = packed_gpt(dtype, **SHAPES[shape]), in_python(packed_gpt(dtype, **SHAPES[shape])), random_prompt(16, rows)
    cache, other_cache = gpt.new_cache(rows, 16), gpt.new_cache(rows, 16)
    for start, end in (0, 4), (9, 12): # read some tokens at once, then one at a time
        assert torch.equal(gpt.logits(idx[:, start:end], cache), other.logits(idx[:, start:end], other_cache))
        step = slice(end, start + 9)
        assert torch.equal(decode(gpt, idx[:, :step.stop], cache, end), decode(other, idx[:, :step.stop], other_cache, end))
        assert cache in gpt.decode_step.traced and not other.decode_step.traced
    assert torch.equal(cache.keys[..., :16, :], other_cache.keys[..., :16, :])


def test_rows_may_leave():
    gpt, other, idx = packed_gpt(), in_python(packed_gpt()), random_prompt(16, 3)
    results = []
    for model in gpt, other:
        cache = model.new_cache(3, 16)
        model.logits(idx[:, :2], cache)
        before = decode(model, idx[:, :6], cache, 2)
        cache.select_rows([0, 2])
        results.append((before, decode(model, idx[[0, 2]], cache, 6)))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
    assert [rows for rows, _ in gpt.decode_step.loops] == [3, 2]


def test_streams_may_alternate():
    gpt, other, idx = packed_gpt(), in_python(packed_gpt()), random_prompt(16, 4)
    parts = idx[:1], idx[1:]
    caches = [gpt.new_cache(len(part), 16) for part in parts]
    expected = [decode(other, part, other.new_cache(len(part), 16)) for part in parts]
    for i in range(16):
        for part, cache, logits in zip(parts, caches, expected, strict=True):
            assert torch.equal(gpt.logits(part[:, i:i + 1], cache), logits[i])


def test_blocks_are_traced_once_for_a_number_of_rows(monkeypatch):
    simulate_processor(monkeypatch, "Intel")
    traced, trace = [], torch.jit.trace
    monkeypatch.setattr(torch.jit, "trace", lambda *args, **kwargs: traced.append(1) or trace(*args, **kwargs))
    gpt, idx = packed_gpt(), random_prompt(16, 3)
    for rows in 1, 3, 1, 3, 1:
        decode(gpt, idx[:rows], gpt.new_cache(rows, 16))
    assert len(traced) == 2


def test_blocks_may_have_different_layouts(monkeypatch):
    """After three prompts of the same length, Intel's layers are packed, except those of the last block after attention."""
    simulate_processor(monkeypatch, "Intel")
    results, idx = [], random_prompt(16)
    for gpt in packed_gpt(**SHAPES["wide"]), in_python(packed_gpt(**SHAPES["wide"])):
        for _ in range(3):
            cache = gpt.new_cache(1, 16)
            gpt.logits(idx[:, :8], cache)
        assert [block.c_fc.packed is None for block in gpt.blocks] == [False, False, True]
        results.append(decode(gpt, idx, cache, 8))
        assert len(gpt.decode_step.loops) == (0 if len(results) == 2 else 2)
    assert torch.equal(*results)


def test_steps_are_traced_only_after_enough_time(monkeypatch):
    monkeypatch.setattr(traced_blocks, "MIN_SECONDS", 3600)
    gpt = packed_gpt()
    decode(gpt, random_prompt(16), cache := gpt.new_cache(1, 16))
    assert 0 < sum(gpt.decode_step.seconds[1]) < 3600 and cache not in gpt.decode_step.traced


def fail(*args, **kwargs):
    raise RuntimeError("unsupported")


def trace_another_function(function, *args, trace=torch.jit.trace, **kwargs):
    return trace(lambda *inputs: function(*inputs) + 2**-10, *args, **kwargs)


@pytest.mark.parametrize("trace", [None, fail, trace_another_function])
def test_without_a_right_trace_python_runs_every_step(trace, monkeypatch):
    if trace:
        monkeypatch.setattr(torch.jit, "trace", trace)
    else:
        monkeypatch.delattr(torch.jit, "trace")
    gpt, other, idx = packed_gpt(), in_python(packed_gpt()), random_prompt(16, 2)
    found = decode(gpt, idx, cache := gpt.new_cache(2, 16))
    assert torch.equal(found, decode(other, idx, other_cache := other.new_cache(2, 16)))
    assert torch.equal(cache.keys, other_cache.keys)
    assert not gpt.decode_step.is_traceable and cache not in gpt.decode_step.traced


def test_a_plain_weight_leaves_memory_once_its_layer_is_packed(monkeypatch):
    simulate_processor(monkeypatch, "Intel")
    gpt, idx = packed_gpt(**SHAPES["wide"]), random_prompt(16, 8)
    cache = gpt.new_cache(1, 16)
    decode(gpt, idx[:1, :8], cache)
    assert cache in gpt.decode_step.traced
    weight = weakref.ref(gpt.blocks[0].c_fc.weight)
    decode(gpt, idx, gpt.new_cache(8, 16)) # packs
    assert gpt.blocks[0].c_fc.packed is not None
    gpt.logits(idx[:1, 8:12], cache)
    assert weight() is None


def test_a_finished_stream_leaves_no_cache_in_memory():
    gpt, idx = packed_gpt(), random_prompt(16)
    cache = gpt.new_cache(1, 16)
    decode(gpt, idx, cache)
    memory = weakref.ref(cache.keys)
    del cache
    assert memory() is None and not gpt.decode_step.traced
