"""tests/bench/gpu.py runs to its end without a GPU, and no cell stops the others."""
import importlib
import json
import os
import subprocess
import sys
import time
from functools import partial

import pytest

from project import PROJECT

BENCH = PROJECT / "tests" / "bench"


@pytest.mark.slow
def test_every_section_runs_without_a_gpu():
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, BENCH / "gpu.py"], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    sections = {section: [line for line in lines if line["section"] == section]
                for section in ("machine", "logits", "text", "runs", "rates")}
    assert sum(map(len, sections.values())) == len(lines)
    assert [line for line in lines if "error" in line or "skipped" in line or line.get("messages")] == []
    assert all(line["ok"] for line in sections["logits"])
    assert [line["mean_logit"] < -60 for line in sections["logits"]] == [False, True, False, True]
    # The default path may round differently in bfloat16.
    texts = {line["cell"]: line["equal"] for line in sections["text"] if not line["cell"].startswith("default, bfloat16")}
    assert len(texts) == 6 and set(texts.values()) == {"4 of 4"}
    assert [line["status"] for line in sections["runs"]] == [0]
    assert all(line["tokens_per_s"] > 0 for line in sections["rates"])


def test_a_cell_that_fails_hangs_or_dies_does_not_stop_the_others(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCH)
    report = importlib.import_module("gpu_cells").Report()
    report.cell("a", "works", partial(dict, value=3), 60, end=600)
    report.cell("a", "hangs", partial(time.sleep, 60), 0.1, end=600)
    report.cell("b", "dies", partial(os._exit, 7), 60, end=600)
    report.cell("b", "fails", partial(int, "x"), 60, end=600)
    report.cell("b", "is late", partial(dict, value=4), 60, end=0)
    report.cell("b", "works again", partial(dict, value=5), 60, end=600)
    report.close()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert max(line.pop("took") for line in lines) < 60
    assert lines == [
        {"section": "a", "cell": "works", "value": 3},
        {"section": "a", "cell": "hangs", "error": "stopped after 0 s"},
        {"section": "b", "cell": "dies", "error": "the process ended with status 7"},
        {"section": "b", "cell": "fails", "error": "ValueError: invalid literal for int() with base 10: 'x'"},
        {"section": "b", "cell": "is late", "skipped": "no time is left"},
        {"section": "b", "cell": "works again", "value": 5},
    ]
