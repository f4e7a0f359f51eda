"""Reads files of torch.save and of safetensors as data.

A file of torch.save is a zip of one pickle and of records, the bytes of tensors. Only a model's
tensors are read.
"""
import json
import os
import re
import struct
import sys
import zipfile
import zlib
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from sampling.checkpoints.pickles import StoredTensor, read_pickle, stored_tensor
from sampling.checkpoints.untrusted_files import reject_lfs_pointer, require

# Bytes that are read at once: the processor's cache still has them when their CRC is computed.
CHUNK = 2**20
# A safetensors file's header: parsing it takes many times its size in memory.
MAX_HEADER_BYTES = 2**23
# A number with which torch.save began before torch 1.6.
OLD_MAGIC = bytes.fromhex("6cfc9c46f9206aa85019")
SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}


class Record(NamedTuple):
    """The place of the bytes of tensors in a file."""
    position: int
    size: int # in bytes
    crc32: int | None # if known


@dataclass(eq=False)
class TensorFile:
    """An open file. It must stay open while tensors are read."""
    file: BinaryIO
    content: Any # what was saved, with a StoredTensor in place of each tensor
    records: dict[str, Record]
    # The last record, if the last tensor was only a part of it.
    last_read: dict[str, Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def check(self, stored: StoredTensor) -> None:
        """Raises ValueError unless the tensor is inside its record, and the record in the file."""
        require(stored.key in self.records, "one of its tensors has no record")
        position, size, _ = self.records[stored.key]
        last = stored.offset
        for length, stride in zip(stored.shape, stored.strides, strict=True):
            last += (length - 1) * stride
        require(0 in stored.shape or last < size // stored.dtype.itemsize,
                "one of its tensors reaches beyond its record")
        if position + size > self.size:
            raise ValueError("it is cut short")

    def read(self, stored: StoredTensor) -> Tensor:
        """Read a tensor. Raises ValueError if its record is damaged or cut."""
        self.check(stored)
        record = self.last_read.get(stored.key)
        if record is None:
            record = self.read_record(stored.key)
        self.last_read = {stored.key: record} if record.nbytes > stored.nbytes else {}
        return record.view(stored.dtype).as_strided(stored.shape, stored.strides, stored.offset)

    def read_record(self, key: str) -> Tensor:
        """Read the bytes of a record straight into the memory of a tensor."""
        position, size, expected = self.records[key]
        record = torch.empty(size, dtype=torch.uint8)
        target = memoryview(record.numpy())
        crc = 0
        self.file.seek(position)
        for start in range(0, size, CHUNK):
            part = target[start:start + CHUNK]
            if self.file.readinto(part) != len(part):
                raise ValueError("it is cut short")
            crc = zlib.crc32(part, crc)
        if expected not in (None, crc):
            raise ValueError("a checksum is wrong")
        self.records[key] = Record(position, size, crc)
        return record


def read_tensor_file(file: BinaryIO) -> TensorFile:
    """The content of an open file of torch.save or of safetensors.

    Raises RejectedFileError if it is neither.
    """
    start = file.read(32)
    reject_lfs_pointer(start)
    if start[8:9] == b"{": # the length of a header in JSON comes before it
        return read_safetensors(file)
    if start.startswith(b"PK\3\4"):
        return read_zip(file)
    require(OLD_MAGIC not in start,
            "torch.save wrote it in the format from before torch 1.6; save it anew, in Python: "
            "torch.save(torch.load(path, weights_only=True), path)")
    require(not start.strip(b"\0"),
            "it is not a checkpoint: neither torch.save nor safetensors wrote it; pass the ckpt.pt "
            "of a training")
    # The program that saves the file has written nothing yet.
    raise ValueError("it holds only zeros" if start else "it is empty")


def read_zip(file: BinaryIO) -> TensorFile:
    archive = zipfile.ZipFile(file)
    names = archive.namelist()
    pickle_names = [name for name in names if re.fullmatch("[^/]*/data.pkl", name)]
    require(pickle_names, "it is a zip file without a data.pkl, so torch.save has not written it")
    folder = pickle_names[0].removesuffix("data.pkl")

    records = {} # of the tensors by their keys, of others by their names
    # torch.save has an option to leave checksums out. zipfile checks none that is None.
    has_crcs = any(info.CRC for info in archive.infolist())
    for info in archive.infolist():
        require(info.compress_type == zipfile.ZIP_STORED, "one of its records is compressed")
        if not has_crcs:
            info.CRC = None
        # A header of 30 bytes ends with the lengths of a name and an extra field, which follow.
        file.seek(info.header_offset + 26)
        position = info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        key = info.filename.removeprefix(f"{folder}data/")
        records[key] = Record(position, info.file_size, info.CRC)

    if f"{folder}byteorder" in names:
        order = archive.open(f"{folder}byteorder").read(9) # it could be long
        require(order == sys.byteorder.encode(),
                "it was saved on a machine with another byte order")
    return TensorFile(file, read_pickle(archive.read(pickle_names[0])), records)


def read_safetensors(file: BinaryIO) -> TensorFile:
    """A file of the length of its header, the header in JSON, and the bytes of the tensors.

    There are no checksums.
    """
    file.seek(0)
    header_bytes = int.from_bytes(file.read(8), "little")
    require(header_bytes <= MAX_HEADER_BYTES,
            f"it claims a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} are allowed")
    header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    content = {}
    records = {}
    for key, entry in header.items():
        dtype = entry["dtype"]
        require(dtype in SAFETENSORS_DTYPES,
                f"it has a tensor of the type {dtype!r:.20}, which is not supported")
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        tensor = stored_tensor(key, SAFETENSORS_DTYPES[dtype], shape, shape, 0) # checks the shape
        strides = torch.empty(shape, device="meta").stride() # of a contiguous tensor
        content[key] = tensor._replace(strides=strides)
        records[key] = Record(8 + header_bytes + begin, end - begin, None)
        require(begin >= 0 and tensor.nbytes == end - begin,
                "one of its tensors does not fit its place")
    return TensorFile(file, content, records)
