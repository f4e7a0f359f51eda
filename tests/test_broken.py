"""Damaged files: an error of one line, or a load of exactly what was saved where the damage can be told.

Nearly all cases load in this process, in which a crash or a hang would end the tests; some run the whole script.
"""
import io
import random
import zipfile

import pytest
import torch
import weights
from loading import load
from tokenizer import CharTokenizer

from conftest import end_as_torch, make_gpt, make_transformers_gpt2, save_checkpoint, save_meta

CASES = {"ckpt.pt": 1000, "old ckpt.pt": 1000, "model.safetensors": 500, "pytorch_model.bin": 500, "meta.pkl": 300, "config.json": 300}
SMALL = dict(n_layer=1, n_head=1, n_embd=4, block_size=4, vocab_size=5)


def make_checkpoint(folder, zipped):
    """A small checkpoint with some optimizer state, and its table."""
    path = save_checkpoint(folder, make_gpt(**SMALL), meta=False)
    if not zipped:
        torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    save_meta(folder / "meta.pkl", "\nabcd")
    return path


def make_hub_folder(folder, kind):
    """A small GPT-2 of Hugging Face's with safetensors, or with pytorch_model.bin."""
    theirs = make_transformers_gpt2(vocab_size=50257, n_layer=1, n_embd=2, n_head=1, n_positions=4)
    theirs.save_pretrained(folder)
    if kind == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), folder / kind)
    return folder / kind


@pytest.fixture(params=["ckpt.pt", "old ckpt.pt", "meta.pkl", "model.safetensors", "pytorch_model.bin", "config.json"])
def file(request, tmp_path, gpt2_encoding):
    """(its kind, the path, the settings that load it)."""
    if request.param in ("model.safetensors", "pytorch_model.bin", "config.json"):
        kind = request.param if request.param != "config.json" else "model.safetensors"
        make_hub_folder(tmp_path, kind)
        return request.param, tmp_path / request.param, (str(tmp_path), "")
    path = make_checkpoint(tmp_path, zipped=request.param != "old ckpt.pt")
    return request.param, tmp_path / "meta.pkl" if request.param == "meta.pkl" else path, ("resume", str(tmp_path))


def loaded(settings):
    """What loading gives, for comparing, or None where it is refused in a line that can be read."""
    try:
        model, tokenizer, _ = load(*settings)
    except (ValueError, OSError) as e:
        assert settings[0 if settings[1] == "" else 1] in str(e) and len(str(e)) < 3000
        return None
    table = (tokenizer.stoi, tokenizer.itos) if isinstance(tokenizer, CharTokenizer) else None
    return model.config, {name: tensor.clone() for name, tensor in model.state_dict().items()}, table


def same(one, other):
    return one[0] == other[0] and one[2] == other[2] and one[1].keys() == other[1].keys() and all(
        torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())


def places(kind, size):
    """Some places in so many bytes: both ends, and any."""
    rng = random.Random(kind)
    ends = [*range(min(100, size)), *range(max(0, size - 100), size)]
    return ends + [rng.randrange(size) for _ in range(CASES[kind] - len(ends))]


def test_cut_anywhere(file):
    """A part of a file is never the whole, but for what an old one keeps of the optimizer at its end."""
    kind, path, settings = file
    good, content, refused = loaded(settings), path.read_bytes(), 0
    for at in places(kind, len(content)):
        path.write_bytes(content[:at])
        found = loaded(settings)
        refused += found is None
        assert found is None or same(found, good), at
    assert refused > (0.7 if kind == "old ckpt.pt" else 0.99) * CASES[kind]


def test_a_byte_is_another_anywhere(file):
    """Where there are checksums, what loads is what was saved. Else it is at least a network and a table that fit."""
    kind, path, settings = file
    good, content, rng, refused = loaded(settings), path.read_bytes(), random.Random(kind), 0
    for at in places(kind, len(content)):
        damaged = bytearray(content)
        damaged[at] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        found = loaded(settings)
        refused += found is None
        assert found is None or same(found, good) or kind not in ("ckpt.pt", "pytorch_model.bin"), at
    assert refused > 0.1 * CASES[kind]


