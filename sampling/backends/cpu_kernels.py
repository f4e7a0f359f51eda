"""The kernels of the CPU backend: plain loops, compiled by numba.

Axes: R rows (tokens of all samples), I inputs and O outputs of a linear layer, B samples, T new
tokens of a sample, S its positions so far, C room for positions in the cache, E width, H heads, D =
E / H. Arrays are float32 and C-contiguous. The backend calls layer_norm, attention and those of
LINEAR; the other functions are parts of them.
"""
import math
import platform
from functools import partial

import numpy as np
from numba import config, njit, prange

from sampling import jit

# AVX-512 and ARM have 32 vector registers, other processors 16. all_rows keeps its sums in them.
has_avx512 = "+avx512f" in (config.CPU_FEATURES or "")
has_32_registers = has_avx512 or platform.machine() in ("aarch64", "arm64")
OUTPUTS, GROUP = (4, 10) if has_32_registers else (2, 5)

# LLVM may reorder sums, which vectorises them, and fuse products with sums. It may not assume that
# there are no NaN and no infinity, as fastmath=True would: the sampler must see them to recognise a
# damaged model.
FLAGS = {"reassoc", "contract", "arcp", "nsz"}
Array = np.ndarray
BLOCK = 16 # neighbouring outputs that a thread computes at once
ZERO, ONE = np.float32(0), np.float32(1)

inner = njit(fastmath=FLAGS, **jit.OPTIONS)
parallel = partial(jit.parallel, fastmath=FLAGS)


@inner
def exp(x: np.float32) -> np.float32:
    """exp(x) for x <= 0, to float32 accuracy, but exp(-87) for smaller x.

    LLVM vectorises it, but not math.exp.

    exp(x) = 2**n * exp(rest), where n is a whole number, whose bits make the float32 2**n, and
    |rest| is at most log(2) / 2.
    """
    if x < np.float32(-87): # not max(): it might drop NaN
        x = np.float32(-87)
    # Rounds to the nearest, because x <= 0.
    n = np.int32(x * np.float32(1 / math.log(2)) - np.float32(0.5))
    # log(2) in two parts: the product with the first one is exact.
    x -= np.float32(n) * np.float32(0.693359375)
    x -= np.float32(n) * np.float32(-2.12194440e-4)
    p = np.float32(1 / 720)
    p = p * x + np.float32(1 / 120)
    p = p * x + np.float32(1 / 24)
    p = p * x + np.float32(1 / 6)
    p = p * x + np.float32(1 / 2)
    power_of_two = np.int32((n + np.int32(127)) * np.int32(2**23)).view(np.float32)
    return ((p * x + ONE) * x + ONE) * power_of_two


# GELU is max(x, 0) - |x| * exp(P(|x|)), where exp(P(z)) is the share of the normal distribution
# above z: exactly, or in the tanh form nearly. These are the coefficients of polynomials P, fitted
# so that GELU is off by at most 1e-7.
EXACT = (0, -1.38068236e-06, 2.0289853e-05, -9.57157354e-05, -1.75668094e-04, 5.00201916e-03,
         -3.64616548e-02, -3.18273928e-01, -7.97888463e-01, -6.93147114e-01)
TANH = (-2.80885487e-06, 1.87247376e-05, 1.02340362e-04, -1.09109089e-03, 1.57972961e-03,
        3.680921e-03, -3.47971156e-02, -3.18540895e-01, -7.97861889e-01, -6.93147532e-01)


@inner
def gelu_of(x: np.float32, form: tuple[float, ...]) -> np.float32:
    p = ZERO
    for coefficient in form:
        p = p * abs(x) + np.float32(coefficient)
    return max(x, ZERO) - abs(x) * exp(p)


@inner
def epilogue(y: Array, first: int, last: int, scales: Array, bias: Array, gelu: int) -> None:
    """Apply to the sums y[:, first:last]: scales, bias, GELU (0 none, 1 exact, 2 tanh)."""
    scales = scales[first:last]
    bias = bias[first:last]
    form = EXACT if gelu == 1 else TANH
    for r in range(len(y)):
        yr = y[r, first:last]
        for o in range(len(yr)):
            result = yr[o] * scales[o] + bias[o]
            if gelu:
                result = gelu_of(result, form)
            yr[o] = result


