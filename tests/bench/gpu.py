"""Measures a GPU for sample.py within 400 seconds: the machine, whether logits and text are right, and the rates.

    python tests/bench/gpu.py [--seconds=385] [--only=TEXT] > results.jsonl
    python tests/bench/gpu.py --smoke    # small sizes, also without a GPU: shows only that the command works

The models are random, so nothing is downloaded. Each line is the result of one cell, printed at once. A cell that
fails, or takes too long, does not stop the others.
"""
import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import torch
from contenders import TEMPERATURE, TOP_K, nanogpt_loop
from gpu_cells import Report
from gpu_setup import SEED, Scale, make_engine, make_model, make_scale, run_engine
from measure import PROJECT, count

# measure.py has added the tests' folder to the path.
from oracles import nanogpt_generate
from sampling.backends.cuda_graphs import compare_logits
from sampling.backends.devices import autocast
from sampling.sampler.row_streams import draws_like_multinomial

ENDS = {"machine": 0.1, "logits": 0.3, "text": 0.45, "runs": 0.6, "rates": 1.0} # of sections, in shares of all time
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cells(scale: Scale) -> Iterator[tuple[str, str, Callable[[], dict], float]]:
    """Yield (section, name, function, limit in seconds) for each cell."""
    on_gpu, (small, *_) = scale.device.type == "cuda", scale.shapes
    shape = scale.shapes[small]
    yield "machine", "versions", partial(describe, scale), 15
    yield "machine", "limits", partial(measure_limits, scale), 20
    for name, dtype in DTYPES.items():
        for around in 0, -100:
            yield "logits", f"{name}, around {around}", partial(check_logits, scale, shape, dtype, around), 30
    for name, dtype in DTYPES.items():
        for past_window in False, True:
            for exact in False, True:
                title = f"{'exact' if exact else 'default'}, {name}, {'past' if past_window else 'inside'} the window"
                yield "text", title, partial(check_text, scale, shape, dtype, past_window, exact), 20
    demo = "sample.py", "--out_dir=out-shakespeare-char", f"--device={scale.device.type}", "--num_samples=3"
    yield "runs", "the demo", partial(run_program, 25, *demo, f"--max_new_tokens={2 * scale.new_tokens}"), 30
    if on_gpu:
        tests = "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "cuda", "tests/backends", "tests/generation"
        yield "runs", "tests", partial(run_program, 55, *tests), 60
        yield "runs", "out of memory", partial(check_out_of_memory, scale, shape), 20
    for dtype, models in ("bfloat16", [*scale.shapes]), ("float32", [small]):
        for model in models:
            name, where = f"{model}, {dtype}, {{}}, {{}}".format, (scale, scale.shapes[model], DTYPES[dtype])
            yield "rates", name("1 sample", "nanoGPT's loop"), partial(time_loop, *where), 40
            for samples in scale.samples:
                yield "rates", name(count(samples), "ours"), partial(time_ours, *where, samples), 25
                if dtype == "bfloat16" and find_spec("transformers"):
                    yield "rates", name(count(samples), "transformers"), partial(time_hf, *where, samples), 40
    for options in {"exact": True}, {"cuda_graphs": False}, *([{"compile": True}] if on_gpu else []):
        function = partial(time_ours, scale, shape, torch.bfloat16, 1, **options)
        yield "rates", f"{small}, bfloat16, 1 sample, {options}", function, 90 # a compiler takes a minute


# ---- the machine

def describe(scale: Scale) -> dict:
    """Versions, the GPU, and whether RowStreams draws the numbers of torch.multinomial."""
    packages = {name: version(name) for name in ("transformers", "triton") if find_spec(name)}
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda, **packages,
             "same_random_numbers": {size: draws_like_multinomial(scale.device, size) for size in (65, 50257, 50304)}}
    if scale.device.type == "cuda":
        command = "nvidia-smi --query-gpu=driver_version,clocks.sm,clocks.mem --format=csv,noheader"
        found |= {"gpu": str(torch.cuda.get_device_properties(scale.device)), "built_for": torch.cuda.get_arch_list(),
                  "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
                  "driver_and_clocks": subprocess.getoutput(command)}
    return found


