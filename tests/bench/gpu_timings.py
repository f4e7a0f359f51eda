"""The timings of gpu.py: sample.py, nanoGPT's loop, and Hugging Face's generate, with the same random models."""
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from unittest.mock import patch

import torch
from contenders import nanogpt_loop
from gpu_setup import DTYPES, TEMPERATURE, TOP_K, Scale, make_engine, make_model, run_engine, seconds, set_nanogpt_flags
from measure import count
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sampling.backends.cuda import padded_head, static_forward
from sampling.backends.devices import autocast
from sampling.backends.prepare import warm_up_compile

PROMPT = [1]
LOOP_SECONDS = 5 # nanoGPT's loop stops after this time: its rate is known by then


def timing_cells(scale: Scale, limits: dict) -> Iterator:
    """Yield (name, function, limit in seconds) for each timing, the most important ones first.

    limits: the rates of the machine, if they are known.
    """
    loops = {} # (model, dtype) -> tokens/s of nanoGPT's loop
    has_transformers = find_spec("transformers") is not None
    small, *_ = scale.shapes
    for dtype in "bfloat16", "float32":
        for model in scale.shapes:
            where, name = (scale, model, dtype), f"{model}, {{}}, {dtype}, {{}}".format
            ours = partial(time_ours, *where, limits, loops)
            yield name("1 sample", "nanoGPT's loop"), partial(time_loop, *where, loops), 20
            for samples in scale.samples:
                yield name(count(samples), "ours"), partial(ours, samples), 25
            yield name("1 sample", "streaming"), partial(ours, 1, stream=True), 15
            if dtype == "bfloat16": # which of these are faster decides what the backend does
                yield name("1 sample", "ours, attention as products"), partial(time_product_attention, ours), 15
                yield name("1 sample", "ours, head not padded"), partial(time_plain_head, ours), 15
            if dtype == "bfloat16" or model == small:
                yield name("4 samples", "exact"), partial(time_exact, *where, loops), 35
            if dtype == "bfloat16" and has_transformers:
                for samples in scale.samples:
                    yield name(count(samples), "Hugging Face"), partial(time_hf, scale, model, samples, loops), 30
    if scale.compiles: # compilers take minutes, so they come last
        for samples in scale.samples[:2]:
            name = f"{small}, {count(samples)}, bfloat16, {{}}".format
            ours = partial(time_ours, scale, small, "bfloat16", limits, loops, samples, compile=True)
            yield name("ours compiled"), ours, 60
            if has_transformers:
                static = partial(time_hf, scale, small, samples, loops, cache_implementation="static")
                yield name("Hugging Face static and compiled"), static, 60


def time_loop(scale: Scale, model: str, dtype: str, loops: dict) -> dict:
    """nanoGPT's loop, one sample, after one that warmed up: cuDNN's attention prepares each length once."""
    gpt, idx = make_model(scale, scale.shapes[model]), torch.tensor([PROMPT], device=scale.device)
    set_nanogpt_flags()
    found = []

    def run():
        end = time.perf_counter() + LOOP_SECONDS
        found[:] = [nanogpt_loop(gpt, idx, scale.new_tokens, lambda: time.perf_counter() < end)]
    with autocast(scale.device, DTYPES[dtype]):
        first, took = seconds(run, scale.device), seconds(run, scale.device)
    tokens = found[0].size(1) - len(PROMPT)
    loops[model, dtype] = tokens / took
    return {"tokens": tokens, **rate(1, tokens, took, None), "first_s": round(first, 3)}


def time_ours(scale: Scale, model: str, dtype: str, limits: dict, loops: dict, samples: int,
              stream: bool = False, compile: bool = False) -> dict:
    """The engine of sample.py: the first run, which also captures the graphs, and a later one."""
    shape, found = scale.shapes[model], {}
    torch_dtype = DTYPES[dtype]
    engine = make_engine(scale, shape, torch_dtype, samples, scale.new_tokens, stream, compile=compile)
    reset_peak(scale)
    if compile:
        with autocast(scale.device, torch_dtype):
            found["compile_s"] = round(seconds(lambda: warm_up_compile(
                engine.backend, len(PROMPT), [samples], engine.params, lambda text: None), scale.device), 2)
    first, *later = (seconds(partial(run_engine, engine, torch_dtype, samples, PROMPT, i * samples), scale.device)
                     for i in range(3))
    took = min(later)
    found |= {**rate(samples, scale.new_tokens, took, loops.get((model, dtype))),
              "cold_start_s": round(first - took, 3), "peak_gb": peak_gb(scale)}
    if "read_gb_s" in limits:
        least = bytes_a_step(shape, torch_dtype, samples, scale.new_tokens) / (1e9 * limits["read_gb_s"])
        found["share_of_bandwidth"] = round(least * scale.new_tokens / took, 3)
    return found


