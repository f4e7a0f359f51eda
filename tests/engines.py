"""Requests for an Engine, and the samples that it must generate for them."""
from functools import cache

import torch

from models import make_gpt
from oracles import reference_generate, reference_generate_with_context_shift
from sampling.params import Prompt, SampleRequest, SamplingParams

PROMPTS = ["The ", "O", "What is it?", "a" * 15, "b" * 16, "And then they all went home. ", "x", "yes, "] # block_size is 16
BACKENDS = ["eager", "packed", "shortlist", "direct", "graphs"] # the parameters of the fixture make_engine
PARAMS = SamplingParams(max_new_tokens=20, temperature=0.9, top_k=30, seed=3)


def make_requests(tokenizer, texts, samples_per_prompt=1):
    """One request for each of these prompts, or several consecutive ones for each."""
    texts = [text for text in texts for _ in range(samples_per_prompt)]
    return [SampleRequest(i, Prompt(text), tokenizer.encode(text)) for i, text in enumerate(texts)]


def generate(engine, requests):
    """The finished samples, in the order in which the engine yields them."""
    return [sample for sample in engine.generate(requests) if sample.finish_reason]


def token_ids(engine, requests):
    """The token ids of the finished samples."""
    return [sample.token_ids for sample in generate(engine, requests)]


def reference_token_ids(requests, max_new_tokens=PARAMS.max_new_tokens, context_shift=False):
    """The token ids that an Engine must sample with make_gpt(): nanoGPT's loop, one prompt after another, from one random stream."""
    return reference_samples(tuple(tuple(request.prompt_ids) for request in requests), max_new_tokens, context_shift)


@cache
def reference_samples(prompts, max_new_tokens, context_shift):
    """The implementation of reference_token_ids. Its results are cached, because it is slower than the tested code."""
    model = make_gpt()
    torch.manual_seed(PARAMS.seed)

    def generate(idx):
        if context_shift:
            return reference_generate_with_context_shift(model, idx, max_new_tokens, PARAMS.top_k)
        return reference_generate(model, idx, max_new_tokens, PARAMS.temperature, PARAMS.top_k)
    return [generate(torch.tensor([ids]))[0, len(ids):].tolist() for ids in prompts]


def truncate_at_stop(text, stops):
    """The text up to the first stop text."""
    return text[:min([start for stop in stops if (start := text.find(stop)) >= 0], default=len(text))]
