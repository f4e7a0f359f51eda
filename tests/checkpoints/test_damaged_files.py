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
KINDS = ["ckpt.pt", "old ckpt.pt", "model.safetensors", "pytorch_model.bin", "config.json"]
NUM_POSITIONS = 200 # in each kind of file, for each kind of damage
each_step = pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["every-fifth", "all"])


@pytest.fixture(params=KINDS)
def file(request, tmp_path):
    """(kind of the file, its path) in the folder of a small model."""
    kind = request.param
    if "ckpt" in kind:
        path = save_checkpoint(tmp_path, make_gpt(**SMALL), meta=False)
        if kind == "old ckpt.pt":
            torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
        return kind, path
    theirs = make_transformers_gpt2(vocab_size=50, n_layer=1, n_embd=2, n_head=1, n_positions=4)
    theirs.save_pretrained(tmp_path)
    if kind == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), tmp_path / kind)
    return kind, tmp_path / kind


def load(path, content=None):
    """The loaded settings and tensors after content was written to path; None if loading raises a short error."""
    if content is not None:
        write_settled(path, content)
    try:
        model = build_gpt(load_by_name(path.parent, log=lambda text: None))
    except (ValueError, OSError) as e:
        assert str(path.parent) in str(e) and len(str(e)) < 3000 and "\n" not in str(e)
        return None
    return model.config, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return one[0] == other[0] and all(torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())


def positions(kind, size, step):
    """Positions in a file of this size, at both ends and at random. A step above 1 selects fewer of them."""
    rng = random.Random(kind)
    ends = [*range(min(60, size)), *range(max(0, size - 60), size)]
    return (ends + [rng.randrange(size) for _ in range(NUM_POSITIONS - len(ends))])[::step]


@each_step
def test_a_cut_file_is_refused(file, step):
    """Only an old file may still load, because the optimizer's tensors are at its end."""
    kind, path = file
    good, content = load(path), path.read_bytes()
    found = [load(path, content[:at]) for at in positions(kind, len(content), step)]
    assert all(model is None or (same(model, good) and kind in ("old ckpt.pt", "config.json")) for model in found)


@each_step
def test_a_changed_byte_is_detected_if_there_are_checksums(file, step):
    """Without checksums, a file that loads still gives a model that fits together."""
    kind, path = file
    good, content, rng, refused = load(path), path.read_bytes(), random.Random(kind), 0
    for at in positions(kind, len(content), step):
        damaged = bytearray(content)
        damaged[at] ^= rng.randrange(1, 256)
        found = load(path, damaged)
        refused += found is None
        assert found is None or same(found, good) or kind not in ("ckpt.pt", "pytorch_model.bin"), at
    assert refused > 3


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


def swaps(path, content):
    """Changes (position, num_bytes, number), each of which points to another record of the same length."""
    records = [info for info in zipfile.ZipFile(path).infolist() if "/data/" in info.filename]
    for one in records:
        for other in records:
            if one.file_size != other.file_size or one.CRC == other.CRC:
                continue
            entry, between = content.rindex(one.filename.encode() + b"PK") - 46, other.header_offset - one.header_offset
            yield entry + 42, 4, other.header_offset
            for at in (26, 28) if between > 0 else (): # or the header claims a longer name or extra field
                number = int.from_bytes(content[one.header_offset + at:][:2], "little") + between
                yield from [(one.header_offset + at, 2, number)] if number < 2**16 else []


def test_no_record_is_read_instead_of_another(tmp_path):
    path = save_checkpoint(tmp_path, make_gpt(**SMALL), meta=False)
    content, good = path.read_bytes(), load(path)
    found = [load(path, content[:at] + number.to_bytes(size, "little") + content[at + size:])
             for at, size, number in swaps(path, content)]
    assert len(found) > 100 and all(model is None or same(model, good) for model in found)
    assert sum(model is None for model in found) > 50


def test_a_good_file_is_not_called_damaged_if_memory_runs_out(file, monkeypatch):
    def fail(*arguments, **settings):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    _, path = file
    with monkeypatch.context() as patch:
        patch.setattr("torch.empty", fail)
        with pytest.raises(MemoryError):
            load(path)
    assert load(path)
