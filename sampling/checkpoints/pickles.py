"""Reads pickles as data.

A pickle runs code by naming classes and functions. The unpickler here knows only a short list of names, and each stands
for a harmless function of this file. A tensor becomes a note of where its bytes lie.
"""
import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sampling.checkpoints.checkpoint import RejectedFileError, require

# Valid files stay below these limits: the pickle of a GPT-2 XL with its optimizer has a tenth of them.
MAX_PICKLE_BYTES = 2**23
MAX_OPCODES = 2**21
HASHED_OPERANDS = {"SETITEM": slice(1, -1, 2), "SETITEMS": slice(1, -1, 2), "DICT": slice(1, None, 2),
                   "ADDITEMS": slice(-1), "FROZENSET": slice(None)}


class StoredTensor(NamedTuple):
    """Where a tensor lies in a file: a view of a record. A pickle cannot change a tuple."""
    key: str # of the record
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] # in elements, like offset
    offset: int

    @property
    def nbytes(self) -> int: # when the tensor is contiguous
        return math.prod(self.shape) * self.dtype.itemsize


def check_pickle(pickled: bytes) -> int:
    """Check the first pickle in these bytes before the C unpickler reads it, and return its length.

    Two things could harm the process: a huge memo index, which allocates gigabytes, and a dict key or set item made of
    nested tuples, whose hash never ends or overflows the stack. So memo indices are limited, and keys must be plain:
    pickletools knows which values each opcode takes from the stack and leaves there. Raises RejectedFileError for
    either. A damaged pickle can raise anything.
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
            hashed = operands[HASHED_OPERANDS[opcode.name]] if opcode.name in HASHED_OPERANDS else []
            require(not any(hashed), "it has keys that are neither text nor numbers")
            stack += [None if after is mark else bool(operands) for after in opcode.stack_after]
    return stream.tell()


class DataUnpickler(pickle.Unpickler):
    """Reads the first pickle in some bytes."""

    def __init__(self, pickled: bytes):
        check_pickle(pickled)
        super().__init__(io.BytesIO(pickled), encoding="utf-8")

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for: a dtype or something of ours. Raises RejectedFileError for all other names."""
        full = f"{module}.{name}"
        if full in DTYPES:
            return DTYPES[full]
        if full in FUNCTIONS:
            return lambda *arguments: FUNCTIONS[full](*arguments) # a new one: a pickle cannot change another file's
        if re.fullmatch(r"([A-Za-z_]\w*\.)+GPTConfig", full[:200], re.ASCII):
            return type("GPTConfig", (Record,), {}) # a new one, too
        raise RejectedFileError(f"it names {full:.80}, which could run code; only data is allowed")

    def persistent_load(self, saved_id: tuple) -> StoredTensor:
        """A whole record, of which tensors are views: saved_id is ("storage", dtype, key, device, ...)."""
        kind, dtype, key, *_ = saved_id
        require(kind == "storage" and isinstance(dtype, torch.dtype) and isinstance(key, str)
                and not any(saved_id[5:]), "it has a record that torch.save does not write")
        return StoredTensor(key, dtype, (), (), 0)


def rebuild_tensor(record: StoredTensor, offset: int, shape: tuple, strides: tuple, *others: Any) -> StoredTensor:
    """Stands in for torch's functions. The third of the others is a dtype, if torch had no class for its storages."""
    require(isinstance(record, StoredTensor), "one of its tensors has no record")
    dtype = others[2] if len(others) > 2 and isinstance(others[2], torch.dtype) else record.dtype
    return StoredTensor(record.key, dtype, shape, strides, offset)


class PlainDict(dict):
    """Stands in for OrderedDict. It drops the _metadata of a state_dict."""
    __setstate__ = staticmethod(lambda state: None)


class Record:
    """Stands in for an instance of a class: the first argument, if there was any, and what was then put into it."""
    first, state = None, {}

    def __init__(self, first=None, *others):
        self.first = first

    def __setstate__(self, state):
        self.state = state


def numpy_scalar(dtype: Record, data: bytes) -> Any:
    """Stands in for numpy's function that makes scalars. Returns a number or text; None for other types."""
    import numpy as np
    if not re.fullmatch(r"[biufcUS]\d{1,2}", dtype.first) or not isinstance(data, bytes):
        return None
    byte_order = dtype.state[1] if dtype.state else "<"
    return np.frombuffer(data, np.dtype(dtype.first).newbyteorder(byte_order), count=1)[0].item()


# None of these functions copies much: a few bytes of a pickle could otherwise ask for many large copies. So a set or a
# Counter is the list or dict that it is made from, and of a path or of long bytes only a note is left.
FUNCTIONS: dict[str, Callable] = {
    "collections.OrderedDict": lambda: PlainDict(),
    **dict.fromkeys(["collections.Counter", "builtins.set", "__builtin__.set", "torch.Size"], lambda items: items),
    "torch.device": lambda *parts: None, "numpy.dtype": Record,
    # How pickle's protocol 2 writes bytes.
    "_codecs.encode": lambda text, encoding: text.encode("latin1") if len(text) <= 64 else "long bytes",
    "numpy._core.multiarray.scalar": numpy_scalar, "numpy.core.multiarray.scalar": numpy_scalar,
    **{f"pathlib{module}.{kind}Path": lambda *parts: "a path" for module in ("", "._local")
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
