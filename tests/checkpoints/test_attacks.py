"""Hostile files that could run code, crash the process, fill its memory or reach other files.

Each is loaded in a process of its own. It must run nothing and stay small, and one that is needed must be refused in
one line. What is not needed may load: nothing looks at it.
"""
import itertools
import json
import os
import pickle
import signal
import struct
import time
import zipfile
from pathlib import Path

import pytest
import torch

from attacks import call, tensor, value, with_entry, write_attack, write_settled
from models import SHAPE, make_gpt, save_checkpoint
from script_process import start_script

pytest_plugins = ["attacks"]
DAMAGED = "is damaged or incomplete"

# ---- pickles that would run code

RAN = value("ran") # the folder that attacks make
CODE = { # with pickle.loads, all but the last six make it
    "GLOBAL-REDUCE": b"cos\nmkdir\n(" + RAN + b"tR",
    "STACK_GLOBAL": value("os") + value("mkdir") + b"\x93" + RAN + b"\x85R",
    "STACK_GLOBAL-dotted": value("shutil") + value("os.mkdir") + b"\x93" + RAN + b"\x85R",
    "INST": b"(" + RAN + b"ios\nmkdir\n",
    "OBJ": b"(cos\nmkdir\n" + RAN + b"o",
    "NEWOBJ": b"cbuiltins\nbytes\ncbuiltins\nmap\ncos\nmkdir\n](" + RAN + b"e\x86\x81\x85\x81",
    "BUILD": b"ctypes\nSimpleNamespace\n)R}" + value("__setstate__") + b"cos\nmkdir\nsb" + RAN + b"b",
    "APPEND": b"ctypes\nSimpleNamespace\n)R}" + value("append") + b"cos\nmkdir\nsb" + RAN + b"a",
    "ADDITEMS": b"ctypes\nSimpleNamespace\n)R}" + value("add") + b"cos\nmkdir\nsb(" + RAN + b"\x90",
    "EXT1": b"\x82\x12" + RAN + b"\x85R", # attacks.py gives this code to os.mkdir
    "PERSID": b"Pran\n",
    "BINPERSID": b"(" + value("module") + b"cos\nmkdir\n" + RAN + RAN + b"tQ",
    "NEXT_BUFFER": b"\x97",
    "escape-codes": b"cx\x1b[31mred\x07\nmk\x1b]0;title\x07dir\n(" + RAN + b"tR",
    "a-long-name": b"c" + b"x" * 10**6 + b"\nmkdir\n(" + RAN + b"tR",
    "an-import": b"cimported\nname\n",
}

# ---- pickles that would crash the process, hang it, or fill its memory

LARGE = struct.pack("<Q", 2**40)
NOTE = b"csome\nthing\n"
DEEP = b")" + b"\x85" * 10**5 # its hash would overflow the stack of C
NESTED = b")q\1" + b"h\1\x86q\1" * 40 # each tuple holds the one before twice: its hash would take hours
WAYS = { # through which a nested value could become a key, or a part of one
    "itself": NESTED, "a-part-of-a-tuple": NESTED + b"\x85", "a-part-of-a-long-tuple": b"(N" + NESTED + b"t",
    "DUP": NESTED + b"20", "GET": NESTED + b"q\2" + b"0h\2", "POP_MARK": NESTED + b"(N1",
    "FROZENSET": b"(" + NESTED + b"\x91", "a-set-by-a-call": call("builtins frozenset", b"](" + NESTED + b"e"),
    "BUILD-with-None": NESTED + b"Nb", "BUILD-of-a-note": NOTE + b")R" + NESTED + b"b",
    "slots-of-a-note": NOTE + b")RN}" + value("first") + NESTED + b"s\x86b",
    "APPEND-to-a-note": NOTE + b")R" + NESTED + b"a", "a-value-of-a-note": NOTE + b")RN" + NESTED + b"s",
    "a-key-of-a-note": NOTE + b")R" + NESTED + b"Ns", "ADDITEMS-of-a-note": NOTE + b")R(" + NESTED + b"\x90",
    "REDUCE": call("some thing", NESTED), "NEWOBJ": NOTE + NESTED + b"\x81", "OBJ": b"(" + NOTE + NESTED + b"o",
    "NEWOBJ_EX": NOTE + b")}" + value("cls") + NESTED + b"s\x92", "INST": b"(" + NESTED + b"isome\nthing\n",
    "bytes": call("_codecs encode", NESTED, value("latin1")), "dtype": call("numpy dtype", NESTED),
    "scalar": call("numpy.core.multiarray scalar", call("numpy dtype", NESTED), value("x")),
    "scalar-of-a-dtype": call("numpy.core.multiarray scalar", call("numpy dtype", value("i8")) + NESTED + b"b",
                              call("_codecs encode", value("x" * 8), value("latin1"))),
    "Size": call("torch Size", NESTED), "OrderedDict": call("collections OrderedDict", NESTED),
    "shape": tensor(NESTED, b"h\1"), "offset": tensor((1,), offset=NESTED), "key": tensor((1,), key=NESTED),
    "parameter": call("torch._utils _rebuild_parameter", NESTED), "storage": b"(" + NESTED + b"tQ",
}


