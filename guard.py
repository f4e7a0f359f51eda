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
import zipfile
import zlib

import torch

# A pickle's bytes; its values and all copies of them; how deep they lie. A table of all of Unicode's characters has
# three quarters and a quarter of that, a checkpoint of twelve layers with its optimizer a hundredth.
MOST_BYTES, MOST_VALUES, MOST_DEPTH = 2**22, 2**21, 100
TRAILER = struct.Struct("<4s36xQQ4s4xQ4x4s16xH") # the end of a zip64: where its directory is, and where that is said
WIDE = 2**10 # what an integer of more than 64 bits counts: as keys of a dict such can be made to collide

REMEMBER, RECALL = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"GET", "BINGET", "LONG_BINGET"}
GROW = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
COPY = {"REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST", "BUILD", "BINPERSID", "DUP"} # or may do so


class Value:
    """What an opcode would push: how many values that is with all copies, and how deep.

    known: its text, or the "module name" it stands for; of a pair both.
    """
    __slots__ = "depth", "known", "size"

    def __init__(self, size, depth=0, known=None):
        self.size, self.depth, self.known = size, depth, known


def check_pickle(pickled, names=()):
    """Raise Refused if loading these bytes, up to a pickle's end, would take more than a pickle of data does.

    names: what it may name and call, each as "module name". Returns how many bytes the pickle has.
    """
    file, stack, marks, memo, total = io.BytesIO(pickled[:MOST_BYTES]), [], [], {}, 0
    try:
        for opcode, argument, _ in pickletools.genops(file):
            name = opcode.name
            if name == "MARK":
                marks.append(len(stack))
            elif name in REMEMBER:
                place = len(memo) if argument is None else argument
                require(place <= len(memo), "it numbers what it remembers as pickle never does")
                memo[place] = stack[-1]
            elif name in RECALL:
                stack.append(memo[argument])
                total += memo[argument].size if memo[argument].depth else 1 # a text is no copy
            else:
                taken = take(stack, marks, opcode.stack_before)
                value = outcome(name, argument, taken)
                check_names(name, value, taken, names)
                stack += [value] * len(opcode.stack_after)
                total += value.size if name in COPY or not taken else 1
            require(total <= MOST_VALUES and (not stack or stack[-1].depth <= MOST_DEPTH),
                    "it would take far more memory or time than data of its kind has use for")
    except Refused:
        raise
    except (LookupError, ValueError, TypeError, AttributeError) as e:
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


def outcome(name, argument, taken):
    """The Value that an opcode makes of its argument and what it takes."""
    if name in GROW: # in place: others may hold it too
        grown, *more = taken
        grown.size += sum(value.size for value in more)
        grown.depth = max([grown.depth, *(value.depth + 1 for value in more)])
        return grown
    size, depth, known = 1, 0, None
    for value in taken:
        size, depth = size + value.size, max(depth, value.depth + 1)
    if isinstance(argument, int) and argument.bit_length() > 64:
        size += WIDE
    elif isinstance(argument, str | bytes | bytearray):
        size, known = size + len(argument) // 16, argument # characters are small
    elif name == "TUPLE2":
        known = [value.known for value in taken]
    elif name == "STACK_GLOBAL":
        known = " ".join(value.known for value in taken)
    return Value(size, depth, known)


def check_names(name, value, taken, names):
    """Raise Refused if an opcode names anything else, or would call what takes long."""
    if name in ("GLOBAL", "INST", "STACK_GLOBAL"):
        require(value.known in names, f"it names {value.known.replace(' ', '.'):.80}, which could run code")
    if name == "REDUCE" and taken[0].known == "_codecs encode": # so bytes are pickled; other codecs are slow
        require(taken[1].known and taken[1].known[1:] == ["latin1"], "it holds bytes as pickle never writes them")


def check_zip(path):
    """The pickle in a zip that torch.save wrote, and its records' checksums; Refused where it is no such zip.

    They are a set, empty where torch was told to leave them out, or the file has the other byte order.
    """
    require_plain_directory(path)
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        require(all(record.compress_type == zipfile.ZIP_STORED for record in records), "a record of it is compressed")
        require(sum(record.file_size for record in records) <= os.path.getsize(path), "its records overlap")
    reader = torch._C.PyTorchFileReader(os.fspath(path)) # as torch.load has
    pickled, sums = reader.get_record("data.pkl"), {record.CRC for record in records}
    if not any(sums) or (reader.has_record("byteorder") and reader.get_record("byteorder") != sys.byteorder.encode()):
        return pickled, set()
    require(zlib.crc32(pickled) in sums, "its pickle does not match its checksum")
    return pickled, sums


def require_plain_directory(path):
    """Raise Refused unless a zip ends as torch.save ends it.

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
