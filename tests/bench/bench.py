"""How fast sample.py is beside what people would use instead: one run, alternating, medians and ratios.

    pip install -r requirements.txt -r tests/bench/requirements.txt
    python tests/bench/bench.py [--device=cuda] [--rounds=N] [--quick] [--only=TEXT] [--suffix=TEXT]

Every figure is taken from outside: whole processes, timed for two lengths, and the rate is the difference of
the tokens over the difference of the times, so that start and loading cancel. Writes RESULTS.md and
chart.svg beside this file, with a suffix, which for a GPU is -cuda, RESULTS-cuda.md and chart-cuda.svg.
"""
import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from workers import SHAPES

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent

# One letter, or the characters that fill the window of the 10.6M model.
SHORT, FULL = "a", "a" * 256


class Case:
    """One line of the table: the processes to time for lengths (fewer, more), and what they draw at each."""

    def __init__(self, row, name, command, lengths, samples, at_once=None, prompt=1, busy=0):
        self.row, self.name, self.command, self.lengths, self.samples = row, name, command, lengths, samples
        self.at_once, self.prompt, self.busy = at_once or samples, prompt, busy
        self.times = {length: [] for length in lengths}

    def run(self):
        """Time both lengths once."""
        with busy_cores(self.busy):
            for length in self.lengths:
                self.times[length].append(timed(self.command(length))[0])

    def rate(self):
        """Tokens a second between the two lengths: the median of the rounds."""
        fewer, more = self.lengths
        rates = [self.samples * (more - fewer) / (slow - quick)
                 for quick, slow in zip(self.times[fewer], self.times[more], strict=True)]
        return statistics.median(rates)


def timed(command):
    """Run a process; its seconds and its peak memory in MB."""
    began = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{command} failed:\n{said.decode()}")
    return time.perf_counter() - began, usage.ru_maxrss / 1024


@contextmanager
def busy_cores(count):
    """So many other programs meanwhile, each of which takes a core."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


# ---- the contenders

def ours(source, samples, at_once=None, dtype="float32", start=SHORT, device="cpu", more=()):
    """sample.py, as users run it."""
    def command(length):
        return [sys.executable, PROJECT / "sample.py", source, f"--num_samples={samples}", f"--max_new_tokens={length}",
                f"--batch_size={at_once or samples}", f"--dtype={dtype}", f"--start={start}", f"--device={device}", *more]
    return command


def rival(name, folder, samples, start=SHORT, device="cpu"):
    """One of the rivals, for as many tokens as it is told."""
    return lambda length: worker(name, folder, samples, length, len(start), device)


def worker(name, folder, *rest):
    """The command of workers.py. A process of its own, since a child's peak memory counts from its parent's."""
    return [sys.executable, HERE / "workers.py", name, folder, *rest]


# ---- the run

def cpu_cases(folder, quick):
    """Every line of a CPU's table, in the order it is shown."""
    gpt2, large, small = (folder / name for name in ("124M", "10.6M", "0.8M"))
    found = []
    for samples in ((1,) if quick else (1, 10)):
        row, lengths = f"124M, {count(samples)}", (8, 264)
        found += [
            Case(row, "plain loop", rival("plain", gpt2, 1), (4, 44), 1),
            Case(row, "Hugging Face", rival("transformers", gpt2, samples), (8, 136), samples),
            Case(row, "CTranslate2 float32", rival("ctranslate2", gpt2, samples), lengths, samples),
            Case(row, "CTranslate2 int8", rival("int8", gpt2, samples), lengths, samples),
            Case(row, "sample.py float32", ours(f"--init_from={gpt2}", samples), lengths, samples),
            Case(row, "sample.py bfloat16", ours(f"--init_from={gpt2}", samples, dtype="bfloat16"), lengths, samples),
        ]
    row = "124M, 1 sample, a core busy"
    found += [
        Case(row, "Hugging Face", rival("transformers", gpt2, 1), (8, 40), 1, busy=1),
        Case(row, "CTranslate2 float32", rival("ctranslate2", gpt2, 1), (8, 136), 1, busy=1),
        Case(row, "sample.py float32", ours(f"--init_from={gpt2}", 1), (8, 136), 1, busy=1),
    ]
    row = "10.6M, 10 samples, inside the window"
    found += [
        Case(row, "plain loop", rival("plain", large, 1), (8, 248), 1),
        Case(row, "Hugging Face", rival("transformers", large / "transformers", 10), (8, 248), 10),
        Case(row, "CTranslate2 float32", rival("ctranslate2", large / "transformers", 10), (8, 248), 10),
        Case(row, "CTranslate2 int8", rival("int8", large / "transformers", 10), (8, 248), 10),
        Case(row, "sample.py float32", ours(f"--out_dir={large}", 60, 10), (8, 248), 60, at_once=10),
    ]
    row = "10.6M, 10 samples, past the window"
    found += [
        Case(row, "plain loop", rival("plain", large, 1, FULL), (8, 72), 1),
        Case(row, "sample.py float32", ours(f"--out_dir={large}", 10, start=FULL), (4, 44), 10, prompt=256),
        Case(row, "sample.py context_shift", ours(f"--out_dir={large}", 60, 10, start=FULL, more=["--context_shift"]),
             (4, 244), 60, at_once=10, prompt=256),
    ]
    row = "0.8M, the default run of 10 x 500"
    found += [
        Case(row, "plain loop", rival("plain", small, 10), (0, 500), 10),
        Case(row, "sample.py float32", ours(f"--out_dir={small}", 10), (0, 500), 10),
    ]
    return found


