"""Compares the speed of sample.py with other programs. They run alternately; the results are medians and ratios.

    pip install -r requirements.txt -r tests/bench/requirements.txt
    python tests/bench/bench.py [--rounds=N] [--only=PATTERN]
    python tests/bench/bench.py --against=FOLDER    # sample.py alone, beside that of another commit, a checkout

llama.cpp takes part if llama-cpp-python is installed (its compilation takes minutes) and LLAMA_CPP names the folder of
llama.cpp's sources, which have the converter for models.

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

from measure import FULL, HERE, PROJECT, QUARTER, Case, contender, count, make_models, other, sample_py, score_py, timed


def all_cases(folder):
    gpt2, gpt2_large, large, small = (folder / name for name in ("124M", "774M", "10.6M", "0.8M"))
    found = [*gpt2_cases(gpt2, 1), *gpt2_cases(gpt2, 10),
             *our_cases("774M, 1 sample", gpt2_large, 1, (8, 264), ("float32", "draft=False", "int8"))]
    row = "124M, 1 sample, a core busy"
    found += [
        Case(row, "Hugging Face", other("transformers", gpt2, 1), (8, 40), 1, busy=1),
        Case(row, "CTranslate2 float32", other("ctranslate2", gpt2, 1), (32, 160), 1, busy=1),
        Case(row, "sample.py float32", sample_py(f"--init_from={gpt2}", 1), (32, 160), 1, busy=1),
    ]
    row, lengths, converted = "10.6M, 10 samples, inside the window", (8, 248), large / "transformers"
    found += [
        Case(row, "nanoGPT's loop", other("nanogpt", large, 1), lengths, 1),
        Case(row, "Hugging Face", other("transformers", converted, 10), lengths, 10),
        Case(row, "CTranslate2 float32", other("ctranslate2", converted, 10), lengths, 10),
        Case(row, "CTranslate2 int8", other("int8", converted, 10), lengths, 10),
        Case(row, "sample.py float32", sample_py(f"--out_dir={large}", 60, 10), (40, 248), 60),
    ]
    row, shift = "10.6M, 10 samples, past the window", ["--context_shift"]
    found += [
        Case(row, "nanoGPT's loop", other("nanogpt", large, 1, FULL), (8, 72), 1),
        Case(row, "sample.py float32", sample_py(f"--out_dir={large}", 10, start=QUARTER), (196, 236), 10),
        Case(row, "sample.py context_shift", sample_py(f"--out_dir={large}", 60, 10, start=FULL, more=shift), (40, 244),
             60),
    ]
    for source, model, lengths in ("init_from", gpt2, (1, 4097)), ("out_dir", large, (1, 65537)):
        row = f"{model.name}, a long text scored"
        found += [Case(row, "its products in F.linear alone", other("products", model, 1), lengths, 1),
                  Case(row, "sample.py score", score_py(f"--{source}={model}", folder), lengths, 1)]
    found += [*threads_cases("124M int8", f"--init_from={gpt2}", 1, (32, 160), dtype="int8"),
              *threads_cases("124M int8", f"--init_from={gpt2}", 10, (32, 160), dtype="int8"),
              *threads_cases("124M float32", f"--init_from={gpt2}", 10, (32, 160)),
              *threads_cases("10.6M float32", f"--out_dir={large}", 10, (8, 248))]
    row = "0.8M, the default run of 10 x 500"
    return [
        *found,
        Case(row, "nanoGPT's loop", other("nanogpt", small, 10), (0, 500), 10),
        Case(row, "sample.py float32", sample_py(f"--out_dir={small}", 10), (0, 500), 10),
    ]


def gpt2_cases(gpt2, samples):
    """GPT-2 124M, by all programs. llama.cpp's Python package generates one sample at a time."""
    row, lengths = f"124M, {count(samples)}", (32, 288)
    found = [
        Case(row, "nanoGPT's loop", other("nanogpt", gpt2, 1), (4, 44), 1),
        Case(row, "Hugging Face", other("transformers", gpt2, samples), (8, 136), samples),
        Case(row, "CTranslate2 float32", other("ctranslate2", gpt2, samples), lengths, samples),
        Case(row, "CTranslate2 int8", other("int8", gpt2, samples), lengths, samples),
    ]
    if "LLAMA_CPP" in os.environ and samples == 1:
        found += [Case(row, "llama.cpp float32", other("llama", gpt2, 1), lengths, 1),
                  Case(row, "llama.cpp Q8_0", other("llama q8", gpt2, 1), lengths, 1)]
    drafts = ["draft=False"] if samples == 1 else []
    return found + our_cases(row, gpt2, samples, lengths, ["float32", *drafts, "bfloat16", "int8"])


