"""The backend for CPUs: kernels compiled by numba, layer by layer, on the checkpoint's own weights.

Axes: B rows, T new tokens, S positions so far, E width, H heads, D = E / H, V vocabulary,
R = B * T.
"""
import logging
from collections.abc import Mapping
from threading import RLock
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sampling import jit
from sampling.backends import cpu_kernels as kernels
from sampling.backends.backend import Backend, many_rows_linear
from sampling.backends.backend_choice import has_numba
from sampling.checkpoints.checkpoint import QuantizedWeight, quantize
from sampling.model import GPTConfig, KVCache

logger = logging.getLogger(__name__)
GELU = {None: 0, "none": 1, "tanh": 2} # the names of F.gelu, the numbers of the kernels
# With more rows, torch's products are as fast in float32, or faster. With still more, this pays for
# rounding int8 weights back to float32.
MAX_KERNEL_ROWS = 32 if kernels.has_32_registers else 64
MAX_INT8_KERNEL_ROWS = 512
MAX_KERNEL_TOKENS = 16 # of a row: for longer prompts, torch's attention is faster
MIN_DRAFT_PARAMS = 50_000_000 # of a model whose steps wait for memory
MIN_DRAFT_TOKENS = 100 # of a sample that pays for the copy


class Linear:
    """A Linear of the model, on its weight (O, I) in float32 or int8. It also applies GELU."""

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor):
        if isinstance(weight, QuantizedWeight):
            values, scales = weight
        else:
            values = weight
            scales = torch.ones(len(weight))
        self.weight = as_array(values)
        self.scales = as_array(scales)
        self.bias = as_array(bias)
        self.kernel = kernels.LINEAR[self.weight.dtype.name]

    def __call__(self, x: np.ndarray, gelu: str | None = None) -> np.ndarray:
        """(R, I) -> (R, O)."""
        is_float32 = self.weight.dtype == np.float32
        if len(x) > (MAX_KERNEL_ROWS if is_float32 else MAX_INT8_KERNEL_ROWS):
            weight = self.weight if is_float32 else self.weight * self.scales[:, None]
            y = many_rows_linear(*map(torch.from_numpy, (x, weight, self.bias)))
            if gelu:
                y = F.gelu(y, approximate=gelu)
            return y.numpy()
        work = x.size * len(self.weight)
        return jit.launch(self.kernel, work, x, self.weight, self.scales, self.bias, GELU[gelu])


class LayerNorm(NamedTuple):
    """A LayerNorm of the model. Its fields are the kernel's arguments."""
    weight: np.ndarray # (E,)
    bias: np.ndarray # (E,)
    epsilon: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """(R, E) -> (R, E)."""
        # So much work gets as many threads as the Linears around it. To change their number costs
        # more than it saves.
        work = x.size * len(self.weight)
        return jit.launch(kernels.layer_norm, work, x, *self)


