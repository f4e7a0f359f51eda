"""Hostile files that could run code, crash the process, fill its memory or reach other files: see attacks.py."""
import itertools
import json
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from shutil import copytree

import pytest
import torch

from attacks import call, tensor, value, write_attack, write_settled
from models import SHAPE, make_gpt, save_checkpoint, save_meta
from project import PROJECT, SCRIPT
from script_process import start_script

pytest_plugins = ["attacks"]
DAMAGED = "is damaged or incomplete"

# ---- pickles that would run code

RAN = value("ran") # the folder that attacks make
CODE = { # with pickle.loads, all but the last two make it
    "GLOBAL-REDUCE": b"cos\nmkdir\n(" + RAN + b"tR",
    "STACK_GLOBAL": value("os") + value("mkdir") + b"\x93" + RAN + b"\x85R",
    "INST": b"(" + RAN + b"ios\nmkdir\n",
    "OBJ": b"(cos\nmkdir\n" + RAN + b"o",
    "NEWOBJ": b"cbuiltins\nbytes\ncbuiltins\nmap\ncos\nmkdir\n](" + RAN + b"e\x86\x81\x85\x81",
    "BUILD": b"ctypes\nSimpleNamespace\n)R}" + value("__setstate__") + b"cos\nmkdir\nsb" + RAN + b"b",
    "APPEND": b"ctypes\nSimpleNamespace\n)R}" + value("append") + b"cos\nmkdir\nsb" + RAN + b"a",
    "EXT1": b"\x82\x12" + RAN + b"\x85R", # attacks.py gives this code to os.mkdir
    "BINPERSID": b"(" + value("module") + b"cos\nmkdir\n" + RAN + RAN + b"tQ",
    "an-import": b"cimported\nname\n",
}


@pytest.mark.parametrize("name, place", [
    *((name, "model") for name in CODE),
    ("GLOBAL-REDUCE", "meta.pkl stoi"), ("GLOBAL-REDUCE", "hf model")])
def test_a_pickle_runs_nothing(name, place, attack, valid_checkpoint, tmp_path):
    attack(tmp_path, "", write_attack(place, CODE[name], tmp_path, valid_checkpoint))


# ---- a stranger's folder as the working directory

MODULES = "ctypes", "json", "model", "numba", "readline", "sampling", "sitecustomize", "torch", "tqdm", "typing", "yaml"
LOAD = "import sampling; print(sampling.load('out', 'cpu', 'int8').generate('A', sampling.SamplingParams(1)))"
RUN = [SCRIPT, "--max_new_tokens=1", "--device=cpu"]
NEEDS_SAFE_PATH = pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python knows no PYTHONSAFEPATH")


@pytest.mark.parametrize("program, arguments", [
    ("python", [*RUN, "config/greedy.py", "--dtype=int8"]), ("python", ["../program.py"]),
    ("torchrun", ["--nproc_per_node=2", *RUN, "--dtype=int8"]),
    pytest.param("python", [*RUN, "--compile"], marks=[pytest.mark.slow, NEEDS_SAFE_PATH])],
    ids=["sample.py", "sampling.load", "torchrun", "compile"])
