"""The rules for one opcode of a pickle: which names, calls, keys and attributes data may have.

Each check raises RejectedFileError, and its docstring says which attack it stops.
"""
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sampling.checkpoints.errors import ForbiddenNameError, require

HASHED_OPERANDS = {"SETITEM": slice(1, None, 2), "SETITEMS": slice(1, None, 2), "DICT": slice(0, None, 2),
                   "ADDITEMS": slice(1, None), "FROZENSET": slice(None)}
HASHING_CALLS = {"collections OrderedDict", "collections Counter", "builtins set", "__builtin__ set"}

# The settings of a model as an instance of a class, whose module is the program that saved them. Nobody imports it.
ANY_CONFIG = "* GPTConfig" # among the allowed names, it allows a GPTConfig of any module
CONFIG_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)* GPTConfig", re.ASCII)
MAX_CONFIG_NAME = 200 # characters
MAX_CONFIG_FIELDS, MAX_CONFIG_SIZE = 64, 1000 # a config's fields, and the values that they count for


@dataclass(slots=True)
class StackItem:
    """Describes a value that the reader would have on its stack."""
    size: int = 1 # how many values it consists of; a value that it holds twice counts twice
    depth: int = 0 # of nested values
    literal: Any = None # a text or number; a tuple's items; a dict's keys; a storage's id; a global's "module name"
    constructor: str | None = None # "GLOBAL", or the "module name" that was called to make it
    shared: bool = False # it is part of another value, or was read from the memo


def check_opcode(name: str, argument: Any, operands: list[StackItem], allowed_names: Collection[str]) -> None:
    """Check an opcode before it is applied."""
    if name in ("GLOBAL", "STACK_GLOBAL"):
        check_name(" ".join(operand.literal for operand in operands) or argument, allowed_names)
    elif name in HASHED_OPERANDS:
        check_keys(operands[HASHED_OPERANDS[name]])
    elif name == "REDUCE":
        check_call(*operands)
    elif name == "NEWOBJ":
        check_new_object(*operands)
    elif name == "BUILD":
        check_state(*operands)
    elif name == "BINPERSID":
        check_storage_id(*operands)


def check_name(name: str, allowed_names: Collection[str]) -> None:
    """Stops a pickle from running code: it can only call what it names."""
    if name not in allowed_names and not (ANY_CONFIG in allowed_names and is_config(name)):
        raise ForbiddenNameError(f"it names {name.replace(' ', '.'):.80}, which could run code")


def is_config(name: Any) -> bool:
    """Whether a "module name" is a GPTConfig of any module."""
    return isinstance(name, str) and len(name) <= MAX_CONFIG_NAME and CONFIG_NAME.fullmatch(name) is not None


def check_keys(keys: list[StackItem]) -> None:
    """Stops keys that take hours to hash: nested tuples can have 2**n leaves, and tuples can be chosen to collide."""
    require(not any(key.depth for key in keys), "it has keys that are neither text nor numbers")


def check_storage_id(storage_id: StackItem) -> None:
    """Stops one record from being read under many names: torch ignores the case of names."""
    require(storage_id.literal[2].isdecimal(), "it has a storage name that torch.save does not write")


def check_new_object(kind: StackItem, arguments: StackItem) -> None:
    """Stops NEWOBJ from making anything but an empty GPTConfig."""
    require(kind.constructor == "GLOBAL" and is_config(kind.literal) and arguments.literal == [],
            "it creates an object that torch.save does not write")


def check_state(target: StackItem, state: StackItem) -> None:
    """Stops BUILD from replacing methods: it may only set a state_dict's _metadata, the state of a numpy dtype, and
    the fields of a GPTConfig, which are few and flat."""
    if is_config(target.constructor):
        return check_config_state(state)
    is_metadata = (target.constructor, state.literal) == ("collections OrderedDict", ["_metadata"])
    is_dtype_state = target.constructor == "numpy dtype" and isinstance(state.literal, list) and state.depth <= 1
    require(is_metadata or is_dtype_state, "it sets attributes that torch.save does not set")


def check_config_state(state: StackItem) -> None:
    """Stops a GPTConfig that nests values, or has more of them than sizes need."""
    fields = state.literal
    require(isinstance(fields, list) and all(isinstance(field, str) for field in fields) and state.depth <= 1,
            "its GPTConfig must hold numbers and text by name")
    require(len(fields) <= MAX_CONFIG_FIELDS and state.size <= MAX_CONFIG_SIZE, "its GPTConfig holds too much")


def check_call(function: StackItem, arguments: StackItem) -> None:
    """Stops calls that torch.save and pickle do not write, and calls that cost far more than their arguments."""
    name, values = function.literal, arguments.literal
    # A storage by number of bytes takes any amount of memory, and a tensor that is called iterates over its entries.
    require(function.constructor == "GLOBAL" and isinstance(values, list)
            and not name.endswith("Storage") and not is_config(name),
            "it makes a call that torch.save does not write")
    if name.startswith("torch._utils _rebuild_tensor"):
        check_tensor(*values[:4])
    elif name == "_codecs encode": # pickle's protocol 2 writes bytes in this way; other codecs are slow
        require(values[1:] == ["latin1"], "it encodes bytes in a way that pickle does not use")
    elif name in HASHING_CALLS: # each character of a text would become a key
        require(arguments.depth <= 2 and not any(isinstance(value, str) for value in values),
                "it has keys that are neither text nor numbers")
    elif not name.startswith("torch._utils"): # a tensor as an argument may claim any number of values
        require(arguments.depth <= 3, "it makes a call that torch.save does not write")


def check_tensor(storage_id: list, offset: int, sizes: list[int], strides: list[int]) -> None:
    """Stops a tensor that reaches beyond its storage: torch would enlarge the storage, up to all memory."""
    *_, storage_size = storage_id[:5]
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    require(min([offset, *sizes, *strides]) >= 0 and (0 in sizes or last < storage_size),
            "one of its tensors reaches beyond its storage, or has an impossible shape")
