"""Helpers for tests of hostile files. Loading one must run no code, take bounded memory, and print
one error line.

Each attack is loaded in a process of its own, attacked.py, which may take 20 seconds, and 600 MB
more than a valid small file.
"""
import io
import os
import pickle
import re
import zipfile

import pytest

from models import make_gpt, save_checkpoint, save_meta
from project import PROJECT
from script_process import start_script

ATTACKED = PROJECT / "tests" / "attacked.py"
MAX_MB = 600
CONTROL_CHARS = re.compile("[\x00-\x1f\x7f-\x9f]") # which can move the cursor


@pytest.fixture(scope="session")
def attack(tiktoken_cache, tmp_path_factory, valid_checkpoint):
    """attack(folder, message) loads the model in folder/out in a process of its own.

    Asserts that it prints one error line with this message, stays within the limits, and runs no
    code.
    """
    def run(folder):
        process = start_script(script=ATTACKED, cwd=folder, TIKTOKEN_CACHE_DIR=tiktoken_cache)
        _, stderr = process.communicate()
        return process.returncode, stderr.decode(errors="replace"), process.peak

    def check(folder, message=""):
        status, stderr, peak = run(folder)
        assert not (folder / "ran").exists(), "the attack has run its code"
        assert peak < valid_peak + MAX_MB
        assert status == 1, (status, stderr[-2000:])
        line, = stderr.splitlines()
        assert line.startswith("error: ")
        assert message in line
        assert "out" in line
        assert not CONTROL_CHARS.search(line)
        assert len(line) < 3000
        return line

    valid = tmp_path_factory.mktemp("valid")
    write_attack("nothing", value(0), valid, valid_checkpoint)
    *result, valid_peak = run(valid)
    assert result == [0, ""]
    return check


# ---- files

def write_settled(path, content):
    """Write a file as if long ago: if it is damaged, it is refused without waiting."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (0, 0))


@pytest.fixture(scope="session")
def valid_checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("valid"), make_gpt()).read_bytes()


def with_entry(pickled, key, piece):
    """A pickle of a dict, in which this piece of pickle is also the value of key."""
    return pickled[:-1] + b"(" + value(key) + piece + b"u."


def poison(valid_checkpoint, key, piece):
    """The bytes of a valid checkpoint in which this piece of pickle is the value of key."""
    content = zipfile.ZipFile(io.BytesIO(valid_checkpoint))
    poisoned = io.BytesIO()
    with zipfile.ZipFile(poisoned, "w") as archive:
        for name in content.namelist():
            record = content.read(name)
            if name.endswith("data.pkl"):
                record = with_entry(record, key, piece)
            archive.writestr(name, record)
    return poisoned.getvalue()


def write_attack(place, piece, folder, valid_checkpoint):
    """Write files with this piece of pickle to folder/out.

    place: "model" or another entry of a ckpt.pt, "stoi" of "meta.pkl", or "model" of a
    pytorch_model.bin, "hf".
    """
    out = folder / "out"
    meta = out / "meta.pkl"
    save_meta(meta)
    (folder / "imported.py").write_text("import os; os.mkdir('ran')")
    kind, _, key = place.rpartition(" ")
    if kind == "meta.pkl":
        write_settled(meta, with_entry(meta.read_bytes(), key, piece))
        write_settled(out / "ckpt.pt", valid_checkpoint)
        return
    name = "ckpt.pt"
    if kind == "hf":
        (out / "config.json").write_text('{"model_type": "gpt2"}')
        name = "pytorch_model.bin"
    write_settled(out / name, poison(valid_checkpoint, key, piece))


# ---- hand-written pickles: opcodes that leave one value on the stack

def value(anything):
    """Plain data, as pickle writes it. Bytes are opcodes already."""
    if isinstance(anything, bytes):
        return anything
    return pickle.dumps(anything, 2)[2:-1]


def named(function):
    """A function or a class, by GLOBAL."""
    return b"c" + function.replace(" ", "\n").encode() + b"\n"


def call(function, *arguments):
    """The result of a function call, by REDUCE."""
    return named(function) + b"(" + b"".join(map(value, arguments)) + b"tR"


def tensor(size, stride=None, offset=0, key="0", kind="torch FloatStorage"):
    """A tensor as torch.save writes it. Bytes may stand in the place of the first four."""
    if stride is None:
        stride = (1,) * len(size)
    parts = "storage", named(kind), key, "cpu", 1
    storage = b"(" + b"".join(map(value, parts)) + b"tQ"
    hooks = call("collections OrderedDict")
    return call("torch._utils _rebuild_tensor_v2", storage, offset, size, stride, False, hooks)
