"""What check_pickle allows, and the error message for everything that it refuses. These tests load nothing."""
import pickle

import pytest

from pickle_code import LISTS, TUPLES, call, nested, tensor, value
from sampling.checkpoints.errors import RejectedFileError
from sampling.checkpoints.pickle_scanner import MAX_DEPTH, check_pickle
from sampling.checkpoints.torch_files import ALLOWED_NAMES

PAIR = b"K\x01K\x02\x86"
COSTLY, KEYS, CALLS = "far more memory or time", "it has keys that are neither text nor numbers", "it makes a call that torch.save does not write"
BEYOND, ATTRIBUTES = "reaches beyond its storage, or has an impossible shape", "it sets attributes that torch.save does not set"

REFUSED = {
    "a-function": (b"cos\nmkdir\n", "it names os.mkdir, which could run code"),
    "a-function-by-STACK_GLOBAL": (value("os") + value("mkdir") + b"\x93", "it names os.mkdir, which could run code"),
    "POP": (b"N0", "it uses the opcode POP,"), "POP_MARK": (b"(1", "it uses the opcode POP_MARK,"), "DUP": (b"N2", "it uses the opcode DUP,"),
    "INST": (b"(ios\nmkdir\n", "it uses the opcode INST,"), "OBJ": (b"(No", "it uses the opcode OBJ,"), "NEWOBJ": (b"N)\x81", "it creates an object that torch.save does not write"),
    "NEWOBJ_EX": (b"N)}\x92", "it uses the opcode NEWOBJ_EX,"), "PERSID": (b"P0\n", "it uses the opcode PERSID,"), "EXT1": (b"\x82\1", "it uses the opcode EXT1,"),
    "EXT2": (b"\x83\1\0", "it uses the opcode EXT2,"), "EXT4": (b"\x84\1\0\0\0", "it uses the opcode EXT4,"),
    "a-far-memo-index": (b"]r\x00\x00\x00\x10", "its memo indices are not consecutive"),
    "a-far-memo-index-by-PUT": (b"]p400000000\n", "its memo indices are not consecutive"),
    "many-values": (b"(" + b"N" * 5000 + b"l", COSTLY), "many-marks": (b"(" * 5000 + b"l", COSTLY),
    "many-calls": (b"(" + (b"ccollections\nOrderedDict\n)R") * 150 + b"l", COSTLY),
    "tuples-that-hold-one-twice": (nested(TUPLES), COSTLY), "lists-that-hold-one-twice": (nested(LISTS), COSTLY),
    "many-copies-of-a-tuple": (b"(" + value((None,) * 100) + b"q\0" + b"h\0" * 60 + b"l", COSTLY),
    "many-copies-by-calls": (b"(](" + b"K\1" * 100 + b"eq\0" + b"c__builtin__\nset\nh\0\x85R" * 20 + b"l", COSTLY),
    "many-wide-integers": (value([2**64 + i for i in range(5)]), COSTLY), "deep": (b")" + b"\x85" * (MAX_DEPTH + 1), COSTLY),
    "a-list-in-itself": (b"]q\0h\0a", "it changes a value that is already part of another one"),
    "a-list-changed-in-a-tuple": (b"]q\0\x85q\1h\0Na\x86", "it changes a value that is already part of another one"),
    "a-tuple-as-a-key-of-SETITEM": (b"}" + PAIR + b"Ns", KEYS), "a-tuple-as-a-key-of-SETITEMS": (b"}(" + PAIR + b"Nu", KEYS),
    "a-tuple-as-a-key-of-DICT": (b"(" + PAIR + b"Nd", KEYS), "a-tuple-in-a-set": (b"\x8f(" + PAIR + b"\x90", KEYS),
    "a-tuple-in-a-frozenset": (b"(" + PAIR + b"\x91", KEYS), "tuples-in-a-set-by-a-call": (call("builtins set", b"](" + PAIR + PAIR + b"e"), KEYS),
    "pairs-in-an-OrderedDict": (call("collections OrderedDict", b"]" + PAIR + b"\x85a"), KEYS), "a-set-of-a-text": (call("builtins set", value("ab")), KEYS),
    "a-storage-by-a-name-with-letters": (tensor((1,), key="0A"), "it has a storage name that torch.save does not write"),
    "a-method-of-a-dict": (b"ccollections\nOrderedDict\n)R}" + value("values") + b"Nsb", ATTRIBUTES),
    "attributes-of-a-tensor": (tensor((1,)) + b"(ctorch\nfloat64\nK\0t" + b"b", ATTRIBUTES),
    "a-storage-by-its-size": (call("torch FloatStorage", value(2**31)), CALLS), "a-tensor-called": (tensor((1,)) + b")R", CALLS),
    "arguments-that-are-no-tuple": (b"ctorch\nSize\n](NeR", CALLS), "a-size-of-a-tensor": (call("torch Size", tensor((1,))), CALLS),
    "bytes-by-a-slow-codec": (call("_codecs encode", value("x"), value("punycode")), "it encodes bytes in a way that pickle does not use"),
    "a-tensor-beyond-its-storage": (tensor((3,), count=2), BEYOND), "beyond-by-a-stride": (tensor((2,), (2,), count=2), BEYOND),
    "beyond-by-an-offset": (tensor((1,), (1,), 1), BEYOND), "a-negative-size": (tensor((-1,)), BEYOND), "a-negative-stride": (tensor((2,), (-1,), 1), BEYOND),
    "a-long-pickle": (value("x" * 2**23), "its pickle has more than 8388608 bytes"),
}


@pytest.mark.parametrize("piece, message", REFUSED.values(), ids=REFUSED)
def test_the_error_states_the_reason(piece, message):
    with pytest.raises(RejectedFileError) as error:
        check_pickle(b"\x80\x02" + piece + b".", ALLOWED_NAMES, max_steps=4096)
    assert message in str(error.value)


@pytest.mark.parametrize("pickled", [b"", b"\x80\x02", b"N", b"a.", b"h\1.", b"}K\1s.", b"X\xff\xff\xff\x7fx.", b"\xff."])
def test_the_error_says_that_a_pickle_is_damaged(pickled):
    with pytest.raises(ValueError, match="its pickle is damaged") as error:
        check_pickle(pickled)
    assert not isinstance(error.value, RejectedFileError)


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_is_allowed_in_every_protocol(protocol):
    shared = [1, (2, "b" * 300)]
    pickled = pickle.dumps({"a": [1.5, None, True, 2**70, -1], "b": {1: {"c": ()}}, 3: (shared, shared), "d": ["e"] * 2000}, protocol)
    assert check_pickle(pickled + b"what follows").length == len(pickled)


def test_max_steps_limits_the_length_of_a_pickle():
    pickled = pickle.dumps(list(range(100)), 2)
    assert check_pickle(pickled, max_steps=1000).length == len(pickled)
    with pytest.raises(RejectedFileError, match=COSTLY):
        check_pickle(pickled, max_steps=100)