def copies(function, argument, rest):
    """A list of the results of many calls. The rest of each call gets the argument by h\\1."""
    return b"](" + value(argument) + b"q\1" + (b"c" + function + rest) * 500 + b"e"


NUMBERS, NO_TENSORS, KEYS = range(300_000), "must hold tensors by name", "keys must be text"
BOMBS = { # the piece of pickle, a part of the error line
    "memo": (b"]r\x00\x00\x00\x10", NO_TENSORS), "memo-as-text": (b"]p400000000\n", NO_TENSORS),
    "bytes": (b"\x8e" + LARGE, DAMAGED), "bytearray": (b"\x96" + LARGE, DAMAGED),
    "bytearray-by-a-call": (call("builtins bytearray", value(3 * 10**9)), NO_TENSORS),
    "key": (b"}" + DEEP + b"Ns", KEYS), "key-of-DICT": (b"(" + NESTED + b"Nd", KEYS),
    "in-a-set": (b"\x8f(" + NESTED + b"\x90", NO_TENSORS), "in-a-frozenset": (b"(" + NESTED + b"\x91", NO_TENSORS),
    "long-number": (b"}" + value(2**65) + b"Ns", KEYS), "wide-key": (b"}(" + b"N" * 65 + b"tNs", KEYS),
    "deep-lists": (b"]" * 200_000 + b"a" * 199_999, NO_TENSORS),
    "deep-notes": (NOTE + b"q\1)R" + b"q\2h\1h\2\x85R" * 200_000, NO_TENSORS),
    "copies-of-a-set": (copies(b"__builtin__\nset\n", [*NUMBERS], b"h\1\x85R"), NO_TENSORS),
    "copies-of-a-dict": (copies(b"collections\nCounter\n", dict.fromkeys(NUMBERS), b"h\1\x85R"), NO_TENSORS),
    "copies-of-arguments": (copies(b"numpy\ndtype\n", (*NUMBERS,), b"h\1R"), NO_TENSORS),
    "copies-of-keywords": (copies(b"a\nb\n", {f"a{i}": i for i in NUMBERS}, b")h\1\x92"), NO_TENSORS),
    "copies-for-a-function": (copies(b"torch._utils\n_rebuild_parameter\n", (*NUMBERS,), b"h\1R"), DAMAGED),
    "copies-as-bytes": (copies(b"_codecs\nencode\n", "x" * 2**21, b"h\1" + value("latin1") + b"\x86R"), NO_TENSORS),
    "names": (b"](" + b"".join(b"ca\n%x\n" % i for i in range(100_000)) + b"e", NO_TENSORS),
    "one-name": (b"](" + b"ca\nb\n" * 800_000 + b"e", NO_TENSORS),
    "text-about-memory": (tensor((1,)) + b"N}" + value("out of memory\x1b[31m") + b"Ns\x86b", DAMAGED),
    "many-values": (b"N" * 2**22 + b"]", "opcodes"),
}

# ---- the settings of a model as an object

