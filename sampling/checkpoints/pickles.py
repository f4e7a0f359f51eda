"""Reads pickles as data.

A pickle runs code by naming classes and functions. Here no name means what it names: a few stand for harmless functions
of this file, and all others for notes, which do nothing. A tensor becomes a StoredTensor: where its bytes lie.
"""
import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sampling.checkpoints.untrusted_files import reject_pointer, require

# Valid files stay below these limits: the pickle of a GPT-2 XL with its optimizer has a tenth of the first two.
MAX_PICKLE_BYTES, MAX_OPCODES, MAX_NAMES, MAX_ARGUMENTS = 2**23, 2**21, 4096, 1024
MAX_PARTS = 64 # of a tuple that is a key, and dimensions of a tensor

# ---- the check before the C unpickler reads the bytes

MARK, PLAIN, FLAT, OTHER = range(4) # what stands on the stack: FLAT is a tuple of PLAIN values, OTHER is never hashed
CONTAINERS = {"EMPTY_LIST", "LIST", "EMPTY_DICT", "DICT", "EMPTY_SET", "FROZENSET", "BYTEARRAY8", "NEXT_BUFFER"}
CHANGES = {"DUP", "BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"} # they leave the object they change
HASHED_OPERANDS = {"SETITEM": slice(1, -1, 2), "SETITEMS": slice(1, -1, 2), "DICT": slice(1, None, 2),
                   "ADDITEMS": slice(-1), "FROZENSET": slice(None)}


def check_pickle(pickled: bytes) -> tuple[int, bytes]:
    """Check the first pickle in these bytes before the C unpickler reads it. Return its length, and the pickle without
    its FRAMEs: where one ends inside an operand, the C unpickler reads other opcodes than pickletools.

    Two things could harm the process: a huge memo index, which allocates gigabytes, and a key of a dict or an item of a
    set whose hash never ends or overflows the stack. So memo indices are limited, and what is hashed must be a number
    of at most 8 bytes, a text, what a call makes (a note, a number, a text or a StoredTensor), or a flat tuple of
    these. pickletools knows which values each opcode takes and leaves. Raises RejectedFileError for either; a damaged
    pickle can raise anything.
    """
    stream, memo, stack, parts, start = io.BytesIO(pickled), {}, [], [], 0
    for count, (opcode, argument, position) in enumerate(pickletools.genops(stream)):
        name, fixed, operands = opcode.name, opcode.stack_before, []
        require(count < MAX_OPCODES, f"its pickle has more than {MAX_OPCODES} opcodes")
        require(not name.startswith("EXT"), "it uses copyreg's extensions") # they need no name
        if name == "FRAME":
            parts.append(pickled[start:position])
            start = position + 9
        if name == "MEMOIZE" or "PUT" in name:
            index = len(memo) if argument is None else argument
            require(0 <= index <= count, "its memo indices are higher than its number of values")
            memo[index] = stack[-1]
            continue
        if pickletools.markobject in fixed:
            while (value := stack.pop()) != MARK:
                operands.append(value)
            fixed = fixed[:fixed.index(pickletools.markobject)]
        operands += [stack.pop() for _ in fixed] # the top of the stack is the first of them
        if name in HASHED_OPERANDS:
            require(OTHER not in operands[HASHED_OPERANDS[name]], "its keys must be text, numbers, or tuples of them")
        if "GET" in name:
            made = memo[argument]
        elif name in CHANGES:
            made = operands[-1]
        elif "TUPLE" in name:
            made = FLAT if len(operands) <= MAX_PARTS and set(operands) <= {PLAIN} else OTHER
        else:
            is_long = isinstance(argument, int) and argument.bit_length() > 64
            made = OTHER if is_long or name in CONTAINERS else PLAIN
        stack += [MARK if after is pickletools.markobject else made for after in opcode.stack_after]
    return stream.tell(), b"".join([*parts, pickled[start:stream.tell()]])


# ---- what a pickle gets instead of what it names

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


class Note:
    """Stands in for an object of a class, or for the result of a function, that a pickle names. Does nothing.

    It holds references: to the first argument, to the last state, and to the items that it is given one by one. It
    copies nothing: a few bytes of a pickle could otherwise ask for many large copies.
    """
    __slots__ = "first", "items", "state"
    name = "a value of an unknown type" # what the pickle names, for messages

    def __new__(cls, /, *arguments, **keywords):
        require(len(arguments) + len(keywords) <= MAX_ARGUMENTS, f"it calls {cls.name} with too many arguments")
        note = object.__new__(cls)
        note.first, note.items, note.state = arguments[0] if arguments else None, None, None
        return note

    def __setstate__(self, state, /): # without it, a pickle could set attributes
        self.state = state

    def __call__(self, /, *_, **__): # what a function returned may be another function
        return Note()

    def __setitem__(self, key, value, /):
        self.items = self.items if isinstance(self.items, dict) else {} # an object may get both kinds, a list first
        self.items[key] = value

    def append(self, item, /):
        self.items = [] if self.items is None else self.items
        self.items.append(item)

    add = append # to a set


def note_class(name: str, function: Callable | None = None) -> type[Note]:
    """A class of notes. With a function, calling the class calls it: a pickle could change a function, but no class."""
    new = {"__new__": lambda cls, /, *arguments: function(*arguments)} if function else {}
    return type("Note", (Note,), {"__slots__": (), "name": name, **new})