def test_no_file_that_happens_to_be_in_the_working_directory_changes_what_runs(program, arguments, valid_checkpoint,
                                                                               tmp_path):
    folder = tmp_path / "folder"
    write_settled(folder / "out" / "ckpt.pt", valid_checkpoint)
    save_meta(folder / "out" / "meta.pkl")
    for name in MODULES:
        (folder / f"{name}.py").write_text("open('ran', 'w')")
    (tmp_path / "program.py").write_text(LOAD)
    before = {*os.listdir(folder)}
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([Path(sys.executable).with_name(program), *arguments], cwd=folder, env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0 and {*os.listdir(folder)} == before, done.stderr
    assert "numba" not in done.stderr.lower(), done.stderr


@pytest.mark.parametrize("program, status, message", [
    ([SCRIPT, "--interactive"], 0, "warning: {}; continuing without the kernels, which is slower\n"),
    ([SCRIPT, "--dtype=int8"], 1, "error: {}\n"), (["../program.py"], 1, "ValueError: {}\n")], ids=str)
def test_numbas_settings_in_the_working_directory_are_not_applied(program, status, message, char_checkpoint, tmp_path):
    (tmp_path / "program.py").write_text(LOAD)
    folder = copytree(char_checkpoint, tmp_path / "folder" / "out").parent
    (folder / ".numba_config.yaml").write_text("cache_dir: ran") # numba would load pickles from there, too
    before = {*os.listdir(folder)}
    done = subprocess.run([sys.executable, *program], cwd=folder, env={**os.environ, "PYTHONPATH": str(PROJECT)},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == status and {*os.listdir(folder)} == before, done.stderr
    reason = (".* need numba \\(which would apply the .numba_config.yaml of this folder\\): remove that file, or start "
              "in another folder")
    assert len(re.findall(f"^{message.format(reason)}", done.stderr, re.M)) == 1, done.stderr


# ---- pickles that would crash the process, hang it, or fill its memory

LARGE = struct.pack("<Q", 2**40)
NOTE = b"csome\nthing\n"
DEEP = b")" + b"\x85" * 10**5 # its hash would overflow the stack of C
NESTED = b")q\1" + b"h\1\x86q\1" * 40 # each tuple holds the one before twice: its hash would take hours
NESTED_KEYS = { # through which a nested value could become a key, or a part of one
    "itself": NESTED, "a-part-of-a-tuple": NESTED + b"\x85", "of-a-note": call("some thing", NESTED),
    "as-bytes": call("_codecs encode", NESTED, value("latin1")),
    "as-a-scalar": call("numpy.core.multiarray scalar", call("numpy dtype", NESTED), value("x")),
    "as-a-shape": tensor(NESTED, b"h\1"), "as-an-offset": tensor((1,), offset=NESTED),
    "as-a-record": tensor((1,), key=NESTED),
}


def copies(function, argument, rest):
    """A list of the results of many calls. The rest of each call gets the argument by h\\1."""
    return b"](" + value(argument) + b"q\1" + (b"c" + function + rest) * 500 + b"e"


NUMBERS, NO_TENSORS, KEYS = range(300_000), "must hold tensors by name", "keys must be text"
BOMBS = { # the piece of pickle, a part of the error line
    "memo": (b"]r\x00\x00\x00\x10", NO_TENSORS), "bytes": (b"\x8e" + LARGE, DAMAGED),
    "bytearray-by-a-call": (call("builtins bytearray", value(3 * 10**9)), NO_TENSORS),
    "key": (b"}" + DEEP + b"Ns", KEYS), "key-of-DICT": (b"(" + NESTED + b"Nd", KEYS),
    "in-a-set": (b"\x8f(" + NESTED + b"\x90", NO_TENSORS),
    "long-number": (b"}" + value(2**65) + b"Ns", KEYS), "wide-key": (b"}(" + b"N" * 65 + b"tNs", KEYS),
    "deep-lists": (b"]" * 200_000 + b"a" * 199_999, NO_TENSORS),
    "deep-notes": (NOTE + b"q\1)R" + b"q\2h\1h\2\x85R" * 200_000, NO_TENSORS),
    "copies-of-a-dict": (copies(b"collections\nCounter\n", dict.fromkeys(NUMBERS), b"h\1\x85R"), NO_TENSORS),
    "copies-of-arguments": (copies(b"numpy\ndtype\n", (*NUMBERS,), b"h\1R"), NO_TENSORS),
    "copies-as-bytes": (copies(b"_codecs\nencode\n", "x" * 2**21, b"h\1" + value("latin1") + b"\x86R"), NO_TENSORS),
    "text-about-memory": (tensor((1,)) + b"N}" + value("out of memory\x1b[31m") + b"Ns\x86b", DAMAGED),
    "many-values": (b"N" * 2**22 + b"]", "opcodes"),
}
BEYOND, IMPOSSIBLE = "reaches beyond its record", "has an impossible shape"
TENSORS = { # with no place in the file: the piece of pickle, a part of the error line
    "beyond-by-one": (tensor((61 * 24 + 1,)), BEYOND), "beyond-by-an-offset": (tensor((1,), (1,), 61 * 24), BEYOND),
    "beyond-by-a-stride": (tensor((2,), (2**40,)), BEYOND), "expanded": (tensor((2**25, 24), (0, 0)), "claims tensors"),
    "negative-offset": (tensor((1,), (1,), -1), IMPOSSIBLE), "negative-stride": (tensor((2,), (-1,), 1), IMPOSSIBLE),
    "overflowing-size": (tensor((2**62, 4), (0, 0)), IMPOSSIBLE), "no-strides": (tensor((1, 1), (1,)), IMPOSSIBLE),
    "floats-as-size": (tensor(value((1.0,)), (1,)), IMPOSSIBLE), "many-dimensions": (tensor((1,) * 65), IMPOSSIBLE),
    "a-record-outside": (tensor((1,), key="../../../etc/passwd"), "has no record"),
    "a-list-in-itself": (b"]q\0(h\0e", "but holds 'transformer.wpe.weight': list"),
    "two-numbers-a-byte": (tensor((), kind="torch quint4x2"), "but holds 'transformer.wpe.weight': a value of"),
}
PICKLES = {
    **{name: (b"}" + key + b"Ns", "") for name, key in NESTED_KEYS.items()}, **BOMBS,
    **{name: (b"}" + value("transformer.wpe.weight") + piece + b"s", message)
       for name, (piece, message) in TENSORS.items()},
}


@pytest.mark.parametrize("name", PICKLES)
def test_hostile_pickles_are_refused(name, attack, valid_checkpoint, tmp_path):
    piece, message = PICKLES[name]
    attack(tmp_path, message, write_attack("model", piece, tmp_path, valid_checkpoint))


@pytest.mark.parametrize("entry, change, message", [
    ("model", {f"x{i}": view for i, view in enumerate([torch.ones(2**20)] * 1000)}, "claims tensors of"),
    ("model", {f"transformer.h.{i}.x": torch.ones(1) for i in range(5000)}, "at most 4096 may be"),
    ("model", {"\x1b[31m\n\r\x07\x9b" * 9: torch.ones(1)}, ""), ("model_args", {"vocab_size": 2**31 - 1}, ""),
    ("model_args", {"n_embd": "9" * 10**6}, ""), ("model_args", {"rope": "\ud800"}, ""),
])
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


@pytest.mark.parametrize("name, compression, message", [
    ("ckpt/data.pkl", zipfile.ZIP_DEFLATED, "one of its records is compressed"),
    ("ckpt/data", zipfile.ZIP_STORED, "it is a zip file without a data.pkl"),
    ("ckpt/data.pkl", zipfile.ZIP_STORED, "its pickle has more than"),
])
def test_other_zip_files_are_refused(name, compression, message, attack, tmp_path):
    (tmp_path / "out").mkdir()
    with zipfile.ZipFile(tmp_path / "out" / "ckpt.pt", "w", compression) as archive:
        archive.writestr(name, b"N" * 2**24)
    attack(tmp_path, message)


@pytest.mark.parametrize("itos, message", [
    (dict.fromkeys(range(5000), "x" * 1000), "has 5000 tokens"), ("x" * 8_000_000, "has 8000000 tokens"),
    (["x" * 8_000_000], "a text may have 1000"),
], ids=["text-of-many-ids", "a-long-text", "a-long-symbol"])
def test_hostile_vocabularies_are_refused(itos, message, attack, valid_checkpoint, tmp_path):
    write_settled(tmp_path / "out" / "ckpt.pt", valid_checkpoint)
    write_settled(tmp_path / "out" / "meta.pkl", pickle.dumps({"stoi": {itos[0]: 0}, "itos": itos}))
    attack(tmp_path, message)


def test_a_file_of_torch_before_1_6_is_refused_with_a_way_to_save_it_anew(attack, tmp_path):
    (tmp_path / "out").mkdir()
    torch.save({"model": {}}, tmp_path / "out" / "ckpt.pt", _use_new_zipfile_serialization=False)
    attack(tmp_path, "torch.save(torch.load(path, weights_only=True), path)")


# ---- Hugging Face's files

def safetensors_file(length=None, data=bytes(4), count=1, **changes):
    """A safetensors file of tensors in one place. length replaces the header length that the file states."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes
    header = json.dumps({f"transformer.wpe.weight{i or ''}": entry for i in range(count)})
    return struct.pack("<Q", len(header) if length is None else length) + header.encode() + data


NO_PLACE = "does not fit its place"
SAFETENSORS = { # the file, a part of the error line
    "header-of-all": (safetensors_file(2**63), "claims a header of"),
    "many-dimensions": (safetensors_file(shape=[1] * 2_700_000), IMPOSSIBLE),
    "terabytes": (safetensors_file(shape=[2**40], data_offsets=[0, 2**42]), "it is cut short"),
    "before": (safetensors_file(data_offsets=[-4, 0]), NO_PLACE),
    "longer": (safetensors_file(data_offsets=[0, 8]), NO_PLACE),
    "overlapping": (safetensors_file(data=bytes(4000), count=3, shape=[1000], data_offsets=[0, 4000]),
                    "claims tensors"),
    "deep": (struct.pack("<Q", 10**6) + b"{" * 10**6, DAMAGED),
}
JSON = {"deep-json": b'{"a":' * 10**6, "digits": b'{"n_layer": ' + b"9" * 10**6 + b"}", "long": b" " * 2**25 + b"{}"}


@pytest.mark.parametrize("name", [*SAFETENSORS, *JSON])
def test_hostile_files_of_hugging_face_are_refused(name, attack, tmp_path):
    weights, message = SAFETENSORS.get(name, (safetensors_file(), "out/config.json"))
    write_settled(tmp_path / "out" / "config.json", JSON.get(name, b'{"model_type": "gpt2"}'))
    write_settled(tmp_path / "out" / "model.safetensors", weights)
    attack(tmp_path, message, "out")


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
