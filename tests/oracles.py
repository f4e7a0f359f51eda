"""Slow and simple reference implementations, which compute the expected samples."""
import torch
from torch.nn import functional as F

from sampling.model import GPT


@torch.no_grad()
def reference_generate(model, idx, max_new_tokens, context_shift=False, **settings):
    """Run the model on the whole window for every token, with torch's global random numbers.

    settings: those of reference_token. context_shift: a window longer than block_size shrinks to
    its newer half, rounded up.
    """
    size = model.config.block_size
    kept = size
    if context_shift:
        kept = (size + 1) // 2
    window = idx[:, -size:]
    for _ in range(max_new_tokens):
        if window.size(1) > size:
            window = window[:, -kept:]
        token = reference_token(model(window, targets=window)[0][:, -1], window, **settings)
        window = torch.cat([window, token], dim=1)
        idx = torch.cat([idx, token], dim=1)
    return idx


def reference_token(logits, ids, temperature=1.0, top_k=None, top_p=None, min_p=None,
                    repetition_penalty=1.0, in_own_dtype=False):
    """Sample after ids (B, S) from logits (B, V), as transformers orders the settings.

    in_own_dtype: as in nanoGPT under autocast on CUDA, only the softmax is computed in float32.
    """
    logits = logits.clone()
    if not in_own_dtype:
        logits = logits.float()
    for row, seen in zip(logits, ids.tolist(), strict=True):
        if repetition_penalty == 1:
            break
        for i in set(seen):
            if row[i] < 0:
                row[i] *= repetition_penalty
            else:
                row[i] /= repetition_penalty
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits /= temperature
    if top_k:
        kth = logits.sort(dim=-1, descending=True).values[:, min(top_k, logits.size(-1)) - 1]
        logits[logits < kth[:, None]] = -torch.inf
    if top_p:
        probs, order = logits.softmax(-1).sort(dim=-1, descending=True)
        removed = probs.cumsum(-1) - probs >= top_p # more likely tokens already have top_p
        logits[removed.scatter(1, order, removed)] = -torch.inf
    if min_p:
        probs = logits.softmax(-1)
        logits[probs < min_p * probs.amax(dim=-1, keepdim=True)] = -torch.inf
    return torch.multinomial(logits.float().softmax(-1), 1)


def nanogpt_samples(trained, seed, prompt, num_samples, max_new_tokens, **settings):
    """The samples of a nanoGPT run with this model: lists of ids.

    The run seeds, initialises a model, which draws random numbers, loads weights, and generates.
    """
    torch.manual_seed(seed)
    model = GPT(trained.config).eval()
    model.load_state_dict(trained.state_dict())
    idx = torch.tensor([prompt])
    return [reference_generate(model, idx, max_new_tokens, **settings)[0].tolist()
            for _ in range(num_samples)]


@torch.no_grad()
def nanogpt_logits(model, window):
    """The logits (1, V) after a window (1, T), by nanoGPT's operations in nanoGPT's shapes.

    Autocast may cast float32 weights.
    """
    weights = model.state_dict()

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x, name):
        weight = weights[f"{name}.weight"]
        return F.layer_norm(x, weight.shape, weight, weights.get(f"{name}.bias"), 1e-5)
    positions = torch.arange(window.size(1), device=window.device)
    x = F.embedding(window, weights["transformer.wte.weight"])
    x = x + F.embedding(positions, weights["transformer.wpe.weight"])
    for i in range(model.config.n_layer):
        block = f"transformer.h.{i}"
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn")
        qkv = qkv.unflatten(-1, (3, model.config.n_head, -1)).transpose(1, 3) # (1, H, 3, T, D)
        y = F.scaled_dot_product_attention(*qkv.unbind(2), is_causal=True)
        x = x + linear(y.transpose(1, 2).flatten(2), f"{block}.attn.c_proj")
        y = F.gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"))
        x = x + linear(y, f"{block}.mlp.c_proj")
    return linear(norm(x, "transformer.ln_f")[:, [-1]], "lm_head")[:, -1]


def nanogpt_generate(model, idx, max_new_tokens, temperature, top_k=None,
                     logits_of=nanogpt_logits):
    """nanoGPT's loop in any dtype, as on CUDA: use it inside autocast.

    In float32, reference_generate is the same. logits_of: computes the logits of the model.
    """
    for _ in range(max_new_tokens):
        logits = logits_of(model, idx[:, -model.config.block_size:])
        token = reference_token(logits, idx, temperature, top_k, in_own_dtype=True)
        idx = torch.cat([idx, token], dim=1)
    return idx
