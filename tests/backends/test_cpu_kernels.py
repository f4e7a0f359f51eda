"""The kernels are compiled once on a machine, whatever happens to the files of numba's cache."""
import os
import shutil
import sys
from contextlib import suppress
from subprocess import PIPE, Popen
from unittest.mock import MagicMock

import pytest
import torch

from project import PROJECT
from sampling.backends import cpu_kernels as kernels
from sampling.backends.cpu import compile_kernels

RUN = "import logging; logging.basicConfig(level=20); from sampling.backends import cpu; cpu.compile_kernels('float32')"


@pytest.fixture
def is_compiled(tmp_path, monkeypatch, messages):
    """is_compiled() prepares a new layer_norm, as a new process does. Returns whether two lines say it was compiled."""
    def prepare():
        messages.clear()
        monkeypatch.setattr(kernels, "layer_norm", kernels.parallel(kernels.layer_norm.py_func))
        for _ in range(2): # the second call says nothing
            compile_kernels("float32")
        found = kernels.layer_norm(torch.ones(3, 40).numpy(), torch.ones(40).numpy(), torch.ones(40).numpy(), 1e-5)
        assert (found == 1).all() and [line[:12] for line in messages] in ([], ["compiling ke", "compiled in "])
        return bool(messages)
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    return prepare


@pytest.mark.parametrize("pattern, kept", [("*.nbi", 0), ("*.nbc", -1)]) # the index is empty, the code lacks a byte
def test_a_kernel_is_compiled_once_and_again_if_its_files_are_damaged(is_compiled, tmp_path, pattern, kept):
    assert [is_compiled(), is_compiled()] == [True, False]
    path, = tmp_path.rglob(pattern)
    path.write_bytes(path.read_bytes()[:kept])
    assert [is_compiled(), is_compiled()] == [True, False]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_neither_a_full_disk_nor_ctrl_c_leaves_an_index_without_its_code(is_compiled, tmp_path, error, monkeypatch):
    move = MagicMock(side_effect=[os.replace, error]) # the index is put in its place first, then the code
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(os, "replace", lambda *paths: move()(*paths))
        assert is_compiled() and isinstance(error, OSError), "a full disk costs only time"
    assert move.call_count == 2 and not [*tmp_path.rglob("*.nbi")] and [is_compiled(), is_compiled()] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("home, count", [("home", 3), ("/dev/null", 1)]) # where nothing can be written
def test_several_processes_may_compile_at_once(home, count, tmp_path):
    shutil.copytree(PROJECT / "sampling", tmp_path / "sampling", ignore=lambda *_: ["__pycache__"])
    (tmp_path / "sampling/backends/__pycache__").touch() # a file, which also root cannot use as a folder
    env = {**os.environ, "XDG_CACHE_HOME": f"{home}/cache", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(PROJECT)}
    for expected in 2, 2 if home == "/dev/null" else 0:
        processes = [Popen([sys.executable, "-c", RUN], env=env, cwd=tmp_path, stderr=PIPE) for _ in range(count)]
        assert [process.communicate()[1].count(b"\n") for process in processes] == count * [expected]
