"""Hostile zip files are refused."""
import io
import struct
import zipfile

import pytest
import torch

from attacks import make_zip, named_cases, needs_linux, poison, write_checkpoint
from pickle_code import tensor, value

pytest_plugins = ["attacks"]
pytestmark = needs_linux


def test_a_compressed_pickle_is_refused(assert_refused, valid_checkpoint, tmp_path):
    """A zip file of 16 kB contains a pickle of 32 megabytes. It could also be one of gigabytes."""
    write_checkpoint(tmp_path, poison(valid_checkpoint, piece=b"N" * 2**24 + b"2" * 2**24, compression=zipfile.ZIP_DEFLATED))
    assert_refused("one of its records is compressed")


@pytest.mark.parametrize("compression", named_cases({"deflate": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2, "lzma": zipfile.ZIP_LZMA}, quick={"deflate"}))
def test_compressed_weights_are_refused(compression, assert_refused, valid_checkpoint, tmp_path):
    """Mapped without decompression, they would be wrong numbers."""
    write_checkpoint(tmp_path, poison(valid_checkpoint, compression=compression))
    assert_refused("one of its records is compressed")


def change_directory(content, change):
    """The zip file after change(name, entry) has edited each entry of its directory (flags, sizes, offset, ...)."""
    content = bytearray(content)
    at = content.index(b"PK\1\2")
    while at >= 0:
        entry = list(struct.unpack_from("<IHHHHHHIIIHHHHHII", content, at))
        name = bytes(content[at + 46:at + 46 + entry[10]]).decode()
        change(name, entry)
        struct.pack_into("<IHHHHHHIIIHHHHHII", content, at, *entry)
        at = content.find(b"PK\1\2", at + 46)
    return bytes(content)


def set_field(index, number, only="/data/0"):
    """A change for change_directory: set this field of this record's entry to number, or to number(old value)."""
    def change(name, entry):
        if name.endswith(only):
            entry[index] = number(entry[index]) if callable(number) else number
    return change


