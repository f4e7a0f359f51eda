"""The timings of gpu.py: sample.py, nanoGPT's loop, and Hugging Face's generate, with the same random models."""
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import torch
from gpu_setup import (
    DTYPES,
    TEMPERATURE,
    TOP_K,
    Scale,
    autocast,
    make_engine,
    make_model,
    plain_loop,
    run_engine,
    seconds,
    set_nanogpt_flags,
)

from sampling.backends.prepare import warm_up_compile

PROMPT = [1]
LOOP_SECONDS = 6 # nanoGPT's loop stops after this time: its rate is known by then


def timing_cells(scale: Scale, limits: dict) -> Iterator:
    """Yield (name, function, limit in seconds) for each timing, the most important ones first.

    limits: the rates of the machine, if they are known.
    """
    loops = {} # (model, dtype) -> tokens/s of nanoGPT's loop
    for dtype in "bfloat16", "float32":
        for model in scale.shapes:
            where = scale, model, dtype
            yield f"{model}, 1 sample, {dtype}, nanoGPT's loop", partial(time_loop, *where, loops), 15
            for samples in scale.samples:
                ours = partial(time_ours, *where, samples, limits, loops)
                yield f"{model}, {named(samples)}, {dtype}, ours", ours, 25
            streaming = partial(time_ours, *where, 1, limits, loops, stream=True)
            yield f"{model}, 1 sample, {dtype}, streaming", streaming, 15
            yield f"{model}, 5 samples, {dtype}, exact", partial(time_exact, *where, loops), 30
    if find_spec("transformers"):
        for model in scale.shapes:
            for samples in scale.samples:
                hugging_face = partial(time_hf, scale, model, samples, loops)
                yield f"{model}, {named(samples)}, bfloat16, Hugging Face", hugging_face, 30
    if scale.compiles: # compilers take minutes, so they come last
        for samples in scale.samples[:2]:
            model = next(iter(scale.shapes))
            yield (f"{model}, {named(samples)}, bfloat16, ours compiled",
                   partial(time_ours, scale, model, "bfloat16", samples, limits, loops, compile=True), 60)
            if find_spec("transformers"):
                yield (f"{model}, {named(samples)}, bfloat16, Hugging Face static and compiled",
                       partial(time_hf, scale, model, samples, loops, cache_implementation="static"), 60)


def named(samples: int) -> str:
    """Such as "1 sample" or "10 samples"."""
    return f"{samples} sample{'s' * (samples > 1)}"


def time_loop(scale: Scale, model: str, dtype: str, loops: dict) -> dict:
    """nanoGPT's own loop, one sample."""
    gpt, idx = make_model(scale, scale.shapes[model]), torch.tensor([PROMPT], device=scale.device)
    set_nanogpt_flags()
    with autocast(scale.device, DTYPES[dtype]):
        plain_loop(gpt, idx, 3)
        end, found = time.perf_counter() + LOOP_SECONDS, []
        took = seconds(lambda: found.append(
            plain_loop(gpt, idx, scale.new_tokens, lambda: time.perf_counter() < end)), scale.device)
    tokens = found[0].size(1) - len(PROMPT)
    loops[model, dtype] = tokens / took
    return {"tokens": tokens, **rate(1, tokens, took, None)}


def time_ours(scale: Scale, model: str, dtype: str, samples: int, limits: dict, loops: dict,
              stream: bool = False, compile: bool = False) -> dict:
    """The engine of sample.py: the first run, which also captures the graphs, and a later one."""
    shape, found = scale.shapes[model], {}
    torch_dtype = DTYPES[dtype]
    reset_peak(scale)
    engine = make_engine(scale, shape, torch_dtype, samples, scale.new_tokens, stream, compile=compile)
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


def time_exact(scale: Scale, model: str, dtype: str, loops: dict) -> dict:
    """exact=True: one sample after another. The second one captures graphs, the later ones replay them."""
    reset_peak(scale)
    engine = make_engine(scale, scale.shapes[model], DTYPES[dtype], 1, scale.new_tokens, exact=True)
    times = [seconds(partial(run_engine, engine, DTYPES[dtype], 1, PROMPT, i), scale.device) for i in range(5)]
    return {**rate(1, scale.new_tokens, min(times[2:]), loops.get((model, dtype))), "peak_gb": peak_gb(scale),
            "seconds_of_each_sample": [round(took, 3) for took in times]}


def time_hf(scale: Scale, model: str, samples: int, loops: dict, **how) -> dict:
    """Hugging Face's generate, all samples in one batch. how: cache_implementation="static", which it compiles."""
    import transformers
    shape = scale.shapes[model]
    set_nanogpt_flags() # the defaults of Hugging Face too, except for TF32
    sizes = {"n_positions": shape["block_size"], "bos_token_id": None, "eos_token_id": None,
             **{name: shape[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}}
    reset_peak(scale)
    with scale.device:
        gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to(torch.bfloat16).eval()
    idx = torch.tensor([PROMPT] * samples, device=scale.device)

    def run():
        gpt.generate(idx, attention_mask=torch.ones_like(idx), do_sample=True, temperature=TEMPERATURE, top_k=TOP_K,
                     eos_token_id=None, pad_token_id=0, max_new_tokens=scale.new_tokens, **how)
    first, took = seconds(run, scale.device), seconds(run, scale.device)
    return {**rate(samples, scale.new_tokens, took, loops.get((model, "bfloat16"))),
            "cold_start_s": round(first - took, 3), "peak_gb": peak_gb(scale)}


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
    if scale.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(scale.device)


def peak_gb(scale: Scale) -> float | None:
    """The peak of GPU memory since reset_peak."""
    return round(torch.cuda.max_memory_allocated(scale.device) / 2**30, 2) if scale.device.type == "cuda" else None