def measure_limits(scale: Scale) -> dict:
    """How fast the GPU reads memory and multiplies matrices, and how many kernels are launched one by one."""
    def rate(work: float, function: Callable[[], object]) -> float:
        return round(work / min(seconds(function, scale.device) for _ in range(6)), 1)
    big, small = torch.ones(scale.read // 4, device=scale.device), torch.ones(1, device=scale.device)
    found = {"read_gb_s": rate(scale.read / 1e9, big.sum),
             "kernels_a_ms": rate(1, lambda: [small.add_(1) for _ in range(1000)])}
    for name, precision, dtype in [("bfloat16", "high", torch.bfloat16), ("tf32", "high", torch.float32),
                                   ("float32", "highest", torch.float32)]:
        torch.set_float32_matmul_precision(precision)
        a, b = (torch.randn(scale.matrix, scale.matrix, device=scale.device).to(dtype) for _ in range(2))
        found[f"{name}_tflop_s"] = rate(2 * scale.matrix**3 / 1e12, partial(torch.mm, a, b))
    return found


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """How long one call takes."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


# ---- logits and text

@torch.no_grad()
def check_logits(scale: Scale, shape: dict, dtype: torch.dtype, around: float) -> dict:
    """The errors of the logits of steps at these positions, whose graphs attend to several buckets, and of a full window.

    Beside it: the tolerance of SelfCheck, which must be larger; what a step at a wrong position gives, which must be
    larger than the tolerance; and the error against a forward pass without a cache.
    """
    messages, size = [], shape["block_size"]
    backend = make_engine(scale, shape, dtype, messages.append, logits_around=around).model.backend
    backend.checks.agree = lambda found, expected: True # go on, so that all errors are measured
    errors, worst, limits, wrong, uncached, num_graphs = {}, 0.0, [], [], [], 0
    with autocast(scale.device, dtype):
        for rows in scale.rows:
            ids = torch.randint(shape["vocab_size"], (rows, size), device=scale.device)
            cache, found = backend.new_cache(rows, size), {}
            for position in 5, 77, 128, 200, size // 2 + 3, size - 1: # some of them share a graph
                cache.seq_len, token = 0, ids[:, position:position + 1]
                backend.logits(ids[:, :position], cache)
                step = backend.logits(token, cache).clone()
                expected = backend.plain_logits(token, cache.kv, position)
                error, limit = compare_logits(step, expected)
                found[position] = error.max().item()
                limits.append(limit.min().item())
                uncached.append(compare_logits(step, backend.model(ids[:, :position + 1])[0][:, -1])[0].max().item())
                wrong_step = backend.plain_logits(token, cache.kv, position - 1)
                wrong.append(compare_logits(wrong_step, expected)[0].min().item())
            expected = backend.model(ids)[0][:, -1]
            found["window"] = compare_logits(backend.logits(ids, None), expected)[0].max().item()
            num_graphs += len(cache.graphs.graphs) + len(backend.window[1].graphs)
            errors[f"rows: {rows}"] = {name: f"{error:.1e}" for name, error in found.items()}
            worst = max(worst, *found.values())
    return {"ok": worst <= min(limits), "worst": f"{worst:.1e}", "tolerance": round(min(limits), 4),
            "least_wrong": f"{min(wrong):.1e}", "uncached": f"{max(uncached):.1e}", "errors": errors,
            "mean_logit": round(expected.float().mean().item(), 1), "graphs": num_graphs, "messages": messages}


def check_text(scale: Scale, shape: dict, dtype: torch.dtype, past_window: bool, exact: bool) -> dict:
    """Four samples beside those of nanoGPT's operations. They must be equal in float32, and with exact in any dtype."""
    messages, num_tokens = [], scale.checked_tokens
    length = shape["block_size"] - num_tokens // 2 if past_window else 3
    prompt = [7 * i % shape["vocab_size"] for i in range(length)]
    engine = make_engine(replace(scale, new_tokens=num_tokens), shape, dtype, messages.append, 1 if exact else 4,
                         exact=exact)
    found, backend = run_engine(engine, 4, prompt), engine.model.backend
    if exact:
        use_nanogpts_settings() # the other path uses no TF32
    model, idx = make_model(scale, shape), torch.tensor([prompt], device=scale.device)
    torch.manual_seed(SEED)
    with autocast(scale.device, dtype):
        expected = [nanogpt_generate(model, idx, num_tokens, TEMPERATURE, TOP_K)[0, length:].tolist() for _ in range(4)]
    first = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), None)
             for pair in zip(found, expected, strict=True)]
    return {"equal": f"{first.count(None)} of 4", "first_differences": first,
            "graphs": 0 if exact else len(backend.idle.graphs.graphs), "messages": messages}


