"""Hostile pickles run no code, and take little memory and time."""
import json
import pickle
import struct
from contextlib import suppress
from functools import cache

import pytest

from attacks import needs_linux, poison, write_attack, write_checkpoint
from models import SHAPE
from pickle_code import LISTS, TUPLES, as_key, call, colliding_pairs, nested, repeat, tensor, value
from sampling.checkpoints.pickle_scanner import MAX_PICKLE_STEPS, check_pickle
from sampling.checkpoints.torch_files import ALLOWED_NAMES

pytest_plugins = ["attacks"]
pytestmark = needs_linux


def in_files(payloads, kinds, quick):
    """Every payload in every kind of file. The quick cases are the payloads that quick names, in alternating kinds of file."""
    return [pytest.param(kind, payload, id=f"{name}-{kind}", marks=() if name in quick and i % len(kinds) == n else pytest.mark.slow)
            for i, (name, payload) in enumerate(payloads.items()) for n, kind in enumerate(kinds)]


# ---- code

RAN = value("ran")
ATTACKS = {
    "GLOBAL-REDUCE": b"cos\nmkdir\n(" + RAN + b"tR",
    "STACK_GLOBAL": value("os") + value("mkdir") + b"\x93" + RAN + b"\x85R",
    "STACK_GLOBAL-dotted": value("shutil") + value("os.mkdir") + b"\x93" + RAN + b"\x85R",
    "INST": b"(" + RAN + b"ios\nmkdir\n",
    "OBJ": b"(cos\nmkdir\n" + RAN + b"o",
    "NEWOBJ": b"cbuiltins\nbytes\ncbuiltins\nmap\ncos\nmkdir\n](" + RAN + b"e\x86\x81\x85\x81",
    "NEWOBJ_EX": b"cbuiltins\nbytes\ncbuiltins\nmap\ncos\nmkdir\n](" + RAN + b"e\x86}\x92\x85}\x92",
    "BUILD": b"ctypes\nSimpleNamespace\n)R}" + value("__setstate__") + b"cos\nmkdir\nsb" + RAN + b"b",
    "APPEND": b"ctypes\nSimpleNamespace\n)R}" + value("append") + b"cos\nmkdir\nsb" + RAN + b"a",
    "APPENDS": b"ctypes\nSimpleNamespace\n)R}" + value("extend") + b"cos\nremovexattr\nsb(" + RAN + b"e",
    "ADDITEMS": b"ctypes\nSimpleNamespace\n)R}" + value("add") + b"cos\nmkdir\nsb(" + RAN + b"\x90",
    "EXT1": b"\x82\x12" + RAN + b"\x85R",
    "EXT2": b"\x83\x34\x12" + RAN + b"\x85R",
    "EXT4": b"\x84\x56\x34\x12\x00" + RAN + b"\x85R",
    "PERSID": b"Pran\n",
    "BINPERSID": RAN + b"Q",
    "BINPERSID-module": b"(" + value("module") + b"cos\nmkdir\n" + RAN + RAN + b"tQ",
    "NEXT_BUFFER": b"\x97", "READONLY_BUFFER": RAN + b"\x98",
    "eval": call("builtins eval", value("__import__('os').mkdir('ran')")),
    "import": call("builtins __import__", value("antigravity")),
    "getattr": call("builtins getattr", b"cos\npath\n", value("os")),
    "apply-a-builtin-of-Python-2": call("__builtin__ apply", b"cos\nmkdir\n", b"(" + RAN + b"t"),
    "a-module": b"cos\n\n",
    "torch.hub": call("torch.hub load", value("a/b"), value("c")),
    "torch.load": call("torch load", RAN, b"N", b"N", value(False)),
    "rebuild-by-anything": call("torch._tensor _rebuild_from_type_v2", b"cos\nmkdir\n", b"ctorch\nTensor\n", RAN + b"\x85", b"}"),
    "rebuild-setting-attributes": call("torch._tensor _rebuild_from_type_v2", b"ccollections\nCounter\n", b"ctorch\nTensor\n", b")", value({"__class__": 1})),
    "escape-codes": b"cx\x1b[31mred\x07\nmk\x1b]0;title\x07dir\n(" + RAN + b"tR",
    "a-long-name": b"c" + b"x" * 10**6 + b"\nmkdir\n(" + RAN + b"tR",
}