def cuda_cases(folder, quick):
    """Every line of a GPU's table. Nothing here has run yet on one."""
    found = []
    for name, sizes in ("124M", (1, 10, 100)), ("XL", (1, 10)):
        for samples in sizes[:1] if quick else sizes:
            row, source = f"{name}, {count(samples)}", folder / name
            compiled = name == "124M" and samples < 100 # each takes minutes
            rivals = [("Hugging Face", "transformers"), ("Hugging Face static", "static")][:1 + compiled]
            found += [Case(row, "plain loop", rival("plain", source, 1, device="cuda"), (8, 508), 1)]
            found += [Case(row, label, rival(worker, source, samples, device="cuda"), (8, 264), samples)
                      for label, worker in rivals]
            modes = [("float32", []), ("bfloat16", []), ("bfloat16 compile", ["--compile"])][:2 + compiled]
            drawn = samples * (40 if compiled else 8) # for the difference to be seconds
            for mode, more in modes:
                command = ours(f"--init_from={source}", drawn, samples, mode.split()[0], device="cuda", more=more)
                # Both lengths take as many graphs, so that making these cancels too.
                found.append(Case(row, f"sample.py {mode}", command, (392, 508), drawn, at_once=samples))
    large = folder / "10.6M"
    for start, where in (SHORT, "inside"), (FULL, "past"):
        row, lengths = f"10.6M, 10 samples, {where} the window", (8, 248)
        command = ours(f"--out_dir={large}", 100, 10, "bfloat16", start, "cuda")
        found += [
            Case(row, "plain loop", rival("plain", large, 1, start, "cuda"), lengths, 1),
            Case(row, "sample.py bfloat16", command, lengths, 100, at_once=10, prompt=len(start)),
        ]
    return found


def count(samples):
    """How a row names a number of samples."""
    return f"{samples} sample{'s' * (samples > 1)}"


def one_offs(folder, device):
    """Whole processes: (row, name, command)."""
    demo, checkpoint = f"--out_dir={PROJECT / 'out-shakespeare-char'}", folder / "124M checkpoint"
    row = "124M checkpoint with optimizer state, to the first token"
    return [
        (row, "plain way", rival("load", checkpoint, 1, device=device)(1)),
        (row, "sample.py", ours(f"--out_dir={checkpoint}", 1, device=device)(1)),
        ("demo, to the first token", "import torch alone", [sys.executable, "-c", "import torch"]),
        ("demo, to the first token", "sample.py", ours(demo, 1, device=device)(1)),
        ("demo, default run (10 x 500)", "sample.py", ours(demo, 10, start="\n", device=device)(500)),
    ]


def share_of_limit(case, bandwidth, float32, bfloat16):
    """What part of the machine's limit a rate of ours is: which limit is the nearer, step by step."""
    if not case.name.startswith("sample.py") or "context_shift" in case.name or case.busy:
        return ""
    size, rate = (2, bfloat16) if "bfloat16" in case.name else (4, float32)
    shape = SHAPES[case.row.split(",")[0]]
    layers, width, window = shape["n_layer"], shape["n_embd"], shape["block_size"]
    block, head = 12 * width**2, shape["vocab_size"] * width # weights
    reading = computing = 0
    for length in range(case.prompt + case.lengths[0], case.prompt + case.lengths[1]):
        if length <= window: # the weights and what is cached are read once
            read = size * (layers * block + head + case.at_once * 2 * layers * width * length) / bandwidth
            work = 2 * case.at_once * (layers * block + head + 2 * layers * width * length) / rate
        else: # the window but for what follows the last layer's keys and values; of attention causality's half
            read = 0
            work = 2 * case.at_once * window * ((layers - 1) * (block + width * window) + 3 * width**2) / rate
        reading, computing = (reading + read, computing) if read > work else (reading, computing + work)
    least = (reading + computing) / (case.at_once * (case.lengths[1] - case.lengths[0]))
    return f"{case.rate() * least:.0%} of {'memory' if reading > computing else 'arithmetic'}"


