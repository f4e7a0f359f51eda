"""Helpers for tests of hostile files. Loading one must run no code, take little time and memory, and print one error line.

The tests build each attack and load it in a separate process. The limits are 20 seconds, and 300 MB more than a valid small
file takes. The largest allowed pickle stays within them. Without the checks, the bombs would take two gigabytes or more, or
hours, and an attacker could make them larger at no cost.
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

from models import add_zip64_end, make_gpt, make_transformers_gpt2, save_checkpoint, save_meta
from pickle_code import value
from project import PROJECT

MAX_MB, MAX_SECONDS = 300, 20
CONTROL_CHARS = re.compile("[\x00-\x1f\x7f-\x9f]") # control characters, which can move the cursor
OLD_FILE_START = b"".join(pickle.dumps(part, 2) for part in (0x1950a86a20f9469cfc6c, 1001, {}))
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and ru_maxrss in kB")


def named_cases(table, quick):
    """Parameters for the cases of this table. Cases that quick does not name are slow. Large cases are functions, which return them."""
    return [pytest.param(case, id=name, marks=() if name in quick else pytest.mark.slow) for name, case in table.items()]


@pytest.fixture(scope="session")
def load_in_subprocess(tiktoken_cache):
    """load_in_subprocess(folder, init_from="resume") loads folder/out in a separate process -> exit status, stderr, peak memory in MB."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TIKTOKEN_CACHE_DIR": str(tiktoken_cache), "CUDA_VISIBLE_DEVICES": "",
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
def baseline_peak(load_in_subprocess, tmp_path_factory):
    """The peak memory of loading a valid file, in MB."""
    folder = tmp_path_factory.mktemp("baseline")
    save_checkpoint(folder / "out", make_gpt())
    status, stderr, peak = load_in_subprocess(folder)
    assert (status, stderr) == (0, "")
    return peak


@pytest.fixture
def assert_refused(load_in_subprocess, baseline_peak, tmp_path):
    """assert_refused(message, init_from="resume") asserts that loading tmp_path/out prints one error line with this message,
    stays within the limits, and runs no code."""
    def check(message, init_from="resume"):
        before = set(os.listdir(tmp_path))
        status, stderr, peak = load_in_subprocess(tmp_path, init_from)
        assert set(os.listdir(tmp_path)) - before <= {"stderr"}, "the attack has run its code"
        assert status == 1 and stderr.count("\n") == 1 and stderr.startswith("error: ") and not CONTROL_CHARS.search(stderr[:-1]), (status, stderr[-2000:])
        assert message in stderr and len(stderr) < 3000
        assert peak < baseline_peak + MAX_MB
    return check


@pytest.fixture(scope="session")
def valid_checkpoint(tmp_path_factory):
    """The bytes of a valid checkpoint."""
    return save_checkpoint(tmp_path_factory.mktemp("valid"), make_gpt()).read_bytes()


def poison(valid_checkpoint, key="config", piece=b"N", **options):
    """The bytes of a valid checkpoint in which this piece of pickle is the value of key. Options go to ZipFile."""
    content, out = zipfile.ZipFile(io.BytesIO(valid_checkpoint)), io.BytesIO()
    with zipfile.ZipFile(out, "w", **options) as archive:
        for name in content.namelist():
            record = content.read(name)
            if name.endswith("data.pkl"):
                record = record[:-1] + b"(" + value(key) + piece + b"u."
            archive.writestr(name, record)
    return add_zip64_end(out.getvalue())


def write_attack(kind, payload, folder, valid_checkpoint):
    """Write a file of this kind with the payload, a piece of pickle, to folder/out. Return the init_from that loads it."""
    out = folder / "out"
    out.mkdir()
    if kind == "meta.pkl":
        (out / "ckpt.pt").write_bytes(valid_checkpoint)
        (out / "meta.pkl").write_bytes(b"\x80\x04" + payload + b".")
        return "resume"
    save_meta(out / "meta.pkl")
    if kind == "pytorch_model.bin":
        (out / "config.json").write_text('{"model_type": "gpt2"}')
        (out / "pytorch_model.bin").write_bytes(poison(valid_checkpoint, "x", payload))
        return "out"
    old = OLD_FILE_START + b"\x80\x02" + payload + b"." + pickle.dumps([], 2)
    (out / "ckpt.pt").write_bytes(old if kind == "old ckpt.pt" else poison(valid_checkpoint, "model", payload))
    return "resume"


def write_checkpoint(folder, content):
    """Write a ckpt.pt with this content and a valid meta.pkl to folder/out."""
    save_meta(folder / "out" / "meta.pkl")
    (folder / "out" / "ckpt.pt").write_bytes(content)


def make_zip(pickled, records, crc32s=()):
    """A zip file with this pickle and these records, [(name, bytes)]. crc32s replace the first checksums in its directory."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, record in [("data.pkl", b"\x80\x02" + pickled + b"."), ("byteorder", b"little"), ("version", b"3\n"), *records]:
            archive.writestr(f"archive/{name}", record)
    content, at = bytearray(add_zip64_end(out.getvalue())), 0
    for crc32 in crc32s:
        at = content.index(b"PK\1\2", at) + 4
        content[at + 12:at + 16] = struct.pack("<I", crc32)
    return bytes(content)


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    """A folder with a small GPT-2 in Hugging Face's format."""
    folder = tmp_path_factory.mktemp("hf")
    make_transformers_gpt2(vocab_size=300, n_positions=20).save_pretrained(folder)
    return folder


@pytest.fixture
def hf_copy(hf_folder, tmp_path):
    """A copy of hf_folder at tmp_path/out that a test may change."""
    (tmp_path / "out").mkdir()
    for file in hf_folder.iterdir():
        (tmp_path / "out" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "out"
