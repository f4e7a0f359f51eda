"""The table and the chart of bench.py."""
import os
import re
import statistics
from importlib.metadata import version
from importlib.util import find_spec

from measure import processor


def report(cases, processes, limits, rounds):
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
        cells = [case.row, case.name, shown_rate(case),
                 f"{case.over(nanogpt[case.row]):.1f}" if case.row in nanogpt else "",
                 f"{ours.over(case):.2f}" if ours != case else "", f"{statistics.median(case.memory):,.0f} MB"]
        lines.append(f"| {' | '.join(cells)} |")
    if processes:
        lines += ["", "| whole process | | seconds | peak memory |", "|---|---|---:|---:|"]
    for row, name, measured in processes:
        seconds, memory = (statistics.median(values) for values in zip(*measured, strict=True))
        lines.append(f"| {row} | {name} | {seconds:.2f} | {memory:,.0f} MB |")
    return "\n".join(lines) + "\n"


def slug():
    """The name of the files with the results of this processor."""
    return re.sub(r"\W+", "-", processor().lower())


def is_8_bit(case):
    return "8" in case.name


def shown_rate(case):
    rate = case.rate()
    return f"{rate:.1f}" if rate < 9.95 else f"{rate:,.0f}"


def draw_chart(cases, path):
    """Draw one panel per row, with one bar per program."""
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sample.py" # so that the same results give the same file
    matplotlib.rcParams["svg.fonttype"] = "none" # text, which any browser draws with its own font, instead of outlines
    from matplotlib import pyplot
    rows = list(dict.fromkeys(case.row for case in cases))
    cases_of = {row: [case for case in cases if case.row == row] for row in rows}
    heights = [0.8 + 0.22 * len(cases_of[row]) for row in rows] # in inches
    figure, panels = pyplot.subplots(len(rows), figsize=(8, sum(heights)), height_ratios=heights, layout="constrained")
    for row, panel in zip(rows, panels, strict=True):
        shown = cases_of[row]
        colours = ["#d95f02" if case.name.startswith("sample.py") else "#8da0cb" for case in shown]
        bars = panel.barh([case.name for case in shown], [case.rate() for case in shown], color=colours)
        panel.bar_label(bars, [shown_rate(case) for case in shown], padding=3)
        panel.set_title(f"{row}, tokens/s", loc="left", fontsize=10)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
