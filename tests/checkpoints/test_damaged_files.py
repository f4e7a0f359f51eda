"""Damaged files: loading raises a short error, or returns exactly what was saved.

Files without checksums may load changed values. The tests load in this process, so a crash or a hang would stop them. The quick cases damage every tenth position.
"""
import random
import zipfile

import pytest
import torch

from models import make_gpt, make_transformers_gpt2, save_checkpoint, save_meta
from sampling.checkpoints.build import build_gpt
from sampling.checkpoints.huggingface import load_gpt2
from sampling.checkpoints.nanogpt import load_checkpoint
from sampling.inputs.char_tokenizer import CharTokenizer
from sampling.inputs.tokenizer import load_tokenizer

NUM_POSITIONS = {"ckpt.pt": 400, "old ckpt.pt": 400, "model.safetensors": 300, "pytorch_model.bin": 300, "meta.pkl": 300, "config.json": 300}
SMALL = dict(n_layer=1, n_head=1, n_embd=4, block_size=4, vocab_size=5, bias=False)
each_stride = pytest.mark.parametrize("stride", [10, pytest.param(1, marks=pytest.mark.slow)], ids=["every-tenth", "all"])


def make_checkpoint(folder, zipped=True):
    """A small checkpoint with some optimizer state, and its vocabulary."""
    path = save_checkpoint(folder, make_gpt(**SMALL), meta=False)
    if not zipped:
        torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    save_meta(folder / "meta.pkl", "\nabcd")
    return path


def make_hf_folder(folder, kind):
    """A small GPT-2 in Hugging Face's format, with model.safetensors or pytorch_model.bin."""
    theirs = make_transformers_gpt2(vocab_size=50257, n_layer=1, n_embd=2, n_head=1, n_positions=4)
    theirs.save_pretrained(folder)
    if kind == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), folder / kind)


@pytest.fixture(params=NUM_POSITIONS)
def file(request, tmp_path, gpt2_encoding):
    """(kind of the file, its path, the function that loads its folder)."""
    kind = request.param
    if kind in ("model.safetensors", "pytorch_model.bin", "config.json"):
        make_hf_folder(tmp_path, kind)
        return kind, tmp_path / kind, load_gpt2
    path = make_checkpoint(tmp_path, zipped=kind != "old ckpt.pt")
    return kind, tmp_path / "meta.pkl" if kind == "meta.pkl" else path, load_checkpoint


def load(folder, load_from=load_checkpoint):
    """The loaded config, tensors and vocabulary, or None if loading raises a short error."""
    try:
        checkpoint = load_from(str(folder))
        model, tokenizer = build_gpt(checkpoint), load_tokenizer(checkpoint, log=lambda text: None)
    except (ValueError, OSError) as e:
        assert str(folder) in str(e) and len(str(e)) < 3000
        return None
    vocabulary = (tokenizer.stoi, tokenizer.itos) if isinstance(tokenizer, CharTokenizer) else None
    return model.config, {name: tensor.clone() for name, tensor in model.state_dict().items()}, vocabulary


def same(one, other):
    return one[0] == other[0] and one[2] == other[2] and one[1].keys() == other[1].keys() and all(
        torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())


def positions(kind, size, stride):
    """Positions in a file of this size, at both ends and at random. A stride above 1 selects fewer of them."""
    rng = random.Random(kind)
    ends = [*range(min(100, size)), *range(max(0, size - 100), size)]
    return (ends + [rng.randrange(size) for _ in range(NUM_POSITIONS[kind] - len(ends))])[::stride]


@each_stride
def test_a_truncated_file_is_refused(file, stride):
    """Only an old-format file may still load, because the optimizer's tensors are at its end."""
    kind, path, load_from = file
    good, content, refused = load(path.parent, load_from), path.read_bytes(), 0
    cuts = positions(kind, len(content), stride)
    for at in cuts:
        path.write_bytes(content[:at])
        found = load(path.parent, load_from)
        refused += found is None
        assert found is None or same(found, good), at
    assert refused >= (0.7 if kind == "old ckpt.pt" else 0.99) * len(cuts)


