"""What the samples have to be: slow and plain ways to generate them."""
from contextlib import contextmanager

import torch

from model import GPT, GPTConfig


@torch.no_grad()
def plain_generate(model, idx, max_new_tokens, temperature=1.0, top_k=None):
    """Read the whole window again for every token, and draw from torch's global generator."""
    for _ in range(max_new_tokens):
        window = idx[:, -model.config.block_size:]
        logits = model(window, targets=window)[0][:, -1] / temperature
        if top_k is not None:
            kth = logits.sort(dim=-1, descending=True).values[:, min(top_k, logits.size(-1)) - 1]
            logits = torch.where(logits < kth[:, None], -torch.inf, logits)
        idx = torch.cat([idx, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return idx


def nanogpt_samples(model_args, state_dict, seed, prompt, num_samples, max_new_tokens, **sampling):
    """What a run of nanoGPT does: seed, build a model (which draws), load the weights, then generate one by one."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**model_args))
    model.load_state_dict(state_dict)
    model.eval()
    with single_thread():
        return [plain_generate(model, torch.tensor([prompt]), max_new_tokens, **sampling)[0].tolist() for _ in range(num_samples)]


@contextmanager
def single_thread():
    """Compute with one thread: for a small model others are no help, and on a busy machine they are waited for."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@torch.no_grad()
def plain_shifting_generate(model, idx, max_new_tokens, top_k=None):
    """What context_shift does: a window that has grown past block_size keeps its newer half, rounded up."""
    window, size = idx[:, -model.config.block_size:], model.config.block_size
    for _ in range(max_new_tokens):
        if window.size(1) > size:
            window = window[:, -((size + 1) // 2):]
        token = plain_generate(model, window, 1, top_k=top_k)[:, -1:]
        window, idx = torch.cat([window, token], dim=1), torch.cat([idx, token], dim=1)
    return idx
