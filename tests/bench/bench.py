"""Compares the speed of sample.py with other programs. They run alternately; the results are medians and ratios.

    pip install -r requirements.txt -r tests/bench/requirements.txt
    python tests/bench/bench.py [--device=cuda] [--rounds=N] [--quick] [--only=TEXT] [--suffix=TEXT]

llama.cpp takes part if llama-cpp-python is installed (its compilation takes minutes) and LLAMA_CPP names the folder of
llama.cpp's sources, which have the converter for models.

Writes RESULTS.md and chart.svg beside this file, with a suffix if one is given; for a GPU it is -cuda.
"""
import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import FULL, HERE, PROJECT, SHORT, Case, contender, count, make_models, other, sample_py, timed
from report import draw_chart, report


def cpu_cases(folder, quick):
    """All cases of the table for a CPU, in order."""
    found = [*gpt2_cases(folder / "124M", (1,) if quick else (1, 10))]
    if not quick:
        found += gpt2_large_cases(folder / "774M")
    return [*found, *busy_cases(folder / "124M"), *character_cases(folder / "10.6M", folder / "0.8M")]


def gpt2_cases(gpt2, batch_sizes):
    """GPT-2 124M, by all programs."""
    found = []
    for samples in batch_sizes:
        row, lengths = f"124M, {count(samples)}", (8, 264)
        found += [
            Case(row, "nanoGPT's loop", other("nanogpt", gpt2, 1), (4, 44), 1),
            Case(row, "Hugging Face", other("transformers", gpt2, samples), (8, 136), samples),
            Case(row, "CTranslate2 float32", other("ctranslate2", gpt2, samples), lengths, samples),
            Case(row, "CTranslate2 int8", other("int8", gpt2, samples), lengths, samples),
            *llama_cases(row, gpt2, samples, lengths),
            Case(row, "sample.py float32", sample_py(f"--init_from={gpt2}", samples), lengths, samples),
            Case(row, "sample.py bfloat16", sample_py(f"--init_from={gpt2}", samples, dtype="bfloat16"), lengths, samples),
            Case(row, "sample.py int8", sample_py(f"--init_from={gpt2}", samples, dtype="int8"), lengths, samples),
        ]
        if samples == 1:
            found.append(draft_case(row, gpt2, lengths))
    return found


def gpt2_large_cases(source):
    """GPT-2 774M, by sample.py."""
    row, lengths = "774M, 1 sample", (8, 264)
    return [
        Case(row, "sample.py float32", sample_py(f"--init_from={source}", 1), lengths, 1),
        Case(row, "sample.py int8", sample_py(f"--init_from={source}", 1, dtype="int8"), lengths, 1),
        draft_case(row, source, lengths),
    ]


def busy_cases(gpt2):
    """GPT-2 124M, while another program uses one core."""
    row = "124M, 1 sample, a core busy"
    return [
        Case(row, "Hugging Face", other("transformers", gpt2, 1), (8, 40), 1, busy=1),
        Case(row, "CTranslate2 float32", other("ctranslate2", gpt2, 1), (8, 136), 1, busy=1),
        Case(row, "sample.py float32", sample_py(f"--init_from={gpt2}", 1), (8, 136), 1, busy=1),
    ]


def character_cases(large, small):
    """The two character models."""
    row = "10.6M, 10 samples, inside the window"
    found = [
        Case(row, "nanoGPT's loop", other("nanogpt", large, 1), (8, 248), 1),
        Case(row, "Hugging Face", other("transformers", large / "transformers", 10), (8, 248), 10),
        Case(row, "CTranslate2 float32", other("ctranslate2", large / "transformers", 10), (8, 248), 10),
        Case(row, "CTranslate2 int8", other("int8", large / "transformers", 10), (8, 248), 10),
        Case(row, "sample.py float32", sample_py(f"--out_dir={large}", 60, 10), (8, 248), 60, batch_size=10),
    ]
    row = "10.6M, 10 samples, past the window"
    found += [
        Case(row, "nanoGPT's loop", other("nanogpt", large, 1, FULL), (8, 72), 1),
        Case(row, "sample.py float32", sample_py(f"--out_dir={large}", 10, start=FULL), (4, 44), 10, prompt=256),
        Case(row, "sample.py context_shift", sample_py(f"--out_dir={large}", 60, 10, start=FULL, more=["--context_shift"]),
             (4, 244), 60, batch_size=10, prompt=256),
    ]
    row = "0.8M, the default run of 10 x 500"
    found += [
        Case(row, "nanoGPT's loop", other("nanogpt", small, 10), (0, 500), 10),
        Case(row, "sample.py float32", sample_py(f"--out_dir={small}", 10), (0, 500), 10),
    ]
    return found


