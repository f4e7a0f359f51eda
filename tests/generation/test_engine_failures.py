"""Generation when memory runs out, or when logits are not finite."""
from dataclasses import replace

import pytest
import torch

from engines import PARAMS, PROMPTS, generate, make_requests, reference_token_ids, token_ids, truncate_at_stop
from model import KVCache
from models import make_gpt
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.generation.batch_sampler import BatchSampler
from sampling.generation.engine import Engine
from sampling.params import TextCursor


def test_out_of_memory_halves_the_batch_and_does_not_change_the_samples(tokenizer, make_engine, monkeypatch):
    requests, messages, init = make_requests(tokenizer, PROMPTS), [], KVCache.__init__

    def init_small(self, config, batch_size, *rest):
        if batch_size > 2:
            raise MemoryError
        init(self, config, batch_size, *rest)
    monkeypatch.setattr(KVCache, "__init__", init_small)
    found = token_ids(make_engine(make_gpt(), tokenizer, batch_size=8, stream=True, log=messages.append), requests)
    monkeypatch.undo()
    assert found == reference_token_ids(requests)
    assert messages == ["out of memory with 8 samples at once: continuing with 4", "out of memory with 4 samples at once: continuing with 2"]


def test_out_of_memory_with_a_single_sample_raises(tokenizer, make_engine, monkeypatch):
    def init(self, config, batch_size, *rest):
        raise MemoryError("too large")
    monkeypatch.setattr(KVCache, "__init__", init)
    with pytest.raises(MemoryError, match="too large"):
        generate(make_engine(make_gpt(), tokenizer, batch_size=8), make_requests(tokenizer, PROMPTS))


def test_other_errors_are_not_handled_as_out_of_memory(tokenizer, make_engine, monkeypatch):
    def init(self, config, batch_size, *rest):
        raise RuntimeError("an illegal memory access was encountered")
    monkeypatch.setattr(KVCache, "__init__", init)
    with pytest.raises(RuntimeError, match="illegal"):
        generate(make_engine(make_gpt(), tokenizer, batch_size=8), make_requests(tokenizer, PROMPTS))


def run_out_of_memory_at_step(monkeypatch, number):
    """Let BatchSampler run out of memory once, at this step. Return a list that collects the batch size of every step."""
    batch_sizes, sample = [], BatchSampler.__call__

    def sample_or_fail(self, logits, ids):
        batch_sizes.append(len(logits.values))
        if len(batch_sizes) == number:
            raise MemoryError
        return sample(self, logits, ids)
    monkeypatch.setattr(BatchSampler, "__call__", sample_or_fail)
    return batch_sizes


@pytest.mark.parametrize("stream", [False, True])
def test_samples_finished_before_out_of_memory_are_not_generated_again(tokenizer, make_engine, monkeypatch, stream):
    requests, counts = make_requests(tokenizer, ["The "], 4), []
    texts = [tokenizer.decode(ids) for ids in reference_token_ids(requests)]
    stops = [texts[2][3:6]]
    batch_sizes = run_out_of_memory_at_step(monkeypatch, 12)
    engine = make_engine(make_gpt(), tokenizer, replace(PARAMS, stop=stops), batch_size=4, stream=stream, on_tokens=counts.append)
    found, expected = generate(engine, requests), [truncate_at_stop(text, stops) for text in texts]
    assert [sample.text for sample in found] == expected and len(expected[2]) == 3
    assert batch_sizes[11] < 4 and batch_sizes.count(4) <= 6, "one sample is finished before memory runs out"
    assert sum(counts) == sum(sample.num_tokens for sample in found)


def test_streaming_emits_each_character_once_if_memory_runs_out(tokenizer, make_engine, monkeypatch):
    requests, cursors = make_requests(tokenizer, ["The "], 4), {}
    expected = [tokenizer.decode(ids) for ids in reference_token_ids(requests)]
    read = [""] * 4
    run_out_of_memory_at_step(monkeypatch, 12)
    for sample in make_engine(make_gpt(), tokenizer, batch_size=4, stream=True).generate(requests):
        cursor = cursors.setdefault(sample.index, TextCursor(sample))
        read[sample.index] += "".join(text for text, _ in cursor.read())
    assert read == expected


def test_graphs_captured_before_out_of_memory_are_not_reused(tokenizer, recordings, monkeypatch):
    requests, messages = make_requests(tokenizer, ["O", "x", "a" * 15, "b" * 15, "P", "y", "Q", "z"]), []
    start_batch = BatchSampler.start_batch

    def start_small_batch(self, prompts, *rest):
        start_batch(self, prompts, *rest)
        if len(prompts) > 2:
            raise MemoryError
    monkeypatch.setattr(BatchSampler, "start_batch", start_small_batch)
    engine = Engine(CUDAGraphGPT(make_gpt()), tokenizer, replace(PARAMS, max_new_tokens=9), batch_size=4, log=messages.append)
    assert token_ids(engine, requests) == reference_token_ids(requests, 9)
    assert messages


@pytest.mark.parametrize("settings", [dict(), dict(stream=True), dict(num_logprobs=2), dict(stop=["never so"])], ids=str)
@pytest.mark.parametrize("make_engine", ["eager", "packed", "direct", "graphs",
                                         pytest.param("shortlist", marks=pytest.mark.slow)], indirect=True)
def test_a_sample_with_nan_logits_is_not_yielded(tokenizer, make_engine, settings):
    model, stream, yielded = make_gpt(), settings.get("stream", False), set()
    params = replace(PARAMS, max_new_tokens=4, **{name: value for name, value in settings.items() if name != "stream"})
    with torch.no_grad():
        model.transformer.wpe.weight[9] = torch.nan # a position that only the longest prompt has
    engine = make_engine(model, tokenizer, params, batch_size=2, stream=stream)
    with pytest.raises(ValueError, match="NaN or infinite"):
        yielded.update(sample.index for sample in engine.generate(make_requests(tokenizer, ["The ", "O", "What is it?"])))
    assert yielded == {0, 1}
