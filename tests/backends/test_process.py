"""Settings of the whole process."""
import os
from itertools import cycle
from pathlib import Path

import pytest

from sampling.backends.process import avoid_amx, shorten_spinning


@pytest.mark.parametrize("cpuinfo, by_user, expected", [
    ("flags : avx512f amx_bf16 amx_int8", None, "AVX512_CORE_VNNI"), ("flags : amx_int8", "DEFAULT", "DEFAULT"), ("flags : avx2", None, None), (None, None, None)])
def test_amx_is_avoided_unless_the_user_has_limited_the_instructions(cpuinfo, by_user, expected, monkeypatch):
    def read_text(path):
        assert path == Path("/proc/cpuinfo")
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo
    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", by_user or "")
    if by_user is None:
        del os.environ["ONEDNN_MAX_CPU_ISA"]
    avoid_amx()
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == expected


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