def use_nanogpts_settings() -> None:
    """Allow TF32 as nanoGPT does, and cuDNN's attention, which CUDABackend switches off."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(True)


# ---- runs

def run_program(limit: float, *arguments: str) -> dict:
    """How a Python program ends, in the project's folder. limit: in seconds."""
    done = subprocess.run([sys.executable, *arguments], cwd=PROJECT, capture_output=True, text=True, timeout=limit)
    return {"status": done.returncode, "stdout": done.stdout[-400:], "stderr": done.stderr[-400:]}


def check_out_of_memory(scale: Scale, shape: dict) -> dict:
    """Whether a run goes on with smaller batches, and gives all samples, if memory runs out."""
    messages = []
    engine = make_engine(replace(scale, new_tokens=300), shape, torch.bfloat16, messages.append, batch_size=64)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(scale.device).total_memory
    room = torch.cuda.memory_reserved() + 64 * engine.model.backend.bytes_per_row(301) // 3
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / total))
    try:
        samples = run_engine(engine, 64, [1])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return {"samples": len(samples), "batch_size_at_the_end": engine.batch_size, "messages": messages}


# ---- rates

def time_loop(scale: Scale, shape: dict, dtype: torch.dtype) -> dict:
    """nanoGPT's loop, one sample."""
    gpt, idx = make_model(scale, shape), torch.tensor([[1]], device=scale.device)
    use_nanogpts_settings()
    with autocast(scale.device, dtype):
        return measure(scale, 1, lambda: nanogpt_loop(gpt, idx, scale.new_tokens))


def time_ours(scale: Scale, shape: dict, dtype: torch.dtype, samples: int, **options) -> dict:
    """The engine of sample.py, all samples in one batch. Its first run captures the graphs."""
    messages = []
    engine = make_engine(scale, shape, dtype, messages.append, samples, **options)
    estimate = samples * engine.model.backend.bytes_per_row(1 + scale.new_tokens) # beside the weights
    found = measure(scale, samples, lambda: run_engine(engine, samples, [1]))
    return {**found, "estimate_gb": round(estimate / 1e9, 2), "messages": messages}


def time_hf(scale: Scale, shape: dict, dtype: torch.dtype, samples: int) -> dict:
    """Hugging Face's generate with its KV cache, all samples in one batch."""
    import transformers
    use_nanogpts_settings()
    sizes = {"n_positions": shape["block_size"], "bos_token_id": None, "eos_token_id": None,
             **{name: shape[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}}
    with scale.device:
        gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to(dtype).eval()
    idx = torch.ones(samples, 1, dtype=torch.long, device=scale.device)
    return measure(scale, samples, lambda: gpt.generate(
        idx, attention_mask=torch.ones_like(idx), do_sample=True, temperature=TEMPERATURE, top_k=TOP_K,
        eos_token_id=None, pad_token_id=0, max_new_tokens=scale.new_tokens))


def measure(scale: Scale, samples: int, run: Callable[[], object]) -> dict:
    """The rate at which run generates these samples, after a run that warms up, and the memory that it takes."""
    if on_gpu := scale.device.type == "cuda":
        torch.cuda.empty_cache() # of what made the model
        torch.cuda.reset_peak_memory_stats(scale.device)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    first, took = (seconds(run, scale.device) for _ in range(2))
    peak = torch.cuda.max_memory_reserved() if on_gpu else 0
    return {"tokens_per_s": round(samples * scale.new_tokens / took, 1), "first_run_s": round(first, 2),
            "ms_a_step": round(1000 * took / scale.new_tokens, 4), "weights_gb": round(before / 1e9, 2),
            "peak_gb": round(peak / 1e9, 2)}


def main() -> None:
    """Run all cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=385) # and the imports
    parser.add_argument("--only", default="", help="only cells with this text in 'section: name'")
    parser.add_argument("--smoke", action="store_true", help="small sizes; always so without a GPU")
    options = parser.parse_args()
    report, is_small = Report(), options.smoke or not torch.cuda.is_available()
    for section, name, function, limit in cells(make_scale(is_small)):
        if options.only in f"{section}: {name}":
            report.cell(section, name, function, limit, ENDS[section] * options.seconds)
    report.close()


if __name__ == "__main__":
    main()
