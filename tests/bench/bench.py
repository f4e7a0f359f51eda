"""Compares the speed of sample.py with other programs. They run alternately; the results are
medians and ratios.

    pip install -r requirements.txt -r tests/bench/requirements.txt
    python tests/bench/bench.py [--rounds=N] [--only=PATTERN]
    python tests/bench/bench.py --against=FOLDER    # beside the sample.py of another checkout

llama.cpp takes part if llama-cpp-python is installed (its compilation takes minutes) and LLAMA_CPP
names the folder of llama.cpp's sources, which have the converter for models.

Writes a table to results/, named after the processor. gpu.py measures a GPU.
"""
import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from measure import (
    FULL,
    HERE,
    QUARTER,
    SCRIPT,
    SHORT,
    Case,
    contender,
    count,
    make_models,
    other,
    sample_py,
    score_py,
    timed,
)

FLOAT32 = "float32", "draft=False" # with a draft, for one sample, and without


def all_cases(folder):
    gpt2 = folder / "124M"
    large = folder / "10.6M"
    return [
        *gpt2_cases(gpt2, 1),
        *gpt2_cases(gpt2, 10),
        *our_cases("774M, 1 sample", folder / "774M", 1, (104, 232), [*FLOAT32, "int8"]),
        *busy_cases(gpt2),
        *character_cases(large),
        *score_cases("init_from", gpt2, (1, 4097), folder),
        *score_cases("out_dir", large, (1, 65537), folder),
        *threads_cases("124M int8", f"--init_from={gpt2}", 1, 1, (56, 312), dtype="int8"),
        *threads_cases("124M int8", f"--init_from={gpt2}", 10, 1, (56, 312), dtype="int8"),
        *threads_cases("124M float32", f"--init_from={gpt2}", 10, 1, (56, 312)),
        *threads_cases("10.6M float32", f"--out_dir={large}", 10, 6, (40, 248)),
    ]


def busy_cases(gpt2):
    row = "124M, 1 sample, a core busy"
    lengths = 104, 232
    source = f"--init_from={gpt2}"
    return [
        Case(row, "Hugging Face", other("transformers", gpt2, 1), (8, 40), 1, busy=1),
        Case(row, "CTranslate2 float32", other("ctranslate2", gpt2, 1), lengths, 1, busy=1),
        Case(row, "sample.py float32", sample_py(source, 1), lengths, 1, busy=1),
    ]


def character_cases(large):
    """The character model of 10.6M parameters, inside its window and past it."""
    row = "10.6M, 10 samples, inside the window"
    past = "10.6M, 10 samples, past the window"
    lengths = 8, 248
    converted = large / "transformers"
    source = f"--out_dir={large}"
    shifted = sample_py(source, 60, 10, start=FULL, more=["--context_shift"])
    return [
        Case(row, "nanoGPT's loop", other("nanogpt", large, 1), lengths, 1),
        Case(row, "Hugging Face", other("transformers", converted, 10), lengths, 10),
        Case(row, "CTranslate2 float32", other("ctranslate2", converted, 10), lengths, 10),
        Case(row, "CTranslate2 int8", other("int8", converted, 10), lengths, 10),
        Case(row, "sample.py float32", sample_py(source, 60, 10), (40, 248), 60),
        Case(past, "nanoGPT's loop", other("nanogpt", large, 1, FULL), (8, 72), 1),
        Case(past, "sample.py float32", sample_py(source, 10, start=QUARTER), (196, 236), 10),
        Case(past, "sample.py context_shift", shifted, (40, 244), 60),
    ]


def score_cases(source, model, lengths, folder):
    row = f"{model.name}, a long text scored"
    return [
        Case(row, "its products in F.linear alone", other("products", model, 1), lengths, 1),
        Case(row, "sample.py score", score_py(f"--{source}={model}", folder), lengths, 1),
    ]


def gpt2_cases(gpt2, samples):
    """GPT-2 124M, by all programs. llama.cpp's Python package generates one sample at a time."""
    row = f"124M, {count(samples)}"
    lengths = 56, 312
    settings = ["float32"]
    if samples == 1:
        lengths = 104, 360
        settings = [*FLOAT32]
    found = [
        Case(row, "nanoGPT's loop", other("nanogpt", gpt2, 1), (4, 44), 1),
        Case(row, "Hugging Face", other("transformers", gpt2, samples), (8, 136), samples),
        Case(row, "CTranslate2 float32", other("ctranslate2", gpt2, samples), lengths, samples),
        Case(row, "CTranslate2 int8", other("int8", gpt2, samples), lengths, samples),
    ]
    if "LLAMA_CPP" in os.environ and samples == 1:
        found += [
            Case(row, "llama.cpp float32", other("llama", gpt2, 1), lengths, 1),
            Case(row, "llama.cpp Q8_0", other("llama q8", gpt2, 1), lengths, 1),
        ]
    return found + our_cases(row, gpt2, samples, lengths, [*settings, "bfloat16", "int8"])


def our_cases(row, folder, samples, lengths, settings):
    """sample.py, in each of these dtypes, or in float32 without a draft."""
    found = []
    for setting in settings:
        arguments = {"more": [f"--{setting}"]} if "=" in setting else {"dtype": setting}
        command = sample_py(f"--init_from={folder}", samples, **arguments)
        found.append(Case(row, f"sample.py {setting}", command, lengths, samples))
    return found


def threads_cases(model, source, batch_size, num_batches, lengths, **settings):
    """sample.py with one and with two threads: see serial_parts."""
    samples = batch_size * num_batches
    command = sample_py(source, samples, batch_size, more=["--draft=False"], **settings)
    row = f"{model}, {count(batch_size)}, threads"
    return [Case(row, f"sample.py, {number} of 2 threads", command, lengths, samples,
                 threads=number, batch_size=batch_size) for number in (1, 2)]


