"""Files that somebody made to do harm: none runs code, takes much time or memory, or ends in more than one line.

Each attack is built here, and tried in a process of its own, forked from one that has all modules loaded. Bounds: the
peak memory that an honest small file needs and 300 MB, which is the most that a pickle of the largest size can take;
20 seconds. The bombs here would take two gigabytes or more, or hours, and could have been made larger for free.
"""
import io
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import unicodedata
import zipfile
from contextlib import suppress

import pytest
import torch
from conftest import PROJECT, SHAPE, end_as_torch, make_gpt, make_transformers_gpt2, save_checkpoint, save_meta

from guard import MOST_STEPS

MEMORY, SECONDS = 300, 20
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f]") # what moves a cursor
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and ru_maxrss in kB")

# Forks for each line of standard input, a folder and settings, and loads there what they say.
LOADER = """
import copyreg, json, os, resource, signal, sys, traceback
import safetensors.torch, tiktoken, torch
from console import mistakes_told
from loading import load
copyreg.add_extension("os", "mkdir", 0x12)
copyreg.add_extension("os", "makedirs", 0x1234)
copyreg.add_extension("os", "mkfifo", 0x123456)
print(flush=True)
for line in sys.stdin:
    folder, settings, seconds = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33)) # so that a test that fails does no harm
        signal.alarm(seconds)
        try:
            with mistakes_told():
                load(*settings)
            os._exit(0)
        except SystemExit as e:
            os._exit(e.code)
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    _, status, used = os.wait4(child, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_maxrss / 1024]), flush=True)
"""


@pytest.fixture(scope="session")
def load_apart(vocabulary):
    """load_apart(folder, *settings) -> exit status, standard error and peak memory in MB of loading.load there."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TIKTOKEN_CACHE_DIR": str(vocabulary), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen([sys.executable, "-c", LOADER], cwd=PROJECT, env=env, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()

    def run(folder, *settings):
        print(json.dumps([str(folder), settings or ("resume", "out"), SECONDS]), file=process.stdin, flush=True)
        status, peak = json.loads(process.stdout.readline())
        return status, (folder / "stderr").read_text(errors="replace"), peak
    yield run
    process.communicate()


@pytest.fixture(scope="session")
def honest(load_apart, good, tmp_path_factory):
    """The peak memory of loading a good file, in MB."""
    folder = tmp_path_factory.mktemp("honest")
    save_checkpoint(folder / "out", make_gpt())
    status, said, peak = load_apart(folder)
    assert (status, said) == (0, "")
    return peak


@pytest.fixture
def refused(load_apart, honest, tmp_path):
    """Asserts that loading from tmp_path ends in one line that says this, within the bounds, and runs nothing."""
    def check(said, *settings):
        before = set(os.listdir(tmp_path))
        status, errors, peak = load_apart(tmp_path, *settings)
        assert set(os.listdir(tmp_path)) - before <= {"stderr"}, "it has run"
        assert status == 1 and errors.count("\n") == 1 and errors.startswith("error: ") and not CONTROLS.search(errors[:-1]), (status, errors[-2000:])
        assert said in errors and len(errors) < 3000
        assert peak < honest + MEMORY
    return check


# ---- pickles by hand: pieces that each leave one value on the stack

def value(anything):
    """Plain data."""
    return pickle.dumps(anything, 2)[2:-1]


def call(function, *arguments):
    """What the function gives, by GLOBAL and REDUCE."""
    return b"c" + function.replace(" ", "\n").encode() + b"\n(" + b"".join(arguments) + b"tR"


def tensor(size, stride=None, offset=0, key="0", kind="torch FloatStorage", count=1):
    """A tensor as torch.save describes it."""
    storage = b"(" + value("storage") + b"c" + kind.replace(" ", "\n").encode() + b"\n" + value(key) + value("cpu") + value(count) + b"tQ"
    size, stride = (n if isinstance(n, bytes) else value(n) for n in (size, stride or (1,) * len(size)))
    return call("torch._utils _rebuild_tensor_v2", storage, value(offset), size, stride, value(False), call("collections OrderedDict"))


def nested(code, depth=60):
    """A value that holds itself twice, again and again: few bytes, 2**60 leaves."""
    return b"](" + value("x" * 10) + b"".join(b"q\x01" + code for _ in range(depth)) + b"e"


TUPLES, LISTS = b"h\x01\x86", b"](h\x01h\x01e"


def key(piece):
    """The last of a list, nested as above, as a dict's key."""
    return b"}" + piece[2:-1] + b"Ns"


def many(piece, code):
    """A list of what the code makes, 3000 times, of a piece that lies under 1 in the memo."""
    return b"](" + piece + b"q\x01" + code * 3000 + b"e"


def colliding_pairs(count):
    """Pickled pairs of 64 bits each that all have one hash: every step of Python's, which is xxHash's, can be undone."""
    mask, one, two, five = 2**64 - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261
    wanted, by_one, by_two, a = (0x123456789abcdef0 - (2 ^ five ^ 3527539)) & mask, pow(one, -1, 2**64), pow(two, -1, 2**64), 0
    while count:
        a += 1
        first, last = (five + a * two) & mask, wanted * by_one & mask
        first = (first << 31 | first >> 33) * one & mask
        b = ((last >> 31 | last << 33) - first) * by_two & mask
        b -= 2**64 if b >> 63 else 0
        if abs(b) < 2**61 - 1: # whose hash is itself
            count -= 1
            yield value(a) + value(b) + b"\x86"


