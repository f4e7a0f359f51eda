"""Hostile files that could run code, crash the process, fill its memory or reach other files.

Each is loaded in a process of its own, and must be refused in one line.
"""
import json
import os
import struct
import zipfile

import pytest
import torch

from attacks import call, needs_linux, poison, tensor, value, write_attack, write_settled
from models import SHAPE, make_gpt, save_checkpoint
from sampling.checkpoints.pickles import DataUnpickler, Record

pytest_plugins = ["attacks"]
pytestmark = needs_linux

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
}

# ---- pickles that would crash the process, hang it, or fill its memory

LARGE = struct.pack("<Q", 2**40)
TUPLES = value("x" * 10) + b"q\x01h\x01\x86" * 60 # each holds the one before it twice: few bytes, 2**60 leaves


def copies(function, argument, rest):
    """A list of the results of many calls. The rest of each call gets the argument by h\\1."""
    return b"](" + value(argument) + b"q\1" + (b"c" + function + rest) * 500 + b"e"


NUMBERS, NO_TENSORS = range(300_000), "must hold tensors by name"
BOMBS = { # the piece of pickle, a part of the error line
    "memo": (b"]r\x00\x00\x00\x10", "memo indices"), "memo-as-text": (b"]p400000000\n", "memo indices"),
    "bytes": (b"\x8e" + LARGE, "damaged"), "bytearray": (b"\x96" + LARGE, "damaged"),
    "deep-tuples-as-a-key": (b"})" + b"\x85" * 400_000 + b"Ns", "keys that are neither"),
    "wide-tuples-as-a-key": (b"}" + TUPLES + b"Ns", "keys that are neither"),
    "tuples-as-a-key-of-DICT": (b"(" + TUPLES + b"Nd", "keys that are neither"),
    "tuples-in-a-set": (b"\x8f(" + TUPLES + b"\x90", "keys that are neither"),
    "tuples-in-a-frozenset": (b"(" + TUPLES + b"\x91", "keys that are neither"),
    "tuples-in-a-set-by-a-call": (call("builtins set", b"](" + TUPLES + b"e"), NO_TENSORS),
    "deep-lists": (b"]" * 200_000 + b"a" * 199_999, NO_TENSORS),
    "copies-of-a-set": (copies(b"__builtin__\nset\n", [*NUMBERS], b"h\1\x85R"), NO_TENSORS),
    "copies-of-the-parts-of-a-path": (copies(b"pathlib\nPath\n", (*NUMBERS,), b"h\1R"), NO_TENSORS),
    "copies-of-arguments": (copies(b"numpy\ndtype\n", (*NUMBERS,), b"h\1R"), NO_TENSORS),
    "copies-as-bytes": (copies(b"_codecs\nencode\n", "x" * 2**21, b"h\1" + value("latin1") + b"\x86R"), NO_TENSORS),
    "many-values": (b"N" * 2**22 + b"]", "opcodes"),
    "long": (value("x" * 9_000_000), "its pickle"),
}

# ---- the settings of a model as an object

CONFIG = b"ctrain_gpt2\nGPTConfig\n"
CONFIGS = {
    "state-of-text": CONFIG + b")\x81" + value("abc") + b"b",
    "attributes-of-the-class": CONFIG + b"N" + value({"__init__": 1}) + b"\x86b",
    "attributes-of-a-function": b"ctorch\nSize\nN" + value({"__code__": 1}) + b"\x86b",
    "methods-of-a-dict": b"ccollections\nOrderedDict\n)R" + value({"items": 1}) + b"b",
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
    **{name: (piece, "model", "") for name, piece in CODE.items()},
    **{name: (piece, "model", message) for name, (piece, message) in BOMBS.items()},
    **{name: (piece, "model_args", "") for name, piece in CONFIGS.items()},
    **{name: (b"}" + value("transformer.wpe.weight") + piece + b"s" + FITTING_ARGS, "model",
              {"beyond-by-one": "beyond its record", "expanded": "claims tensors of"}.get(name, ""))
       for name, piece in TENSORS.items()},
}


@pytest.mark.parametrize("kind, name", [
    *(("ckpt.pt", name) for name in PICKLES), ("old ckpt.pt", "GLOBAL-REDUCE"), ("old ckpt.pt", "memo"),
    ("old ckpt.pt", "deep-tuples-as-a-key"), ("pytorch_model.bin", "STACK_GLOBAL"), ("meta.pkl", "NEWOBJ"),
    ("meta.pkl", "EXT1"), ("meta.pkl", "memo"), ("meta.pkl", "wide-tuples-as-a-key"), ("meta.pkl", "many-values"),
])
def test_hostile_pickles_are_refused(kind, name, assert_refused, valid_checkpoint, tmp_path):
    piece, key, message = PICKLES[name]
    assert_refused(tmp_path, message, write_attack(kind, piece, tmp_path, valid_checkpoint, key))


def test_a_pickle_does_not_change_what_reads_the_next_one():
    DataUnpickler(b"cnumpy\ndtype\nN" + value({"first": "f4"}) + b"\x86b.").load() # sets an attribute
    assert Record.first is None


