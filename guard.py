"""What is looked at in a pickle, or in a zip of torch's, before it is loaded.

Loaders that run no code can still be made to take all memory, by a few bytes: which number what is remembered up to
2**31, hold a tuple that holds itself twice, sixty times over, or call bytearray(2**40). So opcodes are counted first,
and nothing is made of them.
"""
import io
import os
import pickletools
import struct
import sys
import tarfile
import zipfile
import zlib
from contextlib import suppress

import torch

# A pickle's bytes; its opcodes, with all that they copy; how deep values lie. A checkpoint of twelve layers with its
# optimizer takes a fortieth of that, a table of all of Unicode's characters two thirds.
MOST_BYTES, MOST_STEPS, MOST_DEPTH = 2**23, 2**21, 100
WIDE = 2**10 # what an integer of more than 64 bits counts: as keys, such can be made to collide
LOCAL = struct.Struct("<4s22xHH") # what stands before a record in a zip: a sign, and how long its name and the rest are
TRAILER = struct.Struct("<4s36xQQ4s4xQ4x4s16xH") # the end of a zip64: where its directory is, and where that is said

REMEMBER, RECALL = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"GET", "BINGET", "LONG_BINGET"}
GROW = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
KEYS = {"SETITEM": slice(1, None, 2), "SETITEMS": slice(1, None, 2), "DICT": slice(0, None, 2),
        "ADDITEMS": slice(1, None), "FROZENSET": slice(None)} # which of what they take are hashed
HASHED = {"collections OrderedDict", "collections Counter", "builtins set", "__builtin__ set"} # so do they
# Readers differ in what these do, or call more than a name; data needs none.
FOREIGN = {"POP", "POP_MARK", "DUP", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "PERSID", "EXT1", "EXT2", "EXT4"}


class Value:
    """What an opcode would push: how many values that is with all copies, and how deep.

    known: its text or number; the items of a tuple, the keys of a dict, what names a storage; the "module name" of a
    global. made: "GLOBAL", or the global that was called for it. held: it is part of another, or was recalled.
    """
    __slots__ = "depth", "held", "known", "made", "size"

    def __init__(self, size):
        self.size, self.depth, self.known, self.made, self.held = size, 0, None, None, False


def check_pickle(pickled, names=(), most=MOST_STEPS):
    """Raise Refused if loading these bytes, up to a pickle's end, would take more than a pickle of data does.

    names: what it may name and call, each as "module name". most: how many steps, and values copied, are many. Returns
    how many bytes the pickle has.
    """
    file, stack, marks, memo, total = io.BytesIO(pickled[:MOST_BYTES]), [], [], {}, 0
    try:
        for opcode, argument, _ in pickletools.genops(file):
            name = opcode.name
            require(name not in FOREIGN, f"it holds {name}, which no pickle of data does")
            total += 16 if name in ("GLOBAL", "REDUCE") else 1 # these are slow
            if name == "MARK":
                marks.append(len(stack))
            elif name in REMEMBER:
                place = len(memo) if argument is None else argument
                require(place <= len(memo), "it numbers what it remembers as pickle never does")
                memo[place] = stack[-1]
            elif name in RECALL:
                stack.append(memo[argument])
                stack[-1].held = True
                total += stack[-1].size if stack[-1].depth else 0 # a text is no copy
            else:
                taken = take(stack, marks, opcode.stack_before)
                check_use(name, argument, taken, names)
                value = outcome(name, argument, taken)
                stack += [value] * len(opcode.stack_after)
                total += value.size if name in ("REDUCE", "BUILD", "BINPERSID") or not taken else 0
            require(total <= most and (not stack or stack[-1].depth <= MOST_DEPTH),
                    "it would take far more memory or time than data of its kind has use for")
    except Refused:
        raise
    except (LookupError, ValueError, TypeError, AttributeError) as e:
        require(len(pickled) <= MOST_BYTES, f"its pickle has more than {MOST_BYTES} bytes")
        raise ValueError(f"its pickle is damaged: {e}") from None
    return file.tell()


class Refused(ValueError):
    """A file is whole, perhaps, but not what it should be."""


def require(holds, else_said):
    """Raise Refused, unless it holds."""
    if not holds:
        raise Refused(else_said)


def take(stack, marks, before):
    """Remove from the stack what an opcode takes, as pickletools describes it; IndexError if it is not there."""
    marked = pickletools.markobject in before
    at = marks.pop() - before.index(pickletools.markobject) if marked else len(stack) - len(before)
    if at < 0:
        raise IndexError
    taken = stack[at:]
    del stack[at:]
    return taken


def check_use(name, argument, taken, names):
    """Raise Refused if an opcode names what it may not, or would do what takes long."""
    if name in ("GLOBAL", "STACK_GLOBAL"):
        wanted = " ".join(value.known for value in taken) or argument
        require(wanted in names, f"it names {wanted.replace(' ', '.'):.80}, which could run code")
    elif name in KEYS: # tuples can be made to collide, and their hashes take as long as they are
        require(not any(key.depth for key in taken[KEYS[name]]), "it has keys that are neither text nor numbers")
    elif name == "REDUCE":
        check_call(*taken)
    elif name == "BUILD": # what torch.save writes of a state_dict, and numpy of its types; others change methods
        made, state = taken
        require((made.made, state.known) == ("collections OrderedDict", ["_metadata"])
                or (made.made == "numpy dtype" and isinstance(state.known, list) and state.depth <= 1),
                "it changes what it made as torch.save never does")
    elif name == "BINPERSID": # torch's reader takes names that differ in case for the same
        require(taken[0].known[2].isdecimal(), "it names a storage as torch.save never does")


