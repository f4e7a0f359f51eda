"""GPT: the network of nanoGPT and GPT-2, its KV cache, and how it generates.

Axes: B batch, T tokens given now, S all positions so far (T and what the cache holds), E width, H heads,
D = E / H, V vocabulary.
"""
import math
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sampler import enough, next_token


@dataclass
class GPTConfig:
    """nanoGPT's fields and defaults, then what only Hugging Face's GPT-2 models vary."""
    block_size: int = 1024
    vocab_size: int = 50304 # GPT-2's 50257, padded to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True # in Linears and LayerNorms
    gelu: str = "none" # F.gelu's approximate: nanoGPT trains with the exact GELU, OpenAI's GPT-2 with "tanh"
    n_inner: int | None = None # the MLP's inner width; None: 4 * n_embd
    layer_norm_epsilon: float = 1e-5
    tied: bool = True # the head shares the token embedding's weights

    def __post_init__(self):
        for name in "block_size", "vocab_size", "n_layer", "n_head", "n_embd":
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 2**31:
                raise ValueError(f"{name} must be a whole number, at least 1 and below 2**31, got {value!r:.100}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head}")
        if self.n_inner is not None and (type(self.n_inner) is not int or not 1 <= self.n_inner < 2**31):
            raise ValueError("n_inner must be a whole number, at least 1 and below 2**31, or None, "
                             f"got {self.n_inner!r:.100}")
        for name in "dropout", "layer_norm_epsilon":
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"{name} must be a number between 0 and 1, got {value!r:.100}")
        for name in "bias", "tied":
            if getattr(self, name) not in (True, False):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r:.100}")
        if self.gelu not in ("none", "tanh"):
            raise ValueError(f"gelu must be 'none' or 'tanh', got {self.gelu!r:.100}")


