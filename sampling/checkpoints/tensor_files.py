"""Reads files of torch.save and of safetensors as data.

A file of torch.save is a zip of one pickle and of records, the bytes of tensors. Only a model's tensors are read.
"""
import json
import math
import os
import re
import sys
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sampling.checkpoints.pickles import (
    MAX_PICKLE_BYTES,
    DataUnpickler,
    StoredTensor,
    read_pickle,
    stored_tensor,
    unwrap,
)
from sampling.checkpoints.untrusted_files import DamagedFileError, damaged_if_fails, reject_pointer, require

CHUNK = 2**20 # bytes that are read at once; the processor's cache still has them when their CRC is computed
MAX_HEADER_BYTES = 2**23 # of a safetensors file: parsing it takes many times its size in memory
OLD_MAGIC = bytes.fromhex("6cfc9c46f9206aa85019") # a number with which torch.save began before torch 1.6
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
          "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@dataclass(eq=False)
class TensorFile:
    content: Any # what was saved, with a StoredTensor in place of each tensor
    sizes: dict[str, int] # the bytes of each record, by its key
    crcs: dict[str, int] # the CRC-32 of each record, if the file has them
    open_record: Callable[[str], AbstractContextManager[BinaryIO]]
    last_record: dict[tuple, Tensor] = field(default_factory=dict) # if the last tensor was a part of it

    def check(self, stored: StoredTensor) -> None:
        """Raises RejectedFileError if the tensor is not inside its record."""
        key, dtype, shape, strides, offset = stored
        require(key in self.sizes, "one of its tensors has no record")
        length, rest = divmod(self.sizes[key], dtype.itemsize)
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        require(not rest and (0 in shape or last < length), "one of its tensors reaches beyond its record")

    @damaged_if_fails()
    def read(self, stored: StoredTensor) -> Tensor:
        """Read a tensor straight into its memory. Raises RejectedFileError if its record is damaged or cut."""
        self.check(stored)
        record = self.last_record.get(stored[:2])
        if record is None:
            record = torch.empty(self.sizes[stored.key] // stored.dtype.itemsize, dtype=stored.dtype)
            target = memoryview(record.view(torch.uint8).numpy())
            with self.open_record(stored.key) as file: # zipfile compares the CRC of a record when it is at its end
                for start in range(0, len(target), CHUNK):
                    part = target[start:start + CHUNK]
                    if file.readinto(part) != len(part):
                        raise DamagedFileError("it is cut short")
        self.last_record = {stored[:2]: record} if record.nbytes > stored.nbytes else {}
        return record.as_strided(stored.shape, stored.strides, stored.offset)


@damaged_if_fails()
def read_tensor_file(file: BinaryIO) -> TensorFile:
    """The content of an open file of torch.save or of safetensors. It must stay open while tensors are read.

    Raises DamagedFileError if the file is cut or damaged; RejectedFileError if it is none of these.
    """
    file.seek(0)
    start = file.read(32)
    file.seek(0)
    reject_pointer(start)
    if start[8:9] == b"{": # the length of a header in JSON comes before it
        return read_safetensors(file)
    if start.startswith(b"PK\3\4"):
        return read_zip(file)
    is_begun = not start.strip(b"\0") # its writer has written nothing yet
    require(is_begun or OLD_MAGIC in start, "it is not a checkpoint: neither torch.save nor safetensors wrote it")
    return read_old_file(file)


def read_zip(file: BinaryIO) -> TensorFile:
    archive, file_size = zipfile.ZipFile(file), file.seek(0, os.SEEK_END)
    infos = {info.filename: info for info in archive.infolist()}
    pickle_name = next(name for name in infos if re.fullmatch("[^/]*/data.pkl", name))
    for info in infos.values():
        require(info.compress_type == zipfile.ZIP_STORED, "one of its records is compressed")
        if info.file_size != info.compress_size or info.header_offset + info.file_size > file_size:
            raise DamagedFileError("one of its records reaches beyond its end")
    has_crcs = any(info.CRC for info in infos.values()) # torch.save has an option to leave them out
    for info in infos.values():
        info.CRC = info.CRC if has_crcs else None
    require(infos[pickle_name].file_size <= MAX_PICKLE_BYTES, f"its pickle has more than {MAX_PICKLE_BYTES} bytes")
    folder = pickle_name.removesuffix("data.pkl")
    if f"{folder}byteorder" in infos:
        require_byte_order(archive.read(f"{folder}byteorder").decode())
    content, prefix = read_pickle(archive.read(pickle_name)), f"{folder}data/"
    records = {name.removeprefix(prefix): info for name, info in infos.items() if name.startswith(prefix)}
    sizes, crcs = ({key: getattr(info, name) for key, info in records.items()} for name in ("file_size", "CRC"))
    return TensorFile(content, sizes, crcs if has_crcs else {}, lambda key: archive.open(records[key]))


def read_old_file(file: BinaryIO) -> TensorFile:
    """A file of torch before 1.6: five pickles, and then each record after its number of elements."""
    position, contents, dtypes, file_size = 0, [], {}, file.seek(0, os.SEEK_END)
    for _ in range(5): # the magic number, the version, the machine, the content, the keys of the records in order
        file.seek(position)
        unpickler = DataUnpickler(file.read(MAX_PICKLE_BYTES))
        contents.append(unwrap(unpickler.load()))
        position, dtypes = position + unpickler.length, dtypes | unpickler.dtypes
    require_byte_order("little" if contents[2]["little_endian"] else "big")
    places = {}
    for key in contents[4]:
        require(isinstance(key, str) and key in dtypes, "it has a record of an unknown type")
        file.seek(position)
        position += 8
        places[key] = position, int.from_bytes(file.read(8), "little") * dtypes[key].itemsize
        position += places[key][1]
        if position > file_size:
            raise DamagedFileError("it is cut short")
    return raw_tensor_file(contents[3], places, file)


def read_safetensors(file: BinaryIO) -> TensorFile:
    """A file of the length of its header, the header in JSON, and the bytes of the tensors. There are no checksums."""
    header_bytes = int.from_bytes(file.read(8), "little")
    require(header_bytes <= MAX_HEADER_BYTES,
            f"it claims a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} are allowed")
    header, start = json.loads(file.read(header_bytes)), 8 + header_bytes
    header.pop("__metadata__", None)
    content, places = {}, {}
    for key, entry in header.items():
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        strides = tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))
        content[key] = stored_tensor(key, DTYPES[entry["dtype"]], shape, strides, 0)
        places[key] = start + begin, end - begin
        require(0 <= begin <= end and content[key].nbytes == end - begin, "one of its tensors does not fit its place")
    end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != file.seek(0, os.SEEK_END):
        raise DamagedFileError("it is cut short, or longer than its header says")
    return raw_tensor_file(content, places, file)


def raw_tensor_file(content: Any, places: dict[str, tuple[int, int]], file: BinaryIO) -> TensorFile:
    """A TensorFile whose records are at these places: (position, bytes)."""
    def open_record(key: str) -> AbstractContextManager[BinaryIO]:
        file.seek(places[key][0])
        return nullcontext(file)
    return TensorFile(content, {key: size for key, (_, size) in places.items()}, {}, open_record)


def require_byte_order(byte_order: str) -> None:
    require(byte_order == sys.byteorder, "it was saved on a machine with another byte order")
