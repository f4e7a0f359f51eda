"""Checks a pickle, opcode by opcode, before anything loads it.

A reader that runs no code (torch's weights_only, an unpickler without classes) is still open to denial of service.
A few bytes suffice: a memo index of 2**31 allocates gigabytes, bytearray(2**40) allocates a terabyte, and a tuple that
holds the same tuple twice, and so on for sixty levels, has 2**60 leaves to hash or to print. So the scanner simulates
the reader's stack with StackItems, which only describe values. It refuses every opcode that data does not need, every
operand that pickle_rules does not allow, and everything that costs far more than ordinary data.
"""
import io
import pickletools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sampling.checkpoints.errors import RejectedFileError, first_sentence, require
from sampling.checkpoints.pickle_rules import StackItem, check_opcode, is_config

# Valid files stay below these limits: a checkpoint of 12 layers with its optimizer needs a fortieth of
# MAX_PICKLE_STEPS, a vocabulary of all Unicode characters needs two thirds.
MAX_PICKLE_BYTES = 2**23 # of a pickle
MAX_PICKLE_STEPS = 2**21 # of a pickle: its opcodes, and the values that they copy
MAX_DEPTH = 100 # of nested values
MAX_CONFIG_NAMES = 4 # different GPTConfigs in a pickle
SLOW_OPCODES, SLOW_STEPS = {"GLOBAL", "REDUCE", "NEWOBJ"}, 16 # steps of each: it looks up or calls something
WIDE_INT_STEPS = 2**10 # steps of an integer of more than 64 bits: an attacker can choose such keys to collide

MEMO_PUT = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
MEMO_GET = {"GET", "BINGET", "LONG_BINGET"}
MUTATE = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"} # change their first operand
COPY = {"REDUCE", "BUILD", "BINPERSID"} # may copy their operands
# These can call something without a checked name, or unpicklers disagree about them. Data needs none of them.
FORBIDDEN = {"POP", "POP_MARK", "DUP", "INST", "OBJ", "NEWOBJ_EX", "PERSID", "EXT1", "EXT2", "EXT4"}


@dataclass(frozen=True)
class CheckedPickle:
    """What check_pickle finds out about a pickle."""
    length: int
    config_names: frozenset[str] # "module GPTConfig" for each GPTConfig that it names


def check_pickle(pickled: bytes, allowed_names: Collection[str] = (),
                 max_steps: int = MAX_PICKLE_STEPS) -> CheckedPickle:
    """Check the first pickle in these bytes.

    allowed_names: what it may name and call, each as "module name". ANY_CONFIG also allows a GPTConfig of any module:
    an instance made without arguments, and filled with flat values. Raises RejectedFileError if loading the pickle
    could run code or cost far more than ordinary data; ValueError if the pickle is damaged.
    """
    stream, scanner = io.BytesIO(pickled[:MAX_PICKLE_BYTES]), PickleScanner(allowed_names, max_steps)
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            scanner.step(opcode, argument)
    except RejectedFileError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError) as e:
        require(len(pickled) <= MAX_PICKLE_BYTES, f"its pickle has more than {MAX_PICKLE_BYTES} bytes")
        raise ValueError(f"its pickle is damaged: {first_sentence(e)}") from None
    return CheckedPickle(stream.tell(), frozenset(scanner.config_names))