@pytest.mark.parametrize("entry, change, message", [
    ("model", {f"x{i}": view for i, view in enumerate([torch.ones(2**20)] * 1000)}, "claims tensors of"),
    ("model", {f"transformer.h.{i}.x": torch.ones(1) for i in range(5000)}, "layers"),
    ("model", {f"transformer.h.0.x{i}": view for i, view in enumerate(torch.zeros(2**22).split(2**10))}, "of nothing"),
    ("model", {"\x1b[31m\n\r\x07\x9b" * 9: torch.ones(1)}, ""), ("model_args", {"vocab_size": 2**31 - 1}, ""),
    ("model_args", {"n_embd": "9" * 10**6}, ""), ("model_args", {"rope": "\ud800"}, ""),
], ids=["one-record-under-many-names", "many-layers", "many-views-of-one-record", "escape-codes", "terabytes",
        "a-million-digits", "half-a-character"])
def test_absurd_models_are_refused(entry, change, message, assert_refused, tmp_path):
    model = make_gpt()
    entries = {"model": model.state_dict(), "model_args": SHAPE}
    save_checkpoint(tmp_path / "out", model, **{entry: entries[entry] | change}, optimizer=None)
    assert_refused(tmp_path, message)


# ---- zip files

@pytest.mark.parametrize("name, offset, changed", [ # in the entry of this record in the zip's directory
    ("data/0", 8, b"\1"), # encrypted
    ("data/0", 16, bytes(4)), # another checksum
    ("data/0", 20, b"\0\0\0\x80"), # a length of 2 GiB in the file
    ("data/0", 24, b"\0\0\0\x80"), # a length of 2 GiB
    ("data/0", 42, bytes(4)), # the place of another record
    ("data.pkl", 24, b"\0\0\0\x80"),
    ("data/0", 28, b"\xff\xff"), # a long name
])
def test_a_wrong_zip_directory_is_refused(name, offset, changed, assert_refused, valid_checkpoint, tmp_path):
    content = bytearray(valid_checkpoint)
    at = content.rindex(b"ckpt/" + name.encode() + b"PK") - 46 + offset # the name follows the 46 bytes of its entry
    content[at:at + len(changed)] = changed
    write_settled(tmp_path / "out" / "ckpt.pt", content)
    assert_refused(tmp_path)


def test_a_zip_bomb_is_refused(assert_refused, valid_checkpoint, tmp_path):
    bomb = poison(valid_checkpoint, "config", b"N" * 2**24, compression=zipfile.ZIP_DEFLATED)
    write_settled(tmp_path / "out" / "ckpt.pt", bomb)
    assert_refused(tmp_path, "one of its records is compressed")


# ---- Hugging Face's files

def safetensors_file(length=None, data=bytes(4), **changes):
    """A safetensors file with one tensor. length replaces the header length that the file states."""
    header = json.dumps({"transformer.wpe.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes})
    return struct.pack("<Q", len(header) if length is None else length) + header.encode() + data


SAFETENSORS = {
    "header-of-all": safetensors_file(2**63), "overflowing": safetensors_file(shape=[2**62, 4]),
    "terabytes": safetensors_file(shape=[2**40], data_offsets=[0, 2**42]), "longer": safetensors_file(data=bytes(5)),
    "backwards": safetensors_file(data_offsets=[4, 0]), "before": safetensors_file(data_offsets=[-4, 0]),
    "negative-size": safetensors_file(shape=[-1]), "text-as-shape": safetensors_file(shape="1"),
    "deep": struct.pack("<Q", 10**6) + b"{" * 10**6,
}
JSON = {"deep-json": b'{"a":' * 10**6, "digits": b'{"n_layer": ' + b"9" * 10**6 + b"}", "long": b" " * 2**25 + b"{}"}


@pytest.mark.parametrize("name", [*SAFETENSORS, *JSON])
def test_hostile_files_of_hugging_face_are_refused(name, assert_refused, tmp_path):
    write_settled(tmp_path / "out" / "config.json", JSON.get(name, b'{"model_type": "gpt2"}'))
    write_settled(tmp_path / "out" / "model.safetensors", SAFETENSORS.get(name, safetensors_file()))
    assert_refused(tmp_path, "out/config.json" if name in JSON else "out/model.safetensors", "out")


@pytest.mark.parametrize("name, target", [
    ("config.json", "/dev/zero"), ("model.safetensors", "fifo"), ("model.safetensors", "/etc/passwd"),
    ("ckpt.pt", "folder"), ("ckpt.pt", "/dev/zero"), ("ckpt.pt", "/etc/passwd"),
])
def test_links_to_other_files_are_refused_and_their_content_is_not_printed(name, target, assert_refused, tmp_path):
    out = tmp_path / "out"
    (out / "folder").mkdir(parents=True)
    os.mkfifo(out / "fifo")
    write_settled(out / "config.json", b'{"model_type": "gpt2"}')
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(target)
    assert_refused(tmp_path, "", "resume" if name == "ckpt.pt" else "out")
    assert "root" not in (tmp_path / "stderr").read_text()
