"""Hostile files that could run code, crash the process, fill its memory or reach other files.

Each is loaded in a process of its own, and must be refused in one line.
"""
import json
import os
import pickle
import struct
import zipfile
from contextlib import suppress

import pytest
import torch

from attacks import call, needs_linux, poison, tensor, value, write_attack, write_settled
from models import SHAPE, make_gpt, save_checkpoint

pytest_plugins = ["attacks"]
pytestmark = needs_linux

# ---- pickles that would run code

RAN = value("ran") # the folder that attacks make
CODE = {
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
    "EXT1": b"\x82\x12" + RAN + b"\x85R", # attack_loader.py gives these codes to os.mkdir and others
    "EXT2": b"\x83\x34\x12" + RAN + b"\x85R",
    "EXT4": b"\x84\x56\x34\x12\x00" + RAN + b"\x85R",
    "PERSID": b"Pran\n",
    "BINPERSID": RAN + b"Q",
    "BINPERSID-module": b"(" + value("module") + b"cos\nmkdir\n" + RAN + RAN + b"tQ",
    "NEXT_BUFFER": b"\x97",
    "READONLY_BUFFER": RAN + b"\x98",
    "eval": call("builtins eval", value("__import__('os').mkdir('ran')")),
    "torch.load": call("torch load", RAN, b"N", b"N", value(False)),
    "escape-codes": b"cx\x1b[31mred\x07\nmk\x1b]0;title\x07dir\n(" + RAN + b"tR",
    "a-long-name": b"c" + b"x" * 10**6 + b"\nmkdir\n(" + RAN + b"tR",
}


@pytest.mark.parametrize("kind, name", [
    *(("ckpt.pt", name) for name in CODE), ("old ckpt.pt", "GLOBAL-REDUCE"), ("pytorch_model.bin", "STACK_GLOBAL"),
    ("meta.pkl", "NEWOBJ"), ("meta.pkl", "EXT1"),
])
def test_no_code_is_run(kind, name, assert_refused, valid_checkpoint, tmp_path):
    assert_refused("", write_attack(kind, CODE[name], tmp_path, valid_checkpoint))


@pytest.mark.parametrize("name", ["GLOBAL-REDUCE", "STACK_GLOBAL", "STACK_GLOBAL-dotted", "INST", "OBJ", "NEWOBJ",
                                  "NEWOBJ_EX", "BUILD", "APPEND", "ADDITEMS", "eval"])
