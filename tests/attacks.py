"""Helpers for tests of hostile files. Loading one must run no code, take bounded memory, and print one error line.

Each attack is loaded in a process of its own, which may take 20 seconds, and 600 MB more than a valid small file.
"""
import io
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from models import make_gpt, make_transformers_gpt2, save_checkpoint, save_meta
from project import PROJECT

MAX_MB, MAX_SECONDS = 600, 20
CONTROL_CHARS = re.compile("[\x00-\x1f\x7f-\x9f]") # control characters, which can move the cursor
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and ru_maxrss in kB")


def write_settled(path, content):
    """Write a file that looks as if nobody had changed it for years: a damaged one is refused without waiting."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (0, 0))


@pytest.fixture(scope="session")
def load_in_subprocess(tiktoken_cache, tmp_path_factory):
    """load_in_subprocess(folder, init_from) loads folder/out in a separate process -> exit status, stderr, and how many
    MB more it takes than to load a valid file."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TIKTOKEN_CACHE_DIR": str(tiktoken_cache), "CUDA_VISIBLE_DEVICES": "",
           "PYTHONPATH": str(PROJECT)}
    process = subprocess.Popen([sys.executable, Path(__file__).with_name("attack_loader.py")], cwd=PROJECT, env=env,
                               text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()

    def load(folder, init_from="resume"):
        print(json.dumps([str(folder), init_from, MAX_SECONDS]), file=process.stdin, flush=True)
        status, peak = json.loads(process.stdout.readline())
        return status, (folder / "stderr").read_text(errors="replace"), peak - valid_peak

    valid, valid_peak = tmp_path_factory.mktemp("baseline"), 0
    save_checkpoint(valid / "out", make_gpt())
    status, stderr, valid_peak = load(valid)
    assert (status, stderr) == (0, "")
    yield load
    process.communicate()


@pytest.fixture
def assert_refused(load_in_subprocess, tmp_path):
    """assert_refused(message, init_from) asserts that loading tmp_path/out prints one error line with this message,
    stays within the limits, and runs no code."""
    def check(message, init_from="resume"):
        before = set(os.listdir(tmp_path))
        status, stderr, more_mb = load_in_subprocess(tmp_path, init_from)
        assert set(os.listdir(tmp_path)) - before <= {"stderr"}, "the attack has run its code"
        assert (status, stderr.count("\n"), stderr[:7]) == (1, 1, "error: "), (status, stderr[-2000:])
        assert message in stderr and len(stderr) < 3000 and not CONTROL_CHARS.search(stderr[:-1]), stderr
        assert more_mb < MAX_MB
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
    return out.getvalue()


def write_attack(kind, payload, folder, valid_checkpoint, key="model"):
    """Write a file of this kind with the payload, a piece of pickle, to folder/out. Return the init_from for it.

    key: which entry of a ckpt.pt the payload replaces. An old ckpt.pt is one of torch before 1.6.
    """
    out = folder / "out"
    save_meta(out / "meta.pkl")
    if kind == "meta.pkl":
        write_settled(out / "ckpt.pt", valid_checkpoint)
        write_settled(out / "meta.pkl", b"\x80\x04" + payload + b".")
    elif kind == "pytorch_model.bin":
        (out / "config.json").write_text('{"model_type": "gpt2"}')
        write_settled(out / "pytorch_model.bin", poison(valid_checkpoint, "x", payload))
        return "out"
    elif kind == "old ckpt.pt":
        start = b"".join(pickle.dumps(part, 2) for part in (0x1950a86a20f9469cfc6c, 1001, {}))
        write_settled(out / "ckpt.pt", start + b"\x80\x02" + payload + b"." + pickle.dumps([], 2))
    else:
        write_settled(out / "ckpt.pt", poison(valid_checkpoint, key, payload))
    return "resume"


@pytest.fixture
def hf_model(tmp_path):
    """tmp_path/out with a small GPT-2 in Hugging Face's format."""
    make_transformers_gpt2(vocab_size=300, n_positions=20).save_pretrained(tmp_path / "out")
    return tmp_path / "out"


# ---- hand-written pickles: opcodes that leave one value on the stack

def value(anything):
    """Plain data, as pickle writes it."""
    return pickle.dumps(anything, 2)[2:-1]


def call(function, *arguments):
    """The result of a function call, by GLOBAL and REDUCE."""
    return b"c" + function.replace(" ", "\n").encode() + b"\n(" + b"".join(arguments) + b"tR"


def tensor(size, stride=None, offset=0, key="0", kind="torch FloatStorage", count=1):
    """A tensor as torch.save writes it; count is the number of elements in its storage."""
    storage = (b"(" + value("storage") + b"c" + kind.replace(" ", "\n").encode() + b"\n"
               + value(key) + value("cpu") + value(count) + b"tQ")
    size, stride = (n if isinstance(n, bytes) else value(n) for n in (size, stride or (1,) * len(size)))
    return call("torch._utils _rebuild_tensor_v2", storage, value(offset), size, stride, value(False),
                call("collections OrderedDict"))
