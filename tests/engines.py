"""Backends for an Engine, the model that it runs, the samples that it must generate, and the text of the oracle."""
from functools import cache
from pathlib import Path

import torch

from models import make_gpt
from oracles import reference_generate
from sampling.backends.backend import EagerBackend
from sampling.backends.cpu import CPUBackend
from sampling.backends.cuda import CUDABackend
from sampling.checkpoints.checkpoint import Checkpoint
from sampling.generation.engine import LoadedModel
from sampling.params import Prompt, Sample, SamplingParams

PROMPTS = ["The ", "Thou", "What is it?", "a" * 15, "b" * 16, "And then they all went home. ", "x", "yes, "]
PARAMS = SamplingParams(max_new_tokens=20, temperature=0.9, top_k=30, seed=3)


class FakeGPU(str):
    """The device of a backend on a CPU, for which the engine decides as for a GPU. torch takes it as the CPU's name."""
    type = "cuda"


def on_fake_gpu(backend):
    """The backend, with a FakeGPU as its device."""
    backend.device = FakeGPU("cpu")
    return backend


class LeastBackend(EagerBackend):
    """Returns no logits but those that it must, and overwrites them at the next call. Notes the calls.

    Raises error for more than most_rows rows, and once in call fails_at.
    """

    def __init__(self, gpt, error=MemoryError, most_rows=99, fails_at=None):
        super().__init__(gpt)
        self.error, self.most_rows, self.fails_at = error, most_rows, fails_at
        self.latest, self.num_rows, self.needed = torch.zeros(0), [], [] # of each call: its rows, and num_needed

    def logits(self, ids, cache, num_positions=1, num_needed=None):
        self.num_rows.append(len(ids))
        self.needed.append(num_needed)
        self.latest.fill_(torch.nan)
        logits = self.latest = super().logits(ids, cache, num_positions).clone()
        if num_needed is not None:
            logits[logits < logits.topk(min(num_needed, logits.size(1))).values[:, -1:]] = -torch.inf
        if len(ids) > self.most_rows or len(self.num_rows) == self.fails_at:
            raise self.error
        return logits


def static_steps(gpt):
    """A CUDABackend. If its check finds a wrong step, whose logits it would not use, a warning says so."""
    return CUDABackend(gpt)


def recorded_graphs(gpt):
    """The same with graphs, for tests that call record_graphs."""
    backend = static_steps(gpt)
    backend.checks.path = "graphs"
    return backend


BACKENDS = {
    "eager": EagerBackend, "least": LeastBackend, "cpu": lambda gpt: CPUBackend(gpt.config, gpt.state_dict()),
    "static steps": static_steps, "recorded graphs": recorded_graphs, "cuda": lambda gpt: static_steps(gpt.cuda())}


def load(tokenizer, backend=None, **fields):
    """A LoadedModel with this backend, or with the plain model of make_gpt(). fields are those of its Checkpoint."""
    checkpoint = Checkpoint("out/ckpt.pt", {}, {}, 61, Path("out"), **fields)
    return LoadedModel(backend or EagerBackend(make_gpt()), tokenizer, checkpoint, torch.float32, num_params=1)


def make_samples(tokenizer, texts, samples_per_prompt=1):
    """Consecutive samples for each of these prompts, without tokens."""
    texts = [text for text in texts for _ in range(samples_per_prompt)]
    return [Sample(i, Prompt(text), tokenizer.encode(text)) for i, text in enumerate(texts)]


def without_tokens(samples):
    return [Sample(sample.index, sample.prompt, sample.prompt_ids, sample.already_saved) for sample in samples]


def run(engine, samples):
    """The finished samples, in the order in which the engine yields them. The given samples stay without tokens."""
    return [sample for sample in engine.generate(without_tokens(samples)) if sample.finish_reason]


def streamed_texts(engine, samples):
    """The texts as a reader of the stream gets them: each character once."""
    texts = [""] * len(samples)
    for sample in engine.generate(without_tokens(samples)):
        assert sample.num_emittable_chars <= len(sample.text)
        texts[sample.index] += sample.text[len(texts[sample.index]):sample.num_emittable_chars]
    return texts


def expected_ids(prompts, num_tokens=20, seed=3, block_size=16, device="cpu", **settings):
    """The token ids with which make_gpt() continues prompts (lists of ids), one after another in one random stream."""
    return continue_each(tuple(map(tuple, prompts)), num_tokens, seed, block_size, device, **settings)


@cache # several tests expect the same
def continue_each(prompts, num_tokens, seed, block_size, device, **settings):
    model = make_gpt(block_size=block_size).to(device)
    torch.manual_seed(seed)
    samples = [reference_generate(model, torch.tensor([ids], device=device), num_tokens, **settings) for ids in prompts]
    return [sample[0, len(ids):].tolist() for ids, sample in zip(prompts, samples, strict=True)]


def expected_texts(samples, tokenizer, num_tokens=PARAMS.max_new_tokens, stops=(), device="cpu"):
    """The texts of the plain model with PARAMS, up to the first stop text."""
    prompts, settings = [sample.prompt_ids for sample in samples], dict(temperature=0.9, top_k=30)
    texts = map(tokenizer.decode, expected_ids(prompts, num_tokens, device=device, **settings))
    return [truncate_at_stop(text, stops) for text in texts]


def truncate_at_stop(text, stops):
    return text[:min([start for stop in stops if (start := text.find(stop)) >= 0], default=len(text))]
