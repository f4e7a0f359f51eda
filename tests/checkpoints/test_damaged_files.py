"""Files that are damaged, or that a training overwrites: a load gets exactly what was saved, or says what is wrong.

Files without checksums may load changed values. The tests load in this process: a crash or a hang would stop them.
"""
import itertools
import os
import random
from functools import partial
from pathlib import Path
from threading import Timer

import pytest
import torch

from attacks import write_settled
from models import make_gpt, make_transformers_gpt2, save_checkpoint
from sampling.checkpoints import tensor_files, untrusted_files
from sampling.checkpoints.build import build_gpt
from sampling.checkpoints.huggingface import load_huggingface
from sampling.checkpoints.nanogpt import load_nanogpt
from sampling.checkpoints.tensor_files import TensorFile
from sampling.inputs.char_tokenizer import read_meta

# ---- damaged files

@pytest.fixture(params=["ckpt.pt", "model.safetensors", "pytorch_model.bin", "config.json"])
def path(request, tmp_path, monkeypatch):
    """The path of a file of a small model, of which a tensor is read in several chunks."""
    monkeypatch.setattr(tensor_files, "CHUNK", 20)
    if request.param == "ckpt.pt":
        small = dict(n_layer=1, n_head=1, n_embd=4, block_size=4, vocab_size=5, bias=False)
        return save_checkpoint(tmp_path, make_gpt(**small), meta=False)
    theirs = make_transformers_gpt2(vocab_size=50, n_layer=1, n_embd=2, n_head=1, n_positions=4)
    theirs.save_pretrained(tmp_path)
    if request.param == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), tmp_path / request.param)
    return tmp_path / request.param


def load_model(path):
    """The Checkpoint of which the file at path is a part."""
    return (load_nanogpt if path.name == "ckpt.pt" else load_huggingface)(str(path.parent))


def load(path, content):
    """The loaded settings and numbers after content was written to path; None if loading raises a short error."""
    write_settled(path, content) # nobody has changed it lately, so it is refused without waiting
    try:
        model = build_gpt(load_model(path))
    except (ValueError, OSError) as e:
        assert str(path.parent) in str(e) and len(str(e)) < 3000 and "\n" not in str(e)
        assert "is being written" not in str(e)
        return None
    return model.config, {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def test_a_cut_file_is_refused_and_a_changed_byte_detected_if_there_are_checksums(path):
    content, has_checksums = path.read_bytes(), path.name in ("ckpt.pt", "pytorch_model.bin")
    good, size, rng = load(path, content), len(content), random.Random(len(content))
    assert good is not None
    for _ in range(60): # most positions are near the ends
        at = rng.choice([rng.randrange(size), rng.randrange(60), size - 1 - rng.randrange(60)])
        cut = load(path, content[:at])
        assert cut is None or (cut == good and path.name == "config.json")
        changed = load(path, content[:at] + bytes([content[at] ^ (1 + at % 255)]) + content[at + 1:])
        assert changed is None or not has_checksums or changed == good


def test_a_good_file_is_not_called_damaged_if_memory_runs_out(path, monkeypatch):
    def fail(*arguments, **settings):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr("torch.empty", fail)
    with pytest.raises(RuntimeError, match=r"^DefaultCPUAllocator"):
        load(path, path.read_bytes())


def test_a_file_that_cannot_be_opened_is_an_error_at_once(tmp_path):
    for read in partial(untrusted_files.read_complete, read=pytest.fail), lambda paths: read_meta(*paths):
        with pytest.raises(IsADirectoryError, match=f"^cannot read {tmp_path}: Is a directory; give another path"):
            read([tmp_path])


# ---- files that are being written

@pytest.fixture
def act(monkeypatch):
    """act(action) calls action(number of the tensor) whenever a tensor of a file is read."""
    def install(action):
        count, read = itertools.count(1), TensorFile.read
        monkeypatch.setattr(TensorFile, "read", lambda *arguments: (action(next(count)), read(*arguments))[1])
    return install


def test_a_file_that_is_never_complete_is_an_error_that_says_so(act, tmp_path, monkeypatch, messages):
    monkeypatch.setattr(untrusted_files, "MAX_WAIT", 0.2)
    path = save_checkpoint(tmp_path, make_gpt())
    act(lambda count: os.utime(path))
    with pytest.raises(ValueError, match=r"ckpt.pt: it is being written, and was never complete for 0.2 seconds"):
        load_nanogpt(path)
    assert messages == [f"{path} is being written: waiting"]


@pytest.mark.parametrize("path", ["ckpt.pt", "model.safetensors"], indirect=True)
def test_a_file_that_is_removed_and_completed_meanwhile_loads(path, messages):
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    Timer(0.2, path.unlink).start()
    Timer(0.4, path.write_bytes, [content]).start()
    loaded = load_model(path)
    assert messages == [f"{path} is being written: waiting", loaded.describe()]


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(b""), os.utime], ids=["cut", "time"])
def test_a_file_that_changes_while_its_tensors_are_read_is_read_again(change, act, tmp_path, messages):
    path = save_checkpoint(tmp_path, make_gpt())
    content, counts = path.read_bytes(), []
    os.utime(path, (0, 0)) # long before

    def change_third(count):
        counts.append(count)
        if count == 3:
            change(path)
            Timer(0.3, path.write_bytes, [content]).start()
    act(change_third)
    load_nanogpt(path)
    assert len(counts) > 28 and "waiting" in messages[0] and "iteration 100" in messages[1]


def test_the_file_is_closed_and_never_mapped(tmp_path):
    """Windows lets nobody write an open file, and a mapped page of a file that was cut kills the process."""
    path, model = save_checkpoint(tmp_path, make_gpt()), make_gpt()
    state_dict = load_nanogpt(path).state_dict
    path.write_bytes(b"")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state_dict.items())
    open_files = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert str(path) not in open_files and str(path) not in Path("/proc/self/maps").read_text()
