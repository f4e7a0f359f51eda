"""Damaged files: loading raises a short error, or returns exactly what was saved.

Files without checksums may load changed values. The tests load in this process: a crash or a hang would stop them.
"""
import random
import zipfile

import pytest
import torch

from attacks import write_settled
from models import make_gpt, make_transformers_gpt2, save_checkpoint
from sampling.checkpoints.build import build_gpt
from sampling.checkpoints.nanogpt import load_by_name

SMALL = dict(n_layer=1, n_head=1, n_embd=4, block_size=4, vocab_size=5, bias=False)
CHECKED = "ckpt.pt", "pytorch_model.bin" # they have checksums


@pytest.fixture(params=["ckpt.pt", "model.safetensors", "pytorch_model.bin", "config.json"])
def file(request, tmp_path):
    """(kind of the file, its path) in the folder of a small model."""
    kind = request.param
    if kind == "ckpt.pt":
        return kind, save_checkpoint(tmp_path, make_gpt(**SMALL), meta=False)
    theirs = make_transformers_gpt2(vocab_size=50, n_layer=1, n_embd=2, n_head=1, n_positions=4)
    theirs.save_pretrained(tmp_path)
    if kind == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), tmp_path / kind)
    return kind, tmp_path / kind


def load(path, content):
    """The loaded settings and tensors after content was written to path; None if loading raises a short error."""
    write_settled(path, content)
    try:
        model = build_gpt(load_by_name(path.parent, log=lambda text: None))
    except (ValueError, OSError) as e:
        assert str(path.parent) in str(e) and len(str(e)) < 3000 and "\n" not in str(e)
        return None
    return model.config, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return one[0] == other[0] and all(torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())


def positions(size, count):
    """Positions in a file of this size: half of them near its ends."""
    rng = random.Random(size)
    return [rng.choice([rng.randrange(size), rng.randrange(60), size - 1 - rng.randrange(60)]) for _ in range(count)]


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_a_cut_file_is_refused_and_a_changed_byte_detected_if_there_are_checksums(file, count):
    (kind, path), content = file, file[1].read_bytes()
    good = load(path, content)
    for at in positions(len(content), count):
        cut = load(path, content[:at])
        assert cut is None or (same(cut, good) and kind == "config.json")
        changed = load(path, content[:at] + bytes([content[at] ^ (1 + at % 255)]) + content[at + 1:])
        assert changed is None or kind not in CHECKED or same(changed, good)


def test_a_changed_bit_is_detected_in_every_record_that_is_used(tmp_path):
    """The optimizer's records are not read, so changes in them are not detected."""
    path = save_checkpoint(tmp_path, make_gpt(**SMALL), meta=False)
    content, used = path.read_bytes(), torch.load(path, weights_only=True)["model"].values()
    records = [info for info in zipfile.ZipFile(path).infolist() if "/data/" in info.filename]
    refused = 0
    for info in records:
        damaged = bytearray(content)
        name_length, extra_length = (int.from_bytes(content[info.header_offset + at:][:2], "little") for at in (26, 28))
        damaged[info.header_offset + 30 + name_length + extra_length + info.file_size // 2] ^= 16
        refused += load(path, damaged) is None
    # The validation loss is a record of its own.
    assert refused == len({tensor.data_ptr() for tensor in used}) + 1 < len(records)


def test_a_good_file_is_not_called_damaged_if_memory_runs_out(file, monkeypatch):
    def fail(*arguments, **settings):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr("torch.empty", fail)
    with pytest.raises((MemoryError, RuntimeError), match="allocate memory"):
        load(file[1], file[1].read_bytes())
