"""tests/bench/gpu.py runs to its end without a GPU, and no cell stops the others."""
import importlib
import json
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from project import PROJECT

BENCH = PROJECT / "tests" / "bench"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no interval timers")


def measure(*arguments):
    """Run gpu.py with small sizes. Returns its lines."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, BENCH / "gpu.py", "--smoke", *arguments], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_lines(lines, sections):
    """No cell failed, and every comparison is as it must be on a CPU, where float16 and bfloat16 paths only differ by rounding."""
    assert list(dict.fromkeys(line["section"] for line in lines)) == sections
    assert [line for line in lines if "error" in line] == []
    assert {line["cell"] for line in lines if "skipped" in line} <= {"out of memory"}
    for line in lines:
        if line["cell"].startswith(("exact", "graphs")):
            assert line["samples_equal"] in ("4 of 4", "8 of 8"), line
        if line["cell"].startswith("arithmetic"):
            assert len(line["errors"]) == 2 and max(map(float, line["errors"].values())) <= line["limit"], line
        assert not line.get("messages"), line
        assert line.get("equal", True) and line.get("jsonl_equal", True) and line.get("html_equal", True), line
    cells = {line["cell"]: line for line in lines}
    assert cells["stream"]["equal"]
    assert cells["default path against the loop, float32"]["first_differences_float32_division"] == [None] * 4
    assert cells["float32 batches of 1 and 10, highest"]["samples_equal"] == "10 of 10"


@pytest.mark.slow
def test_every_section_runs_without_a_gpu():
    lines = measure("--skip=script")
    check_lines(lines, ["machine", "checks", "timings", "kernels"])
    timings = [line for line in lines if line["section"] == "timings"]
    assert all(line["tokens_per_s"] > 0 for line in timings) and any("exact" in line["cell"] for line in timings)
    kernels = [line for line in lines if line["section"] == "kernels"]
    assert all(len(line["longest"]) == 5 and line["kernels_a_step"] > 0 for line in kernels)


@pytest.mark.slow
def test_repeated_runs_of_the_script_in_the_benchmark_are_equal():
    lines = measure("--only=script")
    assert len(lines) == 6 and [line for line in lines if "error" in line or "skipped" in line] == []
    assert all(line.get("equal", line.get("jsonl_equal") and line.get("html_equal")) for line in lines)


@pytest.fixture
def report(monkeypatch):
    """A Report whose section has a second left."""
    monkeypatch.syspath_prepend(BENCH)
    report = importlib.import_module("gpu_setup").Report(100.0)
    report.begin("checks", 0.05)
    return report


def test_a_cell_that_fails_or_takes_too_long_does_not_stop_the_others(report, capsys):
    def fail():
        raise RuntimeError("no such kernel")
    report.cell("fails", fail)
    report.cell("hangs", lambda: time.sleep(60), limit=0.2)
    report.cell("works", lambda: {"value": 3})
    report.begin("timings", 0.0)
    report.cell("late", lambda: {"value": 4})
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    results = [{key: value for key, value in line.items() if key != "took"} for line in lines]
    assert results == [
        {"section": "checks", "cell": "fails", "error": "RuntimeError: no such kernel"},
        {"section": "checks", "cell": "hangs", "skipped": "stopped after 0 s"},
        {"section": "checks", "cell": "works", "value": 3},
        {"section": "timings", "cell": "late", "skipped": "no time is left"},
    ]
    assert lines[1]["took"] < 5


def test_when_the_time_is_up_no_process_is_left(report, tmp_path):
    checks, setup = (importlib.import_module(name) for name in ("gpu_checks", "gpu_setup"))
    with pytest.raises(setup.TimeIsUp), setup.time_limit(1):
        checks.run_together(tmp_path, ["sh", "-c", "sleep 60 & echo $! > pid; wait"])
    time.sleep(0.1)
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("num_keys", [4, 16])
def test_attention_as_products_equals_torchs(num_keys, monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    product_attention = importlib.import_module("gpu_timings").product_attention
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(3, 2, length, 12, generator=generator) for length in (1, num_keys, num_keys))
    mask = torch.zeros(1, num_keys).masked_fill(torch.arange(num_keys) > 2, -torch.inf)
    expected = scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    torch.testing.assert_close(product_attention(q, keys, values, attn_mask=mask), expected)
