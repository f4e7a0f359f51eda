"""Requests for an Engine, and the samples that it has to give for them."""
from functools import cache

import torch

from models import make_gpt
from oracles import plain_generate, plain_shifting_generate
from sampling.params import Prompt, SampleRequest, SamplingParams

PROMPTS = ["The ", "O", "What is it?", "a" * 15, "b" * 16, "And then they all went home. ", "x", "yes, "] # block_size is 16
PARAMS = SamplingParams(max_new_tokens=20, temperature=0.9, top_k=30, seed=3)


def requests_of(tokenizer, texts, each=1):
    """A request for each of these prompts, or several one after another."""
    texts = [text for text in texts for _ in range(each)]
    return [SampleRequest(i, Prompt(text), tokenizer.encode(text)) for i, text in enumerate(texts)]


def generate(engine, requests):
    """The finished samples, in the order in which they come."""
    return [sample for sample in engine.generate(requests) if sample.finish_reason]


def token_ids(engine, requests):
    return [sample.token_ids for sample in generate(engine, requests)]


def one_by_one(requests, max_new_tokens=PARAMS.max_new_tokens, context_shift=False):
    """The token ids that make_gpt() has to give: nanoGPT's loop, prompt after prompt, from one random stream."""
    return plain_samples(tuple(tuple(request.prompt_ids) for request in requests), max_new_tokens, context_shift)


@cache
def plain_samples(prompts, max_new_tokens, context_shift):
    """As one_by_one; kept, since it takes longer than what is tested."""
    model = make_gpt()
    torch.manual_seed(PARAMS.seed)

    def generate(idx):
        if context_shift:
            return plain_shifting_generate(model, idx, max_new_tokens, PARAMS.top_k)
        return plain_generate(model, idx, max_new_tokens, PARAMS.temperature, PARAMS.top_k)
    return [generate(torch.tensor([ids]))[0, len(ids):].tolist() for ids in prompts]


def cut(text, stops):
    return text[:min([start for stop in stops if (start := text.find(stop)) >= 0], default=len(text))]
