"""Compares the speed of sample.py with that of another commit, of which FOLDER is a checkout. They run alternately.

    python tests/bench/compare.py FOLDER [--rounds=N] [--only=TEXT]
"""
import argparse
import statistics
import tempfile
from pathlib import Path

from measure import PROJECT, QUARTER, Case, machine, make_models, sample_py, timed


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


def rows(folder, script):
    """The cases, with this sample.py."""
    gpt2, large, small = (folder / name for name in ("124M", "10.6M", "0.8M"))
    demo = f"--out_dir={PROJECT / 'out-shakespeare-char'}"

    def case(row, source, lengths, samples, batch_size=None, busy=0, **settings):
        command = sample_py(source, samples, batch_size, script=script, **settings)
        return Case(row, "", command, lengths, samples, batch_size, busy=busy)
    return [
        case("124M, 1 sample", f"--init_from={gpt2}", (32, 288), 1),
        case("124M, 1 sample, int8", f"--init_from={gpt2}", (32, 288), 1, dtype="int8"),
        case("124M, 10 samples", f"--init_from={gpt2}", (32, 288), 10),
        case("124M, 10 samples, int8", f"--init_from={gpt2}", (32, 288), 10, dtype="int8"),
        case("124M, 1 sample, a core busy", f"--init_from={gpt2}", (32, 160), 1, busy=1),
        case("10.6M, 10 samples, inside the window", f"--out_dir={large}", (40, 248), 60, 10),
        case("10.6M, 10 samples, past the window", f"--out_dir={large}", (196, 236), 10, start=QUARTER),
        case("0.8M, the default run of 10 x 500", f"--out_dir={small}", (0, 500), 10),
        ToFirstToken("124M checkpoint, to the first token",
                     sample_py(f"--out_dir={folder / '124M checkpoint'}", 1, script=script)),
        ToFirstToken("demo, to the first token", sample_py(demo, 1, script=script)),
        ToFirstToken("demo, default run (10 x 500)", sample_py(demo, 10, script=script), 500),
    ]


def main():
    """Time both versions of each row in turn for several rounds, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("against", type=Path, help="a checkout of the other commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="only rows with this text in their name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_models(folder, ["124M", "10.6M", "0.8M"])
        ours, theirs = rows(folder, PROJECT / "sample.py"), rows(folder, options.against.resolve() / "sample.py")
        pairs = [pair for pair in zip(ours, theirs, strict=True) if options.only in pair[0].row]
        for i in range(options.rounds):
            for one, two in pairs:
                for case in (one, two) if i % 2 == 0 else (two, one):
                    case.run()
    print(f"{machine()}; medians of {options.rounds} rounds.\n")
    print("| where | rate, x | smallest | largest |\n|---|---:|---:|---:|")
    for one, two in pairs:
        ratios = sorted(a / b for a, b in zip(one.rates(), two.rates(), strict=True))
        print(f"| {one.row} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} | {ratios[-1]:.2f} |")


if __name__ == "__main__":
    main()
