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
import zipfile

import pytest
from conftest import PROJECT, end_as_torch, make_gpt, make_transformers_gpt2, save_checkpoint, save_meta

MEMORY, SECONDS = 300, 20
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f]") # what moves a cursor
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and ru_maxrss in kB")

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
