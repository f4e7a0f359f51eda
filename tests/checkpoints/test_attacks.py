"""Hostile files that could run code, crash the process, fill its memory or reach other files: see
attacks.py.
"""
import itertools
import json
import os
import pickle
import re
import signal
import struct
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from attacks import call, named, tensor, value, write_attack, write_settled
from models import SHAPE, make_gpt, save_checkpoint
from project import SCRIPT
from sampling.checkpoints import pickles
from sampling.checkpoints.nanogpt import load_nanogpt
from script_process import run_program, start_script

pytest_plugins = ["attacks"]
DAMAGED = "is damaged or incomplete"

# ---- pickles that would run code

RAN = value("ran") # the folder that attacks make
MKDIR = named("os mkdir")
OBJECT = named("types SimpleNamespace") + b")R}"
CODE = { # with pickle.loads, all but the last two make it
    "GLOBAL-REDUCE": call("os mkdir", RAN),
    "STACK_GLOBAL": value("os") + value("mkdir") + b"\x93" + RAN + b"\x85R",
    "INST": b"(" + RAN + b"ios\nmkdir\n",
    "OBJ": b"(" + MKDIR + RAN + b"o",
    "NEWOBJ": named("builtins bytes") + named("builtins map") + MKDIR + b"](" + RAN
              + b"e\x86\x81\x85\x81",
    "BUILD": OBJECT + value("__setstate__") + MKDIR + b"sb" + RAN + b"b",
    "APPEND": OBJECT + value("append") + MKDIR + b"sb" + RAN + b"a",
    "EXT1": b"\x82\x12" + RAN + b"\x85R", # attacked.py gives this code to os.mkdir
    "BINPERSID": b"(" + value("module") + MKDIR + RAN + RAN + b"tQ",
    "an-import": named("imported name"),
}


@pytest.mark.parametrize("place", ["meta.pkl stoi", "hf model"])
def test_pickles_in_other_files_run_nothing(place, attack, valid_checkpoint, tmp_path):
    write_attack(place, call("os mkdir", "ran"), tmp_path, valid_checkpoint)
    attack(tmp_path)


# ---- a stranger's folder as the working directory

MODULES = "ctypes json model numba readline sampling sitecustomize torch tqdm typing yaml"
RUN = SCRIPT, "--max_new_tokens=1", "--device=cpu"
NEEDS_SAFE_PATH = pytest.mark.skipif(sys.version_info < (3, 11),
                                     reason="this Python knows no PYTHONSAFEPATH")


