"""What the engine does on a GPU to keep it busy, and to sample as nanoGPT does there. Most tests simulate the GPU."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engines import PARAMS, PROMPTS, generate, make_requests, reference_token_ids, token_ids
from models import make_gpt
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.backends.prepare import cast_linears
from sampling.generation import engine as engine_module
from sampling.generation.batch_sampler import BatchSampler
from sampling.generation.engine import Engine
from sampling.params import TextCursor


@pytest.fixture
def copies(monkeypatch):
    """Collects the shape of every tensor that is copied to the host."""
    shapes, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: shapes.append(tuple(tensor.shape)) or tolist(tensor))
    return shapes


@pytest.mark.parametrize("make_engine", ["graphs"], indirect=True)
def test_tokens_and_their_finiteness_are_copied_together_every_16_steps(tokenizer, make_engine, copies):
    requests = make_requests(tokenizer, ["O", "x"])
    expected = reference_token_ids(requests)
    copies.clear()
    assert token_ids(make_engine(make_gpt(), tokenizer, batch_size=2), requests) == expected
    assert copies == [(2, 16 + 1), (2, 4 + 1)]


@pytest.mark.parametrize("make_engine", ["graphs"], indirect=True)
def test_log_probabilities_of_16_steps_are_copied_together(tokenizer, make_engine, copies):
    engine = make_engine(make_gpt(), tokenizer, replace(PARAMS, num_logprobs=3), batch_size=2)
    generate(engine, make_requests(tokenizer, ["O", "x"]))
    assert copies == [(2, 17), (16, 2, 1), (16, 2, 3), (16, 2, 3), (2, 5), (4, 2, 1), (4, 2, 3), (4, 2, 3)]


@pytest.mark.parametrize("num_steps", [1, 5, 16])
@pytest.mark.parametrize("make_engine", ["graphs"], indirect=True)
def test_streaming_shows_the_same_text_however_rarely_tokens_are_copied(tokenizer, make_engine, num_steps, copies, monkeypatch):
    monkeypatch.setattr(engine_module.FlushSchedule, "record_flush", lambda self, steps: setattr(self, "num_steps", num_steps))
    requests, cursors = make_requests(tokenizer, PROMPTS[:3]), {}
    expected, texts = [tokenizer.decode(ids) for ids in reference_token_ids(requests)], [""] * 3
    copies.clear()
    for sample in make_engine(make_gpt(), tokenizer, batch_size=1, stream=True).generate(requests):
        texts[sample.index] += "".join(text for text, _ in cursors.setdefault(sample, TextCursor(sample)).read())
    assert texts == expected
    assert copies[0] == (1, 1 + 1), "the first token is shown at once"
    assert len(copies) == 3 * (1 + -(-19 // num_steps))


@pytest.mark.parametrize("device, is_huggingface, expected", [("cuda", False, True), ("cuda", True, False), ("cpu", False, False), ("mps", False, False)])
def test_only_on_cuda_and_for_a_checkpoint_the_sampler_computes_in_the_dtype_of_the_logits(tokenizer, make_engine, device, is_huggingface, expected):
    engine = make_engine(make_gpt(), tokenizer, is_huggingface=is_huggingface)
    engine.backend = SimpleNamespace(device=torch.device(device), config=engine.backend.config, is_exact=False, allow_sync=device != "cuda")
    assert engine.new_sampler().sample_fn.in_logits_dtype == expected


def test_out_of_memory_frees_the_graphs_before_a_smaller_batch(tokenizer, recordings, monkeypatch):
    engine, kept, start_batch = Engine(CUDAGraphGPT(make_gpt()), tokenizer, PARAMS, batch_size=4, log=lambda text: None), [], BatchSampler.start_batch

    def start_small_batch(self, prompts, *rest):
        kept.append((len(prompts), engine.backend.state))
        if len(prompts) > 2:
            raise RuntimeError("CUDA out of memory")
        start_batch(self, prompts, *rest)
    monkeypatch.setattr(BatchSampler, "start_batch", start_small_batch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: kept.append(("empty_cache", engine.backend.state)))
    engine.batch_size = 2
    assert token_ids(engine, make_requests(tokenizer, ["O", "x"])) == reference_token_ids(make_requests(tokenizer, ["O", "x"]))
    graphs = engine.backend.state
    assert any(graphs.graphs.values())
    engine.batch_size = 4
    requests = make_requests(tokenizer, ["O", "x", "y", "z"])
    assert token_ids(replace(engine), requests) == reference_token_ids(requests)
    assert kept == [(2, None), (4, graphs), ("empty_cache", None), (2, None), (2, engine.backend.state)]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
class TestCuda:
    def test_streamed_samples_equal_others(self, tokenizer):
        torch.set_float32_matmul_precision("highest")
        backend, requests = CUDAGraphGPT(make_gpt().cuda()), make_requests(tokenizer, PROMPTS)
        expected = token_ids(Engine(backend, tokenizer, PARAMS, batch_size=8), requests)
        engine, cursors, texts = Engine(backend, tokenizer, PARAMS, batch_size=1, stream=True), {}, [""] * len(requests)
        for sample in engine.generate(requests):
            texts[sample.index] += "".join(text for text, _ in cursors.setdefault(sample, TextCursor(sample)).read())
        assert texts == [tokenizer.decode(ids) for ids in expected]

    def test_bfloat16_samples_run_as_graphs(self, tokenizer):
        messages = []
        with torch.autocast("cuda", torch.bfloat16):
            backend = CUDAGraphGPT(cast_linears(make_gpt(), torch.bfloat16).cuda(), log=messages.append)
            assert len(generate(Engine(backend, tokenizer, PARAMS, batch_size=8), make_requests(tokenizer, PROMPTS))) == 8
        assert messages == [] and any(backend.state.graphs.values())

    def test_a_batch_that_is_too_large_is_halved(self, tokenizer):
        """The limit leaves room for the model and a few samples, not for 64 of them."""
        messages, requests = [], make_requests(tokenizer, ["O"], 64)
        backend = CUDAGraphGPT(make_gpt(block_size=1024, n_embd=256, n_head=4, n_layer=4).cuda())
        cache_bytes = 2 * 4 * 256 * 1024 * 4 # keys and values, layers, width, tokens, bytes
        limit = torch.cuda.memory_reserved() + 24 * cache_bytes
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
        try:
            params = replace(PARAMS, max_new_tokens=1000)
            found = generate(Engine(backend, tokenizer, params, batch_size=64, log=messages.append), requests)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert len(found) == 64 and messages[0] == "out of memory with 64 samples at once: continuing with 32"
