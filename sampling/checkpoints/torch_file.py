"""Reads files of torch.save as data.

Such a file is a zip of one pickle and of records, the bytes of the tensors; before torch 1.6 it was a few pickles and
then the records. A pickle runs code by naming classes and functions, so the unpickler here knows only a short list of
names, and what stands behind them is ours. A tensor becomes a note of where its bytes lie. Only the tensors that a
model needs are read later.
"""
import io
import math
import os
import pickle
import pickletools
import posixpath
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from sampling.checkpoints.checkpoint import (
    DamagedFileError,
    IncompleteFileError,
    RejectedFileError,
    first_sentence,
    require,
)
from sampling.messages import is_out_of_memory

# Valid files stay below these limits: the pickle of a GPT-2 XL with its optimizer has a tenth of them.
MAX_PICKLE_BYTES = 2**23
MAX_OPCODES = 2**21
MAX_COPIES = 2**20 # values that a pickle lets functions copy
CHUNK = 2**20 # bytes that are read at once; the processor's cache still has them when their CRC is computed
KEYS = {"SETITEM": slice(1, -1, 2), "SETITEMS": slice(1, -1, 2), "DICT": slice(1, None, 2), "ADDITEMS": slice(-1),
        "FROZENSET": slice(None)} # which operands of an opcode are hashed
NO_KEYS = "it has keys that are neither text nor numbers"
OLD_MAGIC = 0x1950a86a20f9469cfc6c


