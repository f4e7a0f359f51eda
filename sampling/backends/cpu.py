"""The backend for CPUs: kernels compiled by numba, layer by layer, on the checkpoint's own weights.

Axes: B rows, T new tokens, S positions so far, E width, H heads, D = E / H, V vocabulary, R = B * T.
"""
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from model import GPTConfig
from sampling.backends import cpu_kernels as kernels
from sampling.backends.backend import Backend
from sampling.backends.cpu_runtime import compile_kernels, run
from sampling.messages import Log, warn

NO_VECTOR, NO_MATRIX = np.empty(0, np.float32), np.empty((1, 0), np.float32)
GELU = {"none": 1, "tanh": 2} # the names of F.gelu, the numbers of the kernels
MAX_KERNEL_ROWS = 128 # with more rows, F.linear is as fast in float32
MAX_KERNEL_TOKENS = 16 # of a row: for longer prompts, torch's attention is faster
CHUNK = 2**18 # weights that are quantized at once, so that their copies need little memory
SMALLEST = 2.0**-100 # added to scales: a row of zeros must not be divided by 0


class QuantizedWeight(NamedTuple):
    """A weight (O, I) as whole numbers in int8, and the scale (O,) that each row is multiplied by."""
    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """(O, I)."""
        return self.values.shape