def report(found, singles, limits, rounds, device):
    """The whole table as Markdown."""
    limits = [statistics.median(values) for values in zip(*limits, strict=True)]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "ctranslate2") if find_spec(name))
    lines = [f"{machine(device)}; {packages}; medians of {rounds} rounds. The plain loop draws one sample after another, so "
             f"its rate is that of one. Memory reads at {limits[0] / 1e9:,.0f} GB/s; matrix products run at "
             f"{limits[1] / 1e9:,.0f} GFLOP/s in float32, {limits[2] / 1e9:,.0f} in bfloat16. The last column is the rate as "
             "a share of what the nearer of these limits allows.", "",
             "| | | tokens/s | x plain loop | of the limit |", "|---|---|---:|---:|---|"]
    plain = {case.row: case.rate() for case in found if case.name == "plain loop"}
    for case in found:
        ratio = f"{case.rate() / plain[case.row]:.1f}" if case.row in plain else ""
        lines.append(f"| {case.row} | {case.name} | {case.rate():,.0f} | {ratio} | {share_of_limit(case, *limits)} |")
    if singles:
        lines += ["", "| whole process | | seconds | peak memory |", "|---|---|---:|---:|"]
    for row, name, measured in singles:
        seconds, memory = (statistics.median(values) for values in zip(*measured, strict=True))
        lines.append(f"| {row} | {name} | {seconds:.2f} | {memory:,.0f} MB |")
    return "\n".join(lines) + "\n"


def machine(device):
    """The GPU, or the processor as the system names it."""
    if device == "cuda":
        import torch
        return torch.cuda.get_device_name()
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        named = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = named[0].split(":")[1].strip() if named else cpu
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores"


def draw_chart(found, path):
    """One bar a contender, a panel a row."""
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sample.py" # the same figures give the same file
    from matplotlib import pyplot
    rows = list(dict.fromkeys(case.row for case in found))
    figure, panels = pyplot.subplots(len(rows), figsize=(8, 1.9 * len(rows)), layout="constrained")
    for row, panel in zip(rows, panels, strict=True):
        shown = [case for case in found if case.row == row]
        colours = ["#d95f02" if case.name.startswith("sample.py") else "#8da0cb" for case in shown]
        bars = panel.barh([case.name for case in shown], [case.rate() for case in shown], color=colours)
        panel.bar_label(bars, fmt=" {:,.0f}")
        panel.set_title(f"{row}, tokens/s", loc="left", fontsize=10)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main():
    """Make the models, time everything in turn, round after round, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round, fewer rows, nothing written")
    parser.add_argument("--only", default="", help="the rows whose name holds this text, nothing written")
    parser.add_argument("--suffix", help="of the names of what is written, for another machine's figures")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        names = ["124M", "10.6M", "0.8M"] if options.device == "cpu" else ["124M", "XL", "10.6M"]
        subprocess.run(worker("models", folder, *names), check=True, stderr=subprocess.DEVNULL)
        every = cpu_cases if options.device == "cpu" else cuda_cases
        found, limits = [case for case in every(folder, options.quick) if options.only in case.row], []
        singles = [(row, name, command, []) for row, name, command in one_offs(folder, options.device)
                   if options.only in row]
        for i in range(rounds):
            print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
            for case in found:
                case.run()
            for *_, command, measured in singles:
                measured.append(timed(command))
            printed = subprocess.run(worker("limits", folder, options.device), check=True, capture_output=True, text=True)
            limits.append([float(number) for number in printed.stdout.split()])
        table = report(found, [(row, name, measured) for row, name, _, measured in singles], limits, rounds,
                       options.device)
    print(table)
    if not (options.quick or options.only):
        suffix = options.suffix or ("" if options.device == "cpu" else f"-{options.device}")
        (HERE / f"RESULTS{suffix}.md").write_text(table)
        draw_chart(found, HERE / f"chart{suffix}.svg")


if __name__ == "__main__":
    main()
