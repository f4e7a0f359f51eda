"""Files that are damaged, or that a training overwrites: a load gets exactly what was saved, or
says what is wrong.

Files without checksums may load changed values. The tests load in this process: a crash or a hang
would stop them.
"""
import os
import random
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit

import pytest
import torch

from attacks import write_settled
from models import make_gpt, make_transformers_gpt2, same_model, save_checkpoint
from sampling.checkpoints import saves
from sampling.checkpoints.checkpoint import build_gpt
from sampling.checkpoints.huggingface import load_huggingface
from sampling.checkpoints.nanogpt import load_nanogpt
from sampling.checkpoints.tensor_files import TensorFile

# ---- damaged files

def test_a_file_is_not_called_damaged_if_no_more_files_may_be_open(tmp_path):
    def read(file):
        setrlimit(RLIMIT_NOFILE, (file.fileno() + 1, limits[1]))
        raise RuntimeError("Failed to initialize cpuinfo!") # as torch does
    write_settled(tmp_path / "a", b"a")
    limits = getrlimit(RLIMIT_NOFILE)
    try:
        with pytest.raises(OSError, match=r"cannot read .*a: Too many open files"):
            saves.read_complete([tmp_path / "a"], read)
    finally:
        setrlimit(RLIMIT_NOFILE, limits)


@pytest.fixture(params=["ckpt.pt", "model.safetensors", "pytorch_model.bin", "config.json"])
def path(request, tmp_path, monkeypatch):
    """The path of a file of a small model, of which a tensor is read in several chunks."""
    monkeypatch.setattr("sampling.checkpoints.tensor_files.CHUNK", 20)
    if request.param == "ckpt.pt":
        return save_checkpoint(tmp_path, make_gpt(n_layer=1, n_embd=4), meta=False)
    theirs = make_transformers_gpt2(vocab_size=50, n_layer=1, n_embd=2)
    theirs.save_pretrained(tmp_path)
    if request.param == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), tmp_path / request.param)
    return tmp_path / request.param


def load_model(path):
    """The Checkpoint of which the file at path is a part."""
    if path.name == "ckpt.pt":
        return load_nanogpt(path)
    return load_huggingface(str(path.parent))


def load(path, content):
    """The settings and numbers of content at path; None if loading raises a short error."""
    write_settled(path, content)
    try:
        model = build_gpt(load_model(path))
    except (ValueError, OSError) as error:
        line = str(error)
        assert str(path.parent) in line
        assert len(line) < 3000
        assert "\n" not in line
        assert "is being written" not in line
        return None
    return model.config, {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def test_a_cut_file_is_refused_and_a_changed_byte_detected_if_there_are_checksums(path):
    content = path.read_bytes()
    size = len(content)
    has_checksums = path.name in ("ckpt.pt", "pytorch_model.bin")
    good = load(path, content)
    assert good is not None
    rng = random.Random(size)
    for _ in range(12): # most positions are near the ends
        at = rng.choice([rng.randrange(size), rng.randrange(60), size - 1 - rng.randrange(60)])
        cut = load(path, content[:at])
        assert cut is None or (cut == good and path.name == "config.json")
        other = bytes([content[at] ^ (1 + at % 255)])
        changed = load(path, content[:at] + other + content[at + 1:])
        assert changed in (None, good) or not has_checksums


def test_a_good_file_is_not_called_damaged_if_memory_runs_out(path, monkeypatch):
    def fail(*arguments, **settings):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(RuntimeError, match=r"^DefaultCPUAllocator"):
        load_model(path)


def test_a_file_that_cannot_be_opened_is_an_error_at_once(tmp_path):
    message = f"^cannot read {tmp_path}: Is a directory; give another path"
    with pytest.raises(IsADirectoryError, match=message):
        saves.read_complete([tmp_path], pytest.fail)


# ---- files that are being written

@pytest.fixture
def before_reading(monkeypatch):
    """before_reading(action) calls action() whenever a tensor of a file is read."""
    read = TensorFile.read

    def install(action):
        def act_and_read(*arguments):
            action()
            return read(*arguments)
        monkeypatch.setattr(TensorFile, "read", act_and_read)
    return install


@pytest.fixture
def while_waiting(monkeypatch):
    """while_waiting(*actions) calls one action each time that a reader waits."""
    def install(*actions):
        actions = iter(actions)
        monkeypatch.setattr(saves.time, "sleep", lambda seconds: next(actions)())
        monkeypatch.setattr(saves, "MAX_WAIT", 1000) # on a busy machine
    return install


def test_a_file_that_is_never_complete_is_an_error_that_says_so(
        before_reading, tmp_path, monkeypatch, messages):
    monkeypatch.setattr(saves, "MAX_WAIT", 0.2)
    path = save_checkpoint(tmp_path, make_gpt())
    before_reading(lambda: os.utime(path))
    message = r"ckpt.pt: it is being written, and was never complete for 0.2 seconds"
    with pytest.raises(ValueError, match=message):
        load_nanogpt(path)
    assert messages == [f"{path} is being written: waiting"]


@pytest.mark.parametrize("path", ["ckpt.pt", "model.safetensors"], indirect=True)
def test_a_file_that_is_removed_and_completed_meanwhile_loads(path, while_waiting, messages):
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    while_waiting(path.unlink, lambda: path.write_bytes(content))
    loaded = load_model(path)
    assert messages == [f"{path} is being written: waiting", loaded.describe()]


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(b""), os.utime])
def test_a_file_that_changes_while_its_tensors_are_read_is_read_again(
        change, before_reading, while_waiting, tmp_path, messages):
    path = save_checkpoint(tmp_path, make_gpt())
    content = path.read_bytes()
    write_settled(path, content)
    changes = [change]
    before_reading(lambda: changes and changes.pop()(path))
    while_waiting(lambda: path.write_bytes(content))
    assert same_model(path, make_gpt())
    assert messages[0] == f"{path} is being written: waiting"


def test_the_file_is_closed_and_never_mapped(tmp_path):
    """Windows lets nobody write an open file, and a mapped page of a file that was cut kills the
    process.
    """
    path = save_checkpoint(tmp_path, make_gpt())
    state_dict = load_nanogpt(path).state_dict
    path.write_bytes(b"")
    for name, tensor in make_gpt().state_dict().items():
        assert torch.equal(state_dict[name], tensor)
    open_files = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert str(path) not in open_files
    assert str(path) not in Path("/proc/self/maps").read_text()