class DataUnpickler(pickle.Unpickler):
    """Reads the first pickle in some bytes, which has this length."""

    def __init__(self, pickled: bytes):
        reject_pointer(pickled)
        self.length, checked = check_pickle(pickled)
        self.dtypes, self.classes = {}, {} # dtypes: of records, by their keys
        super().__init__(io.BytesIO(checked), encoding="utf-8")

    def load(self) -> Any:
        """The content, of plain data and notes. Numbers and texts of numpy are plain ones."""
        return unwrap(super().load())

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for: a dtype, a function of ours, or a class of notes that only this unpickler has."""
        full = f"{module:.80}.{name:.80}"
        if full in MEANINGS:
            return MEANINGS[full]
        if full not in self.classes:
            require(len(self.classes) < MAX_NAMES, f"it names more than {MAX_NAMES} classes and functions")
            self.classes[full] = note_class(full[:80])
        return self.classes[full]

    def persistent_load(self, saved_id: Any) -> Any:
        """A whole record, of which tensors are views, for ("storage", dtype, key, device, size). Old files add None.
        The class Note for anything else, such as the classes of modules in old files.
        """
        parts = saved_id if isinstance(saved_id, tuple) else ()
        require(len(parts) <= 6, "it has a record that torch.save does not write")
        is_record = len(parts) > 2 and parts[0] == "storage" and all(part is None for part in parts[5:])
        if not (is_record and isinstance(parts[1], torch.dtype) and isinstance(parts[2], str)):
            return Note
        self.dtypes.setdefault(parts[2], parts[1])
        return StoredTensor(parts[2], parts[1], (), (), 0)


# ---- functions that a pickle may call. None returns an argument, as the result may be a key, and none copies much.

def stored_tensor(key: str, dtype: torch.dtype, shape: Any, strides: Any, offset: Any) -> StoredTensor:
    """Raises RejectedFileError unless the last three are whole numbers that a tensor may have."""
    is_shape = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides) <= MAX_PARTS
    require(is_shape and all(type(number) is int and 0 <= number < 2**63 for number in (offset, *shape, *strides))
            and math.prod(shape) < 2**63, "one of its tensors has an impossible shape")
    return StoredTensor(key, dtype, shape, strides, offset)


def rebuild_tensor(record: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any = None,
                   hooks: Any = None, dtype: Any = None, metadata: Any = None) -> StoredTensor | Note:
    """Stands in for torch's functions. dtype is one if torch had no class for its storages."""
    if not isinstance(record, StoredTensor):
        return Note()
    return stored_tensor(record.key, dtype if isinstance(dtype, torch.dtype) else record.dtype, shape, strides, offset)


def rebuild_parameter(tensor: Any, requires_grad: Any, hooks: Any, state: Any = None) -> StoredTensor | Note:
    return StoredTensor(*tensor) if isinstance(tensor, StoredTensor) else Note()


def encode(text: Any, encoding: Any) -> bytes | Note:
    """Stands in for codecs.encode, by which protocol 2 writes bytes."""
    return text.encode("latin1") if isinstance(text, str) and len(text) <= 256 else Note()


def numpy_scalar(dtype: Any, data: Any) -> Any:
    """Stands in for numpy's function that makes scalars: a number of at most 8 bytes, a text, or a Note."""
    import numpy as np
    code, state = (dtype.first, dtype.state) if isinstance(dtype, Note) else (None, None)
    is_known = isinstance(code, str) and re.fullmatch(r"b1|[iu][1248]|f[248]|[SU]\d{1,2}", code)
    if not (is_known and isinstance(data, bytes)):
        return Note()
    byte_order = ">" if isinstance(state, tuple) and state[1:2] == (">",) else "<"
    return np.frombuffer(data, np.dtype(code).newbyteorder(byte_order), count=1)[0].item()


STORAGES = {"Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
            "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
            "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128}
NEW_DTYPES = torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2 # no quantized ones
FUNCTIONS = {
    "_codecs.encode": encode, **{f"numpy.{core}.multiarray.scalar": numpy_scalar for core in ("core", "_core")},
    **{f"torch._utils._rebuild_tensor{version}": rebuild_tensor for version in ("", "_v2", "_v3")},
    # Protocol 2 names a nested class, and a method, by getattr. All that it may stand for is one class of notes.
    **{f"{module}.getattr": lambda owner, name: Note for module in ("builtins", "__builtin__")},
    **{f"torch._utils._rebuild_parameter{suffix}": rebuild_parameter for suffix in ("", "_with_state")},
}
MEANINGS: dict[str, Any] = {
    **{f"torch.{name}Storage": dtype for name, dtype in STORAGES.items()}, "torch.storage.UntypedStorage": torch.uint8,
    **{str(dtype): dtype for dtype in (*STORAGES.values(), *NEW_DTYPES)},
    **{name: note_class(name, function) for name, function in FUNCTIONS.items()},
}


# ---- what a value is

def unwrap(value: Any) -> Any:
    """What an object of a subclass of dict, list, tuple or str holds; any other value as it is."""
    if isinstance(value, Note):
        held = value.first if value.items is None else value.items
        return held if isinstance(held, dict | list | tuple | str) else value
    return value


def fields_of(value: Any) -> dict | None:
    """The items of a mapping, or the fields of an object; None for other values."""
    value = unwrap(value)
    if isinstance(value, Note):
        value = value.state
        if isinstance(value, tuple) and len(value) == 2 and value[0] is None: # of a class with slots
            value = value[1]
    return value if isinstance(value, dict) else None


def describe(value: Any) -> str:
    """A short text or number for a message; for other values only their type, as nested values could print forever."""
    if isinstance(value, str | int | float | None):
        return f"{value!r:.60}"
    return value.name if isinstance(value, Note | type) else type(value).__name__.removeprefix("Stored") # a Tensor