def serial_parts(cases):
    """Lines of a table: the part of a decode step that a second thread does not halve, as in
    Amdahl's law.
    """
    lines = ["", "| serial part of a step | ms |", "|---|---:|"]
    threaded = [case for case in cases if case.threads]
    for one, two in zip(threaded[::2], threaded[1::2], strict=True):
        name = one.row.removesuffix(", threads")
        serial = 2 * two.step() - one.step()
        lines.append(f"| {name} | {serial:.1f} of {two.step():.1f} |")
    return lines


def whole_processes(folder):
    """The processes that are timed as a whole: (row, name, command)."""
    demo = f"--out_dir={SCRIPT.with_name('demo')}"
    checkpoint = folder / "124M checkpoint"
    row = "124M checkpoint with optimizer state, to the first token"
    return [
        (row, "nanoGPT's loop", other("load", checkpoint, 1)(1)),
        (row, "sample.py", sample_py(f"--out_dir={checkpoint}", 1)(1)),
        ("demo, to the first token", "import torch alone", [sys.executable, "-c", "import torch"]),
        ("demo, to the first token", "sample.py", sample_py(demo, 1)(1)),
        *default_runs("10.6M", folder / "10.6M"),
        *default_runs("0.8M", folder / "0.8M"),
    ]


def default_runs(model, folder):
    """What a user waits for without settings: ten samples of 500 tokens, past block_size."""
    row = f"{model}, default run (10 x 500)"
    return [
        (row, "nanoGPT's loop", other("nanogpt", folder, 10)(500)),
        (row, "sample.py", [sys.executable, SCRIPT, f"--out_dir={folder}", f"--start={SHORT}",
                            "--device=cpu"]),
    ]


def report(cases, processes, limits, rounds):
    """The table."""
    limits = [statistics.median(values) for values in zip(*limits, strict=True)]
    names = "torch", "transformers", "ctranslate2", "llama-cpp-python"
    modules = [name.removesuffix("-python").replace("-", "_") for name in names]
    packages = ", ".join(f"{name} {version(name)}"
                         for name, module in zip(names, modules, strict=True) if find_spec(module))
    measured = "one round" if rounds == 1 else f"medians of {rounds} rounds"
    lines = [
        f"{processor()}, {os.cpu_count()} cores; {packages}; {measured}. "
        f"Memory reads at {limits[0] / 1e9:,.0f} GB/s; "
        f"matrix products run at {limits[1] / 1e9:,.0f} GFLOP/s in float32.",
        "",
        "| | | tokens/s | x nanoGPT's loop | sample.py / this | peak memory |",
        "|---|---|---:|---:|---:|---:|",
    ]
    nanogpt = {case.row: case for case in cases if case.name == "nanoGPT's loop"}
    ours = {}
    for case in cases:
        if "sample.py" in case.name:
            ours.setdefault((case.row, is_8_bit(case)), case)
    for case in cases:
        rate = case.rate()
        cells = [case.row, case.name, f"{rate:.1f}" if rate < 9.95 else f"{rate:,.0f}"]
        loop = nanogpt.get(case.row)
        cells.append(f"{case.over(loop):.1f}" if loop else "")
        best = ours.get((case.row, is_8_bit(case)), case)
        cells.append(f"{best.over(case):.2f}" if best != case else "")
        cells.append(f"{statistics.median(case.memory):,.0f} MB")
        lines.append(f"| {' | '.join(cells)} |")
    lines += serial_parts(cases)
    if processes:
        lines += ["", "| whole process | | seconds | peak memory |", "|---|---|---:|---:|"]
    for row, name, measured in processes:
        seconds, memory = (statistics.median(values) for values in zip(*measured, strict=True))
        lines.append(f"| {row} | {name} | {seconds:.2f} | {memory:,.0f} MB |")
    return "\n".join(lines) + "\n"


def is_8_bit(case):
    return "8" in case.name


def processor():
    """The name of the processor and of its widest vectors, such as "AMD EPYC, AVX512"."""
    import torch
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    name = re.sub(r"\(\w+\)| Processor", "", found[1] if found else platform.processor()).strip()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def main():
    """Make the models, time all programs in turn for several rounds, and write the results."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="",
                        help="only rows that match this regular expression; nothing is written")
    parser.add_argument("--against", type=Path,
                        help="a checkout of another commit; nothing is written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_models(folder, ["124M", "774M", "10.6M", "0.8M"])
        cases = [case for case in all_cases(folder) if re.search(options.only, case.row)]
        if options.against:
            script = options.against.resolve() / "sample.py"
            ours = [case for case in cases if "sample.py" in case.name]
            cases = [one for case in ours for one in (case, case.of(script))]
        processes = [(row, name, command, []) for row, name, command in whole_processes(folder)
                     if re.search(options.only, row)]
        limits = []
        for i in range(options.rounds):
            print(f"round {i + 1} of {options.rounds}", file=sys.stderr, flush=True)
            for case in cases:
                case.run()
            for *_, command, measured in processes:
                measured.append(timed(command))
            printed = subprocess.check_output(contender("limits", folder), text=True)
            limits.append([float(number) for number in printed.split()])
            measured = [(row, name, times) for row, name, _, times in processes]
            table = report(cases, measured, limits, i + 1)
            print(table, flush=True) # of the rounds so far
    if not (options.only or options.against):
        name = re.sub(r"\W+", "-", processor().lower())
        (HERE / "results" / f"{name}.md").write_text(table)


if __name__ == "__main__":
    main()
