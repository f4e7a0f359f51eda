"""Settings of the whole process."""
import os
from pathlib import Path

import pytest

from sampling.backends.process import avoid_amx


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
