"""Reads pickles as data, also those that torch's weights_only refuses: build-nanogpt's config
object, argparse's Namespace, numpy's losses.

A pickle is a program of a small machine, and runs code by naming classes and functions. Here, a
loop of ours is that machine, and imports nothing. A few names stand for functions of this file,
and all others for notes, which do nothing. A tensor becomes a StoredTensor: where its bytes lie.
Any exception means a damaged file.
"""
import math
import pickletools
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sampling.checkpoints.untrusted_files import reject_lfs_pointer, require

MAX_PICKLE_BYTES = 2**23 # the size of a meta.pkl
# Ten times what a GPT-2 XL with its optimizer has. A pickle may have one more for each eight bytes:
# a loss has nine.
MAX_OPCODES = 2**21
MAX_PARTS = 64 # the items of a tuple that is a key, and the dimensions of a tensor
MARK = object() # on the stack, before the values that one opcode takes together


class StoredTensor(NamedTuple):
    """Where a tensor lies in a file: a view of a record."""
    key: str # the name of the record
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] # in elements, like offset
    offset: int
    file: Any = None # the TensorFile that has the record, once that is known

    @property
    def nbytes(self) -> int: # when the tensor is contiguous
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True, eq=False, repr=False) # a repr could print forever
class Note:
    """Stands in for a class or a function that a pickle names, and for what it would return.

    It copies nothing: a few bytes of a pickle could otherwise ask for many large copies.
    """
    name: str = "a value of an unknown type" # what the pickle names, for messages
    first: Any = None # the first argument of the call
    items: list | dict | None = None # what it is given one by one
    state: Any = None


# What may be a key of a dict, or a part of one.
KEY = str | bytes | int | float | None | Note | StoredTensor | torch.dtype


def read_pickle(pickled: bytes) -> Any:
    """The content of a pickle.

    Numbers and texts of numpy are plain ones in it. An example, {"step": np.int64(7)}: the opcodes,
    and then the stack.

        EMPTY_DICT, BINUNICODE                      {}  "step"
        GLOBAL numpy.core.multiarray.scalar         {}  "step"  Note
        MARK, ... (a dtype and eight bytes)         {}  "step"  Note  MARK  Note  bytes
        TUPLE                                       {}  "step"  Note  (Note, bytes)
        REDUCE, which calls                         {}  "step"  7
        SETITEM                                     {"step": 7}
        STOP
    """
    reject_lfs_pointer(pickled)
    stack = []
    memo = {}
    notes = {}
    max_opcodes = MAX_OPCODES + len(pickled) // 8
    for count, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
        require(count < max_opcodes, f"its pickle has more than {max_opcodes} opcodes")
        taken = pop(stack, opcode.stack_before)
        match opcode.name:
            case "STOP":
                return unwrap(taken[0])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                made = memo[argument] = stack[-1]
            case "MEMOIZE":
                made = memo[len(memo)] = taken[0]
            case "GET" | "BINGET" | "LONG_BINGET":
                made = memo[argument]
            case "GLOBAL" | "STACK_GLOBAL":
                parts = taken or argument.split(" ", 1)
                name = ".".join(part[:80] for part in parts)[:80]
                made = TORCH_DTYPES.get(name) or notes.setdefault(name, Note(name))
            case "BINPERSID":
                made = storage(*taken)
            case _:
                made = execute(opcode.name, argument, taken)
        stack += [made] * len(opcode.stack_after)


def pop(stack: list, kinds: list) -> list:
    """What an opcode takes from the stack: a value for each kind; with a MARK all values above it.
    """
    taken = []
    if pickletools.markobject in kinds:
        while (value := stack.pop()) is not MARK:
            taken.append(value)
        kinds = kinds[:kinds.index(pickletools.markobject)]
    taken += [stack.pop() for _ in kinds]
    return taken[::-1]


def execute(name: str, argument: Any, taken: list) -> Any:
    """The result of an opcode that changes only what it takes from the stack."""
    first, *rest = taken or [argument]
    match name:
        case "MARK":
            return MARK
        case "NEWTRUE" | "NEWFALSE":
            return name == "NEWTRUE"
        case "EMPTY_TUPLE" | "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
            return tuple(taken)
        case "EMPTY_LIST" | "LIST" | "EMPTY_SET" | "FROZENSET":
            return taken # no model needs a set
        case "EMPTY_DICT" | "DICT":
            return pairs(taken)
        case "APPEND" | "APPENDS" | "ADDITEMS":
            items_of(first, list).extend(rest)
        case "SETITEM" | "SETITEMS":
            items_of(first, dict).update(pairs(rest))
        case "BUILD":
            first.state = rest[0] # only a Note has a state
        case "REDUCE" | "NEWOBJ" | "NEWOBJ_EX":
            return call(first, rest[0])
        case ("INST" | "OBJ" | "EXT1" | "EXT2" | "EXT4" | "NEXT_BUFFER" | "READONLY_BUFFER"
              | "PERSID"): # torch.save writes none of these
            raise ValueError(f"its pickle has the opcode {name}")
    return first # a number or a text, or the value that was changed