def time_product_attention(time_ours: Callable[[int], dict]) -> dict:
    """One sample, with attention as two matrix products instead of one kernel with a mask."""
    with patch.object(static_forward.F, "scaled_dot_product_attention", product_attention):
        return time_ours(1)


def product_attention(q: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None = None, **options) -> Tensor:
    """scaled_dot_product_attention of one query with a mask, which may use more multiprocessors if there are few rows.

    The prompt has no mask and many queries: it goes to torch.
    """
    if attn_mask is None or q.size(-2) > 1:
        return scaled_dot_product_attention(q, keys, values, attn_mask, **options)
    scores = q @ keys.mT * q.size(-1)**-0.5 + attn_mask # (B, H, 1, D) @ (B, H, D, S) -> (B, H, 1, S)
    return scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype) @ values


def time_plain_head(time_ours: Callable[[int], dict]) -> dict:
    """One sample, with a head whose size is no multiple of 64."""
    with patch.object(padded_head, "needs_padding", lambda head: False):
        return time_ours(1)


def time_exact(scale: Scale, model: str, dtype: str, loops: dict) -> dict:
    """exact=True: one sample after another. The second one captures graphs, the later ones replay them."""
    engine = make_engine(scale, scale.shapes[model], DTYPES[dtype], 1, scale.new_tokens, exact=True)
    reset_peak(scale)
    times = [seconds(partial(run_engine, engine, DTYPES[dtype], 1, PROMPT, i), scale.device) for i in range(4)]
    return {**rate(1, scale.new_tokens, min(times[2:]), loops.get((model, dtype))), "peak_gb": peak_gb(scale),
            "seconds_of_each_sample": [round(took, 3) for took in times]}


def time_hf(scale: Scale, model: str, samples: int, loops: dict, **how) -> dict:
    """Hugging Face's generate, all samples in one batch. how: cache_implementation="static", which it compiles."""
    import transformers
    shape = scale.shapes[model]
    set_nanogpt_flags() # the defaults of Hugging Face too, except for TF32
    sizes = {"n_positions": shape["block_size"], "bos_token_id": None, "eos_token_id": None,
             **{name: shape[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}}
    with scale.device:
        gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to(torch.bfloat16).eval()
    reset_peak(scale)
    idx = torch.tensor([PROMPT] * samples, device=scale.device)

    def run(new_tokens):
        gpt.generate(idx, attention_mask=torch.ones_like(idx), do_sample=True, temperature=TEMPERATURE, top_k=TOP_K,
                     eos_token_id=None, pad_token_id=0, max_new_tokens=new_tokens, **how)
    warm_up = scale.new_tokens if how else 8 # a static cache of another length would be compiled again
    first, took = (seconds(partial(run, tokens), scale.device) for tokens in (warm_up, scale.new_tokens))
    return {**rate(samples, scale.new_tokens, took, loops.get((model, "bfloat16"))),
            "warm_up_s": round(first, 3), "peak_gb": peak_gb(scale)}


def rate(samples: int, tokens: int, took: float, loop: float | None) -> dict:
    """Tokens a second, milliseconds a step, and the ratio to nanoGPT's loop if its rate is known."""
    tokens_per_second = samples * tokens / took
    ratio = {"times_the_loop": round(tokens_per_second / loop, 2)} if loop else {}
    return {"tokens_per_s": round(tokens_per_second, 1), "ms_a_step": round(1000 * took / tokens, 4), **ratio}


def bytes_a_step(shape: dict, dtype: torch.dtype, samples: int, new_tokens: int) -> float:
    """The least that a step must read: all weights, and the mean of the cache."""
    layers, width = shape["n_layer"], shape["n_embd"]
    weights = 12 * layers * width**2 + shape["vocab_size"] * width
    return dtype.itemsize * (weights + samples * 2 * layers * width * (len(PROMPT) + new_tokens / 2))


def reset_peak(scale: Scale) -> None:
    """Measure the peak of memory from here."""
    gc.collect() # what earlier cells left must not count
    if scale.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(scale.device)


def peak_gb(scale: Scale) -> float | None:
    """The peak of GPU memory since reset_peak."""
    return round(torch.cuda.max_memory_allocated(scale.device) / 2**30, 2) if scale.device.type == "cuda" else None