class StoredTensor(NamedTuple):
    """Where a tensor lies in a file: a view of a record. A pickle cannot change the fields of a tuple."""
    key: str # of the record
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] # in elements, like offset
    offset: int

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes when it is contiguous."""
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def as_damage() -> Iterator[None]:
    """Turn what zipfile, pickle or torch raise for damaged files, which may be anything, into DamagedFileError."""
    try:
        yield
    except (RejectedFileError, MemoryError):
        raise
    except Exception as e:
        if is_out_of_memory(e):
            raise MemoryError(str(e)) from None
        raise DamagedFileError(first_sentence(e)) from None


@dataclass(eq=False)
class TensorFile:
    """An open file of tensors."""
    content: Any # what was saved, with a StoredTensor in place of each tensor
    sizes: dict[str, int] # the bytes of each record, by its key
    open_record: Callable[[str], AbstractContextManager[BinaryIO]]
    kept: dict[tuple, Tensor] = field(default_factory=dict) # the last record, if the last tensor was a part of it

    def check(self, stored: StoredTensor) -> None:
        """Raises RejectedFileError if the tensor is not inside its record."""
        key, dtype, shape, strides, offset = stored
        require(isinstance(key, str) and key in self.sizes, "one of its tensors has no record")
        length, rest = divmod(self.sizes[key], dtype.itemsize)
        is_shape = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides) <= 64 and all(
            type(number) is int and 0 <= number < 2**63 for number in (offset, *shape, *strides))
        require(is_shape and not rest and math.prod(shape) < 2**63 and (0 in shape or offset + sum(
            (size - 1) * stride for size, stride in zip(shape, strides, strict=True)) < length),
            "one of its tensors reaches beyond its record, or has an impossible shape")

    @as_damage()
    def read(self, stored: StoredTensor) -> Tensor:
        """Read a tensor straight into its memory. Raises RejectedFileError if its record is damaged or cut."""
        self.check(stored)
        record = self.kept.get(stored[:2])
        if record is None:
            record = torch.empty(self.sizes[stored.key] // stored.dtype.itemsize, dtype=stored.dtype)
            target = memoryview(record.view(torch.uint8).numpy())
            with self.open_record(stored.key) as file: # zipfile compares the CRC of a record when it is at its end
                for start in range(0, len(target), CHUNK):
                    part = target[start:start + CHUNK]
                    if file.readinto(part) != len(part):
                        raise IncompleteFileError("it is cut short")
        self.kept = {stored[:2]: record} if record.nbytes > stored.nbytes else {}
        return record.as_strided(stored.shape, stored.strides, stored.offset)


@as_damage()
def read_torch_file(file: BinaryIO) -> TensorFile:
    """The content of an open file of torch.save. The file must stay open while tensors are read.

    numpy's numbers and paths, which settings may hold, become plain numbers and text; a GPTConfig of any module becomes
    a ConfigRecord. Raises DamagedFileError if the file is cut or damaged; RejectedFileError if it holds more than data.
    """
    start = file.read(4)
    file.seek(0)
    if not start:
        raise IncompleteFileError("it is empty")
    return read_zip(file) if start == b"PK\3\4" else read_old_file(file)


def read_zip(file: BinaryIO) -> TensorFile:
    """A file of torch 1.6 or later."""
    try:
        archive, file_size = zipfile.ZipFile(file), os.fstat(file.fileno()).st_size
    except zipfile.BadZipFile:
        raise IncompleteFileError("it has no directory of records at its end") from None
    infos = {info.filename: info for info in archive.infolist()}
    pickle_name = next(name for name in infos if re.fullmatch("[^/]*/data.pkl", name))
    folder = pickle_name.removesuffix("data.pkl")
    for info in infos.values():
        require(info.compress_type == zipfile.ZIP_STORED, "one of its records is compressed")
        if info.file_size != info.compress_size or info.header_offset + info.file_size > file_size:
            raise DamagedFileError("one of its records reaches beyond its end")
    if not any(info.CRC for info in infos.values()): # torch.save has an option to leave out checksums
        for info in infos.values():
            info.CRC = None
    require(infos[pickle_name].file_size <= MAX_PICKLE_BYTES, f"its pickle has more than {MAX_PICKLE_BYTES} bytes")
    is_native = f"{folder}byteorder" not in infos or archive.read(f"{folder}byteorder") == sys.byteorder.encode()
    require(is_native, "it was saved on a machine with another byte order")
    content = TensorUnpickler(archive.read(pickle_name)).load()
    prefix = f"{folder}data/"
    records = {name.removeprefix(prefix): info for name, info in infos.items() if name.startswith(prefix)}
    return TensorFile(content, {key: info.file_size for key, info in records.items()},
                      lambda key: archive.open(records[key]))


def read_old_file(file: BinaryIO) -> TensorFile:
    """A file of an older torch: five pickles (a magic number, a version, the sizes of C types, the content, and the
    keys of its records), then each record after the number of its elements. There are no checksums.
    """
    values, dtypes, file_size = [], {}, os.fstat(file.fileno()).st_size
    for _ in range(5):
        start = file.tell()
        unpickler = TensorUnpickler(file.read(MAX_PICKLE_BYTES))
        values.append(unpickler.load())
        dtypes |= unpickler.dtypes
        if values[0] != OLD_MAGIC:
            raise DamagedFileError("torch.save did not write it")
        file.seek(start + unpickler.length)
    require(values[2].get("little_endian") is not False, "it was saved on a machine with another byte order")
    places, position = {}, file.tell()
    for key in values[4]:
        file.seek(position)
        places[key] = position + 8, int.from_bytes(file.read(8), "little") * dtypes[key].itemsize
        position = sum(places[key])
        if position > file_size:
            raise IncompleteFileError("it is cut short")
    return raw_tensor_file(file, values[3], places)


def raw_tensor_file(file: BinaryIO, content: Any, places: dict[str, tuple[int, int]]) -> TensorFile:
    """A file whose records are bytes without a checksum: the position and the number of bytes of each."""
    def open_record(key: str) -> AbstractContextManager[BinaryIO]:
        file.seek(places[key][0])
        return nullcontext(file)
    return TensorFile(content, {key: size for key, (_, size) in places.items()}, open_record)


# ---- pickles

def check_pickle(pickled: bytes) -> int:
    """The length of the first pickle in these bytes, which the C unpickler then reads without harm to this process.

    That unpickler makes room for any memo index that it meets, up to gigabytes. Python overflows the C stack when it
    hashes deeply nested tuples, and hashing those that hold one twice at each level never ends. So keys must be plain:
    pickletools knows which values each opcode takes from the stack and leaves there. Raises RejectedFileError beyond
    these limits; for a damaged pickle also ValueError, IndexError or KeyError.
    """
    stream, mark, memo = io.BytesIO(pickled[:MAX_PICKLE_BYTES]), pickletools.markobject, {}
    stack: list[bool | None] = [] # whether each value is made of others; None is a mark
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        require(count < MAX_OPCODES, f"its pickle has more than {MAX_OPCODES} opcodes")
        require(not opcode.name.startswith("EXT"), "it uses copyreg's extensions") # they need no name
        if opcode.name == "MEMOIZE" or "PUT" in opcode.name:
            index = len(memo) if argument is None else argument
            require(0 <= index <= count, "its memo indices are higher than its number of values")
            memo[index] = stack[-1]
        elif "GET" in opcode.name:
            stack.append(memo[argument])
        else:
            operands, fixed = [], opcode.stack_before
            if mark in fixed:
                while (value := stack.pop()) is not None:
                    operands.append(value)
                fixed = fixed[:fixed.index(mark)]
            operands += [stack.pop() for _ in fixed] # the top of the stack is the first of them
            require(not any(operands[KEYS[opcode.name]] if opcode.name in KEYS else ()), NO_KEYS)
            stack += [None if after is mark else bool(operands) for after in opcode.stack_after]
    return stream.tell()


class ForbiddenNameError(RejectedFileError):
    """A pickle names a class or function that is not on the list of allowed names."""

    def __init__(self, name: str, pickled: bytes):
        super().__init__(f"it names {name:.80}, which could run code")
        self.pickled = pickled


class TensorUnpickler(pickle.Unpickler):
    """Reads the first pickle in some bytes. length: of that pickle. dtypes: those of the records that it names."""

    def __init__(self, pickled: bytes):
        self.pickled, self.length, self.dtypes, self.num_copies = pickled, check_pickle(pickled), {}, 0
        super().__init__(io.BytesIO(pickled), encoding="utf-8")

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for: a dtype or something of ours. Raises ForbiddenNameError for all other names."""
        full = f"{module}.{name}"
        if full in DTYPES:
            return DTYPES[full]
        if full in FUNCTIONS:
            return self.limited(FUNCTIONS[full])
        if re.fullmatch(r"([A-Za-z_]\w*\.)+GPTConfig", full[:200], re.ASCII):
            return type("GPTConfig", (ConfigRecord,), {}) # a new class: a pickle cannot change another file's
        raise ForbiddenNameError(full, self.pickled)

    def limited(self, function: Callable) -> Callable:
        """The function, for as long as it gets few values: copies of copies could fill memory."""
        def call(*arguments):
            self.num_copies += sum(len(argument) for argument in arguments if hasattr(argument, "__len__"))
            require(self.num_copies <= MAX_COPIES, "it copies more values than a checkpoint has")
            return function(*arguments)
        return call

    def persistent_load(self, saved_id: tuple) -> StoredTensor:
        """A whole record, of which tensors are views: saved_id is ("storage", dtype, key, device, ...)."""
        kind, dtype, key, *_ = saved_id
        require(kind == "storage" and isinstance(dtype, torch.dtype) and isinstance(key, str)
                and not any(saved_id[5:]), "it has a record that torch.save does not write")
        self.dtypes[key] = dtype
        return StoredTensor(key, dtype, (), (), 0)