def test_a_bit_is_another_in_any_record_that_is_used(tmp_path):
    """And only in those: what the optimizer keeps is not read."""
    path = make_checkpoint(tmp_path, zipped=True)
    content, settings = path.read_bytes(), ("resume", str(tmp_path))
    checkpoint = torch.load(path, weights_only=True)
    used = checkpoint["model"].values()
    records = {info.filename: info for info in zipfile.ZipFile(path).infolist() if "/data/" in info.filename}
    refused = 0
    for info in records.values():
        at = content.index(info.filename.encode())
        start = at + len(info.filename) + int.from_bytes(content[at - 2:at], "little")
        damaged = bytearray(content)
        damaged[start + info.file_size // 2] ^= 16
        path.write_bytes(damaged)
        refused += loaded(settings) is None
    assert refused == len({tensor.data_ptr() for tensor in used}) < len(records)


def test_no_record_is_read_in_another_ones_place(tmp_path):
    """Of the same length, whose checksum is right: where the directory says that it begins there, or it says so itself."""
    path = make_checkpoint(tmp_path, zipped=True)
    content, good, refused = path.read_bytes(), loaded(("resume", str(tmp_path))), []
    records = [info for info in zipfile.ZipFile(path).infolist() if "/data/" in info.filename]
    for one in records:
        for other in records:
            if one is other or one.file_size != other.file_size or one.CRC == other.CRC:
                continue
            entry, between = content.rindex(one.filename.encode() + b"PK") - 46, other.header_offset - one.header_offset
            changes = [(entry + 42, 4, other.header_offset)]
            if between > 0: # its other half: how much lies between a record's name and its bytes
                changes += [(one.header_offset + at, 2, int.from_bytes(content[one.header_offset + at:][:2], "little") + between)
                            for at in (26, 28)]
            for at, size, number in changes:
                if number >= 2**16:
                    continue
                path.write_bytes(content[:at] + number.to_bytes(size, "little") + content[at + size:])
                found = loaded(("resume", str(tmp_path)))
                assert found is None or same(found, good), (one.filename, other.filename, at)
                refused.append(found is None)
    assert len(refused) > 100 and all(refused)


def test_a_number_is_another(tmp_path):
    """One that no shape gives away."""
    path = make_checkpoint(tmp_path, zipped=True)
    content = path.read_bytes()
    at = content.index(b"K", content.index(b"n_head")) + 1
    path.write_bytes(content[:at] + b"\2" + content[at + 1:])
    assert torch.load(path, weights_only=True)["model_args"]["n_head"] == 2
    with pytest.raises(ValueError, match="does not match its checksum"):
        load("resume", str(tmp_path))


def test_files_without_checksums_are_read(tmp_path):
    """torch can be told to leave them out."""
    path = tmp_path / "ckpt.pt"
    with_them = loaded(("resume", str(make_checkpoint(tmp_path, zipped=True))))
    checkpoint = torch.load(path, weights_only=True)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(checkpoint, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert all(info.CRC == 0 for info in zipfile.ZipFile(path).infolist())
    assert same(loaded(("resume", str(path))), with_them)
    # Not mapped, torch would read whatever lies beyond a record that is shorter than its pickle says.
    assert weights.pages_of(weights.read_pickle(path)[0]["model"].values())


def test_tensors_of_every_kind_that_torch_saves(tmp_path):
    """Views, shared storages, parameters, and types without a storage class of their own."""
    base = torch.arange(24.).view(4, 6)
    saved = {"base": base, "view": base[1:, ::2], "turned": base.t(), "number": torch.tensor(5.0), "none": torch.ones(0, 3),
             "parameter": torch.nn.Parameter(torch.ones(2)), "expanded": torch.ones(1).expand(7, 5), "half": torch.ones(2).half(),
             "bool": torch.tensor([True, False]), "float8": torch.ones(4).to(torch.float8_e4m3fn), "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
             "complex": torch.tensor([1j]), "int64": torch.tensor([2**60])}
    for zipped in True, False:
        if not zipped:
            del saved["float8"], saved["uint16"] # which torch itself cannot read there
        torch.save(saved, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
        found, _ = weights.read_pickle(tmp_path / "x.pt")
        assert found.keys() == saved.keys()
        for name, tensor in saved.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
            assert torch.equal(found[name].contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else found[name],
                               tensor.contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor), name


def test_the_other_byte_order_is_refused(tmp_path):
    """torch turns numbers round where they are mapped, which does not go with letting pages go."""
    path, swapped = make_checkpoint(tmp_path, zipped=True), io.BytesIO()
    with zipfile.ZipFile(path) as held, zipfile.ZipFile(swapped, "w") as archive:
        for name in held.namelist():
            archive.writestr(name, b"big" if name.endswith("byteorder") else held.read(name))
    path.write_bytes(end_as_torch(swapped.getvalue()))
    with pytest.raises(ValueError, match="a machine of the other byte order wrote it"):
        load("resume", str(tmp_path))


@pytest.mark.parametrize("which", range(6))
def test_the_script_with_damaged_files(which, sample, tmp_path):
    """Some of all of these: where loading is refused the script says so in a line, else it samples."""
    path, rng = make_checkpoint(tmp_path, zipped=which % 3 > 0), random.Random(which)
    path = tmp_path / "meta.pkl" if which % 3 == 2 else path
    content = bytearray(path.read_bytes())
    if which < 3:
        content = content[:rng.randrange(len(content))]
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    fine = loaded(("resume", str(tmp_path))) is not None
    done = sample(f"--out_dir={tmp_path}", "--num_samples=1", "--max_new_tokens=3", "--device=cpu")
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr and done.returncode == (0 if fine else 1) and len(lines) == (0 if fine else 1)
