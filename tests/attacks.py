"""Files that somebody made to do harm: none runs code, takes much time or memory, or ends in more than one line.

The tests build each attack, and load it in a process of its own. The bounds: 20 seconds, and 300 MB more than an
honest small file takes, which is the most that a pickle of the largest size can take. The bombs would take two
gigabytes or more, or hours; they could have been made larger for free.
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
from pathlib import Path

import pytest

from models import end_as_torch, make_gpt, make_transformers_gpt2, save_checkpoint, save_meta
from pickle_code import value
from project import PROJECT

MAX_MB, MAX_SECONDS = 300, 20
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f]") # what moves a cursor
OLD_FILE_START = b"".join(pickle.dumps(part, 2) for part in (0x1950a86a20f9469cfc6c, 1001, {}))
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and ru_maxrss in kB")


def cases(table, quick):
    """The table's cases as parameters; those that quick does not name are slow."""
    return [pytest.param(case, id=name, marks=() if name in quick else pytest.mark.slow) for name, case in table.items()]


@pytest.fixture(scope="session")
def load_apart(vocabulary):
    """load_apart(folder, init_from="resume") -> exit status, standard error and peak memory in MB of loading folder/out."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TIKTOKEN_CACHE_DIR": str(vocabulary), "CUDA_VISIBLE_DEVICES": "",
           "PYTHONPATH": str(PROJECT)}
    process = subprocess.Popen([sys.executable, Path(__file__).with_name("attack_loader.py")], cwd=PROJECT, env=env, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()

    def load(folder, init_from="resume"):
        print(json.dumps([str(folder), init_from, MAX_SECONDS]), file=process.stdin, flush=True)
        status, peak = json.loads(process.stdout.readline())
        return status, (folder / "stderr").read_text(errors="replace"), peak
    yield load
    process.communicate()


@pytest.fixture(scope="session")
def honest_peak(load_apart, tmp_path_factory):
    """The peak memory of loading a good file, in MB."""
    folder = tmp_path_factory.mktemp("honest")
    save_checkpoint(folder / "out", make_gpt())
    status, stderr, peak = load_apart(folder)
    assert (status, stderr) == (0, "")
    return peak


@pytest.fixture
def refused(load_apart, honest_peak, tmp_path):
    """refused(message, init_from="resume"): assert that loading tmp_path/out ends in one line that holds this message,
    within the bounds, and runs nothing."""
    def check(message, init_from="resume"):
        before = set(os.listdir(tmp_path))
        status, stderr, peak = load_apart(tmp_path, init_from)
        assert set(os.listdir(tmp_path)) - before <= {"stderr"}, "it has run"
        assert status == 1 and stderr.count("\n") == 1 and stderr.startswith("error: ") and not CONTROLS.search(stderr[:-1]), (status, stderr[-2000:])
        assert message in stderr and len(stderr) < 3000
        assert peak < honest_peak + MAX_MB
    return check


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    """The bytes of a good checkpoint."""
    return save_checkpoint(tmp_path_factory.mktemp("good"), make_gpt()).read_bytes()


def poison(good, key="config", piece=b"N", **options):
    """The bytes of a good checkpoint in which this piece of pickle is the value of key; options are ZipFile's."""
    content, out = zipfile.ZipFile(io.BytesIO(good)), io.BytesIO()
    with zipfile.ZipFile(out, "w", **options) as archive:
        for name in content.namelist():
            record = content.read(name)
            if name.endswith("data.pkl"):
                record = record[:-1] + b"(" + value(key) + piece + b"u."
            archive.writestr(name, record)
    return end_as_torch(out.getvalue())


def place(kind, payload, folder, good):
    """Write the payload, a piece of pickle, into folder/out as part of this kind of file; returns the init_from that loads it."""
    out = folder / "out"
    out.mkdir()
    if kind == "meta.pkl":
        (out / "ckpt.pt").write_bytes(good)
        (out / "meta.pkl").write_bytes(b"\x80\x04" + payload + b".")
        return "resume"
    save_meta(out / "meta.pkl")
    if kind == "pytorch_model.bin":
        (out / "config.json").write_text('{"model_type": "gpt2"}')
        (out / "pytorch_model.bin").write_bytes(poison(good, "x", payload))
        return "out"
    old = OLD_FILE_START + b"\x80\x02" + payload + b"." + pickle.dumps([], 2)
    (out / "ckpt.pt").write_bytes(old if kind == "old ckpt.pt" else poison(good, "model", payload))
    return "resume"


def write_checkpoint(folder, content):
    """Write a ckpt.pt with this content, and a good meta.pkl, into folder/out."""
    save_meta(folder / "out" / "meta.pkl")
    (folder / "out" / "ckpt.pt").write_bytes(content)


def zip_of(pickled, records, crc32s=()):
    """A zip file with that pickle and those records, [(name, bytes)]; its directory may claim other checksums, [number]."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, record in [("data.pkl", b"\x80\x02" + pickled + b"."), ("byteorder", b"little"), ("version", b"3\n"), *records]:
            archive.writestr(f"archive/{name}", record)
    content, at = bytearray(end_as_torch(out.getvalue())), 0
    for crc32 in crc32s:
        at = content.index(b"PK\1\2", at) + 4
        content[at + 12:at + 16] = struct.pack("<I", crc32)
    return bytes(content)


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    """A folder with a small GPT-2 of Hugging Face."""
    folder = tmp_path_factory.mktemp("hf")
    make_transformers_gpt2(vocab_size=300, n_positions=20).save_pretrained(folder)
    return folder


@pytest.fixture
def hf_copy(hf_folder, tmp_path):
    """A copy of it at tmp_path/out, to change."""
    (tmp_path / "out").mkdir()
    for file in hf_folder.iterdir():
        (tmp_path / "out" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "out"
