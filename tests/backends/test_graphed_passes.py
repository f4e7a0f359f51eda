"""The passes of CUDAGraphGPT for speculative decoding. They run on a CPU, directly and as recorded graphs, and on a GPU."""
import gc

import pytest
import torch

from model import generate_stream
from models import make_gpt
from sampling.backends.cuda import decode_state, graphed_passes
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.backends.cuda.graphed_passes import MAX_TOKENS, GraphedPasses
from sampling.backends.cuda.self_check import SelfCheck
from sampling.backends.cuda.static_forward import StaticForward
from sampling.generation.draft_length import MAX_PROPOSALS
from sampling.sampler.sample_token import TokenSampler
from streams import random_prompt

IDS = random_prompt(32)
GREEDY = TokenSampler(temperature=0)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(decode_state, "BUCKET", 8)


@pytest.fixture(params=["direct", "recorded", pytest.param("cuda", marks=[
    pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")])])
def gpt(request):
    """A CUDAGraphGPT with a window of 32 tokens, on a GPU or on a CPU. Its messages are the list of the lines that it logs."""
    if request.param == "recorded":
        request.getfixturevalue("recordings")
    messages = []
    gpt = CUDAGraphGPT(make_gpt(block_size=32).to("cuda" if request.param == "cuda" else "cpu"), log=messages.append)
    gpt.messages, gpt.has_graphs = messages, request.param != "direct"
    return gpt


def read(gpt, cache, start, end, num_positions=1, ids=IDS):
    """The logits (num_positions, V) of the pass over ids[:, start:end], and those that the plain model computes without a cache."""
    ids = ids.to(gpt.device)
    with torch.no_grad():
        expected = gpt.model(ids[:, :end], num_positions=num_positions)[0][0]
    return gpt.next_logits(ids[:, start:end], cache, None, num_positions).values, expected


def assert_right(logits):
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_passes_give_the_logits_of_the_plain_model_and_can_be_undone(gpt):
    for _ in range(4): # the second text captures what the first one ran
        cache = gpt.new_cache(1, 32)
        assert_right(read(gpt, cache, 0, 5))
        for T, num_positions in (1, 1), (9, 9), (2, 1), (4, 4), (9, 1), (2, 2):
            start = cache.seq_len
            gpt.next_logits(IDS[:, :T].to(gpt.device), cache, None, T) # wrong tokens
            assert cache.seq_len == start + T
            cache.seq_len = start
            assert_right(read(gpt, cache, start, start + T, num_positions))
        assert cache.seq_len == 32
    assert list(cache.passes.graphs) == [(1, 8), (9, 16), (2, 24), (4, 24), (9, 32), (2, 32)]
    assert all(cache.passes.graphs.values()) == gpt.has_graphs and gpt.messages == []


def test_a_text_does_not_see_the_keys_of_an_earlier_one(gpt):
    cache = gpt.new_cache(1, 32)
    read(gpt, cache, 0, 30)
    for layer in cache.passes.cache.layers:
        layer.fill_(torch.nan) # as after a text that gave NaN
    cache = gpt.new_cache(1, 32)
    for start, end in (0, 3), (3, 4), (4, 9):
        assert_right(read(gpt, cache, start, end))


def test_long_passes_and_several_rows_use_the_plain_model(gpt):
    cache = gpt.new_cache(1, 32)
    for start, end in (0, 2), (2, 20), (20, 32):
        assert_right(read(gpt, cache, start, end))
    assert not cache.passes.graphs and MAX_TOKENS == MAX_PROPOSALS + 1
    idx = IDS.view(4, 8).to(gpt.device)
    found = torch.cat(list(generate_stream(gpt, idx, 30, GREEDY)), dim=1)
    assert torch.equal(found, gpt.model.generate(idx, 30, temperature=0)[:, 8:])


@pytest.mark.parametrize("context_shift", [False, True])
def test_it_generates_one_row_as_any_causal_lm(gpt, context_shift):
    idx = IDS[:, :3].to(gpt.device)
    found = torch.cat(list(generate_stream(gpt, idx, 60, GREEDY, context_shift)), dim=1)
    assert torch.equal(found, gpt.model.generate(idx, 60, temperature=0, context_shift=context_shift)[:, 3:])
    assert bool(any(gpt.passes.graphs.values())) == gpt.has_graphs


def test_each_pass_is_checked_once(gpt, monkeypatch):
    shapes, check_logits = [], gpt.checks.check_logits
    monkeypatch.setattr(gpt.checks, "check_logits", lambda shape, *logits: shapes.append(shape) or check_logits(shape, *logits))
    for _ in range(3):
        cache = gpt.new_cache(1, 32)
        for start, end in (0, 4), (4, 8), (8, 12), (12, 16), (16, 17):
            read(gpt, cache, start, end, num_positions=end - start)
    assert shapes == [(1, key) for key in ((4, 8), (4, 16), (1, 24))]


@pytest.mark.parametrize("wrong_length", [1, 4])
def test_wrong_logits_are_replaced_and_reported(gpt, wrong_length, monkeypatch):
    decode_step = StaticForward.decode_step

    def wrong(self, tokens, positions, *arguments):
        return decode_step(self, tokens, positions - 1 if tokens.size(1) == wrong_length else positions, *arguments)
    monkeypatch.setattr(StaticForward, "decode_step", wrong)
    for _ in range(3):
        cache = gpt.new_cache(1, 32)
        for start, end in (0, 3), (3, 4), (4, 8), (8, 9), (9, 13), (13, 14), (14, 18):
            assert_right(read(gpt, cache, start, end, num_positions=end - start))
    message, = gpt.messages
    assert message.startswith("the fast path for GPUs computes other logits than the plain model here")
    assert not gpt.checks.use_static_forward and not any(gpt.passes.graphs.values())


def test_a_cache_that_is_dropped_leaves_its_tensors_and_graphs_to_the_next_one(gpt, request):
    request.addfinalizer(gc.enable)
    gc.disable() # the tensors must not wait for it
    cache = gpt.new_cache(1, 20)
    passes = cache.passes
    cache = None
    cache = gpt.new_cache(1, 9)
    assert cache.passes is passes
    cache = None
    assert gpt.new_cache(1, 32).passes is not passes, "it is too small"


def test_texts_at_the_same_time_have_tensors_of_their_own(gpt):
    caches = [gpt.new_cache(1, 32) for _ in range(2)]
    for start, end in (0, 3), (3, 5), (5, 6):
        for cache, ids in zip(caches, [IDS, IDS.flip(1)], strict=True):
            assert_right(read(gpt, cache, start, end, ids=ids))


def test_release_memory_frees_the_tensors(gpt):
    cache = gpt.new_cache(1, 32)
    passes = cache.passes
    gpt.release_memory()
    cache = None
    assert gpt.passes is None and gpt.new_cache(1, 32).passes is not passes


def test_a_new_cache_begins_a_stream_whose_logits_are_finite(gpt):
    gpt.logits_sum = torch.tensor(torch.nan) # of a stream that failed
    gpt.new_cache(1, 8)
    assert gpt.logits_are_finite() and gpt.logits_are_finite().device.type == gpt.device.type


def test_a_pass_never_synchronises_the_gpu(monkeypatch):
    """A CUDA graph cannot synchronise. Tensors on the meta device have no values, so code that needs a value on the host raises."""
    monkeypatch.setattr(graphed_passes, "linear_dtype", lambda model: torch.float32) # autocast does not support "meta"
    passes = GraphedPasses(StaticForward(make_gpt().to("meta")), SelfCheck(print), 16)
    for T in 1, 9:
        logits, = passes.step((T, 16))
        with pytest.raises(RuntimeError, match="meta"):
            logits.sum().item()