def our_cases(row, folder, samples, lengths, settings):
    """sample.py, in each of these dtypes, or in float32 without a draft."""
    arguments = {setting: {"more": [f"--{setting}"]} if "=" in setting else {"dtype": setting} for setting in settings}
    return [Case(row, f"sample.py {setting}", sample_py(f"--init_from={folder}", samples, **more), lengths, samples)
            for setting, more in arguments.items()]


def threads_cases(model, source, samples, lengths, **settings):
    """sample.py with one and with two threads: see serial_parts."""
    command = sample_py(source, samples, more=["--draft=False"], **settings)
    return [Case(f"{model}, {count(samples)}, threads", f"sample.py, {num_threads} of 2 threads", command, lengths,
                 samples, threads=num_threads) for num_threads in (1, 2)]


def serial_parts(cases):
    """Lines of a table: the part of a decode step that a second thread does not halve, as in Amdahl's law."""
    lines = ["", "| serial part of a step | ms |", "|---|---:|"]
    threaded = [case for case in cases if case.threads]
    for one, two in zip(threaded[::2], threaded[1::2], strict=True):
        lines.append(f"| {one.row.removesuffix(', threads')} | {2 * two.step() - one.step():.1f} of {two.step():.1f} |")
    return lines


def whole_processes(folder):
    """The processes that are timed as a whole: (row, name, command)."""
    demo, checkpoint = f"--out_dir={PROJECT / 'demo'}", folder / "124M checkpoint"
    row = "124M checkpoint with optimizer state, to the first token"
    return [
        (row, "nanoGPT's loop", other("load", checkpoint, 1)(1)),
        (row, "sample.py", sample_py(f"--out_dir={checkpoint}", 1)(1)),
        ("demo, to the first token", "import torch alone", [sys.executable, "-c", "import torch"]),
        ("demo, to the first token", "sample.py", sample_py(demo, 1)(1)),
        ("demo, default run (10 x 500)", "sample.py", sample_py(demo, 10, start="\n")(500)),
    ]


def report(cases, processes, limits, rounds):
    """The table."""
    limits = [statistics.median(values) for values in zip(*limits, strict=True)]
    modules = {"torch": "torch", "transformers": "transformers", "ctranslate2": "ctranslate2",
               "llama-cpp-python": "llama_cpp"}
    packages = ", ".join(f"{name} {version(name)}" for name, module in modules.items() if find_spec(module))
    measured = "one round" if rounds == 1 else f"medians of {rounds} rounds"
    lines = [f"{processor()}, {os.cpu_count()} cores; {packages}; {measured}. "
             f"Memory reads at {limits[0] / 1e9:,.0f} GB/s; "
             f"matrix products run at {limits[1] / 1e9:,.0f} GFLOP/s in float32.", "",
             "| | | tokens/s | x nanoGPT's loop | sample.py / this | peak memory |", "|---|---|---:|---:|---:|---:|"]
    nanogpt = {case.row: case for case in cases if case.name == "nanoGPT's loop"}
    for case in cases:
        ours = next((c for c in cases if (c.row, is_8_bit(c)) == (case.row, is_8_bit(case)) and "sample.py" in c.name),
                    case)
        rate = case.rate()
        cells = [case.row, case.name, f"{rate:.1f}" if rate < 9.95 else f"{rate:,.0f}",
                 f"{case.over(nanogpt[case.row]):.1f}" if case.row in nanogpt else "",
                 f"{ours.over(case):.2f}" if ours != case else "", f"{statistics.median(case.memory):,.0f} MB"]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only rows that match this regular expression; nothing is written")
    parser.add_argument("--against", type=Path, help="a checkout of another commit; nothing is written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_models(folder, ["124M", "774M", "10.6M", "0.8M"])
        cases, limits = [case for case in all_cases(folder) if re.search(options.only, case.row)], []
        if options.against:
            other_script = options.against.resolve() / "sample.py"
            cases = [one for case in cases if "sample.py" in case.name for one in (case, case.of(other_script))]
        processes = [(row, name, command, []) for row, name, command in whole_processes(folder)
                     if re.search(options.only, row)]
        for i in range(options.rounds):
            print(f"round {i + 1} of {options.rounds}", file=sys.stderr, flush=True)
            for case in cases:
                case.run()
            for *_, command, measured in processes:
                measured.append(timed(command))
            printed = subprocess.run(contender("limits", folder), check=True, capture_output=True, text=True)
            limits.append([float(number) for number in printed.stdout.split()])
        table = report(cases, [(row, name, measured) for row, name, _, measured in processes], limits, options.rounds)
    print(table)
    if not (options.only or options.against):
        name = re.sub(r"\W+", "-", processor().lower())
        (HERE / "results" / f"{name}.md").write_text(table)


if __name__ == "__main__":
    main()