@each_stride
def test_a_changed_byte_is_detected_if_there_are_checksums(file, stride):
    """Without checksums, a file that loads still gives a model and a vocabulary that fit together."""
    kind, path, load_from = file
    good, content, rng, refused = load(path.parent, load_from), path.read_bytes(), random.Random(kind), 0
    changes = positions(kind, len(content), stride)
    for at in changes:
        damaged = bytearray(content)
        damaged[at] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        found = load(path.parent, load_from)
        refused += found is None
        assert found is None or same(found, good) or kind not in ("ckpt.pt", "pytorch_model.bin"), at
    assert refused > 0.1 * len(changes)


def test_a_changed_bit_is_detected_in_every_record_that_is_used(tmp_path):
    """The optimizer's records are not read, so changes in them are not detected."""
    path = make_checkpoint(tmp_path)
    content, used = path.read_bytes(), torch.load(path, weights_only=True)["model"].values()
    records = {info.filename: info for info in zipfile.ZipFile(path).infolist() if "/data/" in info.filename}
    refused = 0
    for info in records.values():
        at = content.index(info.filename.encode())
        start = at + len(info.filename) + int.from_bytes(content[at - 2:at], "little")
        damaged = bytearray(content)
        damaged[start + info.file_size // 2] ^= 16
        path.write_bytes(damaged)
        refused += load(tmp_path) is None
    assert refused == len({tensor.data_ptr() for tensor in used}) < len(records)


def test_no_record_is_read_instead_of_another(tmp_path):
    """Both records have the same length and correct checksums; the directory or the record's own header points to the other one."""
    path = make_checkpoint(tmp_path)
    content, good, refused = path.read_bytes(), load(tmp_path), []
    for at, size, number in swaps(path, content):
        path.write_bytes(content[:at] + number.to_bytes(size, "little") + content[at + size:])
        found = load(tmp_path)
        assert found is None or same(found, good), at
        refused.append(found is None)
    assert len(refused) > 100 and all(refused)


def swaps(path, content):
    """Changes (position, num_bytes, number). Each makes a reader find another record of the same length."""
    records = [info for info in zipfile.ZipFile(path).infolist() if "/data/" in info.filename]
    for one in records:
        for other in records:
            if one is other or one.file_size != other.file_size or one.CRC == other.CRC:
                continue
            entry, between = content.rindex(one.filename.encode() + b"PK") - 46, other.header_offset - one.header_offset
            changes = [(entry + 42, 4, other.header_offset)]
            if between > 0: # or the record's header claims a longer name or extra field before its bytes
                changes += [(one.header_offset + at, 2, int.from_bytes(content[one.header_offset + at:][:2], "little") + between)
                            for at in (26, 28)]
            yield from (change for change in changes if change[1] == 4 or change[2] < 2**16)


def test_a_changed_setting_is_detected(tmp_path):
    """n_head does not change the shape of any tensor."""
    path = make_checkpoint(tmp_path)
    content = path.read_bytes()
    at = content.index(b"K", content.index(b"n_head")) + 1
    path.write_bytes(content[:at] + b"\2" + content[at + 1:])
    assert torch.load(path, weights_only=True)["model_args"]["n_head"] == 2
    with pytest.raises(ValueError, match="does not match its checksum"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["ckpt.pt", "model.safetensors"])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr)
def test_a_good_file_is_not_called_damaged_if_memory_runs_out(tmp_path, monkeypatch, kind, error):
    make_checkpoint(tmp_path) if kind == "ckpt.pt" else make_hf_folder(tmp_path, kind)

    def fail(*arguments, **settings):
        raise error
    monkeypatch.setattr("torch.load" if kind == "ckpt.pt" else "safetensors.torch.load_file", fail)
    with pytest.raises(MemoryError, match=f"reading .*{kind}"):
        load_checkpoint(tmp_path) if kind == "ckpt.pt" else load_gpt2(str(tmp_path))
