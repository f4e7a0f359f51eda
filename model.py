"""GPT: the model of nanoGPT and GPT-2, its KV cache, and generation. This file needs only torch.

Axes: B batch, T tokens of this call, S positions so far (the cache's and T), E embedding width,
H heads, D = E / H head width, V vocabulary.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F


@dataclass
class GPTConfig:
    """nanoGPT's fields and defaults, followed by fields for other GPTs, such as GPT-2."""
    block_size: int = 1024
    vocab_size: int = 50304 # GPT-2's 50257, padded to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True # in Linears and LayerNorms
    gelu: str = "none" # as in F.gelu: nanoGPT trains with the exact one, OpenAI's GPT-2 with "tanh"
    n_inner: int | None = None # inner width of the MLP; None: 4 * n_embd
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True # lm_head shares the weight of the token embedding


class KVCache:
    """The keys and values of the tokens so far, with room for capacity positions in each of B rows.

    The caller owns the cache. GPT.forward appends to it, and advances seq_len.
    """

    def __init__(self, config: GPTConfig, num_rows: int, capacity: int, device=None, dtype=None):
        head_width = config.n_embd // config.n_head
        shape = 2, num_rows, config.n_head, capacity, head_width # keys and values, (B, H, :, D)
        layers = range(config.n_layer)
        self.layers = [torch.empty(shape, device=device, dtype=dtype) for _ in layers]
        self.device = device
        self.seq_len = 0 # filled positions

    def select_rows(self, rows: list[int]) -> None:
        rows = torch.tensor(rows, device=self.device) # one copy: it synchronises a GPU
        for i, layer in enumerate(self.layers):
            self.layers[i] = layer[:, rows]


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, past=None):
        """(B, T, E) -> (B, T, E). past: a KVCache's layer (2, B, H, capacity, D), its seq_len."""
        T = x.size(1)
        qkv = self.split_heads(x)
        q, k, v = qkv # (B, H, T, D) each
        is_causal = True
        mask = None
        if past is not None:
            cached, start = past
            # One row is broadcast to all rows of the cache: equal prompts are prefilled once.
            cached[..., start:start + T, :] = qkv[1:]
            if start:
                k, v = cached[..., :start + T, :] # (B, H, S, D) each
                is_causal = False # it assumes that query 0 is at position 0: it is at start
                if T > 1:
                    mask = torch.ones(T, start + T, dtype=torch.bool, device=x.device).tril(start)
        dropout = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        return self.dropout(self.c_proj(self.merge_heads(y)))

    def split_heads(self, x):
        """(B, T, E) -> queries, keys and values of every head: (3, B, H, T, D)."""
        return self.c_attn(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)

    def merge_heads(self, y):
        """(B, H, T, D) -> (B, T, E): concatenates the heads."""
        return y.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, inner, bias=config.bias)
        self.gelu = nn.GELU(approximate=config.gelu)
        self.c_proj = nn.Linear(inner, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        """(B, T, E) -> (B, T, E), independently for each position."""
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, past=None):
        """(B, T, E) -> (B, T, E): the residual stream, to which attention and the MLP add."""
        x = x + self.attn(self.ln_1(x), past)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "drop": nn.Dropout(config.dropout),
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, bias=config.bias),
        })
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.transformer.wte.weight = self.lm_head.weight
        self.init_weights()

    def init_weights(self):
        """As nanoGPT does: GPT-2's scheme, with residual projections scaled by depth."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, weight in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def forward(self, idx, targets=None, cache: KVCache | None = None, num_positions: int = 1):
        """Run the model on token ids (B, T) that follow those in the cache. Returns (logits, loss).

        With targets (B, T; -1 is ignored): logits (B, T, V) and the mean cross-entropy in nats.
        Without targets: logits (B, num_positions, V) of the last positions, and None.
        Raises ValueError if there are more than block_size tokens.
        """
        start = 0 if cache is None else cache.seq_len
        end = start + idx.size(1)
        if end > self.config.block_size:
            raise ValueError(f"cannot process {end} tokens: block_size is {self.config.block_size}")
        positions = torch.arange(start, end, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)
        x = self.transformer.drop(x) # (B, T, E)
        for i, block in enumerate(self.transformer.h):
            x = block(x, None if cache is None else (cache.layers[i], start))
        if cache is not None:
            cache.seq_len = end
        x = self.transformer.ln_f(x)
        if targets is None:
            # A copy, as in nanoGPT: from other addresses, a GPU might round differently.
            last = x[:, -num_positions:].clone(memory_format=torch.contiguous_format)
            return self.lm_head(last), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens: int, temperature: float = 1.0,
                 top_k: int | None = None) -> Tensor:
        """Continue token ids (B, T): returns (B, T + max_new_tokens), and does not change idx.
        Samples as nanoGPT does, from torch's global generator; temperature must be above 0.
        """
        block_size = self.config.block_size
        cache = self.new_cache(len(idx), min(idx.size(1) + max_new_tokens, block_size))
        unread = idx[:, -block_size:] # tokens that are not in the cache yet
        for _ in range(max_new_tokens):
            logits = self(unread, cache=cache)[0][:, -1] / temperature # (B, V)
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:] # (B, 1)
                logits = logits.masked_fill(logits < kth, -torch.inf)
            token = torch.multinomial(logits.softmax(dim=-1), num_samples=1) # (B, 1)
            idx = torch.cat([idx, token], dim=1)
            unread = token
            if idx.size(1) > block_size:
                # Positions are absolute: once the window moves, all keys and values change.
                unread = idx[:, -block_size:]
                cache = None
        return idx

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """An empty KVCache for forward."""
        device = self.lm_head.weight.device
        return KVCache(self.config, num_rows, capacity, device, linear_dtype(self))

    @classmethod
    def from_pretrained(cls, model_type: str, override_args: dict | None = None) -> "GPT":
        """GPT-2 by its Hugging Face id ("gpt2", "gpt2-xl", ...) or from a local folder.
        override_args: fields of GPTConfig that no tensor depends on, such as dropout.
        """
        # Here, so that this file can be used alone.
        from sampling.checkpoints.huggingface import load_huggingface
        checkpoint = load_huggingface(model_type)
        model = cls(GPTConfig(**vars(checkpoint.config) | (override_args or {})))
        model.load_state_dict(checkpoint.state_dict)
        return model.eval()


def linear_dtype(model: GPT) -> torch.dtype:
    """The dtype of the outputs of Linears: that of their weights, unless autocast is on."""
    weight = model.lm_head.weight
    device_type = weight.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return weight.dtype