CONFIG = b"ctrain_gpt2\nGPTConfig\n"
CONFIGS = {
    "state-of-text": (CONFIG + b")\x81" + value("abc") + b"b", "must be a dict or an object with fields"),
    "attributes-of-the-class": (CONFIG + b"N" + value({"__new__": 1}) + b"\x86b", "without the fields"),
    "attributes-of-a-function": (b"c_codecs\nencode\nN" + value({"__new__": 1}) + b"\x86b", "without the fields"),
    "methods-of-a-dict": (b"ccollections\nOrderedDict\n)R" + value({"items": 1}) + b"b", "without the fields"),
    "attributes-of-a-dtype": (b"ctorch\nfloat32\nN" + value({"itemsize": 1}) + b"\x86b", DAMAGED),
}

# ---- tensors that have no place in the file

TENSORS = {
    "beyond-by-one": tensor((61 * 24 + 1,)), "beyond-by-an-offset": tensor((1,), (1,), 61 * 24),
    "beyond-by-a-stride": tensor((2,), (2**40,)), "negative-offset": tensor((1,), (1,), -1),
    "negative-stride": tensor((2,), (-1,), 1), "negative-size": tensor((-1,)),
    "overflowing-size": tensor((2**62, 4), (0, 0)), "overflowing-offset": tensor((1,), (1,), 2**64),
    "expanded": tensor((2**25, 24), (0, 0)), "empty-of-terabytes": tensor((0, 2**62, 2**62), (1, 1, 1)),
    "no-strides": tensor((1, 1), (1,)), "many-dimensions": tensor((1,) * 10**5),
    "text-as-size": tensor(value("abc"), (1,)), "floats-as-size": tensor(value((1.0,)), (1,)),
    "a-record-outside": tensor((1,), key="../../../etc/passwd"), "the-pickle": tensor((9,), key="../data.pkl"),
    "a-number-as-record": tensor((1,), key=0), "no-storage-type": tensor((1,), kind="torch Size"),
    "called": tensor((7,) * 12, (0,) * 12) + b")R", "itself": b"]q\0(h\0e",
    "made-longer": tensor((1,)) + b"(" + value("0") + b"ctorch\nfloat32\n" + value((2**30,)) + b"tb",
}
FITTING_ARGS = value("model_args") + value(SHAPE | {"block_size": 2**25})
PICKLES = { # name: (the piece of pickle, the entry that it replaces, a part of the error line)
    **{name: (piece, "model", message) for name, (piece, message) in BOMBS.items()},
    "two-numbers-a-byte": (tensor((), kind="torch quint4x2"), "iter_num", None), # None: it may load
    **{name: (piece, "model_args", message) for name, (piece, message) in CONFIGS.items()},
    **{name: (b"}" + value("transformer.wpe.weight") + piece + b"s" + FITTING_ARGS, "model",
              {"beyond-by-one": "beyond its record", "expanded": "claims tensors of"}.get(name, ""))
       for name, piece in TENSORS.items()},
}


@pytest.mark.parametrize("name, place", [
    *itertools.product(CODE, ["model", "x"]), # what is needed, and what lies beside it
    *itertools.product(["GLOBAL-REDUCE", "EXT1"], ["meta.pkl stoi", "meta.pkl x", "old model", "old x", "hf model"])])
def test_a_pickle_runs_nothing(name, place, attack, valid_checkpoint, tmp_path):
    message = None if place.endswith("x") else ""
    status = attack(tmp_path, message, write_attack(place, CODE[name], tmp_path, valid_checkpoint))
    assert status == 1 or place.endswith("x"), "what is needed is refused"


@pytest.mark.parametrize("name", WAYS)
def test_a_nested_value_is_never_hashed(name, attack, valid_checkpoint, tmp_path):
    piece = b"}" + WAYS[name] + b"Ns"
    attack(tmp_path, None, write_attack("x", piece, tmp_path, valid_checkpoint))


@pytest.mark.parametrize("name", PICKLES)
def test_hostile_pickles_are_refused(name, attack, valid_checkpoint, tmp_path):
    piece, entry, message = PICKLES[name]
    attack(tmp_path, message, write_attack(entry, piece, tmp_path, valid_checkpoint))