class PickleScanner:
    """Simulates the unpickler's stack, with StackItems for values. A damaged pickle raises many kinds of exceptions."""

    def __init__(self, allowed_names: Collection[str], max_steps: int):
        self.allowed_names, self.max_steps = allowed_names, max_steps
        self.stack: list[StackItem] = []
        self.marks: list[int] = [] # how long the stack was at each MARK
        self.memo: dict[int, StackItem] = {}
        self.config_names: set[str] = set()
        self.steps = 0

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        """Check and simulate one opcode."""
        name = opcode.name
        require(name not in FORBIDDEN, f"it uses the opcode {name}, which data does not need")
        self.steps += SLOW_STEPS if name in SLOW_OPCODES else 1
        if name == "MARK":
            self.marks.append(len(self.stack))
        elif name in MEMO_PUT:
            self.memo_put(argument)
        elif name in MEMO_GET:
            self.memo_get(argument)
        else:
            self.execute(opcode, argument)
        require(self.steps <= self.max_steps and (not self.stack or self.stack[-1].depth <= MAX_DEPTH),
                "it would take far more memory or time than data of its kind needs")

    def memo_put(self, index: int | None) -> None:
        """Store the top of the stack. A reader allocates its memo up to the index, so indices must be consecutive."""
        index = len(self.memo) if index is None else index
        require(index <= len(self.memo), "its memo indices are not consecutive")
        self.memo[index] = self.stack[-1]

    def memo_get(self, index: int) -> None:
        """Push a value from the memo. All that it holds counts again, because copying or printing takes time again."""
        item = self.memo[index]
        item.shared = True
        self.stack.append(item)
        self.steps += item.size if item.depth else 0 # a text is not copied

    def execute(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        """Check and simulate an opcode that makes a value of its argument and operands."""
        operands = self.pop_operands(opcode.stack_before)
        check_opcode(opcode.name, argument, operands, self.allowed_names)
        item = apply_opcode(opcode.name, argument, operands)
        self.note_config(item)
        self.stack += [item] * len(opcode.stack_after)
        if opcode.name in COPY or not operands:
            self.steps += item.size

    def note_config(self, item: StackItem) -> None:
        """Note the name of a GPTConfig. A reader compares every name with all of them, so they must be few."""
        if item.constructor == "GLOBAL" and is_config(item.literal):
            self.config_names.add(item.literal)
            require(len(self.config_names) <= MAX_CONFIG_NAMES, "it names too many different GPTConfigs")

    def pop_operands(self, stack_before: list) -> list[StackItem]:
        """Pop the operands of an opcode, as pickletools describes them. Raises IndexError if the stack is too short."""
        if pickletools.markobject in stack_before:
            start = self.marks.pop() - stack_before.index(pickletools.markobject)
        else:
            start = len(self.stack) - len(stack_before)
        if start < 0:
            raise IndexError
        operands = self.stack[start:]
        del self.stack[start:]
        return operands


def apply_opcode(name: str, argument: Any, operands: list[StackItem]) -> StackItem:
    """The StackItem that an opcode leaves on the stack.

    Raises RejectedFileError if the opcode changes a value that is already part of another value, whose size and depth
    would then be wrong. A list that contains itself is one such case.
    """
    if name in MUTATE:
        item, *operands = operands
        require(not item.shared, "it changes a value that is already part of another one")
    else:
        item = StackItem()
    for operand in operands:
        item.size, item.depth, operand.shared = item.size + operand.size, max(item.depth, operand.depth + 1), True
    if isinstance(argument, str | bytes | bytearray | int):
        item.literal = argument
        item.size += size_of_argument(argument)
    note_operands(item, name, operands)
    return item


def size_of_argument(argument: str | bytes | bytearray | int) -> int:
    """How much a text or number adds to the size of its StackItem. A character takes far less memory than a value."""
    if isinstance(argument, int):
        return WIDE_INT_STEPS if argument.bit_length() > 64 else 0
    return len(argument) // 16


def note_operands(item: StackItem, name: str, operands: list[StackItem]) -> None:
    """Store in item what later checks need to know about the operands."""
    if "TUPLE" in name:
        item.literal = [operand.literal for operand in operands]
    elif name in ("SETITEM", "SETITEMS"):
        item.literal = item.literal or []
        item.literal += (key.literal for key in operands[::2])
    elif name == "BINPERSID":
        item.literal = operands[0].literal
    elif name == "STACK_GLOBAL":
        item.literal = " ".join(operand.literal for operand in operands)
    if "GLOBAL" in name:
        item.constructor = "GLOBAL"
    elif name in ("REDUCE", "NEWOBJ"):
        item.constructor = operands[0].literal