@pytest.mark.parametrize("kind, payload", in_files(ATTACKS, ["ckpt.pt", "old ckpt.pt", "pytorch_model.bin", "meta.pkl"], quick={
    "GLOBAL-REDUCE", "STACK_GLOBAL", "STACK_GLOBAL-dotted", "INST", "NEXT_BUFFER", "READONLY_BUFFER", "escape-codes", "a-long-name"}))
def test_hostile_pickles_run_no_code(kind, payload, assert_refused, valid_checkpoint, tmp_path):
    assert_refused("", write_attack(kind, payload, tmp_path, valid_checkpoint))


@pytest.mark.parametrize("name", [name for name, payload in ATTACKS.items() if RAN in payload and name not in (
    "PERSID", "BINPERSID", "BINPERSID-module", "READONLY_BUFFER", "APPENDS", "torch.load", "apply-a-builtin-of-Python-2", "escape-codes",
    "a-long-name") and not name.startswith(("EXT", "rebuild"))])
def test_the_attacks_work_with_pickle_loads(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with suppress(Exception): # the load may fail after the code has run
        pickle.loads(b"\x80\x04" + ATTACKS[name] + b".")
    assert (tmp_path / "ran").exists()


# ---- bombs

@cache
def pairs():
    """Keys with equal hashes."""
    return list(colliding_pairs(60_000))


BOMBS = {
    "LONG_BINPUT": b"]r\x00\x00\x00\x10", "PUT": b"]p400000000\n",
    "FRAME": b"\x95" + struct.pack("<Q", 2**40), "FRAME-of-all": b"\x95" + struct.pack("<Q", 2**64 - 1),
    "BINBYTES8": b"\x8e" + struct.pack("<Q", 2**32), "BINUNICODE8": b"\x8d" + struct.pack("<Q", 2**32),
    "BYTEARRAY8": b"\x96" + struct.pack("<Q", 2**32), "BINBYTES": b"B\xff\xff\xff\xff", "BINUNICODE": b"X\xff\xff\xff\xff",
    "BINSTRING": b"T\xff\xff\xff\x7f", "LONG4": b"\x8b\xff\xff\xff\x7f", "LONG4-negative": b"\x8b\xff\xff\xff\xff", "LONG": b"L" + b"9" * 10**6 + b"L\n",
    "tuples-as-a-key": as_key(nested(TUPLES)), "tuples-in-a-set": b"\x8f(" + nested(TUPLES)[2:-1] + b"\x90",
    "tuples-in-a-frozenset": b"(" + nested(TUPLES)[2:-1] + b"\x91", "tuples-as-a-key-of-DICT": b"(" + nested(TUPLES)[2:-1] + b"Nd",
    "deep-tuples-as-a-key": b"})" + b"\x85" * 400_000 + b"Ns", "deep-lists": b"]" * 200_000 + b"a" * 199_999,
    "bytearray": call("builtins bytearray", value(2**31)), "bytearray-of-Python-2": call("__builtin__ bytearray", value(2**31)),
    "float-tensor": call("torch FloatTensor", value(2**31)),
    "copy-of-an-expanded-tensor": call("torch._utils _rebuild_device_tensor_from_cpu_tensor", tensor((2**29,), (0,)), b"ctorch\nfloat64\n", value("cpu"), value(False)),
    "quantized": call("torch._utils _rebuild_qtensor", tensor((1,)), value(0), value((2**31,)), value((1,)), b"(ctorch\nper_tensor_affine\nG" + bytes(8) + b"K\x00t", value(False), b"N"),
    "bytes-of-one-text": repeat(value("x" * 2**20), b"c_codecs\nencode\nh\x01" + value("latin1") + b"\x86R"),
    "bytes-by-a-slow-codec": call("_codecs encode", value("".join(map(chr, range(0x3000, 0xd000)))), value("punycode")),
    "colliding-pairs": lambda: b"}(" + b"N".join([*pairs(), b""]) + b"u",
    "colliding-pairs-in-a-set": lambda: call("__builtin__ set", b"](" + b"".join(pairs()) + b"e"),
    "colliding-pairs-put-in-later": lambda: b"](" + b"]q\0" + b"h\0\x85q\1" + b"h\0(" + b"".join(pairs()) + b"e" + b"c__builtin__\nset\nh\1R" + b"e",
    "colliding-keys": lambda: b"}(" + b"".join(value(i * (2**61 - 1)) + b"N" for i in range(1, 200_000)) + b"u",
    "paths-of-one-text": repeat(value("x" * 2**20), b"cpathlib\nPosixPath\nh\x01\x85R"),
    "copies-of-a-set": repeat(value(list(range(300_000))), b"c__builtin__\nset\nh\x01\x85R"),
    "copies-of-a-dict": repeat(value(dict.fromkeys(range(100_000))), b"ccollections\nOrderedDict\nh\x01\x85R"),
    "copies-of-a-size": repeat(value(tuple(range(300_000))), b"ctorch\nSize\nh\x01\x85R"),
    "size-of-an-expanded-tensor": call("torch Size", tensor((2**25,), (0,))), "path-of-an-expanded-tensor": b"cpathlib\nPath\n" + tensor((2**25,), (0,)) + b"R",
    "a-tensor-called": tensor((7,) * 12, (0,) * 12) + b")R", "set-of-a-text": repeat(value("".join(map(chr, range(0x10000, 0x60000)))), b"c__builtin__\nset\nh\x01\x85R"),
    "methods-of-a-dict": b"ccollections\nOrderedDict\n)R}" + value("values") + b"c__builtin__\nset\nsb",
    "pairs-for-a-dict": lambda: b"ccollections\nOrderedDict\n)R](" + b"".join(pairs()) + b"eb",
    "a-storage-made-longer": tensor((1,)) + b"(ctorch.storage\nUntypedStorage\n" + value(2**30) + b"\x85RK\0" + value((2**30 + 1,)) + value((1,)) + b"tb",
    "numbers-of-a-type": b"cnumpy\ndtype\n" * 600_000 + b"]", "deep-by-popping": b"N" * 380_000 + b")" + b"\x85(0" * 379_995 + b"q\0}h\0Ns",
    "wide-by-popping": b"N" * 200 + b")" + b"(0q\0h\0\x86(0" * 40 + b"q\0}h\0Ns",
    "pairs-as-a-vocabulary": lambda: b"}(" + value("stoi") + b"](" + b"".join(pairs()) + b"e" + value("itos") + b"]u",
    "many-arguments": repeat(value(tuple(range(300_000))), b"c__builtin__\nset\nh\x01R"),
}


QUICK = ["LONG_BINPUT", "FRAME", "BINUNICODE8", "LONG", "tuples-as-a-key", "tuples-in-a-set", "deep-tuples-as-a-key", "bytearray", "float-tensor",
         "quantized", "bytes-by-a-slow-codec", "colliding-keys", "paths-of-one-text", "size-of-an-expanded-tensor",
         "methods-of-a-dict", "a-storage-made-longer", "a-tensor-called", "wide-by-popping"]


@pytest.mark.parametrize("allowed", [ALLOWED_NAMES, ()], ids=["torch.save", "meta.pkl"])
@pytest.mark.parametrize("name", [name for name in [*ATTACKS, *QUICK] if "BUFFER" not in name])
def test_the_scanner_refuses_it_before_a_reader_sees_it(name, allowed):
    """This takes a millisecond. The quick loads show that the reader of each kind of file asks the scanner first."""
    payload = (ATTACKS | BOMBS)[name]
    with pytest.raises(ValueError):
        check_pickle(b"\x80\x02" + (payload() if callable(payload) else payload) + b".", allowed)


@pytest.mark.parametrize("kind, payload", in_files(BOMBS, ["ckpt.pt", "old ckpt.pt", "meta.pkl"], quick={"a-tensor-called", "tuples-as-a-key", "tuples-in-a-set"}))
def test_pickle_bombs_take_little_memory_and_time(kind, payload, assert_refused, valid_checkpoint, tmp_path):
    assert_refused("", write_attack(kind, payload() if callable(payload) else payload, tmp_path, valid_checkpoint))


def entries(piece):
    """This piece of pickle in each part of a checkpoint that an error message may print: (key, its value)."""
    args, inner = value(SHAPE), piece[2:-1] if piece[:1] == b"]" else value(5)
    return {"model": ("model", piece), "model_args": ("model_args", piece), "tensor": ("model", b"}" + value("a") + piece + b"s"),
            "name": ("model", as_key(piece) if piece[:1] == b"]" else b"}" + value(5) + piece + b"s"),
            "argument": ("model_args", args + value("bias") + piece + b"s"), "key": ("model_args", args + inner + b"Ns"),
            "n_layer": ("model_args", args + value("n_layer") + piece + b"s")}


@pytest.mark.parametrize("piece", [
    pytest.param(nested(TUPLES), id="tuples"), pytest.param(nested(LISTS), id="lists", marks=pytest.mark.slow),
    pytest.param(b"ccollections\nOrderedDict\n)R" + value("a") + nested(LISTS) + b"s", id="dict", marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["model", "model_args", "tensor", "name", "argument", "key", "n_layer"])
def test_error_messages_do_not_print_deeply_nested_values(piece, where, assert_refused, valid_checkpoint, tmp_path):
    write_checkpoint(tmp_path, poison(valid_checkpoint, *entries(piece)[where]))
    assert_refused("")


def test_a_checkpoint_with_nested_keys_is_refused(assert_refused, valid_checkpoint, tmp_path):
    assert_refused("", write_attack("old ckpt.pt", as_key(nested(TUPLES)), tmp_path, valid_checkpoint))


@pytest.mark.slow
@pytest.mark.parametrize("kind, piece", [("ckpt.pt", b"}"), ("meta.pkl", b"N\x85"), ("meta.pkl", b"("), ("meta.pkl", b"\x8f")],
                         ids=["dicts", "tuples", "marks", "sets"])
def test_the_largest_allowed_pickles_take_little_memory_and_time(kind, piece, assert_refused, valid_checkpoint, tmp_path):
    assert_refused("", write_attack(kind, piece * (MAX_PICKLE_STEPS // len(piece) - 9999), tmp_path, valid_checkpoint))


META = value({"vocab_size": 1, "stoi": {"a": 0}, "itos": {0: "a"}})
LONG = {"values": (b"N" * 2**22 + META, "far more memory"), "marks": (b"(" * 2**22 + META, "far more memory"),
        "text": (value("x" * 9_000_000), "its pickle has more than 8388608 bytes")}


@pytest.mark.parametrize("kind, long", in_files(LONG, ["ckpt.pt", "old ckpt.pt", "meta.pkl"], quick=["text"]))
def test_too_long_pickles_are_refused(kind, long, assert_refused, valid_checkpoint, tmp_path):
    piece, message = long
    assert_refused(message, write_attack(kind, piece, tmp_path, valid_checkpoint))


def test_a_tar_file_is_refused(assert_refused, valid_checkpoint, tmp_path):
    """torch.load would read the whole first header of a tar file. The header here has 900 megabytes."""
    write_attack("old ckpt.pt", b"N", tmp_path, valid_checkpoint)
    path = tmp_path / "out" / "ckpt.pt"
    header = bytearray(path.read_bytes().ljust(512, b"\0"))
    header[100:108], header[124:136], header[136:148], header[156:157] = b"0000644\0", b"%011o\0" % (900 << 20), b"00000000000\0", b"x"
    header[148:156], header[257:265] = b" " * 8, b"ustar\x0000"
    header[148:156] = b"%06o\0 " % sum(header)
    with open(path, "wb") as f:
        f.write(header)
        f.truncate(901 << 20)
    assert_refused("it is a tar file")


def test_all_shards_together_have_the_limits_of_one_file(assert_refused, valid_checkpoint, hf_copy):
    """Otherwise many shards, each within the limits, could take hours together."""
    (hf_copy / "model.safetensors").unlink()
    (hf_copy / "0.bin").write_bytes(poison(valid_checkpoint, "x", b"](" + b"c__builtin__\nset\n)R" * 30_000 + b"e")) # within the limits of one file
    for i in range(1, 20):
        (hf_copy / f"{i}.bin").hardlink_to(hf_copy / "0.bin")
    (hf_copy / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {str(i): f"{i}.bin" for i in range(20)}}))
    assert_refused("far more memory or time", "out")
