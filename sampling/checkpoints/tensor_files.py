"""Reads files of torch.save and of safetensors as data.

A file of torch.save is a zip of one pickle and of records, the bytes of tensors. Only a model's tensors are read.
"""
import json
import math
import os
import re
import struct
import sys
import zipfile
import zlib
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sampling.checkpoints.pickles import StoredTensor, read_pickle, stored_tensor
from sampling.checkpoints.untrusted_files import reject_lfs_pointer, require

CHUNK = 2**20 # bytes that are read at once; the processor's cache still has them when their CRC is computed
MAX_HEADER_BYTES = 2**23 # of a safetensors file: parsing it takes many times its size in memory
OLD_MAGIC = bytes.fromhex("6cfc9c46f9206aa85019") # a number with which torch.save began before torch 1.6
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
          "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@dataclass(eq=False)
class TensorFile:
    """An open file. It must stay open while tensors are read."""
    file: BinaryIO
    content: Any # what was saved, with a StoredTensor in place of each tensor
    records: dict[str, tuple[int, int, int | None]] # by key: position, size in bytes, CRC-32 if known
    last_read: dict[tuple, Tensor] = field(default_factory=dict) # the last record, if the last tensor was a part of it

    @property
    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def check(self, stored: StoredTensor) -> None:
        """Raises ValueError unless the tensor is inside its record, and the record inside the file."""
        key, dtype, shape, strides, offset = stored
        require(key in self.records, "one of its tensors has no record")
        position, size, _ = self.records[key]
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        fits = size % dtype.itemsize == 0 and (0 in shape or last < size // dtype.itemsize)
        require(fits, "one of its tensors reaches beyond its record")
        if position + size > self.size:
            raise ValueError("it is cut short")

    def read(self, stored: StoredTensor) -> Tensor:
        """Read a tensor straight into its memory. Raises ValueError if its record is damaged or cut."""
        self.check(stored)
        record, (position, size, expected) = self.last_read.get(stored[:2]), self.records[stored.key]
        if record is None:
            record, crc = torch.empty(size, dtype=torch.uint8), 0
            target = memoryview(record.numpy())
            self.file.seek(position)
            for start in range(0, size, CHUNK):
                part = target[start:start + CHUNK]
                if self.file.readinto(part) != len(part):
                    raise ValueError("it is cut short")
                crc = zlib.crc32(part, crc)
            if expected not in (None, crc):
                raise ValueError("a checksum is wrong")
            self.records[stored.key] = position, size, crc
            record = record.view(stored.dtype)
        self.last_read = {stored[:2]: record} if record.nbytes > stored.nbytes else {}
        return record.as_strided(stored.shape, stored.strides, stored.offset)


def read_tensor_file(file: BinaryIO) -> TensorFile:
    """The content of an open file of torch.save or of safetensors. Raises RejectedFileError if it is neither."""
    file.seek(0)
    start = file.read(32)
    reject_lfs_pointer(start)
    if start[8:9] == b"{": # the length of a header in JSON comes before it
        return read_safetensors(file)
    if start.startswith(b"PK\3\4"):
        return read_zip(file)
    require(OLD_MAGIC not in start, "torch.save wrote it in the format from before torch 1.6; save it anew, in Python: "
            "torch.save(torch.load(path, weights_only=True), path)")
    require(not start.strip(b"\0"),
            "it is not a checkpoint: neither torch.save nor safetensors wrote it; pass the ckpt.pt of a training")
    raise ValueError("it holds only zeros" if start else "it is empty") # its writer has written nothing yet


def read_zip(file: BinaryIO) -> TensorFile:
    archive = zipfile.ZipFile(file)
    infos = {info.filename: info for info in archive.infolist()}
    pickle_name = next((name for name in infos if re.fullmatch("[^/]*/data.pkl", name)), None)
    require(pickle_name, "it is a zip file without a data.pkl, so torch.save has not written it")
    is_plain = all(info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1 for info in infos.values())
    require(is_plain, "one of its records is compressed or encrypted")
    has_crcs = any(info.CRC for info in infos.values()) # torch.save has an option to leave them out
    for info in infos.values():
        info.CRC = info.CRC if has_crcs else None # zipfile does not check None
    folder = pickle_name.removesuffix("data.pkl")
    order = archive.open(f"{folder}byteorder").read(9) if f"{folder}byteorder" in infos else None # it could be long
    require(order in (None, sys.byteorder.encode()), "it was saved on a machine with another byte order")
    content, records = read_pickle(archive.read(pickle_name)), {}
    for name, info in infos.items():
        if name.startswith(f"{folder}data/"):
            file.seek(info.header_offset + 26) # of 30 bytes, which a name and an extra field of these lengths follow
            position = info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
            records[name.removeprefix(f"{folder}data/")] = position, info.file_size, info.CRC
    return TensorFile(file, content, records)


def read_safetensors(file: BinaryIO) -> TensorFile:
    """A file of the length of its header, the header in JSON, and the bytes of the tensors. There are no checksums."""
    file.seek(0)
    header_bytes = int.from_bytes(file.read(8), "little")
    require(header_bytes <= MAX_HEADER_BYTES,
            f"it claims a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} are allowed")
    header, content, records = json.loads(file.read(header_bytes)), {}, {}
    header.pop("__metadata__", None)
    for key, entry in header.items():
        require(entry["dtype"] in DTYPES, f"it has a tensor of the type {entry['dtype']!r:.20}, which is not supported")
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        tensor = stored_tensor(key, DTYPES[entry["dtype"]], shape, shape, 0) # checks the shape before strides are made
        content[key] = tensor._replace(strides=tuple(math.prod(shape[i + 1:]) for i in range(len(shape))))
        records[key] = 8 + header_bytes + begin, end - begin, None
        require(begin >= 0 and content[key].nbytes == end - begin, "one of its tensors does not fit its place")
    return TensorFile(file, content, records)