@pytest.fixture
def run_in_folder(tmp_path):
    """run_in_folder(program, *arguments, files=...) runs a program beside a checkpoint and these
    files, which must not make "ran". Returns what it prints.
    """
    def run(program, *arguments, files):
        folder = save_checkpoint(tmp_path / "folder/out", make_gpt(n_layer=1)).parent.parent
        for name, content in files.items():
            (folder / name).write_text(content)
        done = run_program(Path(sys.executable).with_name(program), *arguments, cwd=folder,
                           TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
        assert not (folder / "ran").exists(), done.stderr
        return done
    return run


FILES = {f"{name}.py": "open('ran', 'w')" for name in MODULES.split()}


@pytest.mark.parametrize("command", [
    ["python", *RUN, "config/greedy.py", "--dtype=int8"],
    pytest.param(["torchrun", "--nproc_per_node=2", *RUN, "--dtype=int8"], marks=pytest.mark.slow),
])
def test_no_file_that_happens_to_be_in_the_working_directory_runs(command, run_in_folder):
    assert "numba" not in run_in_folder(*command, files=FILES).stderr.lower()


@pytest.mark.slow
@NEEDS_SAFE_PATH
def test_no_such_file_runs_when_the_model_is_compiled_which_changes_no_text(
        run_in_folder, run_script, tmp_path):
    run = "--num_samples=1", "--max_new_tokens=3", "--device=cpu"
    compiled = run_in_folder("python", SCRIPT, *run, "--compile", files=FILES)
    assert compiled.stdout == run_script(*run, cwd=tmp_path / "folder").stdout


def test_numbas_settings_in_the_working_directory_are_not_applied(run_in_folder):
    # numba would load pickles from there, too.
    files = {".numba_config.yaml": "cache_dir: ran"}
    shown = run_in_folder("python", SCRIPT, "--interactive", files=files).stderr
    line = (".* need numba \\(which would apply the .numba_config.yaml of this folder\\): "
            "remove that file, or start in another folder; continuing without the kernels, which "
            "is slower")
    assert len(re.findall(f"^warning: {line}$", shown, re.M)) == 1, shown


# ---- pickles that would crash the process, hang it, or fill its memory

# Each tuple holds the one before twice: its hash would take hours.
NESTED = b")q\1" + b"h\1\x86q\1" * 40
NESTED_KEYS = { # through which a nested value could become a key, or a part of one
    "itself": NESTED,
    "of-a-note": call("some thing", NESTED),
    "as-bytes": call("_codecs encode", NESTED, "latin1"),
    "as-a-scalar": call("numpy.core.multiarray scalar", call("numpy dtype", NESTED), "x"),
    "as-a-record": tensor((1,), key=NESTED),
}


def copies(function, argument, rest):
    """A list of the results of many calls. The rest of each call gets the argument by h\\1."""
    return b"](" + value(argument) + b"q\1" + (named(function) + rest) * 500 + b"e"


NUMBERS = range(100_000)
NO_TENSORS = "must hold tensors by name"
KEYS = "keys must be text"
BEYOND = "reaches beyond its record"
IMPOSSIBLE = "has an impossible shape"
BOMBS = { # the piece of pickle, a part of the error line
    "memo": (b"]r\x00\x00\x00\x10", NO_TENSORS),
    "bytes": (b"\x8e" + struct.pack("<Q", 2**40), DAMAGED),
    "bytearray-by-a-call": (call("builtins bytearray", 3 * 10**9), NO_TENSORS),
    "key-of-DICT": (b"(" + NESTED + b"Nd", KEYS),
    "in-a-set": (b"\x8f(" + NESTED + b"\x90", NO_TENSORS),
    "long-number": (b"}" + value(2**65) + b"Ns", KEYS),
    "wide-key": (b"}(" + b"N" * 65 + b"tNs", KEYS),
    "deep-lists": (b"]" * 100_000 + b"a" * 99_999, NO_TENSORS),
    "deep-notes": (named("some thing") + b"q\1)R" + b"q\2h\1h\2\x85R" * 50_000, NO_TENSORS),
    "copies-of-a-dict": (
        copies("collections Counter", dict.fromkeys(NUMBERS), b"h\1\x85R"), NO_TENSORS),
    "copies-of-arguments": (copies("numpy dtype", (*NUMBERS,), b"h\1R"), NO_TENSORS),
    "copies-as-bytes": (
        copies("_codecs encode", "x" * 2**21, b"h\1" + value("latin1") + b"\x86R"), NO_TENSORS),
    "text-about-memory": (
        tensor((1,)) + b"N}" + value("out of memory\x1b[31m") + b"Ns\x86b", DAMAGED),
}
for name, key in NESTED_KEYS.items():
    BOMBS[name] = b"}" + key + b"Ns", ""
TENSORS = { # with no place in the file: the piece of pickle, a part of the error line
    "beyond-by-one": (tensor((61 * 24 + 1,)), BEYOND),
    "beyond-by-an-offset": (tensor((1,), offset=61 * 24), BEYOND),
    "beyond-by-a-stride": (tensor((2,), (2**40,)), BEYOND),
    "expanded": (tensor((2**25, 24), (0, 0)), "claims tensors"),
    "negative-offset": (tensor((1,), offset=-1), IMPOSSIBLE),
    "negative-stride": (tensor((2,), (-1,), 1), IMPOSSIBLE),
    "overflowing-size": (tensor((2**62, 4), (0, 0)), IMPOSSIBLE),
    "no-strides": (tensor((1, 1), (1,)), IMPOSSIBLE),
    "floats-as-size": (tensor((1.0,)), IMPOSSIBLE),
    "many-dimensions": (tensor((1,) * 65), IMPOSSIBLE),
    "a-record-outside": (tensor((1,), key="../../../etc/passwd"), "has no record"),
    "a-list-in-itself": (b"]q\0(h\0e", "but holds 'x': list"),
    "two-numbers-a-byte": (tensor((), kind="torch quint4x2"), "but holds 'x': a value of"),
}
PICKLES = {name: (piece, "") for name, piece in CODE.items()} | BOMBS
for name, (piece, message) in TENSORS.items():
    PICKLES[name] = b"}" + value("x") + piece + b"s", message


@pytest.mark.parametrize("piece, message", PICKLES.values(), ids=PICKLES)
def test_hostile_pickles_are_refused(piece, message, attack, valid_checkpoint, tmp_path):
    """attack finds what their code would make."""
    write_attack("model", piece, tmp_path, valid_checkpoint)
    attack(tmp_path, message)


def test_a_pickle_may_have_only_so_many_opcodes(valid_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(pickles, "MAX_OPCODES", 1000)
    write_attack("model", b"N" * 2000 + b"]", tmp_path, valid_checkpoint)
    with pytest.raises(ValueError, match=r"its pickle has more than \d{4} opcodes"):
        load_nanogpt(tmp_path / "out")


ONE = torch.ones(1)


@pytest.mark.parametrize("tensors, model_args, message", [
    pytest.param({f"transformer.h.{i}.x": ONE for i in range(5000)}, {}, "at most 4096 may be",
                 id="many-layers"),
    ({"\x1b[31m\n\r\x07\x9b" * 9: ONE}, {}, ""),
    ({}, {"vocab_size": 2**31 - 1}, ""),
    ({}, {"n_embd": "9" * 10**6}, ""),
    ({}, {"rope": "\ud800"}, ""),
])
def test_absurd_models_are_refused(tensors, model_args, message, attack, tmp_path):
    model = make_gpt()
    save_checkpoint(tmp_path / "out", model, model=model.state_dict() | tensors,
                    model_args=SHAPE | model_args, optimizer=None)
    attack(tmp_path, message)


def catches(process, number):
    """Whether Python, not the system, acts on a signal to this process."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s(\w+)", status, re.M)[1]
    return int(caught, 16) >> number - 1 & 1


def test_ctrl_c_ends_a_process_whose_file_asks_for_minutes_of_work(valid_checkpoint, tmp_path):
    # -1 and -2 have one hash.
    keys = b"".join(value(key) + b"N" for key in itertools.product((-1, -2), repeat=14))
    write_attack("x", b"}(" + keys + b"u", tmp_path, valid_checkpoint)
    process = start_script("--device=cpu", cwd=tmp_path)
    assert process.stderr.readline().startswith(b"settings: ") # Python catches signals now
    while catches(process, signal.SIGINT): # until the file is read
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize("name, compression, message", [
    ("ckpt/data.pkl", zipfile.ZIP_DEFLATED, "one of its records is compressed"),
    ("ckpt/data", zipfile.ZIP_STORED, "it is a zip file without a data.pkl"),
])
def test_other_zip_files_are_refused(name, compression, message, attack, tmp_path):
    (tmp_path / "out").mkdir()
    with zipfile.ZipFile(tmp_path / "out/ckpt.pt", "w", compression) as archive:
        archive.writestr(name, b"N" * 2**24)
    attack(tmp_path, message)


@pytest.mark.parametrize("itos, message", [
    (dict.fromkeys(range(5000), "x" * 1000), "has 5000 tokens"),
    ("x" * 8_000_000, "has 8000000 tokens"),
    (["x" * 8_000_000], "a text may have 1000"),
])
def test_hostile_vocabularies_are_refused(itos, message, attack, valid_checkpoint, tmp_path):
    meta = {"stoi": {itos[0]: 0}, "itos": itos}
    write_settled(tmp_path / "out/ckpt.pt", valid_checkpoint)
    write_settled(tmp_path / "out/meta.pkl", pickle.dumps(meta))
    attack(tmp_path, message)


# ---- Hugging Face's files

def safetensors_file(length=None, data=bytes(4), count=1, **changes):
    """A safetensors file of tensors in one place. length: of the header, as the file states it."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes
    header = json.dumps({f"transformer.wpe.weight{i}": entry for i in range(count)})
    return struct.pack("<Q", length or len(header)) + header.encode() + data


NO_PLACE = "does not fit its place"
SAFETENSORS = { # the file, a part of the error line
    "header-of-all": (safetensors_file(2**63), "claims a header of"),
    "many-dimensions": (safetensors_file(shape=[1] * 2_700_000), IMPOSSIBLE),
    "terabytes": (safetensors_file(shape=[2**40], data_offsets=[0, 2**42]), "it is cut short"),
    "before": (safetensors_file(data_offsets=[-4, 0]), NO_PLACE),
    "longer": (safetensors_file(data_offsets=[0, 8]), NO_PLACE),
    "overlapping": (
        safetensors_file(data=bytes(4000), count=3, shape=[1000], data_offsets=[0, 4000]),
        "claims tensors"),
    "deep": (struct.pack("<Q", 10**6) + b"{" * 10**6, DAMAGED),
}
JSON = {
    "deep-json": b'{"a":' * 10**6,
    "digits": b'{"n_layer": ' + b"9" * 10**6 + b"}",
    "long": b" " * 2**25 + b"{}",
}


@pytest.mark.parametrize("name", [*SAFETENSORS, *JSON])
def test_hostile_files_of_hugging_face_are_refused(name, attack, tmp_path):
    weights, message = SAFETENSORS.get(name, (safetensors_file(), "out/config.json"))
    config = JSON.get(name, b'{"model_type": "gpt2"}')
    write_settled(tmp_path / "out/config.json", config)
    write_settled(tmp_path / "out/model.safetensors", weights)
    attack(tmp_path, message)


@pytest.mark.parametrize("name, target", [
    ("config.json", "/dev/zero"),
    ("model.safetensors", "fifo"),
    ("model.safetensors", "/etc/passwd"),
])
def test_links_to_other_files_are_refused_and_their_content_is_not_printed(
        name, target, attack, tmp_path):
    out = tmp_path / "out"
    write_settled(out / "config.json", b'{"model_type": "gpt2"}')
    os.mkfifo(out / "fifo")
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(target)
    assert "root" not in attack(tmp_path)
