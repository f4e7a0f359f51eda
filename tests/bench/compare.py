"""Compares sample.py with itself: with another commit, or with one optimisation switched off. They run alternately.

    python tests/bench/compare.py --against=FOLDER [--rounds=N] [--only=TEXT]    # a checkout of the other commit
    python tests/bench/compare.py --optimisations [--rounds=N] [--only=TEXT]     # what each optimisation gives
"""
import argparse
import inspect
import statistics
import sys
import tempfile
from pathlib import Path

from measure import HERE, PROJECT, QUARTER, Case, machine, make_models, sample_py, timed

sys.path.insert(0, str(PROJECT))


class ToFirstToken:
    """A process that is timed as a whole. It has the methods of Case."""

    def __init__(self, row, command, length=1):
        self.row, self.command, self.length, self.seconds = row, command, length, []

    def run(self):
        """Time it once."""
        self.seconds.append(timed(self.command(self.length))[0])

    def rates(self):
        """Runs per second, in each round."""
        return [1 / seconds for seconds in self.seconds]


def rows(folder, script=(PROJECT / "sample.py",)):
    """The cases by row. script is the file that runs sample.py, and its arguments."""
    gpt2, large, small = (folder / name for name in ("124M", "10.6M", "0.8M"))
    demo = f"--out_dir={PROJECT / 'out-shakespeare-char'}"

    def case(row, source, lengths, samples, batch_size=None, busy=0, **settings):
        command = sample_py(source, samples, batch_size, script=script, **settings)
        return Case(row, "", command, lengths, samples, batch_size, busy=busy)
    cases = [
        case("124M, 1 sample", f"--init_from={gpt2}", (32, 288), 1),
        case("124M, 1 sample, int8", f"--init_from={gpt2}", (32, 288), 1, dtype="int8"),
        case("124M, 10 samples", f"--init_from={gpt2}", (32, 288), 10),
        case("124M, 10 samples, int8", f"--init_from={gpt2}", (32, 288), 10, dtype="int8"),
        case("124M, 1 sample, a core busy", f"--init_from={gpt2}", (32, 160), 1, busy=1),
        case("10.6M, 10 samples, inside the window", f"--out_dir={large}", (40, 248), 60, 10),
        case("10.6M, 10 samples, past the window", f"--out_dir={large}", (196, 236), 10, start=QUARTER),
        case("0.8M, 10 samples, inside the window", f"--out_dir={small}", (20, 60), 600, 10),
        case("0.8M, the default run of 10 x 500", f"--out_dir={small}", (0, 500), 10),
        ToFirstToken("124M checkpoint, to the first token", sample_py(f"--out_dir={folder / '124M checkpoint'}", 1,
                                                                      script=script)),
        ToFirstToken("demo, to the first token", sample_py(demo, 1, script=script)),
        ToFirstToken("demo, default run (10 x 500)", sample_py(demo, 10, script=script), 500),
    ]
    return {case.row: case for case in cases}


# The rows in which each optimisation has an effect.
ROWS_OF = {
    "loops": ["124M, 1 sample", "124M, 10 samples", "10.6M, 10 samples, inside the window"],
    "plain_short_runs": ["124M checkpoint, to the first token", "demo, to the first token"],
    "shortlist": ["124M, 1 sample"],
    "random_bits": ["124M, 1 sample, int8", "124M, 10 samples"],
    "skip_init": ["124M checkpoint, to the first token", "demo, to the first token"],
    "jump_ahead": ["124M checkpoint, to the first token"],
    "disable_malloc_trim": ["10.6M, 10 samples, past the window"],
    "shorten_spinning": ["124M, 1 sample, a core busy"],
}


def pairs_of_optimisations(folder):
    """Yield (optimisation and row, a case with the optimisation, the same case without it)."""
    for optimisation, names in ROWS_OF.items():
        without = rows(folder, (HERE / "without.py", optimisation))
        for name in names:
            yield f"{optimisation} | {name}", rows(folder)[name], without[name]


def lines_of(optimisation):
    """The number of lines of code of the optimisation."""
    from sampling.backends import cpu, cpu_kernels, cpu_runtime, memory, prepare, process
    from sampling.checkpoints.build import SkipInit
    from sampling.sampler import mt19937, row_streams
    parts = {
        "loops": [cpu_kernels, cpu_runtime, cpu.CPUCache, cpu.LayerNorm, cpu.Linear, cpu.multiply, cpu.Block,
                  cpu.CPUBackend],
        "plain_short_runs": [prepare.plain_seconds], "shortlist": [cpu.Shortlist],
        "random_bits": [row_streams.exponentials, row_streams.exponential_from_bits],
        "skip_init": [SkipInit], "jump_ahead": [mt19937], "disable_malloc_trim": [memory.disable_malloc_trim],
        "shorten_spinning": [process.shorten_spinning, process.cores_are_busy],
    }[optimisation]
    return sum(bool(line.strip()) for part in parts for line in inspect.getsource(part).splitlines())


def main():
    """Time both cases of each pair in turn for several rounds, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--against", type=Path, help="a checkout of the other commit")
    mode.add_argument("--optimisations", action="store_true", help="what each optimisation gains")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="only lines with this text in their name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_models(folder, ["124M", "10.6M", "0.8M"])
        if options.optimisations:
            pairs = list(pairs_of_optimisations(folder))
        else:
            other = rows(folder, (options.against.resolve() / "sample.py",))
            pairs = [(name, case, other[name]) for name, case in rows(folder).items()]
        pairs = [pair for pair in pairs if options.only in pair[0]]
        for i in range(options.rounds):
            print(f"round {i + 1} of {options.rounds}", file=sys.stderr, flush=True)
            for _, one, two in pairs:
                for case in (one, two) if i % 2 == 0 else (two, one):
                    case.run()
    print(f"{machine()}; medians of {options.rounds} rounds.\n")
    columns = "optimisation | where | lines" if options.optimisations else "where"
    print(f"| {columns} | rate, x | smallest | largest |\n|{'---|' * columns.count('|')}---|---:|---:|---:|")
    for name, one, two in pairs:
        ratios = sorted(a / b for a, b in zip(one.rates(), two.rates(), strict=True))
        lines = f" | {lines_of(name.split(' | ')[0])}" if options.optimisations else ""
        print(f"| {name}{lines} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} | {ratios[-1]:.2f} |")


if __name__ == "__main__":
    main()
