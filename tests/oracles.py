"""Slow and simple reference implementations, which compute the expected samples."""
import torch
from torch.nn import functional as F

from sampling.model import GPT, GPTConfig


@torch.no_grad()
def reference_generate(model, idx, max_new_tokens, context_shift=False, **settings):
    """Run the model on the whole window for every token, with random numbers from torch's global generator.

    settings: see reference_token. context_shift: a window longer than block_size shrinks to its newer half, rounded up.
    """
    size = model.config.block_size
    window = idx[:, -size:]
    for _ in range(max_new_tokens):
        if window.size(1) > size:
            window = window[:, -((size + 1) // 2 if context_shift else size):]
        token = reference_token(model(window, targets=window)[0][:, -1], window, **settings)
        window, idx = torch.cat([window, token], dim=1), torch.cat([idx, token], dim=1)
    return idx


def reference_token(logits, ids, temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0,
                    in_own_dtype=False):
    """Sample after ids (B, S) from logits (B, V), in transformers' order of settings, by torch.multinomial.

    in_own_dtype: as in nanoGPT under autocast on CUDA, only the softmax is computed in float32.
    """
    logits = logits.clone() if in_own_dtype else logits.float().clone()
    for row, seen in zip(logits, ids.tolist(), strict=True):
        for i in set(seen) if repetition_penalty != 1 else ():
            row[i] = row[i] * repetition_penalty if row[i] < 0 else row[i] / repetition_penalty
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits /= temperature
    if top_k:
        kth = logits.sort(dim=-1, descending=True).values[:, min(top_k, logits.size(-1)) - 1]
        logits[logits < kth[:, None]] = -torch.inf
    if top_p:
        probs, order = logits.softmax(-1).sort(dim=-1, descending=True)
        removed = probs.cumsum(-1) - probs >= top_p # those that are more likely already have top_p
        logits[torch.zeros_like(removed).scatter(1, order, removed)] = -torch.inf
    if min_p:
        probs = logits.softmax(-1)
        logits[probs < min_p * probs.max(dim=-1, keepdim=True).values] = -torch.inf
    return torch.multinomial(logits.float().softmax(-1), 1)


def nanogpt_samples(model_args, state_dict, seed, prompt, num_samples, max_new_tokens, **settings):
    """The samples of a nanoGPT run: seed, initialise a model, which draws random numbers, load weights, generate."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**model_args)).eval()
    model.load_state_dict(state_dict)
    idx = torch.tensor([prompt])
    return [reference_generate(model, idx, max_new_tokens, **settings)[0].tolist() for _ in range(num_samples)]


@torch.no_grad()
def nanogpt_logits(model, window):
    """The logits (1, V) after a window (1, T): nanoGPT's operations and shapes. Autocast may cast float32 weights."""
    weights, config = model.state_dict(), model.config

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights.get(f"{name}.bias"), 1e-5)
    positions = torch.arange(window.size(1), device=window.device)
    wte, wpe = weights["transformer.wte.weight"], weights["transformer.wpe.weight"]
    x = F.embedding(window, wte) + F.embedding(positions, wpe)
    for i in range(config.n_layer):
        block = f"transformer.h.{i}"
        parts = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (config.n_head, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).flatten(2), f"{block}.attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")), f"{block}.mlp.c_proj")
    return linear(norm(x, "transformer.ln_f")[:, [-1]], "lm_head")[:, -1]


def nanogpt_generate(model, idx, max_new_tokens, temperature, top_k=None):
    """nanoGPT's loop in any dtype, as on CUDA: use it inside autocast. In float32, reference_generate is the same."""
    for _ in range(max_new_tokens):
        logits = nanogpt_logits(model, idx[:, -model.config.block_size:])
        idx = torch.cat([idx, reference_token(logits, idx, temperature, top_k, in_own_dtype=True)], dim=1)
    return idx