def check_call(function, arguments):
    """Raise Refused if a call is none that torch.save writes, or would take long."""
    name, given = function.known, arguments.known
    require(function.made == "GLOBAL" and isinstance(given, list) and not name.endswith("Storage"),
            "it calls something as torch.save never does")
    if name.startswith("torch._utils _rebuild_tensor"): # torch would make a storage longer that is too short for it
        (*_, numbers), offset, sizes, strides = given[0][:5], *given[1:4]
        reach = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        require(min([offset, *sizes, *strides]) >= 0 and (0 in sizes or reach < numbers),
                "a tensor of it reaches beyond what is stored, or has an impossible shape")
    elif name == "_codecs encode": # so bytes are pickled; other codecs are slow
        require(given[1:] == ["latin1"], "it holds bytes as pickle never writes them")
    elif name in HASHED: # a text would become as many values as it has characters
        require(arguments.depth <= 2 and not any(isinstance(value, str) for value in given),
                "it has keys that are neither text nor numbers")
    elif not name.startswith("torch._utils"): # no tensor, which may say that it has any number of values
        require(arguments.depth <= 3, "it calls something as torch.save never does")


def outcome(name, argument, taken):
    """The Value that an opcode makes of its argument and what it takes."""
    if name in GROW:
        made, *taken = taken
        require(not made.held, "it adds to what is part of something else already")
    else:
        made = Value(1)
    for value in taken:
        made.size, made.depth, value.held = made.size + value.size, max(made.depth, value.depth + 1), True
    if isinstance(argument, str | bytes | bytearray | int):
        made.known = argument
        wide = isinstance(argument, int) and argument.bit_length() > 64
        made.size += WIDE * wide if isinstance(argument, int) else len(argument) // 16 # characters are small
    if "TUPLE" in name:
        made.known = [value.known for value in taken]
    elif name in ("SETITEM", "SETITEMS"):
        made.known = made.known or []
        made.known += (key.known for key in taken[::2])
    elif name == "BINPERSID":
        made.known = taken[0].known
    elif name == "STACK_GLOBAL":
        made.known = " ".join(value.known for value in taken)
    if "GLOBAL" in name:
        made.made = "GLOBAL"
    elif name == "REDUCE":
        made.made = taken[0].known
    return made


def check_zip(path):
    """The pickle in a zip that torch.save wrote, and {(bytes, CRC-32)} of its records; Refused where it is no such zip.

    These are left out where torch was told to leave them out.
    """
    directory = require_plain_directory(path)
    with zipfile.ZipFile(path) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
    require(all(record.compress_type == zipfile.ZIP_STORED for record in records), "a record of it is compressed")
    require_apart(path, records, directory)
    others = [record.file_size for record in records if record.filename.split("/")[1:2] != ["data"]]
    require(max(others, default=0) <= MOST_BYTES, f"its pickle has more than {MOST_BYTES} bytes")
    reader = torch._C.PyTorchFileReader(os.fspath(path)) # as torch.load has
    pickled, sums = reader.get_record("data.pkl"), {(record.file_size, record.CRC) for record in records}
    order = sys.byteorder.encode()
    require(not reader.has_record("byteorder") or reader.get_record("byteorder") == order,
            "a machine of the other byte order wrote it")
    if not any(checksum for _, checksum in sums):
        return pickled, set()
    require((len(pickled), zlib.crc32(pickled)) in sums, "its pickle does not match its checksum")
    return pickled, sums


def require_plain_directory(path):
    """Where the directory of a zip begins; Refused unless it ends as torch.save ends it.

    Readers of zips search for its directory in different ways: torch's and Python's must find the same.
    """
    with open(path, "rb") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(max(0, size - TRAILER.size))
        end = f.read()
    require(len(end) == TRAILER.size, "it is too short")
    *signs, length, start, found, comment = (TRAILER.unpack(end)[i] for i in (0, 3, 5, 1, 2, 4, 6))
    require(signs == [b"PK\6\6", b"PK\6\7", b"PK\5\6"] and start + length == found == size - TRAILER.size
            and not comment, "its directory of records is not where torch.save puts it")
    require(length <= MOST_BYTES, "it has far more records than a network has use for")
    return start


def require_apart(path, records, directory):
    """Raise Refused unless each record, in order, is where a zip's directory says, and ends before the next begins.

    Else one could be read in another's place, whose length and checksum would be right.
    """
    ends = [*(record.header_offset for record in records), directory][1:]
    with open(path, "rb") as f:
        for record, end in zip(records, ends, strict=True):
            f.seek(record.header_offset)
            head = f.read(LOCAL.size)
            require(len(head) == LOCAL.size, "it is cut short")
            sign, named, rest = LOCAL.unpack(head)
            name = record.orig_filename.encode("utf-8" if record.flag_bits & 2**11 else "cp437")
            require(sign == b"PK\3\4" and f.read(named) == name, "a record of it is not where its directory says")
            require(f.tell() + rest + record.file_size <= end, "its records overlap")


def require_no_tar(head):
    """Raise Refused if this is how a tar begins: torch would look for its own first files there, and read all of it."""
    with suppress(tarfile.HeaderError):
        tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape")
        raise Refused("it is a tar")