def test_the_attacks_work_with_pickle_loads(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with suppress(Exception): # the load may fail after the code has run
        pickle.loads(b"\x80\x04" + CODE[name] + b".")
    assert (tmp_path / "ran").exists()


# ---- pickles that would crash the process, hang it, or fill its memory

LARGE = struct.pack("<Q", 2**40)
TUPLES = value("x" * 10) + b"q\x01h\x01\x86" * 60 # each holds the one before it twice: few bytes, 2**60 leaves


def repeat(piece, code):
    """A list of 3000 values. This code makes each of them from a piece at memo index 1."""
    return b"](" + piece + b"q\x01" + code * 3000 + b"e"


BOMBS = {
    "memo": (b"]r\x00\x00\x00\x10", "memo indices"), "memo-as-text": (b"]p400000000\n", "memo indices"),
    "bytes": (b"\x8e" + LARGE, "damaged"), "bytearray": (b"\x96" + LARGE, "damaged"),
    "deep-tuples-as-a-key": (b"})" + b"\x85" * 400_000 + b"Ns", "keys that are neither"),
    "wide-tuples-as-a-key": (b"}" + TUPLES + b"Ns", "keys that are neither"),
    "tuples-as-a-key-of-DICT": (b"(" + TUPLES + b"Nd", "keys that are neither"),
    "tuples-in-a-set": (b"\x8f(" + TUPLES + b"\x90", "keys that are neither"),
    "tuples-in-a-frozenset": (b"(" + TUPLES + b"\x91", "keys that are neither"),
    "tuples-in-a-set-by-a-call": (call("builtins set", b"](" + TUPLES + b"e"), "keys that are neither"),
    "deep-lists": (b"]" * 200_000 + b"a" * 199_999, "must hold tensors by name"),
    "bytes-of-one-text": (repeat(value("x" * 2**20), b"c_codecs\nencode\nh\x01" + value("latin1") + b"\x86R"),
                          "copies more"),
    "copies-of-a-set": (repeat(value(list(range(300_000))), b"c__builtin__\nset\nh\x01\x85R"), "copies more"),
    "many-values": (b"N" * 2**22 + b"]", "opcodes"),
    "long": (value("x" * 9_000_000), "its pickle"),
}


@pytest.mark.parametrize("kind, name", [
    *(("ckpt.pt", name) for name in BOMBS), ("old ckpt.pt", "memo"), ("old ckpt.pt", "deep-tuples-as-a-key"),
    ("meta.pkl", "memo"), ("meta.pkl", "wide-tuples-as-a-key"), ("meta.pkl", "bytearray"), ("meta.pkl", "many-values"),
])
def test_a_pickle_takes_bounded_memory(kind, name, assert_refused, valid_checkpoint, tmp_path):
    piece, message = BOMBS[name]
    assert_refused(message, write_attack(kind, piece, tmp_path, valid_checkpoint))


# ---- the settings of a model as an object

CONFIG = b"ctrain_gpt2\nGPTConfig\n"
MAKE = CONFIG + b")\x81"
CONFIGS = {
    "a-class-of-python": b"cbuiltins\nobject\n)\x81", "an-attribute-of-it": b"ctrain_gpt2\nGPTConfig.x\n)\x81",
    "a-method-called": call("train_gpt2 GPTConfig.__setstate__", value({})),
    "state-of-text": MAKE + value("abc") + b"b", "an-item-set": MAKE + value("a") + b"K\1s",
    "a-record-in-a-record": MAKE + b"}" + value("a") + MAKE + b"sb",
    "attributes-of-the-class": CONFIG + b"N" + value({"__init__": 1}) + b"\x86b",
    "attributes-of-a-function": b"ctorch\nSize\nN" + value({"__code__": 1}) + b"\x86b",
    "methods-of-a-dict": b"ccollections\nOrderedDict\n)R" + value({"items": 1}) + b"b",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gptconfig_holds_plain_fields(name, assert_refused, valid_checkpoint, tmp_path):
    assert_refused("out/ckpt.pt", write_attack("ckpt.pt", CONFIGS[name], tmp_path, valid_checkpoint, key="model_args"))


# ---- tensors

def typed(dtype, count):
    """A tensor whose dtype has no storage class."""
    storage = b"(" + value("storage") + b"ctorch.storage\nUntypedStorage\n" + value("0") + value("cpu")
    return call("torch._utils _rebuild_tensor_v3", storage + value(count) + b"tQ", b"K\x00", value((count,)),
                value((1,)), value(False), b"N", dtype)


TENSORS = {
    "beyond-by-one": tensor((61 * 24 + 1,)), "beyond-by-an-offset": tensor((1,), (1,), 61 * 24),
    "beyond-by-a-stride": tensor((2,), (2**40,)), "of-all": tensor((2**62, 2), count=2**63),
    "negative-offset": tensor((1,), (1,), -1), "negative-stride": tensor((2,), (-1,), 1),
    "negative-size": tensor((-1,)), "overflowing-size": tensor((2**62, 4), (0, 0)),
    "overflowing-stride": tensor((2, 2), (2**63, 2**63)), "overflowing-offset": tensor((1,), (1,), 2**64),
    "expanded": tensor((2**25, 24), (0, 0)), "expanded-to-terabytes": tensor((2**31 - 1, 2**20), (0, 0)),
    "empty-of-terabytes": tensor((0, 2**62, 2**62), (1, 1, 1)), "no-strides": tensor((1, 1), (1,)),
    "many-dimensions": tensor((1,) * 10**5), "text-as-size": tensor(value("abc"), (1,)),
    "floats-as-size": tensor(value((1.0,)), (1,)), "a-record-outside": tensor((1,), key="../../../etc/passwd"),
    "the-pickle-as-record": tensor((9,), key="../data.pkl"), "a-number-as-record": tensor((1,), key=0),
    "no-storage-type": tensor((1,), kind="torch Size"), "wider-type": typed(b"ctorch\nfloat64\n", 10**6),
    "no-such-type": typed(value("float32"), 1), "complex": tensor((1,), kind="torch ComplexFloatStorage"),
    "on-no-device": call("torch._utils _rebuild_meta_tensor_no_storage", b"ctorch\nfloat32\n", value((2**40,))),
    "called": tensor((7,) * 12, (0,) * 12) + b")R", "itself": b"]q\0(h\0e",
    "made-longer": tensor((1,)) + b"(" + value("0") + b"ctorch\nfloat32\n" + value((2**30,)) + b"tb",
}


@pytest.mark.parametrize("name", TENSORS)
def test_impossible_tensors_are_refused(name, assert_refused, valid_checkpoint, tmp_path):
    model = b"}" + value("transformer.wpe.weight") + TENSORS[name] + b"s"
    model_args = value("model_args") + value(SHAPE | {"block_size": 2**25})
    write_settled(tmp_path / "out" / "ckpt.pt", poison(valid_checkpoint, "model", model + model_args))
    assert_refused("claims tensors of" if name.startswith("expanded") else "out/ckpt.pt")


@pytest.mark.parametrize("change, message", [
    ({f"x{i}": view for i, view in enumerate([torch.ones(2**20)] * 1000)}, "claims tensors of"),
    ({f"transformer.h.{i}.x": torch.ones(1) for i in range(5000)}, "layers"),
    ({f"transformer.h.0.x{i}": view for i, view in enumerate(torch.zeros(2**22).split(2**10))}, "instead of nothing"),
    ({"\x1b[31m\n\r\x07\x9b" * 9: torch.ones(1)}, "out/ckpt.pt"),
], ids=["one-record-under-many-names", "many-layers", "many-views-of-one-record", "escape-codes"])
def test_odd_models_are_refused(change, message, assert_refused, tmp_path):
    model = make_gpt()
    save_checkpoint(tmp_path / "out", model, model=model.state_dict() | change, optimizer=None)
    assert_refused(message)


@pytest.mark.parametrize("name, absurd", [
    ("vocab_size", 2**31 - 1), ("n_embd", "9" * 10**6), ("bias", "\x1b[31m\n\x07"), ("rope", "\ud800")])
def test_absurd_settings_are_refused(name, absurd, assert_refused, tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt(), model_args=SHAPE | {name: absurd})
    assert_refused("out/ckpt.pt")


# ---- zip files

ENTRY = "<IHHHHHHIIIHHHHHII" # of a record in the directory of a zip
ZIPS = [ # a record, the index of a field of its entry, the field's new value
    ("ckpt/data/0", 3, 1), # encrypted
    ("ckpt/data/0", 7, 5), # another checksum
    ("ckpt/data/0", 8, 2**31), # another length in the file
    ("ckpt/data/0", 9, 2**31), # another length
    ("ckpt/data/0", 16, 0), # another record's place
    ("ckpt/data.pkl", 9, 2**31),
    ("ckpt/data/0", 10, 2**16 - 1), # a long name
]


@pytest.mark.parametrize("name, field, number", ZIPS)
def test_a_wrong_zip_directory_is_refused(name, field, number, assert_refused, valid_checkpoint, tmp_path):
    content = bytearray(valid_checkpoint)
    at = content.rindex(name.encode() + b"PK") - struct.calcsize(ENTRY)
    entry = list(struct.unpack_from(ENTRY, content, at))
    entry[field] = number
    struct.pack_into(ENTRY, content, at, *entry)
    write_settled(tmp_path / "out" / "ckpt.pt", content)
    assert_refused("out/ckpt.pt")


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_zip_bomb_is_refused(compression, assert_refused, valid_checkpoint, tmp_path):
    write_settled(tmp_path / "out" / "ckpt.pt", poison(valid_checkpoint, piece=b"N" * 2**24, compression=compression))
    assert_refused("one of its records is compressed")


# ---- Hugging Face's files

def safetensors_file(length=None, data=bytes(4), **changes):
    """A safetensors file with one tensor. length replaces the header length that the file states."""
    header = json.dumps({"transformer.wpe.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes})
    return struct.pack("<Q", len(header) if length is None else length) + header.encode() + data


SAFETENSORS = {
    "header-of-all": safetensors_file(2**63), "short-header": safetensors_file(5), "no-header": bytes(8), "empty": b"",
    "terabytes": safetensors_file(shape=[2**40], data_offsets=[0, 2**42]),
    "overflowing": safetensors_file(shape=[2**62, 4]), "backwards": safetensors_file(data_offsets=[4, 0]),
    "negative-size": safetensors_file(shape=[-1]), "negative-offset": safetensors_file(data_offsets=[-4, 0]),
    "cut": safetensors_file(data=b""), "longer": safetensors_file(data=bytes(5)),
    "no-type": safetensors_file(dtype="F31"), "integers": safetensors_file(dtype="I32"),
    "deep": struct.pack("<Q", 10**6) + b"{" * 10**6, "text-for-a-shape": safetensors_file(shape="1"),
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_hostile_safetensors_are_refused(name, assert_refused, hf_model):
    write_settled(hf_model / "model.safetensors", SAFETENSORS[name])
    assert_refused("out", "out")


@pytest.mark.parametrize("content", [
    b'{"a":' * 10**6, b'{"n_layer": ' + b"9" * 10**6 + b"}", b"{" + b" " * 2**25 + b"}",
    b'{"model_type": "\\u001b[31m\\u0007"}'], ids=["deep", "a-million-digits", "long", "escape-codes"])
def test_hostile_json_is_refused(content, assert_refused, hf_model):
    write_settled(hf_model / "config.json", content)
    assert_refused("out", "out")


@pytest.mark.parametrize("name, target", [
    ("config.json", "/dev/zero"), ("config.json", "/etc/passwd"), ("model.safetensors", "fifo"), ("ckpt.pt", "folder"),
    ("model.safetensors", "/etc/passwd"), ("ckpt.pt", "/dev/zero"), ("ckpt.pt", "/etc/passwd"),
])
def test_links_to_other_files_are_refused_and_their_content_is_not_printed(name, target, assert_refused, hf_model):
    os.mkfifo(hf_model / "fifo")
    (hf_model / "folder").mkdir()
    (hf_model / name).unlink(missing_ok=True)
    (hf_model / name).symlink_to(target)
    assert_refused("", "resume" if name == "ckpt.pt" else "out")
    assert "root" not in (hf_model.parent / "stderr").read_text()