def poison(good, key="config", piece=b"N", **how):
    """The bytes of a good checkpoint where key is this piece; how are ZipFile's options."""
    content, out = zipfile.ZipFile(io.BytesIO(good)), io.BytesIO()
    with zipfile.ZipFile(out, "w", **how) as archive:
        for name in content.namelist():
            held = content.read(name)
            if name.endswith("data.pkl"):
                held = held[:-1] + b"(" + value(key) + piece + b"u."
            archive.writestr(name, held)
    return end_as_torch(out.getvalue())


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    """The bytes of a good checkpoint."""
    return save_checkpoint(tmp_path_factory.mktemp("good"), make_gpt()).read_bytes()


def place(kind, payload, folder, good):
    """Write the payload, a pickle's piece, into folder as part of such a file; returns the settings that load it."""
    (folder / "out").mkdir()
    if kind == "meta.pkl":
        (folder / "out" / "ckpt.pt").write_bytes(good)
        (folder / "out" / "meta.pkl").write_bytes(b"\x80\x04" + payload + b".")
        return ()
    save_meta(folder / "out" / "meta.pkl")
    if kind == "ckpt.pt":
        (folder / "out" / "ckpt.pt").write_bytes(poison(good, "model", payload))
    elif kind == "old ckpt.pt":
        start = b"".join(pickle.dumps(part, 2) for part in (0x1950a86a20f9469cfc6c, 1001, {}))
        (folder / "out" / "ckpt.pt").write_bytes(start + b"\x80\x02" + payload + b"." + pickle.dumps([], 2))
    else:
        (folder / "out" / "config.json").write_text('{"model_type": "gpt2"}')
        (folder / "out" / "pytorch_model.bin").write_bytes(poison(good, "x", payload))
        return "out", ""
    return ()


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


@pytest.mark.parametrize("kind", ["ckpt.pt", "old ckpt.pt", "pytorch_model.bin", "meta.pkl"])
@pytest.mark.parametrize("payload", ATTACKS.values(), ids=ATTACKS)
def test_pickles_run_nothing(payload, kind, refused, good, tmp_path):
    refused("", *place(kind, payload, tmp_path, good))


@pytest.mark.parametrize("name", [name for name, payload in ATTACKS.items() if RAN in payload and name not in (
    "PERSID", "BINPERSID", "BINPERSID-module", "READONLY_BUFFER", "APPENDS", "torch.load", "apply-a-builtin-of-Python-2", "escape-codes",
    "a-long-name") and not name.startswith(("EXT", "rebuild"))])