def draft_case(row, folder, lengths):
    """sample.py in float32, with an int8 copy of the model as its draft."""
    return Case(row, "sample.py draft=int8", sample_py(f"--init_from={folder}", 1, more=["--draft=int8"]), lengths, 1)


def llama_cases(row, folder, samples, lengths):
    """llama.cpp, if it is installed. Its Python package generates one sample at a time."""
    if "LLAMA_CPP" not in os.environ or samples > 1:
        return []
    return [Case(row, "llama.cpp float32", other("llama", folder, 1), lengths, 1),
            Case(row, "llama.cpp Q8_0", other("llama q8", folder, 1), lengths, 1)]


def cuda_cases(folder, quick):
    """All cases of the table for a GPU, in order. They have not run on a GPU yet."""
    found = []
    for name, sizes in ("124M", (1, 10, 100)), ("XL", (1, 10)):
        for samples in sizes[:1] if quick else sizes:
            row, source = f"{name}, {count(samples)}", folder / name
            compiled = name == "124M" and samples < 100 # each compilation takes minutes
            others = [("Hugging Face", "transformers"), ("Hugging Face static", "static")][:1 + compiled]
            found += [Case(row, "nanoGPT's loop", other("nanogpt", source, 1, device="cuda"), (8, 508), 1)]
            found += [Case(row, label, other(program, source, samples, device="cuda"), (8, 264), samples)
                      for label, program in others]
            modes = [("float32", []), ("bfloat16", []), ("bfloat16 compile", ["--compile"])][:2 + compiled]
            many = samples * (40 if compiled else 8) # so that the two lengths differ by seconds
            for mode, more in modes:
                command = sample_py(f"--init_from={source}", many, samples, mode.split()[0], device="cuda", more=more)
                # Both lengths need the same number of graphs, so the time to capture them also cancels.
                found.append(Case(row, f"sample.py {mode}", command, (392, 508), many, batch_size=samples))
    large = folder / "10.6M"
    for start, where in (SHORT, "inside"), (FULL, "past"):
        row, lengths = f"10.6M, 10 samples, {where} the window", (8, 248)
        command = sample_py(f"--out_dir={large}", 100, 10, "bfloat16", start, "cuda")
        found += [
            Case(row, "nanoGPT's loop", other("nanogpt", large, 1, start, "cuda"), lengths, 1),
            Case(row, "sample.py bfloat16", command, lengths, 100, batch_size=10, prompt=len(start)),
        ]
    return found


def whole_processes(folder, device):
    """The processes that are timed as a whole: (row, name, command)."""
    demo, checkpoint = f"--out_dir={PROJECT / 'out-shakespeare-char'}", folder / "124M checkpoint"
    row = "124M checkpoint with optimizer state, to the first token"
    return [
        (row, "nanoGPT's loop", other("load", checkpoint, 1, device=device)(1)),
        (row, "sample.py", sample_py(f"--out_dir={checkpoint}", 1, device=device)(1)),
        ("demo, to the first token", "import torch alone", [sys.executable, "-c", "import torch"]),
        ("demo, to the first token", "sample.py", sample_py(demo, 1, device=device)(1)),
        ("demo, default run (10 x 500)", "sample.py", sample_py(demo, 10, start="\n", device=device)(500)),
    ]


def main():
    """Make the models, time all programs in turn for several rounds, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round, fewer rows, nothing is written")
    parser.add_argument("--only", default="", help="only rows with this text in their name, nothing is written")
    parser.add_argument("--suffix", help="added to the names of the files, for the results of another machine")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        large = {"cpu": [] if options.quick else ["774M"], "cuda": ["XL"]}[options.device]
        make_models(folder, ["124M", *large, "10.6M", *(["0.8M"] if options.device == "cpu" else [])])
        all_cases = cpu_cases if options.device == "cpu" else cuda_cases
        cases, limits = [case for case in all_cases(folder, options.quick) if options.only in case.row], []
        processes = [(row, name, command, []) for row, name, command in whole_processes(folder, options.device)
                   if options.only in row]
        for i in range(rounds):
            print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
            for case in cases:
                case.run()
            for *_, command, measured in processes:
                measured.append(timed(command))
            printed = subprocess.run(contender("limits", folder, options.device), check=True, capture_output=True, text=True)
            limits.append([float(number) for number in printed.stdout.split()])
        table = report(cases, [(row, name, measured) for row, name, _, measured in processes], limits, rounds, options.device)
    print(table)
    if not (options.quick or options.only):
        suffix = options.suffix or ("" if options.device == "cpu" else f"-{options.device}")
        (HERE / f"RESULTS{suffix}.md").write_text(table)
        draw_chart(cases, HERE / f"chart{suffix}.svg")


if __name__ == "__main__":
    main()
