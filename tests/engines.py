"""Requests for an Engine, and the samples that it has to give for them."""
import torch

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


def one_by_one(model, requests, max_new_tokens=20, context_shift=False):
    """The oracle: nanoGPT's loop, prompt after prompt, from one random stream."""
    def plain(idx):
        if context_shift:
            return plain_shifting_generate(model, idx, max_new_tokens, top_k=30)
        return plain_generate(model, idx, max_new_tokens, temperature=0.9, top_k=30)
    torch.manual_seed(3)
    return [plain(torch.tensor([request.prompt_ids]))[0, len(request.prompt_ids):].tolist() for request in requests]


def cut(text, stops):
    return text[:min([start for stop in stops if (start := text.find(stop)) >= 0], default=len(text))]