def test_the_attacks_work_on_python_itself(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with suppress(Exception): # after it has run
        pickle.loads(b"\x80\x04" + ATTACKS[name] + b".")
    assert (tmp_path / "ran").exists()


# ---- bombs

META = value({"vocab_size": 1, "stoi": {"a": 0}, "itos": {0: "a"}})
BOMBS = {
    "LONG_BINPUT": b"]r\x00\x00\x00\x10", "PUT": b"]p400000000\n",
    "FRAME": b"\x95" + struct.pack("<Q", 2**40), "FRAME-of-all": b"\x95" + struct.pack("<Q", 2**64 - 1),
    "BINBYTES8": b"\x8e" + struct.pack("<Q", 2**32), "BINUNICODE8": b"\x8d" + struct.pack("<Q", 2**32),
    "BYTEARRAY8": b"\x96" + struct.pack("<Q", 2**32), "BINBYTES": b"B\xff\xff\xff\xff", "BINUNICODE": b"X\xff\xff\xff\xff",
    "BINSTRING": b"T\xff\xff\xff\x7f", "LONG4": b"\x8b\xff\xff\xff\x7f", "LONG4-negative": b"\x8b\xff\xff\xff\xff", "LONG": b"L" + b"9" * 10**6 + b"L\n",
    "tuples-as-a-key": key(nested(TUPLES)), "tuples-in-a-set": b"\x8f(" + nested(TUPLES)[2:-1] + b"\x90",
    "tuples-in-a-frozenset": b"(" + nested(TUPLES)[2:-1] + b"\x91", "tuples-as-a-key-of-DICT": b"(" + nested(TUPLES)[2:-1] + b"Nd",
    "deep-tuples-as-a-key": b"})" + b"\x85" * 400_000 + b"Ns", "deep-lists": b"]" * 200_000 + b"a" * 199_999,
    "bytearray": call("builtins bytearray", value(2**31)), "bytearray-of-Python-2": call("__builtin__ bytearray", value(2**31)),
    "float-tensor": call("torch FloatTensor", value(2**31)),
    "copy-of-an-expanded-tensor": call("torch._utils _rebuild_device_tensor_from_cpu_tensor", tensor((2**29,), (0,)), b"ctorch\nfloat64\n", value("cpu"), value(False)),
    "quantized": call("torch._utils _rebuild_qtensor", tensor((1,)), value(0), value((2**31,)), value((1,)), b"(ctorch\nper_tensor_affine\nG" + bytes(8) + b"K\x00t", value(False), b"N"),
    "bytes-of-one-text": many(value("x" * 2**20), b"c_codecs\nencode\nh\x01" + value("latin1") + b"\x86R"),
    "bytes-by-a-slow-codec": call("_codecs encode", value("".join(map(chr, range(0x3000, 0xd000)))), value("punycode")),
    "colliding-pairs": b"}(" + b"".join(pair + b"N" for pair in colliding_pairs(60_000)) + b"u",
    "colliding-pairs-in-a-set": call("__builtin__ set", b"](" + b"".join(colliding_pairs(60_000)) + b"e"),
    "colliding-pairs-put-in-later": b"](" + b"]q\1" + b"h\1\x85q\2" + b"h\1(" + b"".join(colliding_pairs(60_000)) + b"e" + b"c__builtin__\nset\nh\2R" + b"e",
    "colliding-keys": b"}(" + b"".join(value(i * (2**61 - 1)) + b"N" for i in range(1, 200_000)) + b"u",
    "paths-of-one-text": many(value("x" * 2**20), b"cpathlib\nPosixPath\nh\x01\x85R"),
    "copies-of-a-set": many(value(list(range(300_000))), b"c__builtin__\nset\nh\x01\x85R"),
    "copies-of-a-dict": many(value(dict.fromkeys(range(100_000))), b"ccollections\nOrderedDict\nh\x01\x85R"),
    "copies-of-a-size": many(value(tuple(range(300_000))), b"ctorch\nSize\nh\x01\x85R"),
    "size-of-an-expanded-tensor": call("torch Size", tensor((2**25,), (0,))), "path-of-an-expanded-tensor": b"cpathlib\nPath\n" + tensor((2**25,), (0,)) + b"R",
    "a-tensor-called": tensor((7,) * 12, (0,) * 12) + b")R", "set-of-a-text": many(value("".join(map(chr, range(0x10000, 0x60000)))), b"c__builtin__\nset\nh\x01\x85R"),
    "methods-of-a-dict": b"ccollections\nOrderedDict\n)R}" + value("values") + b"c__builtin__\nset\nsb",
    "pairs-for-a-dict": b"ccollections\nOrderedDict\n)R](" + b"".join(colliding_pairs(60_000)) + b"eb",
    "a-storage-made-longer": tensor((1,)) + b"(ctorch.storage\nUntypedStorage\n" + value(2**30) + b"\x85RK\0" + value((2**30 + 1,)) + value((1,)) + b"tb",
    "numbers-of-a-type": b"cnumpy\ndtype\n" * 600_000 + b"]", "deep-by-popping": b"N" * 380_000 + b")" + b"\x85(0" * 379_995 + b"q\0}h\0Ns",
    "wide-by-popping": b"N" * 200 + b")" + b"(0q\0h\0\x86(0" * 40 + b"q\0}h\0Ns",
    "pairs-as-a-table": b"}(" + value("stoi") + b"](" + b"".join(colliding_pairs(60_000)) + b"e" + value("itos") + b"]u",
    "many-arguments": many(value(tuple(range(300_000))), b"c__builtin__\nset\nh\x01R"),
}


@pytest.mark.parametrize("kind", ["ckpt.pt", "old ckpt.pt", "meta.pkl"])
@pytest.mark.parametrize("payload", BOMBS.values(), ids=BOMBS)
def test_pickles_that_claim_much_take_little(payload, kind, refused, good, tmp_path):
    refused("", *place(kind, payload, tmp_path, good))


@pytest.mark.parametrize("piece", [nested(TUPLES), nested(LISTS), b"ccollections\nOrderedDict\n)R" + value("a") + nested(LISTS) + b"s"],
                         ids=["tuples", "lists", "dict"])
@pytest.mark.parametrize("where", ["model", "model_args", "tensor", "name", "argument", "key", "n_layer"])
def test_what_is_nested_without_end_is_not_written_out(piece, where, refused, good, tmp_path):
    """Where a message shows what it found."""
    args = value(SHAPE)
    keys = {"tensor": ("model", b"}" + value("a") + piece + b"s"), "name": ("model", key(piece) if piece[:1] == b"]" else b"}" + value(5) + piece + b"s"),
            "argument": ("model_args", args + value("bias") + piece + b"s"), "key": ("model_args", args + (piece[2:-1] if piece[:1] == b"]" else value(5)) + b"Ns"),
            "n_layer": ("model_args", args + value("n_layer") + piece + b"s")}
    place("ckpt.pt", b"N", tmp_path, good)
    (tmp_path / "out" / "ckpt.pt").write_bytes(poison(good, *keys.get(where, (where, piece))))
    refused("")


def test_a_checkpoint_of_nested_keys_is_refused(refused, good, tmp_path):
    place("old ckpt.pt", key(nested(TUPLES)), tmp_path, good)
    refused("")


@pytest.mark.parametrize("kind, piece", [("ckpt.pt", b"}"), ("meta.pkl", b"N\x85"), ("meta.pkl", b"("), ("meta.pkl", b"\x8f")],
                         ids=["dicts", "tuples", "marks", "sets"])
def test_the_largest_pickles_take_little(kind, piece, refused, good, tmp_path):
    refused("", *place(kind, piece * (MOST_STEPS // len(piece) - 9999), tmp_path, good))


@pytest.mark.parametrize("kind", ["ckpt.pt", "old ckpt.pt", "meta.pkl"])
@pytest.mark.parametrize("piece, said", [(b"N" * 2**22 + META, "far more memory"), (b"(" * 2**22 + META, "far more memory"),
                                         (value("x" * 9_000_000), "its pickle has more than 8388608 bytes")], ids=["values", "marks", "text"])
def test_longer_pickles_are_refused(kind, piece, said, refused, good, tmp_path):
    refused(said, *place(kind, piece, tmp_path, good))


def test_an_old_file_is_no_tar(refused, good, tmp_path):
    """torch would read all of its first header, of any length: this one has 900 megabytes."""
    place("old ckpt.pt", b"N", tmp_path, good)
    path = tmp_path / "out" / "ckpt.pt"
    header = bytearray(path.read_bytes().ljust(512, b"\0"))
    header[100:108], header[124:136], header[136:148], header[156:157] = b"0000644\0", b"%011o\0" % (900 << 20), b"00000000000\0", b"x"
    header[148:156], header[257:265] = b" " * 8, b"ustar\x0000"
    header[148:156] = b"%06o\0 " % sum(header)
    with open(path, "wb") as f:
        f.write(header)
        f.truncate(901 << 20)
    refused("it is a tar")


# ---- zips

def test_a_compressed_pickle_is_refused(refused, good, tmp_path):
    """16 kB of zip that would be 2 gigabytes of pickle, were they read."""
    place("ckpt.pt", b"N", tmp_path, good)
    (tmp_path / "out" / "ckpt.pt").write_bytes(poison(good, piece=b"N" * 2**24 + b"2" * 2**24, compression=zipfile.ZIP_DEFLATED))
    refused("is compressed")


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA], ids=["deflate", "bzip2", "lzma"])
def test_compressed_weights_are_refused(compression, refused, good, tmp_path):
    """Mapped, they would be wrong numbers."""
    place("ckpt.pt", b"N", tmp_path, good)
    (tmp_path / "out" / "ckpt.pt").write_bytes(poison(good, compression=compression))
    refused("is compressed")


def change_directory(content, change):
    """The zip with its directory's entries (flags, sizes, offset of each record) changed."""
    content = bytearray(content)
    at = content.index(b"PK\1\2")
    while at >= 0:
        entry = list(struct.unpack_from("<IHHHHHHIIIHHHHHII", content, at))
        name = bytes(content[at + 46:at + 46 + entry[10]]).decode()
        change(name, entry)
        struct.pack_into("<IHHHHHHIIIHHHHHII", content, at, *entry)
        at = content.find(b"PK\1\2", at + 46)
    return bytes(content)


def set_field(index, number, only="/data/0"):
    def change(name, entry):
        if name.endswith(only):
            entry[index] = number(entry[index]) if callable(number) else number
    return change


@pytest.mark.parametrize("change", [
    set_field(3, 1), set_field(9, 2**32 - 2), set_field(9, 2**31), set_field(9, lambda n: n + 1), set_field(9, lambda n: n // 2), set_field(7, lambda n: n ^ 1),
    set_field(16, 2**32 - 2), set_field(16, lambda n: n + 1), set_field(16, 0), set_field(9, 2**32 - 2, "data.pkl"), set_field(16, 2**31, "data.pkl"),
    set_field(9, 0, "data.pkl"), set_field(9, 0), set_field(10, 2**16 - 1), set_field(11, 2**16 - 1), set_field(12, 2**16 - 1),
], ids=["encrypted", "4-gigabytes", "2-gigabytes", "a-byte-longer", "cut", "checksum", "far-offset", "next-offset", "first-offset", "long-pickle", "far-pickle",
        "no-pickle", "nothing", "long-name", "long-extra", "long-comment"])
def test_a_directory_that_lies_is_refused(change, refused, good, tmp_path):
    place("ckpt.pt", b"N", tmp_path, good)
    (tmp_path / "out" / "ckpt.pt").write_bytes(change_directory(good, change))
    refused("out/ckpt.pt")


def test_records_that_overlap_are_refused(refused, good, tmp_path):
    def first_one(name, entry):
        if "/data/" in name:
            entry[8] = entry[9] = len(good) // 4
    place("ckpt.pt", b"N", tmp_path, good)
    (tmp_path / "out" / "ckpt.pt").write_bytes(change_directory(good, first_one))
    refused("its records overlap")


def zip_of(pickled, records, sums=()):
    """A zip with that pickle and those records, [(name, bytes)]; its directory may say other checksums, [number]."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, held in [("data.pkl", b"\x80\x02" + pickled + b"."), ("byteorder", b"little"), ("version", b"3\n"), *records]:
            archive.writestr(f"archive/{name}", held)
    content, at = bytearray(end_as_torch(out.getvalue())), 0
    for number in sums:
        at = content.index(b"PK\1\2", at) + 4
        content[at + 12:at + 16] = struct.pack("<I", number)
    return bytes(content)


def test_a_long_pickle_is_not_read(refused, good, tmp_path):
    place("ckpt.pt", b"N", tmp_path, good)
    (tmp_path / "out" / "ckpt.pt").write_bytes(zip_of(b"N." + b"N" * 300_000_000, []))
    refused("its pickle has more than 8388608 bytes")


def test_a_directory_without_end_is_not_read(refused, good, tmp_path):
    place("ckpt.pt", b"N", tmp_path, good)
    (tmp_path / "out" / "ckpt.pt").write_bytes(zip_of(b"N", [(f"data/{i:0100}", b"") for i in range(60_000)]))
    refused("far more records than a network has use for")


def test_a_storage_under_many_names_is_read_once(refused, good, tmp_path):
    """torch finds a record by its name in any case."""
    keys = ["".join(char.upper() if i >> n & 1 else char for n, char in enumerate("abcdefg")) for i in range(100)]
    model = b"](" + b"".join(tensor((1,), key=key, count=2 << 20) for key in keys) + b"e"
    place("ckpt.pt", b"N", tmp_path, good)
    content = zip_of(b"}(" + value("model") + model + value("model_args") + b"}u", [("data/abcdefg", bytes(8 << 20))], [0] * 4)
    (tmp_path / "out" / "ckpt.pt").write_bytes(content)
    refused("it names a storage as torch.save never does")


def test_nothing_beyond_the_file_is_read(refused, good, tmp_path):
    """As torch does where it is not mapped."""
    model = b"}" + value("transformer.wpe.weight") + tensor((2**24,), count=2**24) + b"s"
    place("ckpt.pt", b"N", tmp_path, good)
    content = zip_of(b"}(" + value("model") + model + value("model_args") + b"}u", [("data/0", bytes(64))], [0] * 4)
    (tmp_path / "out" / "ckpt.pt").write_bytes(content)
    refused("out/ckpt.pt")


def test_storages_that_overlap_are_refused(refused, good, tmp_path):
    """Each is a short record and all zeros that follow: a thousand times 20 megabytes, with the right checksums."""
    names, size = range(1000), 20 << 20
    model = b"}(" + b"".join(value(f"transformer.h.0.x{i}") + tensor((1,), key=str(i), count=size // 4) for i in names) + b"u"
    records = [*((f"data/{i}", b"") for i in names), ("data/zeros", bytes(size + 200_000))]
    place("ckpt.pt", b"N", tmp_path, good)
    content = zip_of(b"}(" + value("model") + model + value("model_args") + value({"n_layer": 1}) + b"u", records)
    (tmp_path / "out" / "ckpt.pt").write_bytes(content)
    refused("claims tensors of")


@pytest.mark.parametrize("change", [
    lambda end: end + b"more", lambda end: end[:-2] + b"\1\0", lambda end: end[:64] + b"\0" + end[65:], lambda end: end[:48] + b"\0" + end[49:],
    lambda end: end[:40] + b"\0" + end[41:], lambda end: end[:56] + b"X" + end[57:], lambda end: end[76:],
], ids=["more", "a-comment", "record-elsewhere", "directory-elsewhere", "shorter", "no-locator", "short-form"])
def test_two_readers_of_zips_cannot_find_two_directories(change, refused, good, tmp_path):
    place("ckpt.pt", b"N", tmp_path, good)
    (tmp_path / "out" / "ckpt.pt").write_bytes(good[:-98] + change(good[-98:]))
    refused("directory of records is not where torch.save puts it")


@pytest.mark.filterwarnings("ignore")
def test_a_script_of_torch_is_not_run(refused, good, tmp_path):
    place("ckpt.pt", b"N", tmp_path, good)
    module = torch.jit.script(torch.nn.Linear(2, 2))
    torch.jit.save(module, tmp_path / "out" / "ckpt.pt")
    refused("out/ckpt.pt")


# ---- tensors

WIDE = (2**25, 24) # of float32: 3.2 gigabytes
TENSORS = {
    "beyond-its-storage": tensor((99, 99), (99, 1)), "beyond-by-one": tensor((61 * 24 + 1,)), "beyond-by-an-offset": tensor((1,), (1,), 61 * 24),
    "beyond-by-a-stride": tensor((2,), (2**40,)), "storage-of-terabytes": tensor((2**40,), count=2**40), "storage-of-all": tensor((2**62, 2), count=2**63),
    "negative-offset": tensor((1,), (1,), -1), "negative-stride": tensor((2,), (-1,), 1), "negative-size": tensor((-1,)),
    "negative-storage": tensor((1,), count=-1), "overflowing-size": tensor((2**62, 4), (0, 0)), "overflowing-stride": tensor((2, 2), (2**63, 2**63)),
    "overflowing-offset": tensor((1,), (1,), 2**64), "expanded": tensor(WIDE, (0, 0)), "expanded-to-terabytes": tensor((2**31 - 1, 2**20), (0, 0)),
    "empty-of-terabytes": tensor((0, 2**62, 2**62), (1, 1, 1)), "no-strides": tensor((1, 1), (1,)), "1000-dimensions": tensor((1,) * 1000),
    "many-dimensions": tensor((1,) * 10**5), "text-as-size": tensor(value("abc"), (1,)), "nested-size": tensor(nested(TUPLES), (1,)),
    "floats-as-size": tensor(value((1.0,)), (1,)), "no-such-storage": tensor((1,), key="nowhere"), "storage-outside": tensor((1,), key="../../../etc/passwd"),
    "escape-codes-as-storage": tensor((1,), key="\x1b[31m\n\r"), "number-as-storage": tensor((1,), key=0), "no-storage-type": tensor((1,), kind="torch strided"),
    "nested-storage": call("torch._utils _rebuild_tensor_v2", b"(" + value("storage") + b"ctorch\nFloatStorage\n" + nested(TUPLES) + value("cpu") + b"K\x01tQ", b"K\x00", b")", b")"),
    "pickle-as-storage": tensor((9,), key="../data.pkl"), "wider-type": call("torch._utils _rebuild_tensor_v3", b"(" + value("storage") + b"ctorch.storage\nUntypedStorage\n"
        + value("0") + value("cpu") + value(10**6) + b"tQ", b"K\x00", value((10**6,)), value((1,)), value(False), b"N", b"ctorch\nfloat64\n"),
    "no-such-type": call("torch._utils _rebuild_tensor_v3", b"(" + value("storage") + b"ctorch.storage\nUntypedStorage\n" + value("0") + value("cpu") + b"K\x01tQ",
                         b"K\x00", value((1,)), value((1,)), value(False), b"N", value("float32")),
    "sparse": call("torch._utils _rebuild_sparse_tensor", b"N", b"(" + tensor((1, 1)) + tensor((1,)) + value((2**40,)) + b"t"),
    "on-no-device": call("torch._utils _rebuild_meta_tensor_no_storage", b"ctorch\nfloat32\n", value((2**40,)), value((1,)), value(False)),
    "complex": tensor((1,), kind="torch ComplexFloatStorage"), "text": value("tensor"), "itself": b"]q\x07(h\x07e",
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_impossible_or_too_large_are_refused(name, zipped, refused, good, tmp_path):
    piece = TENSORS[name]
    model = b"}" + value("transformer.wpe.weight") + piece + b"s"
    args = value(SHAPE | {"block_size": 2**25})
    place("ckpt.pt", b"N", tmp_path, good)
    if zipped:
        content = poison(good, "model", model + value("model_args") + args)
    else:
        start = b"".join(pickle.dumps(part, 2) for part in (0x1950a86a20f9469cfc6c, 1001, {}))
        keys = ["0"] if b"Q" in piece else []
        content = start + b"\x80\x02}(" + value("model") + model.replace(b"tQ", b"NtQ") + value("model_args") + args + b"u." + pickle.dumps(keys, 2) + struct.pack("<qf", 1, 1.0)
    (tmp_path / "out" / "ckpt.pt").write_bytes(content)
    refused("claims tensors of" if name.startswith("expanded") else "out/ckpt.pt")


@pytest.mark.parametrize("size, stride", [((2**30 + 1,), (1,)), ((2**20, 2**10 + 1), (2**10, 1)), ((2,), (2**30,))])
def test_an_old_storage_is_not_made_longer(size, stride, refused, good, tmp_path):
    """As torch would, and copy it."""
    piece = tensor(size, stride, count=2**30, kind="torch ByteStorage").replace(b"tQ", b"NtQ")
    refused("reaches beyond what is stored", *place("old ckpt.pt", b"}" + value("model") + b"}" + value("a") + piece + b"ss", tmp_path, good))


def test_many_shards_take_no_longer_than_one(refused, good, hub_copy):
    (hub_copy / "model.safetensors").unlink()
    (hub_copy / "0.bin").write_bytes(poison(good, "x", b"](" + b"c__builtin__\nset\n)R" * 60_000 + b"e"))
    for i in range(1, 20):
        (hub_copy / f"{i}.bin").hardlink_to(hub_copy / "0.bin")
    (hub_copy / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {str(i): f"{i}.bin" for i in range(20)}}))
    refused("far more memory or time", "out", "")


@pytest.mark.parametrize("change", [
    {"transformer.wpe.weight": torch.ones(1, 1).expand(WIDE)},
    {"lm_head.weight": torch.ones(1, 1, dtype=torch.half).expand(WIDE), "transformer.wte.weight": torch.ones(1, 1, dtype=torch.half).expand(WIDE)},
    {f"x{i}": view for i, view in enumerate([torch.ones(2**20)] * 1000)},
], ids=["expanded", "expanded-twice", "one-storage-under-many-names"])
def test_a_network_larger_than_its_file_is_refused(change, refused, tmp_path):
    model = make_gpt()
    save_checkpoint(tmp_path / "out", model, model=model.state_dict() | change, optimizer=None)
    refused("claims tensors of")


def test_a_large_storage_under_many_names_is_summed_once(refused, tmp_path):
    model, large = make_gpt(), torch.zeros(2**23)
    views = {f"transformer.h.0.x{i}": large[i:i + 1] for i in range(6000)}
    save_checkpoint(tmp_path / "out", model, model=model.state_dict() | views, optimizer=None)
    refused("unexpected: transformer.h.0.x0")


def test_a_network_of_too_many_layers_is_refused(refused, tmp_path):
    """Each takes a millisecond to build."""
    model, one = make_gpt(), torch.ones(1)
    layers = {f"transformer.h.{i}.x": one for i in range(5000)}
    save_checkpoint(tmp_path / "out", model, model=model.state_dict() | layers, model_args=SHAPE | {"n_layer": 5000}, optimizer=None)
    refused("layers")


# ---- settings of networks

ABSURD = {
    "huge": 10**30, "long": 10**600, "negative": -1, "zero": 0, "float": 2.0, "text": "12", "long-text": "9" * 10**6, "escape-codes": "\x1b[31m\n\x07", "list": [12], "dict": {"a": 1}, "true": True,
    "large": 2**31 - 1, "infinite": float("inf"), "nan": float("nan"), "none": None, "surrogate": "\ud800",
}
MAY_BE = {("dropout", "zero"), ("dropout", "true"), ("bias", "true"), ("layer_norm_epsilon", "zero"), ("layer_norm_epsilon", "true"), ("n_inner", "none")}


@pytest.mark.parametrize("name, absurd", [
    (name, absurd) for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias", "gelu", "n_inner", "rope") for absurd in ABSURD
    if (name, absurd) not in MAY_BE and absurd != "none"])
def test_absurd_model_args_are_refused(name, absurd, refused, tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt(), model_args=SHAPE | {name: ABSURD[absurd]})
    refused("out/ckpt.pt")


@pytest.fixture(scope="session")
def hub_folder(tmp_path_factory):
    """A folder with a small GPT-2 of Hugging Face's."""
    folder = tmp_path_factory.mktemp("hub")
    make_transformers_gpt2(vocab_size=300, n_positions=20).save_pretrained(folder)
    return folder


@pytest.fixture
def hub_copy(hub_folder, tmp_path):
    """Its files, to change."""
    (tmp_path / "out").mkdir()
    for file in hub_folder.iterdir():
        (tmp_path / "out" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "out"


@pytest.mark.parametrize("name, absurd", [
    (name, absurd) for name in ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd", "n_inner", "layer_norm_epsilon", "activation_function", "model_type")
    for absurd in ABSURD if (name, absurd) not in MAY_BE])
def test_absurd_config_json_is_refused(name, absurd, refused, hub_copy):
    config = json.loads((hub_copy / "config.json").read_text())
    (hub_copy / "config.json").write_text(json.dumps(config | {name: ABSURD[absurd]}))
    refused("out", "out", "")


@pytest.mark.parametrize("content", [
    "[" * 10**6, '{"a":' * 10**6, '{"n_layer": ' + "9" * 10**6 + "}", '{"model_type": "gpt2", "n_layer": 1e999}', "null", "\0", '"\ud800"'.encode("utf-8", "surrogatepass"),
    b"\xff\xfe", "{" + " " * 2**25 + "}", '{"a": [' + "[]," * 10**7 + "1]}", '{"model_type": "\\u001b[31m\\u0007"}',
], ids=["deep-lists", "deep-dicts", "a-million-digits", "infinite", "null", "nul", "surrogate", "utf-16", "long", "many-lists", "escape-codes"])
def test_hostile_json_is_refused(content, refused, hub_copy):
    (hub_copy / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    refused("out", "out", "")


# ---- safetensors

def safetensors_file(header, data=b"", length=None):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def test_a_long_header_is_not_read(refused, hub_copy):
    header = {f"{i:0100}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(60_000)}
    (hub_copy / "model.safetensors").write_bytes(safetensors_file(header))
    refused("a header of", "out", "")


def one_tensor(**changes):
    return {"transformer.wpe.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}


@pytest.mark.parametrize("content", [
    safetensors_file(one_tensor(), bytes(4), 2**63), safetensors_file(one_tensor(), bytes(4), 2**40), safetensors_file(one_tensor(), bytes(4), 5), safetensors_file(b"", b"", 0),
    safetensors_file(one_tensor(shape=[2**40], data_offsets=[0, 2**42]), bytes(4)), safetensors_file(one_tensor(shape=[2**62, 4]), bytes(4)),
    safetensors_file(one_tensor(shape=[2]), bytes(4)), safetensors_file(one_tensor(data_offsets=[4, 8]), bytes(8)), safetensors_file(one_tensor(data_offsets=[4, 0]), bytes(4)),
    safetensors_file(one_tensor(data_offsets=[-4, 0]), bytes(4)), safetensors_file(one_tensor(shape=[-1]), bytes(4)), safetensors_file(one_tensor(dtype="F31"), bytes(4)),
    safetensors_file(one_tensor(dtype="I32"), bytes(4)), safetensors_file(one_tensor(shape=[0, 2**62], data_offsets=[0, 0])),
    safetensors_file({f"x{i}": one_tensor()["transformer.wpe.weight"] for i in range(1000)}, bytes(4)), safetensors_file(b"[" * 10**6), safetensors_file(one_tensor(), bytes(5)),
    safetensors_file(one_tensor(), b""), safetensors_file({"\x1b[31m\n\r" * 10**5: one_tensor()["transformer.wpe.weight"]}, bytes(4)), safetensors_file({}),
    safetensors_file({"__metadata__": {"x": 1}}), b"",
], ids=["header-of-all", "header-of-terabytes", "short-header", "no-header", "terabytes", "overflowing", "too-large", "a-hole", "backwards", "negative-offset", "negative-size",
        "no-type", "integers", "empty-of-terabytes", "overlapping", "deep", "too-long", "cut", "escape-codes", "nothing", "odd-metadata", "empty"])
def test_safetensors_that_lie_are_refused(content, refused, hub_copy):
    (hub_copy / "model.safetensors").write_bytes(content)
    refused("out", "out", "")


# ---- paths

@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "a\0b", "\x1b[31m", "x" * 10**5, 5, None, ["x"], "nowhere.safetensors"],
                         ids=lambda name: repr(name)[:20])
def test_an_index_names_files_of_its_folder_only(name, refused, hub_copy):
    (hub_copy / "sub").mkdir()
    for copy in hub_copy / "sub" / "x.safetensors", hub_copy.parent / "x.safetensors":
        copy.write_bytes((hub_copy / "model.safetensors").read_bytes())
    (hub_copy / "model.safetensors").unlink()
    (hub_copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    refused("must name files of its own folder", "out", "")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "ckpt.pt", "meta.pkl"])
@pytest.mark.parametrize("target", ["/dev/zero", "/dev/tty", "fifo", "folder", "nowhere", "/etc/passwd"])
def test_links_to_what_is_no_file_are_not_read(name, target, refused, hub_copy, good):
    os.mkfifo(hub_copy / "fifo")
    (hub_copy / "folder").mkdir()
    resume = name in ("ckpt.pt", "meta.pkl")
    if resume:
        (hub_copy / "ckpt.pt").write_bytes(good)
    (hub_copy / name).unlink(missing_ok=True)
    (hub_copy / name).symlink_to(target)
    refused("", *() if resume else ("out", ""))
    assert "root" not in (hub_copy.parent / "stderr").read_text()


@pytest.mark.parametrize("dataset", ["../elsewhere", "x/../../elsewhere", "absolute"])
def test_a_table_outside_of_data_is_refused(dataset, refused, tmp_path):
    dataset = str(tmp_path / "elsewhere") if dataset == "absolute" else dataset
    save_meta(tmp_path / "elsewhere" / "meta.pkl")
    (tmp_path / "data" / "x").mkdir(parents=True)
    save_checkpoint(tmp_path / "out", make_gpt(), meta=False, config={"dataset": dataset})
    refused("outside of data/")


@pytest.mark.parametrize("dataset", ["a\0b", "\x1b[31m", "x" * 10**6, 5, ["x"], "", "."], ids=lambda name: repr(name)[:20])
def test_a_data_set_with_an_odd_name_has_no_table(dataset, refused, tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt(), meta=False, config={"dataset": dataset})
    refused("GPT-2's encoding has 50257 tokens and the network 61")


@pytest.mark.parametrize("tensors", [{"\x1b[31m\n\r\x07\x9b" * 9: torch.ones(1)}, {"\N{RIGHT-TO-LEFT OVERRIDE}x" * 10**5: torch.ones(1)}], ids=["escape-codes", "long"])
def test_names_of_tensors_move_no_cursor(tensors, refused, tmp_path):
    model = make_gpt()
    save_checkpoint(tmp_path / "out", model, model=model.state_dict() | tensors)
    refused("out/ckpt.pt")


# ---- tables of characters

@pytest.mark.parametrize("table", [
    {"stoi": {"a": 2**40}, "itos": {0: "a"}}, {"stoi": {"a": 10**4000}, "itos": {0: "a"}}, {"stoi": {"x" * 10**6: 60}, "itos": {60: "x" * 10**6}}, {"stoi": {"a" * 10**6: 0}, "itos": {0: "a"}},
    {"stoi": {"a": 0}, "itos": [None]}, {"stoi": [["a", 0]] * 10, "itos": {0.0: "a"}}, {"stoi": "abc", "itos": "abc"}, {"stoi": {"a": 0, "b": 0}, "itos": {0: "b", 1: "a"}},
    {"stoi": {"\x1b[31m": 0, "b": 0}, "itos": {0: "b", 1: "\x1b[31m"}}, {"stoi": {"a": 0}}, ["stoi", "itos"], {"stoi": {"a": 0}, "itos": {0: "a"}},
], ids=["far-id", "long-id", "long-text", "long-character", "none", "float-id", "text", "disagreeing", "escape-codes", "half", "list", "too-small"])
def test_hostile_tables_are_refused(table, refused, good, tmp_path):
    refused("out/meta.pkl", *place("meta.pkl", value(table), tmp_path, good))


def test_a_table_of_all_characters_is_read(load_apart, tmp_path):
    """The largest honest one."""
    chars = "".join(char for char in map(chr, range(sys.maxunicode)) if unicodedata.category(char) not in ("Cn", "Co", "Cs"))
    save_checkpoint(tmp_path / "out", make_gpt(vocab_size=len(chars), n_embd=2, n_layer=1), meta=False)
    save_meta(tmp_path / "out" / "meta.pkl", chars)
    assert load_apart(tmp_path)[:2] == (0, "")


# ---- through the script

SCRIPT = {
    "code-in-ckpt.pt": ("ckpt.pt", ATTACKS["GLOBAL-REDUCE"]), "code-in-an-old-ckpt.pt": ("old ckpt.pt", ATTACKS["BUILD"]),
    "code-in-pytorch_model.bin": ("pytorch_model.bin", ATTACKS["STACK_GLOBAL"]), "code-in-meta.pkl": ("meta.pkl", ATTACKS["NEWOBJ"]),
    "bomb-in-ckpt.pt": ("ckpt.pt", BOMBS["bytearray"]), "bomb-in-meta.pkl": ("meta.pkl", b"]r\x00\x00\x00\x10"), "tuples-in-ckpt.pt": ("ckpt.pt", BOMBS["tuples-as-a-key"]),
}


@pytest.mark.parametrize("kind, payload", SCRIPT.values(), ids=SCRIPT)
def test_the_script_refuses_them_too(kind, payload, sample, good, tmp_path):
    settings = place(kind, payload, tmp_path, good)
    done = sample(f"--init_from={settings[0]}" if settings else "--out_dir=out", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "ran").exists()
    assert [line[:6] for line in done.stderr.splitlines()] == ["settin", "error:"]


def test_the_names_of_files_move_no_cursor(sample, tmp_path):
    folder = tmp_path / "a\x1b[31m\x07\nerror: b"
    save_checkpoint(folder, make_gpt()).write_bytes(b"damaged")
    done = sample(f"--out_dir={folder}")
    assert done.returncode == 1 and done.stderr.count("\n") == 2 and not CONTROLS.search(done.stderr.replace("\n", ""))