@pytest.mark.parametrize("entry, change, message", [
    ("model", {f"x{i}": view for i, view in enumerate([torch.ones(2**20)] * 1000)}, "claims tensors of"),
    ("model", {f"transformer.h.{i}.x": torch.ones(1) for i in range(5000)}, "layers"),
    ("model", {f"transformer.h.0.x{i}": view for i, view in enumerate(torch.zeros(2**22).split(2**10))}, "of nothing"),
    ("model", {"\x1b[31m\n\r\x07\x9b" * 9: torch.ones(1)}, ""), ("model_args", {"vocab_size": 2**31 - 1}, ""),
    ("model_args", {"n_embd": "9" * 10**6}, ""), ("model_args", {"rope": "\ud800"}, ""),
], ids=["one-record-under-many-names", "many-layers", "many-views-of-one-record", "escape-codes", "terabytes",
        "a-million-digits", "half-a-character"])
def test_absurd_models_are_refused(entry, change, message, attack, tmp_path):
    model = make_gpt()
    entries = {"model": model.state_dict(), "model_args": SHAPE}
    save_checkpoint(tmp_path / "out", model, **{entry: entries[entry] | change}, optimizer=None)
    attack(tmp_path, message)


def test_ctrl_c_ends_a_process_whose_file_asks_for_minutes_of_work(valid_checkpoint, tmp_path):
    keys = b"".join(value(key) + b"N" for key in itertools.product((-1, -2), repeat=15)) # -1 and -2 have one hash
    write_attack("x", b"}(" + keys + b"u", tmp_path, valid_checkpoint)
    process = start_script("--device=cpu", cwd=tmp_path)
    while sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().split()[13:15])) < 4 * os.sysconf("SC_CLK_TCK"):
        time.sleep(0.1) # it starts and checks the pickle in 3 seconds of processor time; the keys take 20 more
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    process.communicate()
    assert process.returncode == -signal.SIGINT and time.monotonic() - begin < 1


# ---- zip files

@pytest.mark.parametrize("name, offset, changed", [ # in the entry of this record in the zip's directory
    ("data/0", 16, bytes(4)), # another checksum
    ("data/0", 20, b"\0\0\0\x80"), # a length of 2 GiB in the file
    ("data/0", 24, b"\0\0\0\x80"), # a length of 2 GiB
    ("data/0", 42, bytes(4)), # the place of another record
    ("data.pkl", 24, b"\0\0\0\x80"),
    ("data/0", 28, b"\xff\xff"), # a long name
])
def test_a_wrong_zip_directory_is_refused(name, offset, changed, attack, valid_checkpoint, tmp_path):
    content = bytearray(valid_checkpoint)
    at = content.rindex(b"ckpt/" + name.encode() + b"PK") - 46 + offset # the name follows the 46 bytes of its entry
    content[at:at + len(changed)] = changed
    write_settled(tmp_path / "out" / "ckpt.pt", content)
    attack(tmp_path)


@pytest.mark.parametrize("name, compression, flags, message", [
    ("ckpt/data.pkl", zipfile.ZIP_DEFLATED, 0, "one of its records is compressed"),
    ("out of memory/data.pkl", 0, 1, "or encrypted"), # zipfile quotes the name in a RuntimeError
    ("ckpt/data", 0, 0, "it is a zip file without a data.pkl"), ("ckpt/data.pkl", 0, 0, "its pickle has more than"),
])
def test_other_zip_files_are_refused(name, compression, flags, message, attack, tmp_path):
    with zipfile.ZipFile(tmp_path / "zip", "w", compression) as archive:
        archive.writestr(name, b"N" * 2**24)
    content = bytearray((tmp_path / "zip").read_bytes())
    content[content.index(b"PK\1\2") + 8] |= flags
    write_settled(tmp_path / "out" / "ckpt.pt", content)
    attack(tmp_path, message)


