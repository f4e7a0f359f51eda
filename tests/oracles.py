"""Slow and simple reference implementations, which compute the expected samples."""

import torch
from torch.nn import functional as F

from model import GPT, GPTConfig


@torch.no_grad()
def reference_generate(model, idx, max_new_tokens, temperature=1.0, top_k=None):
    """Run the model on the whole window for every token, with random numbers from torch's global generator."""
    for _ in range(max_new_tokens):
        window = idx[:, -model.config.block_size:]
        logits = model(window, targets=window)[0][:, -1] / temperature
        if top_k is not None:
            kth = logits.sort(dim=-1, descending=True).values[:, min(top_k, logits.size(-1)) - 1]
            logits = torch.where(logits < kth[:, None], -torch.inf, logits)
        idx = torch.cat([idx, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return idx


def nanogpt_samples(model_args, state_dict, seed, prompt, num_samples, max_new_tokens, **sampling):
    """The samples of a nanoGPT run: seed, initialise a model (which draws random numbers), load the weights, generate one by one."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**model_args))
    model.load_state_dict(state_dict)
    model.eval()
    return [reference_generate(model, torch.tensor([prompt]), max_new_tokens, **sampling)[0].tolist() for _ in range(num_samples)]


@torch.no_grad()
def reference_generate_with_context_shift(model, idx, max_new_tokens, top_k=None):
    """Reference for context_shift: a window longer than block_size shrinks to its newer half, rounded up."""
    window, size = idx[:, -model.config.block_size:], model.config.block_size
    for _ in range(max_new_tokens):
        if window.size(1) > size:
            window = window[:, -((size + 1) // 2):]
        token = reference_generate(model, window, 1, top_k=top_k)[:, -1:]
        window, idx = torch.cat([window, token], dim=1), torch.cat([idx, token], dim=1)
    return idx


@torch.no_grad()
def nanogpt_logits(model, window):
    """The logits (1, V) after a window (1, T): nanoGPT's operations and shapes, from the float32 weights, which autocast may cast."""
    weights, config = model.state_dict(), model.config

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights.get(f"{name}.bias"), 1e-5)
    positions = torch.arange(window.size(1), device=window.device)
    x = F.embedding(window, weights["transformer.wte.weight"]) + F.embedding(positions, weights["transformer.wpe.weight"])
    for i in range(config.n_layer):
        block = f"transformer.h.{i}"
        parts = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (config.n_head, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).flatten(2), f"{block}.attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")), f"{block}.mlp.c_proj")
    return linear(norm(x, "transformer.ln_f")[:, [-1]], "lm_head")[:, -1]


def nanogpt_token(logits, temperature, top_k=None, softmax_dtype=None):
    """Sample from logits (B, V) as nanoGPT does: in their dtype, with torch's global generator. Under autocast on CUDA, softmax computes in float32."""
    logits = logits / temperature
    if top_k is not None:
        logits[logits < torch.topk(logits, min(top_k, logits.size(-1)))[0][:, [-1]]] = -torch.inf
    return torch.multinomial(F.softmax(logits, dim=-1, dtype=softmax_dtype), num_samples=1)


def nanogpt_generate(model, idx, max_new_tokens, temperature, top_k=None):
    """nanoGPT's loop in any dtype: use it inside autocast. reference_generate gives the same samples in float32."""
    for _ in range(max_new_tokens):
        window = idx[:, -model.config.block_size:]
        idx = torch.cat([idx, nanogpt_token(nanogpt_logits(model, window), temperature, top_k)], dim=1)
    return idx