class KVCache:
    """The keys and values of the tokens read so far, with room for capacity of them in each of B rows.

    It belongs to the caller: GPT.forward reads it, adds the tokens it is given and moves size on.
    """

    def __init__(self, config, batch_size, capacity, device=None, dtype=None):
        shape = 2, batch_size, config.n_head, capacity, config.n_embd // config.n_head # keys, values: (2, B, H, S, D)
        self.layers = [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        self.size = 0

    def keep(self, rows):
        """Forget all but these rows."""
        for i, layer in enumerate(self.layers):
            self.layers[i] = layer[:, rows]

    @property
    def nbytes(self):
        """The memory it takes."""
        return sum(layer.nbytes for layer in self.layers)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, past=None):
        """(B, T, E) -> (B, T, E); past: the layer of a KVCache, and how many of its positions are filled."""
        T = x.size(1)
        qkv = self.heads(x)
        q, k, v = qkv
        causal, mask = True, None
        if past is not None:
            cached, start = past
            cached[..., start:start + T, :] = qkv[1:] # one row fills all: a prompt they share is read once
            if start:
                k, v = cached[..., :start + T, :] # (B, H, S, D) each
                causal = False # its triangle would stand at the first key, not at the last
                mask = torch.ones(T, start + T, dtype=torch.bool, device=x.device).tril(start) if T > 1 else None
        dropout = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout)
        return self.dropout(self.c_proj(self.merge(y)))

    def heads(self, x):
        """Queries, keys and values of every head: (3, B, H, T, D)."""
        return self.c_attn(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)

    def merge(self, y):
        """The heads' results side by side: (B, H, T, D) -> (B, T, E)."""
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
        """(B, T, E) -> (B, T, E), each position by itself."""
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, past=None):
        """(B, T, E) -> (B, T, E): what attention and the MLP add to the residual stream."""
        x = x + self.attn(self.ln_1(x), past)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
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
        if config.tied:
            self.transformer.wte.weight = self.lm_head.weight
        self.initialise()

    def initialise(self):
        """Draw the weights as nanoGPT does: GPT-2's scheme, the residual projections scaled by depth."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, weight in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def forward(self, idx, targets=None, cache=None):
        """Read token ids (B, T), after those in the cache if there is one; returns (logits, loss).

        With targets (B, T; -1 counts for nothing): logits (B, T, V) and the mean cross-entropy, in nats.
        Without: logits (B, 1, V) of the last position, all that generation needs, and None.
        """
        start = 0 if cache is None else cache.size
        end = start + idx.size(1)
        if end > self.config.block_size:
            raise ValueError(f"cannot read {end} tokens: block_size is {self.config.block_size}")
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(start, end, device=idx.device))
        x = self.transformer.drop(x) # (B, T, E)
        for i, block in enumerate(self.transformer.h):
            x = block(x, None if cache is None else (cache.layers[i], start))
        if cache is not None:
            cache.size = end
        if targets is None:
            return self.lm_head(self.transformer.ln_f(x[:, -1:])), None
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def next_logits(self, idx, cache, enough=None):
        """forward's logits (B, V) of the last position, in a tuple.

        enough: how many of the largest must be right; then what they are among, ids (K,), may come second.
        """
        return (self(idx, cache=cache)[0][:, -1],)

    def new_cache(self, batch_size, capacity):
        """An empty KVCache for forward."""
        return KVCache(self.config, batch_size, capacity, self.lm_head.weight.device, self.compute_dtype())

    next_token = staticmethod(next_token) # how logits become tokens, unless stream's caller has another way
    shrink_at = 1 # rows that have ended are worth leaving out of a batch once at most this share of it is left

    def check(self):
        """Raise ValueError where logits were NaN or infinite and stream has not said so: here next_token has."""

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, context_shift=False, **how):
        """Continue token ids (B, T) by max_new_tokens: (B, T + max_new_tokens), idx itself left alone.

        temperature, top_k and what else says how are sampler.next_token's.
        """
        def choose(logits, ids, among=None):
            """As stream wants it."""
            return self.next_token(logits, temperature, top_k, ids=ids, among=among, **how)
        choose.enough = enough(temperature, top_k, **how)
        return torch.cat([idx, *self.stream(idx, max_new_tokens, choose, context_shift)], dim=1)

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, choose, context_shift=False):
        """generate, a step at a time: yields (B, 1) ids as they are drawn.

        choose makes them from logits (B, V) and the ids (B, S) in the window. Where it needs only some of the largest
        logits, its attribute enough says how many; of a single row, what these are among, ids (K,), may come third.
        Sending a list of row indices goes on with those rows alone, an empty one ends the stream.
        context_shift is for text longer than block_size, as in llama.cpp: a full window loses its older half and
        is read anew once, where else every further token reads all of the window again.
        """
        B, T = idx.shape
        block_size = self.config.block_size
        if T == 0:
            raise ValueError("there is nothing to continue: idx must hold at least one token")
        cache = self.new_cache(B, min(T + max_new_tokens, block_size))
        idx = idx[:, -block_size:]
        read = idx[:1] if (idx == idx[:1]).all() else idx # rows that are all the same are read as one
        count = getattr(choose, "enough", None)
        for _ in range(max_new_tokens):
            logits, *among = self.next_logits(read, cache, count if len(idx) == 1 else None)
            token = choose(logits.expand(len(idx), -1), idx, *among)
            rows = yield token
            if rows == []:
                return
            if rows is not None:
                idx, token = idx[rows], token[rows]
                if cache is not None:
                    cache.keep(rows)
            idx, read = torch.cat([idx, token], dim=1), token
            if idx.size(1) > block_size:
                # Positions are learned and absolute: in a window that has moved, every key and value is new.
                keep = block_size - block_size // 2 if context_shift else block_size
                idx = read = idx[:, -keep:]
                if context_shift:
                    cache.size = 0
                else:
                    cache = None

    def compile_generation(self, idx, max_new_tokens, context_shift=False):
        """torch.compile what generate runs for such a call: the prompt, single tokens, a window that moves."""
        torch._dynamo.config.recompile_limit = 32 # each of these, for every batch size, is a graph of its own
        torch._inductor.config.freezing = self.lm_head.weight.device.type == "cpu" # packs weights, or is half as fast
        self.compile(dynamic=True)

        def likeliest(logits, ids):
            """A choice without chance, which compiles nothing."""
            return logits.argmax(dim=-1, keepdim=True)
        # The first steps of the very call: a cache of another capacity would be another graph.
        list(islice(self.stream(idx, max_new_tokens, likeliest), 3))
        edge = self.config.block_size - 1
        if idx.size(1) <= edge < idx.size(1) + max_new_tokens:
            list(self.stream(idx[:, :1].repeat(1, edge), 4, likeliest, context_shift))

    def bytes_per_sample(self, length):
        """About what one more row of length tokens takes in generate: its cache, or its window, and its logits."""
        config = self.config
        tokens = min(length, config.block_size)
        window = 10 * 4 * config.n_embd if length > config.block_size else 0
        return tokens * (self.new_cache(1, 1).nbytes + window) + 40 * config.vocab_size

    def compute_dtype(self):
        """The dtype that Linears give here: autocast's where it is on, else that of their weights."""
        weight = self.lm_head.weight
        device_type = weight.device.type
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype

    def cast_linears(self, dtype):
        """Cast once what autocast would cast at every step; the embedding stays as it is. Returns self."""
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.weight.dtype != dtype: # or a tied head would be so no longer
                for name, value in module.named_parameters():
                    setattr(module, name, nn.Parameter(value.to(dtype), requires_grad=False))
        return self

    @classmethod
    def from_state_dict(cls, model_args, state_dict):
        """A network that holds these tensors, not copies of them, in eval mode.

        model_args are GPTConfig's fields. ValueError where they or the tensors' names and shapes do not fit.
        """
        unknown = set(model_args) - set(GPTConfig.__dataclass_fields__)
        if unknown:
            raise ValueError(f"model_args holds what GPT does not have: {', '.join(sorted(map(str, unknown)))}")
        with torch.device("meta"), SkipInitialisation(): # costs no memory, no time and no random numbers
            model = cls(GPTConfig(**model_args))
        require_same_tensors(model.state_dict(), state_dict)
        model.load_state_dict(state_dict, assign=True)
        if model.config.tied:
            model.transformer.wte.weight = model.lm_head.weight
        return model.eval()

    @classmethod
    def from_pretrained(cls, model_type, override_args=None):
        """GPT-2 by its Hugging Face id ("gpt2", "gpt2-xl", "distilgpt2", ...) or from a local folder.

        override_args replaces GPTConfig fields that no tensor depends on, such as dropout.
        ValueError or OSError where the files cannot be had or do not hold a GPT-2.
        """
        from weights import load_huggingface
        model_args, state_dict = load_huggingface(model_type)
        return cls.from_state_dict({**model_args, **(override_args or {})}, state_dict)


class SkipInitialisation(TorchFunctionMode):
    """Leaves new parameters as they are. On the meta device, filling one imports a second of torch first."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.__name__ in ("kaiming_uniform_", "uniform_", "normal_", "fill_", "zero_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def require_same_tensors(expected, found):
    """Raise ValueError that names the first few tensors that are missing, unexpected or misshapen."""
    faults = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "misshapen": [f"{name} {tuple(found[name].shape)} instead of {tuple(expected[name].shape)}"
                      for name in expected if name in found and found[name].shape != expected[name].shape],
    }
    said = [f"{kind}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            for kind, names in faults.items() if names]
    if said:
        raise ValueError(f"the tensors do not fit the network; {'; '.join(said)}")