def pairs(values: list) -> dict:
    """A dict of keys and values in turn. Raises ValueError unless all keys are texts, notes,
    numbers of at most 8 bytes, or flat tuples of these. Hashing other values may never end, or
    overflow the stack.
    """
    keys = values[::2]
    for key in keys:
        parts = key if type(key) is tuple else (key,)
        are_small = all(part.bit_length() <= 64 for part in parts if isinstance(part, int))
        are_flat = all(isinstance(part, KEY) for part in parts)
        require(are_small and are_flat and len(parts) <= MAX_PARTS,
                "its keys must be text, numbers, or tuples of them")
    return dict(zip(keys, values[1::2], strict=True))


def items_of(value: Any, kind: type) -> Any:
    """A list or a dict, or that of a Note, which may get both kinds of items."""
    if isinstance(value, Note):
        if not isinstance(value.items, kind):
            value.items = kind()
        return value.items
    require(isinstance(value, kind), f"it treats a {type(value).__name__} as a {kind.__name__}")
    return value


def call(function: Any, arguments: Any) -> Any:
    """The result of a function of ours, or a Note."""
    require(isinstance(function, Note), f"it calls a {type(function).__name__}")
    if function.name in FUNCTIONS:
        return FUNCTIONS[function.name](*arguments)
    return Note(function.name, *arguments[:1])


def storage(saved_id: Any) -> StoredTensor | Note:
    """A whole record, of which tensors are views, for ("storage", dtype, key, device, size)."""
    match saved_id:
        case ("storage", torch.dtype() as dtype, str() as key, _, _):
            return StoredTensor(key, dtype, (), (), 0)
    return Note()


# ---- functions that a pickle may call: none copies much

def stored_tensor(key: str, dtype: torch.dtype, shape: Any, strides: Any,
                  offset: Any) -> StoredTensor:
    """Raises RejectedFileError unless the last three are whole numbers that a tensor may have."""
    are_tuples = isinstance(shape, tuple) and isinstance(strides, tuple)
    is_shape = (are_tuples and len(shape) == len(strides) <= MAX_PARTS
                and all(map(is_size, (offset, *shape, *strides)))
                and is_size(math.prod(shape)))
    require(is_shape, "one of its tensors has an impossible shape")
    return StoredTensor(key, dtype, shape, strides, offset)


def is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63


def rebuild_tensor(whole: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any = None,
                   hooks: Any = None, *rest: Any) -> StoredTensor | Note:
    """Stands in for torch's functions: a view of a record.

    rest: in version 3 a dtype, for whose storages torch had no class; then metadata.
    """
    if not isinstance(whole, StoredTensor):
        return Note()
    dtype = whole.dtype
    for extra in rest:
        if isinstance(extra, torch.dtype):
            dtype = extra
        elif extra: # such as a bit that negates all values, which the bytes do not show
            return Note("a tensor whose metadata changes its values, such as a negated one: save "
                        "its clone()")
    return stored_tensor(whole.key, dtype, shape, strides, offset)


def encode(text: Any, encoding: Any) -> bytes | Note:
    """Stands in for codecs.encode, by which protocol 2 writes bytes."""
    is_short = isinstance(text, str) and len(text) <= 256
    return text.encode("latin1") if is_short else Note()


def numpy_scalar(dtype: Any, data: Any) -> Any:
    """Stands in for numpy's maker of scalars: a number of at most 8 bytes, a text, or a Note."""
    import numpy as np
    codes = r"b1|[iu][1248]|f[248]|[SU]\d{1,2}"
    match dtype, data:
        case Note(first=str(code)), bytes() if re.fullmatch(codes, code):
            # Only a big-endian machine would write another order.
            return np.frombuffer(data, f"<{code}", count=1)[0].item()
    return Note()


STORAGES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16,
    "BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32, "Short": torch.int16,
    "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
    "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}
TORCH_DTYPES = {
    **{f"torch.{name}Storage": dtype for name, dtype in STORAGES.items()},
    "torch.storage.UntypedStorage": torch.uint8,
    # For the latter, torch has no class of storages. None is quantized.
    **{str(dtype): dtype for dtype in (
        *STORAGES.values(),
        torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)},
}
FUNCTIONS = {
    "_codecs.encode": encode,
    "torch._tensor._rebuild_from_type_v2": lambda function, kind, *rest: Note(kind.name),
    # A tensor that was on a TPU.
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": lambda tensor, *rest: tensor,
    "numpy.core.multiarray.scalar": numpy_scalar,
    "numpy._core.multiarray.scalar": numpy_scalar,
    "torch._utils._rebuild_tensor": rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *rest: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *rest: tensor,
}


# ---- what a value is

def unwrap(value: Any) -> Any:
    """What an object of a subclass of dict, list or tuple holds; any other value as it is."""
    if isinstance(value, Note):
        held = value.first if value.items is None else value.items
        return held if isinstance(held, dict | list | tuple) else value
    return value


def fields_of(value: Any) -> dict | None:
    """The items of a mapping, or the fields of an object; None for other values."""
    value = unwrap(value)
    if isinstance(value, Note):
        value = value.state
        match value:
            case (None, slots): # the state of a class with slots
                value = slots
    return value if isinstance(value, dict) else None


def describe(value: Any) -> str:
    """A short text or number for a message; for other values only their type.

    Nested values could print forever.
    """
    is_small = isinstance(value, int) and value.bit_length() <= 64
    if is_small or isinstance(value, str | float | None):
        return f"{value!r:.60}"
    if isinstance(value, Note):
        return value.name
    return type(value).__name__.removeprefix("Stored") # a Tensor
