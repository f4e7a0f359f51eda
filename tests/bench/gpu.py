"""Measures sample.py on a GPU within 400 seconds: the machine, whether the text is right, how fast it is, and why.

    python tests/bench/gpu.py [--seconds=385] [--only=TEXT] [--skip=TEXT] > results.jsonl
    python tests/bench/gpu.py --smoke    # small sizes, also without a GPU: shows only that the command works

Sections: the machine; checks of random numbers, logits, CUDA graphs, --exact, batch sizes and memory; timings of 124M
and XL with 1, 10 and 100 samples, beside nanoGPT's loop and Hugging Face; the kernels of a step.
The models are random, so nothing is downloaded. Each line is one result, printed at once. A cell whose section has no
time left is skipped, and says so. No cell can stop the others.
"""
import argparse
import os
import platform
from functools import partial
from importlib.metadata import PackageNotFoundError, version

os.environ.update(TEARDOWN_CUPTI="0", DISABLE_CUPTI_LAZY_REINIT="1") # CUPTI may crash if it ends while there are graphs
import torch
from gpu_checks import check_cells
from gpu_setup import DTYPES, Report, Scale, make_engine, make_scale, run_engine, seconds, set_nanogpt_flags
from gpu_timings import timing_cells
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Each section ends at this share of the total time. A section that needs less leaves the rest to the later ones.
ENDS = {"machine": 0.04, "checks": 0.45, "timings": 0.95, "kernels": 1.0}


# ---- the machine

def describe(scale: Scale) -> dict:
    """Versions, and the GPU."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
             "device": str(scale.device)}
    for package in "transformers", "triton":
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if scale.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(scale.device)
        found |= {"gpu": gpu.name, "memory_gb": round(gpu.total_memory / 2**30, 1),
                  "multiprocessors": gpu.multi_processor_count}
    return found


def bandwidth(scale: Scale) -> float:
    """Bytes a second, from reading a tensor that is larger than the caches."""
    big = torch.ones(scale.read // 4, device=scale.device)
    return scale.read / min(seconds(big.sum, scale.device) for _ in range(6))


def matrix_rate(scale: Scale, dtype: torch.dtype) -> float:
    """FLOP/s of a product of two matrices; in float32 with TF32."""
    set_nanogpt_flags()
    a, b = (torch.randn(scale.matrix, scale.matrix, device=scale.device).to(dtype) for _ in range(2))
    return 2 * scale.matrix**3 / min(seconds(partial(torch.mm, a, b), scale.device) for _ in range(6))


def rates(scale: Scale) -> dict:
    """The machine's limits."""
    return {"read_gb_s": round(bandwidth(scale) / 1e9, 1),
            "bfloat16_tflop_s": round(matrix_rate(scale, torch.bfloat16) / 1e12, 2),
            "tf32_tflop_s": round(matrix_rate(scale, torch.float32) / 1e12, 2)}


# ---- kernels

def kernels(scale: Scale, shape: dict, dtype: torch.dtype, batch_size: int) -> dict:
    """The kernels of a step, the five that take longest, and how long the device is idle."""
    steps = scale.new_tokens
    engine = make_engine(scale, shape, dtype, batch_size, steps)
    # The first run warms up, and the second captures what is left.
    runs = [partial(run_engine, engine, dtype, batch_size, [1], i * batch_size) for i in range(4)]
    wall = [seconds(run, scale.device) for run in runs[:3]][-1] # without the profiler, which takes time itself
    on_gpu = scale.device.type == "cuda"
    activity, device = (ProfilerActivity.CUDA, DeviceType.CUDA) if on_gpu else (ProfilerActivity.CPU, DeviceType.CPU)
    with profile(activities=[activity]) as profiler:
        seconds(runs[3], scale.device)
    times = {}
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds > 0 and event.device_type == device: # not the calls that launch kernels
            times[event.key] = (microseconds, event.count)
    busy = sum(microseconds for microseconds, _ in times.values()) / 1e6
    longest = sorted(times.items(), key=lambda item: -item[1][0])[:5]
    return {"kernels_a_step": round(sum(count for _, count in times.values()) / steps, 1),
            "ms_a_step": round(1000 * wall / steps, 4), "idle_share": round(1 - busy / wall, 3),
            "longest": [{"name": name[:80], "us_a_step": round(microseconds / steps, 2),
                         "calls_a_step": round(count / steps, 2)}
                        for name, (microseconds, count) in longest]}


def kernel_cells(scale: Scale):
    """Yield (name, function, limit in seconds) for each cell."""
    for name, shape in scale.shapes.items():
        for batch_size in scale.samples[:2]:
            function = partial(kernels, scale, shape, DTYPES["bfloat16"], batch_size)
            yield f"{name}, {batch_size} at once, bfloat16", function, 20


def main() -> None:
    """Run all cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=385) # and the imports
    parser.add_argument("--only", default="", help="only cells with this text in 'section: name'")
    parser.add_argument("--skip", help="no cells with this text in 'section: name'")
    parser.add_argument("--smoke", action="store_true", help="small sizes; always so without a GPU")
    options = parser.parse_args()
    scale = make_scale(options.smoke or not torch.cuda.is_available())
    report, limits = Report(options.seconds), {}

    def measure_rates() -> dict:
        limits.update(rates(scale))
        return dict(limits)
    sections = {
        "machine": [("versions", partial(describe, scale), 10), ("rates", measure_rates, 20)],
        "checks": check_cells(scale), "timings": timing_cells(scale, limits), "kernels": kernel_cells(scale),
    }
    for section, cells in sections.items():
        report.begin(section, ENDS[section])
        for name, function, limit in cells:
            label = f"{section}: {name}"
            if options.only in label and not (options.skip and options.skip in label):
                report.cell(name, function, limit)


if __name__ == "__main__":
    main()
