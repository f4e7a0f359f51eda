"""Memory that runs out while samples are generated, and logits that are not finite."""
from dataclasses import replace

import pytest
import torch

from engines import PARAMS, PROMPTS, cut, generate, one_by_one, requests_of, token_ids
from model import KVCache
from models import make_gpt
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.generation.batch_sampler import BatchSampler
from sampling.generation.engine import Engine
from sampling.params import TextCursor


def test_when_memory_runs_out_batches_are_halved_and_the_samples_stay_the_same(tokenizer, make_engine, monkeypatch):
    requests, messages, init = requests_of(tokenizer, PROMPTS), [], KVCache.__init__

    def init_small(self, config, batch_size, *rest):
        if batch_size > 2:
            raise MemoryError
        init(self, config, batch_size, *rest)
    monkeypatch.setattr(KVCache, "__init__", init_small)
    found = token_ids(make_engine(make_gpt(), tokenizer, batch_size=8, stream=True, log=messages.append), requests)
    monkeypatch.undo()
    assert found == one_by_one(requests)
    assert messages == ["out of memory with 8 samples at once: going on with 4", "out of memory with 4 samples at once: going on with 2"]


def test_a_single_sample_that_memory_does_not_hold_raises(tokenizer, make_engine, monkeypatch):
    def init(self, config, batch_size, *rest):
        raise MemoryError("too large")
    monkeypatch.setattr(KVCache, "__init__", init)
    with pytest.raises(MemoryError, match="too large"):
        generate(make_engine(make_gpt(), tokenizer, batch_size=8), requests_of(tokenizer, PROMPTS))


def test_other_errors_are_not_taken_for_a_lack_of_memory(tokenizer, make_engine, monkeypatch):
    def init(self, config, batch_size, *rest):
        raise RuntimeError("an illegal memory access was encountered")
    monkeypatch.setattr(KVCache, "__init__", init)
    with pytest.raises(RuntimeError, match="illegal"):
        generate(make_engine(make_gpt(), tokenizer, batch_size=8), requests_of(tokenizer, PROMPTS))


def run_out_of_memory_at_step(monkeypatch, number):
    """Have a BatchSampler run out of memory once, at this step of all; returns the list of the steps' batch sizes."""
    batch_sizes, sample = [], BatchSampler.__call__

    def sample_or_fail(self, logits, ids):
        batch_sizes.append(len(logits.values))
        if len(batch_sizes) == number:
            raise MemoryError
        return sample(self, logits, ids)
    monkeypatch.setattr(BatchSampler, "__call__", sample_or_fail)
    return batch_sizes


@pytest.mark.parametrize("stream", [False, True])
def test_samples_that_were_finished_when_memory_ran_out_are_not_generated_again(tokenizer, make_engine, monkeypatch, stream):
    requests, counts = requests_of(tokenizer, ["The "], 4), []
    texts = [tokenizer.decode(ids) for ids in one_by_one(requests)]
    stops = [texts[2][3:6]]
    batch_sizes = run_out_of_memory_at_step(monkeypatch, 12)
    engine = make_engine(make_gpt(), tokenizer, replace(PARAMS, stop=stops), batch_size=4, stream=stream, on_tokens=counts.append)
    found, expected = generate(engine, requests), [cut(text, stops) for text in texts]
    assert [sample.text for sample in found] == expected and len(expected[2]) == 3
    assert batch_sizes[11] < 4 and batch_sizes.count(4) <= 6, "one is finished by then"
    assert sum(counts) == sum(sample.num_tokens for sample in found)


def test_a_reader_of_a_streaming_sample_reads_each_character_once_although_memory_runs_out(tokenizer, make_engine, monkeypatch):
    requests, cursors = requests_of(tokenizer, ["The "], 4), {}
    expected = [tokenizer.decode(ids) for ids in one_by_one(requests)]
    read = [""] * 4
    run_out_of_memory_at_step(monkeypatch, 12)
    for sample in make_engine(make_gpt(), tokenizer, batch_size=4, stream=True).generate(requests):
        cursor = cursors.setdefault(sample.index, TextCursor(sample))
        read[sample.index] += "".join(text for text, _ in cursor.read())
    assert read == expected


def test_graphs_made_before_memory_ran_out_are_not_used_afterwards(tokenizer, recorded, monkeypatch):
    requests, messages = requests_of(tokenizer, ["O", "x", "a" * 15, "b" * 15, "P", "y", "Q", "z"]), []
    start_batch = BatchSampler.start_batch

    def start_small_batch(self, prompts, *rest):
        start_batch(self, prompts, *rest)
        if len(prompts) > 2:
            raise MemoryError
    monkeypatch.setattr(BatchSampler, "start_batch", start_small_batch)
    engine = Engine(CUDAGraphGPT(make_gpt()), tokenizer, replace(PARAMS, max_new_tokens=9), batch_size=4, log=messages.append)
    assert token_ids(engine, requests) == one_by_one(requests, 9)
    assert messages


@pytest.mark.parametrize("settings", [dict(), dict(stream=True), dict(num_logprobs=2), dict(stop=["never so"])], ids=str)
@pytest.mark.parametrize("make_engine", ["eager", "packed", "steps", "graphs",
                                         pytest.param("shortlist", marks=pytest.mark.slow)], indirect=True)
def test_no_sample_is_yielded_whose_logits_were_nan(tokenizer, make_engine, settings):
    model, stream, yielded = make_gpt(), settings.get("stream", False), set()
    params = replace(PARAMS, max_new_tokens=4, **{name: value for name, value in settings.items() if name != "stream"})
    with torch.no_grad():
        model.transformer.wpe.weight[9] = torch.nan # a position that only the longest prompt has
    engine = make_engine(model, tokenizer, params, batch_size=2, stream=stream)
    with pytest.raises(ValueError, match="NaN or infinite"):
        yielded.update(sample.index for sample in engine.generate(requests_of(tokenizer, ["The ", "O", "What is it?"])))
    assert yielded == {0, 1}