@njit(fastmath=FLAGS, inline="always", **jit.OPTIONS) # LLVM would not always
def one_row(x: Array, weight: Array, y: Array, first: int, last: int, quarter: int) -> None:
    """Outputs first to last of one row, and those of the other quarters: y[o] = weight[o] @ x.

    Four rows of the weight that lie far apart are four streams for the prefetcher, which one core
    needs to read memory at its full rate.
    """
    for o in range(first, last):
        o1 = o + quarter
        o2 = o + 2 * quarter
        o3 = o + 3 * quarter
        w0 = weight[o]
        w1 = weight[o1]
        w2 = weight[o2]
        w3 = weight[o3]
        sum0 = sum1 = sum2 = sum3 = ZERO
        for i in range(len(x)):
            sum0 += np.float32(w0[i]) * x[i]
            sum1 += np.float32(w1[i]) * x[i]
            sum2 += np.float32(w2[i]) * x[i]
            sum3 += np.float32(w3[i]) * x[i]
        y[o] = sum0
        y[o1] = sum1
        y[o2] = sum2
        y[o3] = sum3


@inner
def all_rows(x: Array, weight: Array, y: Array, first: int, last: int, quarter: int) -> None:
    """Outputs first to last of all rows, and of the other quarters: y[r, o] = weight[o] @ x[r].

    OUTPUTS times five sums are computed at once, in registers. Four rows of the weight lie far
    apart for the same reason as in one_row, and serve GROUP rows of x while they are in the L1
    cache. Two of them are faster if five rows of x stay in the L1 cache, and the block of the
    weight in the L2 cache. A last row alone is left to one_row.
    """
    num_rows = len(x)
    if num_rows % 5 == 1:
        num_rows -= 1
    end = num_rows - 1
    for group in range(0, num_rows, GROUP):
        for start in range(0, 4 * quarter, OUTPUTS * quarter):
            for o in range(start + first, start + last):
                o1 = o + quarter
                o2 = o + (OUTPUTS - 2) * quarter
                o3 = o + (OUTPUTS - 1) * quarter
                w0, w1, w2, w3 = weight[o], weight[o1], weight[o2], weight[o3]
                # Beyond the last row, the last one again.
                for r in range(group, min(group + GROUP, num_rows), 5):
                    r1 = min(r + 1, end)
                    r2 = min(r + 2, end)
                    r3 = min(r + 3, end)
                    r4 = min(r + 4, end)
                    x0, x1, x2, x3, x4 = x[r], x[r1], x[r2], x[r3], x[r4]
                    a0 = a1 = a2 = a3 = a4 = ZERO
                    b0 = b1 = b2 = b3 = b4 = ZERO
                    c0 = c1 = c2 = c3 = c4 = ZERO
                    d0 = d1 = d2 = d3 = d4 = ZERO
                    for i in range(len(x0)):
                        v0, v1, v2, v3, v4 = x0[i], x1[i], x2[i], x3[i], x4[i]
                        a = np.float32(w0[i])
                        a0 += a * v0
                        a1 += a * v1
                        a2 += a * v2
                        a3 += a * v3
                        a4 += a * v4
                        b = np.float32(w1[i])
                        b0 += b * v0
                        b1 += b * v1
                        b2 += b * v2
                        b3 += b * v3
                        b4 += b * v4
                        if OUTPUTS == 4:
                            c = np.float32(w2[i])
                            c0 += c * v0
                            c1 += c * v1
                            c2 += c * v2
                            c3 += c * v3
                            c4 += c * v4
                            d = np.float32(w3[i])
                            d0 += d * v0
                            d1 += d * v1
                            d2 += d * v2
                            d3 += d * v3
                            d4 += d * v4
                    y[r, o], y[r1, o], y[r2, o], y[r3, o], y[r4, o] = a0, a1, a2, a3, a4
                    y[r, o1], y[r1, o1], y[r2, o1], y[r3, o1], y[r4, o1] = b0, b1, b2, b3, b4
                    if OUTPUTS == 4:
                        y[r, o2], y[r1, o2], y[r2, o2], y[r3, o2], y[r4, o2] = c0, c1, c2, c3, c4
                        y[r, o3], y[r1, o3], y[r2, o3], y[r3, o3], y[r4, o3] = d0, d1, d2, d3, d4
    for r in range(num_rows, len(x)):
        one_row(x[r], weight, y[r], first, last, quarter)