WRONG = {
    "encrypted": set_field(3, 1), "4-gigabytes": set_field(9, 2**32 - 2), "2-gigabytes": set_field(9, 2**31), "a-byte-longer": set_field(9, lambda n: n + 1),
    "cut": set_field(9, lambda n: n // 2), "checksum": set_field(7, lambda n: n ^ 1), "far-offset": set_field(16, 2**32 - 2), "next-offset": set_field(16, lambda n: n + 1),
    "first-offset": set_field(16, 0), "long-pickle": set_field(9, 2**32 - 2, "data.pkl"), "far-pickle": set_field(16, 2**31, "data.pkl"), "no-pickle": set_field(9, 0, "data.pkl"),
    "nothing": set_field(9, 0), "long-name": set_field(10, 2**16 - 1), "long-extra": set_field(11, 2**16 - 1), "long-comment": set_field(12, 2**16 - 1),
}


@pytest.mark.parametrize("change", named_cases(WRONG, quick={"encrypted", "2-gigabytes", "cut", "checksum", "next-offset", "long-pickle", "long-name"}))
def test_a_wrong_zip_directory_is_refused(change, assert_refused, valid_checkpoint, tmp_path):
    write_checkpoint(tmp_path, change_directory(valid_checkpoint, change))
    assert_refused("out/ckpt.pt")


def test_records_that_overlap_are_refused(assert_refused, valid_checkpoint, tmp_path):
    def enlarge(name, entry):
        if "/data/" in name:
            entry[8] = entry[9] = len(valid_checkpoint) // 4
    write_checkpoint(tmp_path, change_directory(valid_checkpoint, enlarge))
    assert_refused("its records overlap")


def test_swapped_records_are_refused(assert_refused, valid_checkpoint, tmp_path):
    """Both records have the same length, and both checksums are in the directory. No other check would detect it."""
    records = [info for info in zipfile.ZipFile(io.BytesIO(valid_checkpoint)).infolist() if "/data/" in info.filename]
    one, other = next((a, b) for a in records for b in records if a.file_size == b.file_size and a.CRC != b.CRC)
    offsets = {one.filename: other.header_offset, other.filename: one.header_offset}

    def swap(name, entry):
        entry[16] = offsets.get(name, entry[16])
    write_checkpoint(tmp_path, change_directory(valid_checkpoint, swap))
    assert_refused("one of its records is not where its directory says")


@pytest.mark.parametrize("size", [10_000_000, pytest.param(300_000_000, marks=pytest.mark.slow)])
def test_a_long_pickle_is_not_read(size, assert_refused, tmp_path):
    write_checkpoint(tmp_path, make_zip(b"N." + b"N" * size, []))
    assert_refused("its pickle has more than 8388608 bytes")


def test_a_long_directory_is_not_read(assert_refused, tmp_path):
    write_checkpoint(tmp_path, make_zip(b"N", [(f"data/{i:0100}", b"") for i in range(60_000)]))
    assert_refused("far more records than a model needs")


def test_many_spellings_of_one_storage_name_are_refused(assert_refused, tmp_path):
    """torch ignores the letter case of a record's name, so it would read one record many times."""
    keys = ["".join(char.upper() if i >> n & 1 else char for n, char in enumerate("abcdefg")) for i in range(100)]
    model = b"](" + b"".join(tensor((1,), key=key, count=2 << 20) for key in keys) + b"e"
    content = make_zip(b"}(" + value("model") + model + value("model_args") + b"}u", [("data/abcdefg", bytes(8 << 20))], [0] * 4)
    write_checkpoint(tmp_path, content)
    assert_refused("it has a storage name that torch.save does not write")


def test_nothing_beyond_the_end_of_the_file_is_read(assert_refused, tmp_path):
    """Without mapping, torch would read beyond the end of the record."""
    model = b"}" + value("transformer.wpe.weight") + tensor((2**24,), count=2**24) + b"s"
    content = make_zip(b"}(" + value("model") + model + value("model_args") + b"}u", [("data/0", bytes(64))], [0] * 4)
    write_checkpoint(tmp_path, content)
    assert_refused("out/ckpt.pt")


def test_storages_that_overlap_are_refused(assert_refused, tmp_path):
    """Each storage is a short record and all zeros after it: a thousand times 20 megabytes, with correct checksums."""
    names, size = range(1000), 20 << 20
    model = b"}(" + b"".join(value(f"transformer.h.0.x{i}") + tensor((1,), key=str(i), count=size // 4) for i in names) + b"u"
    records = [*((f"data/{i}", b"") for i in names), ("data/zeros", bytes(size + 200_000))]
    content = make_zip(b"}(" + value("model") + model + value("model_args") + value({"n_layer": 1}) + b"u", records)
    write_checkpoint(tmp_path, content)
    assert_refused("claims tensors of")


@pytest.mark.parametrize("change", [
    lambda end: end + b"more", lambda end: end[:-2] + b"\1\0", lambda end: end[:64] + b"\0" + end[65:], lambda end: end[:48] + b"\0" + end[49:],
    lambda end: end[:40] + b"\0" + end[41:], lambda end: end[:56] + b"X" + end[57:], lambda end: end[76:],
], ids=["more", "a-comment", "record-elsewhere", "directory-elsewhere", "shorter", "no-locator", "short-form"])
def test_an_ambiguous_zip_directory_is_refused(change, assert_refused, valid_checkpoint, tmp_path):
    write_checkpoint(tmp_path, valid_checkpoint[:-98] + change(valid_checkpoint[-98:]))
    assert_refused("directory of records is not where torch.save puts it")


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_file_is_refused(assert_refused, tmp_path):
    write_checkpoint(tmp_path, b"")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "out" / "ckpt.pt")
    assert_refused("out/ckpt.pt")