class CPUBackend(Backend):
    """Computes the logits of a GPT. Its float32 weights, named as nanoGPT's, are not copied.

    int8: round those that are not QuantizedWeights yet. Activations and sums stay float32.
    draft: whether a float32 model may make an int8 copy of itself, which proposes tokens.
    """
    device = torch.device("cpu")
    max_window_tokens = 1280
    has_kernels = True

    def __init__(self, config: GPTConfig, weights: Mapping[str, Tensor | QuantizedWeight],
                 int8: bool = False, draft: bool = False):
        def layer(name: str) -> Linear | LayerNorm:
            weight = weights[f"{name}.weight"]
            bias = weights.get(f"{name}.bias", torch.zeros(weight.shape[0]))
            if len(weight.shape) == 1:
                return LayerNorm(as_array(weight), as_array(bias), config.layer_norm_epsilon)
            if int8 and not isinstance(weight, QuantizedWeight):
                weight = quantize(weight)
            return Linear(weight, bias)

        self.config = config
        self.weights = weights
        self.dtype = torch.int8 if int8 else torch.float32
        self.draft: CPUBackend | None = None # the copy, once draft_for has made it
        self.may_make_draft = draft and not int8
        self.draft_lock = RLock() # a signal handler may sample, too
        self.lm_head = layer("lm_head")
        # The embedding is a Linear too, of which only the rows are used.
        self.wte = self.lm_head
        if not config.tie_word_embeddings:
            self.wte = layer("transformer.wte")
        self.wpe = as_array(weights["transformer.wpe.weight"])
        self.ln_f = layer("transformer.ln_f")
        parts = "ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"
        self.blocks = []
        for i in range(config.n_layer):
            self.blocks.append([layer(f"transformer.h.{i}.{part}") for part in parts])

    def draft_for(self, num_tokens: int) -> "CPUBackend | None":
        """The int8 copy. The first sample that it pays for makes it; all later ones get it too."""
        with self.draft_lock:
            is_worth_it = self.num_params >= MIN_DRAFT_PARAMS and num_tokens >= MIN_DRAFT_TOKENS
            if self.may_make_draft and is_worth_it:
                self.may_make_draft = False
                # It may have changed: numba reads a .numba_config.yaml in the working directory.
                if has_numba(is_required=False):
                    self.draft = CPUBackend(self.config, self.weights, int8=True)
                    jit.load_kernels(example_calls("int8"))
                    logger.info("draft: a copy of the model in int8")
        return self.draft

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        return KVCache(self.config, num_rows, capacity, self.device, torch.float32)

    def logits(self, ids: Tensor, cache: KVCache | None, num_positions: int = 1) -> Tensor:
        B, T = ids.shape
        start = 0 if cache is None else cache.seq_len
        rows = ids.contiguous().numpy() # (B, T)
        x = self.wte.weight[rows] * self.wte.scales[rows, None] # (B, T, E)
        x = (x + self.wpe[start:start + T]).reshape(B * T, -1) # (R, E)
        num_last = T # positions that are needed from here on
        for i, block in enumerate(self.blocks):
            ln_1, c_attn, attn_c_proj, ln_2, c_fc, mlp_c_proj = block
            if block is self.blocks[-1]:
                num_last = num_positions
            past = None if cache is None else cache.layers[i] # (2, B, H, C, D)
            qkv = c_attn(ln_1(x)) # (R, 3 * E)
            if num_last < T:
                x = last_positions(x, B, num_last)
            x = x + attn_c_proj(self.attention(qkv, past, start, B, num_last))
            x = x + mlp_c_proj(c_fc(ln_2(x), gelu=self.config.gelu))
        if cache is not None:
            cache.seq_len += T
        if not self.blocks:
            x = last_positions(x, B, num_positions)
        return torch.from_numpy(self.lm_head(self.ln_f(x)))

    def attention(self, qkv: np.ndarray, past: Tensor | None, start: int, B: int,
                  num_last: int) -> np.ndarray:
        """Queries, keys and values (R, 3 * E) of a layer -> results of attention (B * num_last, E)
        for the last positions of each row. Writes the keys and values to the cache's layer, past,
        from position start on.
        """
        E = self.config.n_embd
        H = self.config.n_head
        T = len(qkv) // B
        S = start + T
        has_row_each = past is not None and past.size(1) == B
        if has_row_each and num_last == T <= MAX_KERNEL_TOKENS:
            keys, values = past.numpy() # (B, H, C, D) each
            work = 2 * len(qkv) * S * E
            return jit.launch(kernels.attention, work, qkv, keys, values, start)
        heads = torch.from_numpy(qkv).view(B, T, 3, H, E // H).permute(2, 0, 3, 1, 4)
        q, k, v = heads # (B, H, T, D) each
        if past is not None:
            past[..., start:S, :] = heads[1:] # one row goes to all rows
            k, v = past[:, :B, :, :S] # (B, H, S, D) each
        mask = None
        if 1 < num_last < S:
            mask = torch.ones(num_last, S, dtype=torch.bool).tril(S - num_last)
        is_causal = 1 < num_last == S
        y = F.scaled_dot_product_attention(q[:, :, -num_last:], k, v, mask, is_causal=is_causal)
        return y.transpose(1, 2).reshape(-1, E).numpy()


def last_positions(x: np.ndarray, B: int, n: int) -> np.ndarray:
    """The last n positions of each of B rows: (R, E) -> (B * n, E)."""
    last = x.reshape(B, -1, x.shape[1])[:, -n:]
    return np.ascontiguousarray(last).reshape(B * n, -1)


def as_array(tensor: Tensor) -> np.ndarray:
    """The tensor's own memory, or a copy if its dtype or its layout is another."""
    # The caller's default dtype may be float64, for which numba would compile again.
    if tensor.dtype != torch.int8:
        tensor = tensor.float()
    return np.require(tensor.detach().numpy(), requirements=["C_CONTIGUOUS", "ALIGNED"])


def example_calls(dtype: str) -> dict[jit.Kernel, tuple]:
    """The kernels for weights of this dtype, with arguments of the types that they get."""
    x = np.zeros((1, 1), np.float32)
    cache = np.zeros((1, 1, 1, 1), np.float32)
    return {
        kernels.layer_norm: (x, x[0], x[0], 1e-5),
        kernels.attention: (x.repeat(3, axis=1), cache, cache, 0),
        kernels.LINEAR[dtype]: (x, x.astype(dtype), x[0], x[0], 0),
    }
