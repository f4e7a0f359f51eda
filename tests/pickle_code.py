"""Hand-written pickles. Each function returns opcodes that leave one value on the stack."""
import pickle

TUPLES = b"h\x01\x86" # opcodes that make a pair: twice the value at memo index 1
RAN = pickle.dumps("ran", 2)[2:-1] # the folder that attacks make


def value(anything):
    """Plain data, as pickle writes it."""
    return pickle.dumps(anything, 2)[2:-1]


def call(function, *arguments):
    """The result of a function call, by GLOBAL and REDUCE."""
    return b"c" + function.replace(" ", "\n").encode() + b"\n(" + b"".join(arguments) + b"tR"


def tensor(size, stride=None, offset=0, key="0", kind="torch FloatStorage", count=1):
    """A tensor as torch.save writes it; count is the number of elements in its storage."""
    storage = (b"(" + value("storage") + b"c" + kind.replace(" ", "\n").encode() + b"\n"
               + value(key) + value("cpu") + value(count) + b"tQ")
    size, stride = (n if isinstance(n, bytes) else value(n) for n in (size, stride or (1,) * len(size)))
    return call("torch._utils _rebuild_tensor_v2", storage, value(offset), size, stride, value(False),
                call("collections OrderedDict"))


def nested(code, depth=60):
    """A list in which each value contains the previous value twice: few bytes, 2**60 leaves."""
    return b"](" + value("x" * 10) + b"".join(b"q\x01" + code for _ in range(depth)) + b"e"


def as_key(piece):
    """A dict whose key is the last value of a nested list."""
    return b"}" + piece[2:-1] + b"Ns"


def repeat(piece, code):
    """A list of 3000 values. This code makes each of them from a piece at memo index 1."""
    return b"](" + piece + b"q\x01" + code * 3000 + b"e"
