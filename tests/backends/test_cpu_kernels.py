"""The kernels are compiled once on a machine, whatever happens meanwhile, and use as many threads as they are worth."""
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE

import numba
import pytest
import torch

from project import PROJECT
from sampling.backends.cpu import WORK_PER_THREAD, compile_kernels, run

SETUP = """
import logging
import sys
import numpy as np
import torch
from sampling.backends import cpu_kernels as kernels
from sampling.backends.cpu import CPUBackend, compile_kernels
logging.basicConfig(stream=sys.stdout, format="%(message)s")
logging.getLogger("sampling").setLevel(logging.INFO)
"""
# Two kernels of four: LayerNorm and attention.
COMPILE_SOME = SETUP + "compile_kernels(())"
CHECK = """
x = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
y = kernels.layer_norm(x, np.ones(40, np.float32), np.zeros(40, np.float32), 1e-5)
torch.testing.assert_close(torch.from_numpy(y), torch.nn.functional.layer_norm(torch.from_numpy(x), (40,)))
"""
COMPILE_ALL = SETUP + """
from models import make_gpt
gpt, ids = make_gpt(), torch.zeros(3, 5, dtype=torch.long)
backend = CPUBackend(gpt.config, gpt.state_dict(), sys.argv[1] == "int8")
with torch.no_grad():
    expected = gpt(ids)[0][:, -1]
assert (backend.logits(ids, None) - expected).norm() / expected.norm() < (0.05 if sys.argv[1] == "int8" else 1e-4)
"""


def start(code, cache, *arguments, project=PROJECT, **environment):
    """Start a Python process that keeps numba's cache in this folder."""
    path = f"{project}{os.pathsep}{PROJECT / 'tests'}"
    env = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": path, **environment}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=env, cwd=project, text=True, stdout=PIPE,
                            stderr=PIPE)


def finish(process):
    """The lines that a process has printed. It must have succeeded."""
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0 and not stderr, stderr
    return stdout.splitlines()


def is_compiled(lines):
    """Whether the lines say that kernels were compiled, and for how long; if not, there must be none."""
    if not lines:
        return False
    assert lines[0] == "compiling kernels for this processor, once ..."
    assert lines[1].startswith("compiled in ") and lines[1].endswith(" s") and len(lines) == 2
    return 0.2 < float(lines[1].split()[2]) < 100


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """A folder with the cache of a process that has run COMPILE_SOME. Tests copy it."""
    folder = tmp_path_factory.mktemp("numba")
    assert is_compiled(finish(start(COMPILE_SOME + CHECK, folder)))
    return folder


def test_the_first_process_compiles_and_says_so_and_the_next_ones_say_nothing(compiled):
    assert not is_compiled(finish(start(COMPILE_SOME + CHECK, compiled)))


@pytest.mark.slow
def test_several_processes_may_compile_at_once(tmp_path):
    processes = [start(COMPILE_ALL, tmp_path, dtype) for dtype in ("float32", "int8", "int8")]
    assert all(is_compiled(finish(process)) for process in processes)
    for dtype in "float32", "int8":
        assert not is_compiled(finish(start(COMPILE_ALL, tmp_path, dtype)))


@pytest.mark.slow
def test_a_process_compiles_only_the_kernels_that_no_other_has_compiled(tmp_path):
    runs = [("float32", True), ("int8", True), ("int8", False), ("float32", False)]
    assert [(dtype, is_compiled(finish(start(COMPILE_ALL, tmp_path, dtype)))) for dtype, _ in runs] == runs


@pytest.mark.slow
def test_it_compiles_every_time_where_no_folder_can_be_written(tmp_path):
    shutil.copytree(PROJECT / "sampling", tmp_path / "sampling", ignore=lambda *_: ["__pycache__"])
    shutil.copy(PROJECT / "model.py", tmp_path)
    for folder in tmp_path / "sampling" / "backends", tmp_path:
        (folder / "__pycache__").touch() # a file, which also root cannot use as a folder
    nowhere = dict(HOME="/dev/null", XDG_CACHE_HOME="/dev/null/cache", PYTHONDONTWRITEBYTECODE="1")
    for _ in range(2):
        assert is_compiled(finish(start(COMPILE_SOME + CHECK, "", project=tmp_path, **nowhere)))


@pytest.mark.slow
@pytest.mark.parametrize("pattern, damage", [
    ("*.nbi", lambda content: b""),
    ("*.nbi", lambda content: b"\x80" + os.urandom(500)),
    ("*.nbc", lambda content: content[:-1]),
    ("*.nbc", None),
], ids=["empty index", "noise as the index", "cut code", "no code"])
def test_damaged_and_missing_files_in_the_cache_are_made_again(pattern, damage, compiled, tmp_path):
    shutil.copytree(compiled, tmp_path / "cache")
    for path in (tmp_path / "cache").rglob(pattern):
        path.write_bytes(damage(path.read_bytes())) if damage else path.unlink()
    assert [is_compiled(finish(start(COMPILE_SOME + CHECK, tmp_path / "cache"))) for _ in range(2)] == [True, False]


@pytest.mark.slow
def test_a_full_disk_costs_only_the_time_to_compile_again(tmp_path):
    limit = ("import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
             "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n") # then a write fails as on a full disk
    codes = [limit + COMPILE_SOME + CHECK, COMPILE_SOME + CHECK, COMPILE_SOME + CHECK]
    assert [is_compiled(finish(start(code, tmp_path))) for code in codes] == [True, True, False]


@pytest.mark.slow
def test_after_ctrl_c_while_compiling_the_next_run_works(tmp_path):
    process = start(COMPILE_SOME, tmp_path)
    process.stdout.readline() # it comes after the first kernel
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=100)[1] and process.returncode
    assert [is_compiled(finish(start(COMPILE_SOME + CHECK, tmp_path))) for _ in range(2)] == [True, False]


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("most", [1, 2])
def test_a_kernel_has_at_most_as_many_threads_as_torch_and_one_for_little_work(most):
    def num_threads(work):
        run(lambda: seen.append(numba.get_num_threads()), work)
        return seen[-1]
    compile_kernels(())
    seen, available = [], numba.config.NUMBA_NUM_THREADS
    torch.set_num_threads(most)
    with ThreadPoolExecutor(1) as pool: # numba and torch have numbers of their own for each Python thread
        for call in num_threads, lambda work: pool.submit(num_threads, work).result():
            assert [call(0), call(WORK_PER_THREAD), call(0)] == [1, min(2, most, available), 1]
            assert call(10**12) == min(most, available)
