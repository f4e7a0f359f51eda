"""Settings of the whole process."""
import os
from itertools import cycle
from pathlib import Path

import pytest

from sampling.backends.process import shorten_spinning


@pytest.mark.parametrize("num_running, num_cores, spin_count", [
    (["1"], 2, "10000"), (["2"], 2, "0"), (["2", "2", "1", "2", "2"], 2, "10000"), (["4"], 8, "10000"), (["5"], 8, "0"), (["9"], None, "0"), (["?"], 2, "10000"),
    ([""], 2, "10000"), (None, 2, "10000")], ids=str)
def test_waiting_threads_spin_unless_other_programs_use_half_of_the_cores(num_running, num_cores, spin_count, monkeypatch):
    def read_text(path):
        assert path == Path("/proc/loadavg")
        if num_running is None:
            raise FileNotFoundError(path)
        return f"0.20 0.18 0.12 {count}/80 11206\n" if (count := next(counts)) else ""
    counts = cycle(num_running or [])
    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    monkeypatch.setattr(os, "environ", {})
    shorten_spinning()
    assert os.environ == {"GOMP_SPINCOUNT": spin_count}