def linear(x: Array, weight: Array, scales: Array, bias: Array, gelu: int) -> Array:
    """x (R, I) @ weight (O, I).T, and the epilogue with scales (O,) and bias (O,) -> (R, O)."""
    y = np.empty((len(x), len(weight)), np.float32)
    quarter = len(weight) // 4
    for block in prange((quarter + BLOCK - 1) // BLOCK):
        first = block * BLOCK
        last = min(first + BLOCK, quarter)
        all_rows(x, weight, y, first, last, quarter)
        for start in range(0, 4 * quarter, quarter):
            epilogue(y, start + first, start + last, scales, bias, gelu)
    rest = 4 * quarter
    for r in range(len(x)): # up to three outputs are left
        one_row(x[r], weight, y[r], rest, len(weight), 0)
    epilogue(y, rest, len(weight), scales, bias, gelu)
    return y


LINEAR: dict[str, jit.Kernel] = {dtype: parallel(linear, dtype) for dtype in ("float32", "int8")}


@parallel
def layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    """Rows of x (R, E) with mean 0 and variance 1, times weight (E,), plus bias (E,) -> (R, E)."""
    y = np.empty_like(x)
    for r in prange(len(x)):
        xr = x[r]
        yr = y[r]
        width = np.float32(x.shape[1])
        total = squares = ZERO
        for i in range(len(xr)):
            total += xr[i]
        mean = total / width
        for i in range(len(xr)):
            squares += (xr[i] - mean) * (xr[i] - mean)
        scale = ONE / np.sqrt(squares / width + np.float32(epsilon))
        for i in range(len(xr)):
            yr[i] = (xr[i] - mean) * scale * weight[i] + bias[i]
    return y


@inner
def softmax(scores: Array) -> None:
    """Softmax in place."""
    largest = np.float32(-np.inf)
    total = ZERO
    for s in range(len(scores)):
        largest = max(largest, scores[s])
    for s in range(len(scores)):
        scores[s] = exp(scores[s] - largest)
        total += scores[s]
    for s in range(len(scores)):
        scores[s] /= total


@inner
def attend_head(q: Array, k: Array, v: Array, new_k: Array, new_v: Array, start: int,
                y: Array) -> None:
    """One head of one sample. q, new_k, new_v, y: (T, D). The cache k, v: (C, D).

    Four values that lie far apart are read at once, as the keys in one_row. Beyond the last one, it
    is read with weight 0.
    """
    num_tokens, width = q.shape
    scores = np.empty(start + num_tokens + 3, np.float32)
    scale = np.float32(1 / math.sqrt(width))
    qt = np.empty(width, np.float32) # contiguous, and so is yt
    yt = np.empty(width, np.float32)
    for t in range(num_tokens):
        last = start + t
        quarter = last // 4 + 1
        for d in range(width):
            k[last, d] = new_k[t, d]
            v[last, d] = new_v[t, d]
            qt[d] = q[t, d] * scale
            yt[d] = ZERO
        whole = (last + 1) // 4
        one_row(qt, k, scores, 0, whole, whole)
        one_row(qt, k, scores, 4 * whole, last + 1, 0) # up to three positions are left
        softmax(scores[:last + 1])
        for s in range(last + 1, len(scores)):
            scores[s] = ZERO
        for s in range(quarter):
            s1 = s + quarter
            s2 = s + 2 * quarter
            s3 = s + 3 * quarter
            v0 = v[s]
            v1 = v[min(s1, last)]
            v2 = v[min(s2, last)]
            v3 = v[min(s3, last)]
            p0 = scores[s]
            p1 = scores[s1]
            p2 = scores[s2]
            p3 = scores[s3]
            for d in range(width):
                yt[d] += p0 * v0[d] + p1 * v1[d] + p2 * v2[d] + p3 * v3[d]
        for d in range(width):
            y[t, d] = yt[d]


@parallel
def attention(qkv: Array, keys: Array, values: Array, start: int) -> Array:
    """T new tokens of each sample attend to the tokens up to themselves -> (B * T, E).

    qkv (B * T, 3 * E): their queries, keys and values. The cache (B, H, C, D) gets the latter from
    position start on.
    """
    num_samples, num_heads, _, width = keys.shape
    num_tokens = len(qkv) // num_samples
    heads = qkv.reshape(num_samples, num_tokens, 3, num_heads, width)
    y = np.empty((num_samples, num_tokens, num_heads, width), np.float32)
    for i in prange(num_samples * num_heads):
        b = i // num_heads
        h = i % num_heads
        q = heads[b, :, 0, h] # (T, D) each
        k = heads[b, :, 1, h]
        v = heads[b, :, 2, h]
        attend_head(q, keys[b, h], values[b, h], k, v, start, y[b, :, h])
    return y.reshape(len(qkv), num_heads * width)
