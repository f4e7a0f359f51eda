"""read_torch_file returns everything that torch.save has written."""
import io
import pathlib
import zipfile

import numpy as np
import pytest
import torch

from models import add_zip64_end
from sampling.checkpoints.mapped_memory import pages_of
from sampling.checkpoints.torch_files import read_torch_file


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
def test_every_kind_of_tensor_loads_as_it_was_saved(zipped, tmp_path):
    """Views, shared storages, parameters, and dtypes without their own storage class."""
    base = torch.arange(24.).view(4, 6)
    saved = {"base": base, "view": base[1:, ::2], "turned": base.t(), "number": torch.tensor(5.0), "none": torch.ones(0, 3),
             "parameter": torch.nn.Parameter(torch.ones(2)), "expanded": torch.ones(1).expand(7, 5), "half": torch.ones(2).half(),
             "bool": torch.tensor([True, False]), "float8": torch.ones(4).to(torch.float8_e4m3fn), "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
             "complex": torch.tensor([1j]), "int64": torch.tensor([2**60])}
    if not zipped:
        del saved["float8"], saved["uint16"] # torch itself cannot read them from an old file
    torch.save(saved, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    found, _ = read_torch_file(tmp_path / "x.pt")
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else found[name],
                           tensor.contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor), name


def test_numpy_numbers_and_paths_load_as_plain_numbers_and_text(tmp_path):
    """Training settings may contain them."""
    settings = {"a": np.float64(1.5), "b": np.int32(-7), "c": np.bool_(True), "d": np.float32(0.1), "e": np.dtype(">i4").type(3),
                "out_dir": pathlib.Path("/a/b"), "data": pathlib.PureWindowsPath("c:/d"), "best": torch.tensor(1.0)}
    torch.save({"config": settings}, tmp_path / "x.pt")
    found = read_torch_file(tmp_path / "x.pt")[0]["config"]
    assert [found[key] for key in "abce"] == [1.5, -7, True, 3] and abs(found["d"] - 0.1) < 1e-7
    assert found["out_dir"] == "/a/b" and type(found["a"]) is float


def test_files_without_checksums_load(tmp_path):
    """torch has an option to omit them."""
    path, saved = tmp_path / "x.pt", {"a": torch.arange(10.)}
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(saved, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert all(info.CRC == 0 for info in zipfile.ZipFile(path).infolist())
    found, checksums = read_torch_file(path)
    assert torch.equal(found["a"], saved["a"]) and checksums == set()
    # Without mapping, torch would read beyond the end of a record that is shorter than its pickle says.
    assert pages_of(found.values())


def test_the_other_byte_order_is_refused(tmp_path):
    """torch would swap the bytes of mapped tensors, but the swapped bytes are lost when the pages are released."""
    path, swapped = tmp_path / "x.pt", io.BytesIO()
    torch.save({"a": torch.ones(1)}, path)
    with zipfile.ZipFile(path) as records, zipfile.ZipFile(swapped, "w") as archive:
        for name in records.namelist():
            archive.writestr(name, b"big" if name.endswith("byteorder") else records.read(name))
    path.write_bytes(add_zip64_end(swapped.getvalue()))
    with pytest.raises(ValueError, match="it was saved on a machine with another byte order"):
        read_torch_file(path)