def rebuild_tensor(record: StoredTensor, offset: int, shape: tuple, strides: tuple, *others: Any) -> StoredTensor:
    """Stands in for torch's functions. The third of the others is a dtype, if torch had no class for its storages."""
    require(isinstance(record, StoredTensor), "one of its tensors has no record")
    dtype = others[2] if len(others) > 2 and isinstance(others[2], torch.dtype) else record.dtype
    return StoredTensor(record.key, dtype, shape, strides, offset)


def plain_set(items: list) -> set:
    """Stands in for set, but hashes no tuples."""
    require(not any(isinstance(item, tuple) for item in items), NO_KEYS)
    return set(items)


class PlainDict(dict):
    """Stands in for OrderedDict and Counter. It drops the _metadata of a state_dict."""
    __setstate__ = staticmethod(lambda state: None)


class Instance:
    """Stands in for an instance of a class: what it was made from, and what was then put into it."""
    arguments, state = (), {}

    def __init__(self, *arguments):
        self.arguments = arguments

    def __setstate__(self, state):
        self.state = state


class ConfigRecord(Instance):
    """Stands in for a GPTConfig of any module."""


def fields_of(config: object) -> object:
    """The fields of a GPTConfig that was saved as an object; anything else as it is."""
    return config.state if isinstance(config, ConfigRecord) else config


def python_number(dtype: Instance, data: bytes) -> Any:
    """Stands in for the function that makes numpy scalars. Returns a Python number or text; None for other types."""
    import numpy as np
    if not re.fullmatch(r"[biufcUS]\d{1,4}", dtype.arguments[0]) or not isinstance(data, bytes):
        return None
    byte_order = dtype.state[1] if dtype.state else "<"
    return np.frombuffer(data, np.dtype(dtype.arguments[0]).newbyteorder(byte_order), count=1)[0].item()


FUNCTIONS: dict[str, Callable] = {
    "collections.OrderedDict": lambda: PlainDict(), "collections.Counter": lambda items: PlainDict() | items,
    "builtins.set": plain_set, "__builtin__.set": plain_set, "torch.Size": lambda sizes=(): tuple(sizes),
    "torch.device": lambda *parts: None,
    "_codecs.encode": lambda text, encoding: text.encode("latin1"), # so pickle's protocol 2 writes bytes
    "numpy.dtype": Instance,
    "numpy._core.multiarray.scalar": python_number, "numpy.core.multiarray.scalar": python_number,
    **{f"pathlib{module}.{kind}Path": lambda *parts: posixpath.join("", *parts) or "." for module in ("", "._local")
       for kind in ("", "Posix", "Windows", "Pure", "PurePosix", "PureWindows")},
    **{f"torch._utils._rebuild_tensor{version}": rebuild_tensor for version in ("", "_v2", "_v3")},
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
}
STORAGES = {"Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
            "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
            "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128}
DTYPES: dict[str, torch.dtype] = {
    **{f"torch.{name}Storage": dtype for name, dtype in STORAGES.items()}, "torch.storage.UntypedStorage": torch.uint8,
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
}