def quantize(weight: Tensor, mean: Tensor | float = 0.0) -> QuantizedWeight:
    """Round a weight (O, I), less mean, to int8, with one scale for each row."""
    values, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight), dtype=torch.float32)
    size = max(1, CHUNK // weight.size(1))
    for rows, row_values, row_scales in zip(weight.split(size), values.split(size), scales.split(size), strict=True):
        rows = rows.float() - mean
        row_scales.copy_(rows.abs().amax(dim=1) / 127 + SMALLEST)
        row_values.copy_((rows / row_scales[:, None]).round_())
    return QuantizedWeight(values, scales)


def as_quantized(weight: Tensor | QuantizedWeight) -> QuantizedWeight:
    """The weight in int8. It may be so already: weights of a file are rounded while it is read."""
    return weight if isinstance(weight, QuantizedWeight) else quantize(weight)


class CPUCache:
    """The keys and values of the tokens so far, with room for capacity positions in each row. float32."""

    def __init__(self, config: GPTConfig, num_rows: int, capacity: int):
        shape = config.n_layer, num_rows, config.n_head, config.n_embd // config.n_head, capacity
        # Positions are the last axis, (layers, B, H, D, C), so that the inner loops of attention are over them.
        self.keys, self.values = torch.empty(shape), torch.empty(shape)
        self.seq_len = 0 # filled positions

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only. They move to the front of the same memory, because a second cache might not fit."""
        for tensor in self.keys, self.values:
            for layer in tensor[..., :self.seq_len]: # the rest is unused, and may not be in memory yet
                layer[:len(rows)] = layer[rows]
        self.keys, self.values = self.keys[:, :len(rows)], self.values[:, :len(rows)]


def make_layer_norm(weights: Mapping[str, Tensor], name: str, epsilon: float) -> Callable[[np.ndarray], np.ndarray]:
    """A LayerNorm of the model, (R, E) -> (R, E). name: that of its weights."""
    weight, bias = as_array(weights[f"{name}.weight"]), as_array(weights.get(f"{name}.bias"))

    def layer_norm(x):
        y = np.empty_like(x)
        run(kernels.layer_norm, 4 * x.size, x, weight, bias, epsilon, y)
        return y
    return layer_norm


class Linear:
    """A Linear of the model that also applies GELU, or adds a residual. name: that of its weights."""

    def __init__(self, weights: Mapping[str, Tensor | QuantizedWeight], name: str, int8: bool):
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        self.bias, self.plain = as_array(bias), None
        if int8:
            self.weight, self.scales = (tensor.numpy() for tensor in as_quantized(weight))
        else:
            self.weight, self.scales = as_array(weight), NO_VECTOR
            self.plain = torch.from_numpy(self.weight), None if bias is None else torch.from_numpy(self.bias)

    def __call__(self, x: np.ndarray, gelu: str | None = None, residual: np.ndarray = NO_MATRIX) -> np.ndarray:
        """(R, I) -> (R, O). The residual has the shape of the result."""
        if self.plain and len(x) > MAX_KERNEL_ROWS:
            y = F.linear(torch.from_numpy(x), *self.plain)
            y = F.gelu(y, approximate=gelu) if gelu else y
            return (y.add_(torch.from_numpy(residual)) if residual.size else y).numpy()
        return multiply(x, self.weight, self.scales, self.bias, GELU.get(gelu, 0), residual)


def multiply(x: np.ndarray, weight: np.ndarray, scales: np.ndarray = NO_VECTOR, bias: np.ndarray = NO_VECTOR,
             gelu: int = 0, residual: np.ndarray = NO_MATRIX) -> np.ndarray:
    """The kernel for x (R, I) times the weight (O, I) -> (R, O)."""
    y = np.empty((len(x), len(weight)), np.float32)
    run(kernels.linear[weight.dtype.name], x.size * len(weight), x, weight, scales, bias, gelu, residual, y)
    return y


class Block:
    """The layers of a block of the model."""

    def __init__(self, config: GPTConfig, weights: Mapping[str, Tensor | QuantizedWeight], name: str, int8: bool):
        epsilon, self.gelu = config.layer_norm_epsilon, config.gelu
        self.ln_1, self.ln_2 = (make_layer_norm(weights, f"{name}.{norm}", epsilon) for norm in ("ln_1", "ln_2"))
        self.c_attn, self.attn_c_proj, self.c_fc, self.mlp_c_proj = (
            Linear(weights, f"{name}.{layer}", int8) for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc",
                                                                   "mlp.c_proj"))

    def after_attention(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The residual stream x after the result y of attention and after the MLP: (R, E) each."""
        x = self.attn_c_proj(y, residual=x)
        return self.mlp_c_proj(self.c_fc(self.ln_2(x), gelu=self.gelu), residual=x)


class Shortlist:
    """The logits of an LM head for one row, exact only for tokens that may be among the k largest: the others are -inf.

    This reads a quarter of the bytes: a copy of the weight (V, E) in int8 gives approximate logits. By the
    Cauchy-Schwarz inequality, that of token v is off by at most |x| * |weight[v] - copy[v]|. So it is known which
    tokens may be among the k largest: the shortlist. The copy is of the weight less its mean row, which is large in
    trained weights, and adds the same number to every logit.
    """
    MIN_WEIGHTS = 2**23 # a smaller weight stays in the processor's cache
    MIN_STEPS = 16 # before the copy is made, which takes as long as it saves in about 50 steps
    MAX_FRACTION = 1 / 16 # of the vocabulary: exact logits of a longer shortlist would take as long as all
    MAX_FAILURES = 16 # in total, before it gives up

    def __init__(self, weight: np.ndarray):
        self.weight, self.num_steps, self.num_failures, self.copy = torch.from_numpy(weight), 0, 0, None

    def __call__(self, x: np.ndarray, k: int) -> Tensor | None:
        """(1, E) -> logits (1, V), or None: compute all."""
        self.num_steps += 1
        if self.num_steps < self.MIN_STEPS or self.num_failures >= self.MAX_FAILURES:
            return None
        self.copy = self.copy or self.make_copy()
        (values, scales), errors = self.copy
        logits = torch.from_numpy(multiply(x, values.numpy(), scales.numpy()))
        bound = errors * float(np.linalg.norm(x))
        # The k-th largest of the maxima of groups is at most the k-th largest logit, and takes less time to find.
        lower, size = logits[0] - bound, max(1, min(64, len(values) // (2 * k)))
        groups = lower[:len(lower) // size * size].view(-1, size).amax(dim=1)
        if k <= len(groups):
            ids = (logits[0] + bound >= groups.topk(k).values[-1]).nonzero().squeeze(1)
            if k <= len(ids) <= self.MAX_FRACTION * len(values): # not if there are NaN
                exact = multiply(x, self.weight[ids].numpy())
                return logits.fill_(-torch.inf).index_copy_(1, ids, torch.from_numpy(exact))
        self.num_failures += 1
        return None

    def make_copy(self) -> tuple[QuantizedWeight, Tensor]:
        """The copy, and a bound (V,) on the errors of the logits for an x of norm 1."""
        mean = self.weight.mean(dim=0)
        copy = quantize(self.weight, mean)
        errors = torch.empty_like(copy.scales)
        for part in torch.arange(len(errors)).split(1024):
            exact = self.weight[part] - mean
            rounding = (exact - copy.values[part] * copy.scales[part, None]).norm(dim=1)
            # A float32 sum of E products is off by at most E * 2**-24 times the product of the norms.
            errors[part] = 1.001 * rounding + mean.numel() * 2**-22 * (exact.norm(dim=1) + mean.norm())
        return copy, errors


class CPUBackend(Backend):
    """Computes the logits of a GPT, without copying the float32 weights of the checkpoint.

    weights: by nanoGPT's names. int8: round all weights that are not QuantizedWeights yet; activations and sums are
    float32 all the same. log gets a line if the kernels must be compiled, which happens once on a machine.
    """
    device, max_rows = torch.device("cpu"), 64

    def __init__(self, config: GPTConfig, weights: Mapping[str, Tensor | QuantizedWeight], int8: bool = False,
                 log: Log = warn):
        self.config = config
        has_shortlist = not int8 and config.vocab_size * config.n_embd >= Shortlist.MIN_WEIGHTS
        compile_kernels(("int8",) if int8 else ("float32", "int8") if has_shortlist else ("float32",), log)
        self.lm_head = Linear(weights, "lm_head", int8)
        self.shortlist = Shortlist(self.lm_head.weight) if has_shortlist else None
        if not int8:
            self.wte, self.wte_scales = weights["transformer.wte.weight"].float(), None
        elif config.tie_word_embeddings:
            self.wte, self.wte_scales = map(torch.from_numpy, (self.lm_head.weight, self.lm_head.scales))
        else:
            self.wte, self.wte_scales = as_quantized(weights["transformer.wte.weight"])
        self.wpe = weights["transformer.wpe.weight"].float()
        self.ln_f = make_layer_norm(weights, "transformer.ln_f", config.layer_norm_epsilon)
        self.blocks = [Block(config, weights, f"transformer.h.{i}", int8) for i in range(config.n_layer)]

    def new_cache(self, num_rows: int, capacity: int) -> CPUCache:
        return CPUCache(self.config, num_rows, capacity)

    @torch.inference_mode()
    def logits(self, ids: Tensor, cache: CPUCache | None, num_positions: int = 1,
               num_needed: int | None = None) -> Tensor:
        (B, T), start = ids.shape, 0 if cache is None else cache.seq_len
        x = F.embedding(ids, self.wte)
        if self.wte_scales is not None:
            x = x * self.wte_scales[ids].unsqueeze(-1)
        x = (x + self.wpe[start:start + T]).flatten(0, 1).numpy() # (R, E)
        for layer, block in enumerate(self.blocks):
            num_last = num_positions if layer == len(self.blocks) - 1 else T # only these are needed from here on
            qkv = block.c_attn(block.ln_1(x)) # (R, 3 * E)
            if num_last < T:
                x = np.ascontiguousarray(x.reshape(B, T, -1)[:, -num_last:]).reshape(B * num_last, -1)
            x = block.after_attention(x, self.attention(qkv, cache, layer, B, num_last))
        if cache is not None:
            cache.seq_len += T
        x, logits = self.ln_f(x), None
        if self.shortlist and num_needed and len(x) == 1:
            logits = self.shortlist(x, num_needed)
        return torch.from_numpy(self.lm_head(x)) if logits is None else logits

    def attention(self, qkv: np.ndarray, cache: CPUCache | None, layer: int, B: int, num_last: int) -> np.ndarray:
        """Queries, keys and values (R, 3 * E) of a layer -> results of attention (B * num_last, E) for the last
        positions of each row. Appends the keys and values to the cache.
        """
        E, H = self.config.n_embd, self.config.n_head
        T, start = len(qkv) // B, 0 if cache is None else cache.seq_len
        if cache is not None and num_last == T <= MAX_KERNEL_TOKENS and cache.keys.size(1) == B:
            y = np.empty((len(qkv), E), np.float32)
            run(kernels.attention, 2 * len(qkv) * (start + T) * E, qkv, cache.keys[layer].numpy(),
                cache.values[layer].numpy(), start, y)
            return y
        q, k, v = torch.from_numpy(qkv).view(B, T, 3, H, E // H).permute(2, 0, 3, 1, 4) # (B, H, T, D) each
        if cache is not None:
            keys, values = (t[layer, ..., :start + T].transpose(2, 3) for t in (cache.keys, cache.values))
            keys[:, :, start:], values[:, :, start:] = k, v # if there is one row, all rows of the cache get it
            k, v = (keys[:B], values[:B]) if start else (k, v) # (B, H, S, D) each
        q, S = q[:, :, -num_last:], start + T
        mask = torch.ones(num_last, S, dtype=torch.bool).tril(S - num_last) if 1 < num_last < S else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=1 < num_last == S)
        return y.transpose(1, 2).contiguous().view(-1, E).numpy()


def as_array(tensor: Tensor | None) -> np.ndarray:
    """The tensor's own memory, or a float32 copy if its layout or dtype is another. Empty for None."""
    if tensor is None:
        return NO_VECTOR
    array = tensor.detach().float().contiguous().numpy()
    return array if array.flags.aligned else array.copy()