def test_only_the_content_of_an_old_file_may_be_large(attack, valid_checkpoint, tmp_path):
    magic = pickle.dumps(0x1950a86a20f9469cfc6c, 2)[:-1]
    content = (magic + b"0(" + b"\x8f" * 2_000_000 + b"l.") * 3
    write_settled(tmp_path / "out" / "ckpt.pt", content)
    attack(tmp_path, DAMAGED)


# ---- meta.pkl

LONG = pickle.dumps(1 << 2**25, 2)[2:-1]
METAS = { # stoi, itos, a part of the error line
    "text-of-many-ids": (value({"x" * 10**6: 0}), value(dict.fromkeys(range(5000), "x" * 10**6)), "has 5000 tokens"),
    "a-long-text": (value({"x": 0}), value("x" * 8_000_000), "has 8000000 tokens"),
    "a-long-number-often": (value({0: 0}), b"(" + LONG + b"q\1" + b"h\1" * 500_000 + b"l", "must map texts or bytes"),
}


@pytest.mark.parametrize("name", METAS)
def test_hostile_vocabularies_are_refused(name, attack, valid_checkpoint, tmp_path):
    stoi, itos, message = METAS[name]
    write_settled(tmp_path / "out" / "ckpt.pt", valid_checkpoint)
    write_settled(tmp_path / "out" / "meta.pkl", with_entry(with_entry(b"}.", "stoi", stoi), "itos", itos))
    attack(tmp_path, message)


# ---- Hugging Face's files

def safetensors_file(length=None, data=bytes(4), count=1, **changes):
    """A safetensors file of tensors in one place. length replaces the header length that the file states."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes
    header = json.dumps({f"transformer.wpe.weight{i or ''}": entry for i in range(count)})
    return struct.pack("<Q", len(header) if length is None else length) + header.encode() + data


SAFETENSORS = {
    "header-of-all": safetensors_file(2**63), "overflowing": safetensors_file(shape=[2**62, 4]),
    "terabytes": safetensors_file(shape=[2**40], data_offsets=[0, 2**42]), "longer": safetensors_file(data=bytes(5)),
    "backwards": safetensors_file(data_offsets=[4, 0]), "before": safetensors_file(data_offsets=[-4, 0]),
    "negative-size": safetensors_file(shape=[-1]), "text-as-shape": safetensors_file(shape="1"),
    "many-dimensions": safetensors_file(shape=[1] * 2_700_000),
    "overlapping-tensors": safetensors_file(data=bytes(4000), count=3, shape=[1000], data_offsets=[0, 4000]),
    "deep": struct.pack("<Q", 10**6) + b"{" * 10**6,
}
JSON = {"deep-json": b'{"a":' * 10**6, "digits": b'{"n_layer": ' + b"9" * 10**6 + b"}", "long": b" " * 2**25 + b"{}"}


@pytest.mark.parametrize("name", [*SAFETENSORS, *JSON])
def test_hostile_files_of_hugging_face_are_refused(name, attack, tmp_path):
    write_settled(tmp_path / "out" / "config.json", JSON.get(name, b'{"model_type": "gpt2"}'))
    write_settled(tmp_path / "out" / "model.safetensors", SAFETENSORS.get(name, safetensors_file()))
    reasons = {"overlapping-tensors": "claims tensors of", "many-dimensions": "an impossible shape"}
    attack(tmp_path, reasons.get(name, "out/config.json" if name in JSON else "out/model.safetensors"), "out")


@pytest.mark.parametrize("name, target", [
    ("config.json", "/dev/zero"), ("model.safetensors", "fifo"), ("model.safetensors", "/etc/passwd"),
    ("ckpt.pt", "folder"), ("ckpt.pt", "/dev/zero"), ("ckpt.pt", "/etc/passwd"),
])
def test_links_to_other_files_are_refused_and_their_content_is_not_printed(name, target, attack, tmp_path):
    out = tmp_path / "out"
    (out / "folder").mkdir(parents=True)
    os.mkfifo(out / "fifo")
    write_settled(out / "config.json", b'{"model_type": "gpt2"}')
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(target)
    attack(tmp_path, "", "resume" if name == "ckpt.pt" else "out")
    assert "root" not in (tmp_path / "stderr").read_text()
