"""Helpers for tests of hostile files. Loading one must run no code, take bounded memory, and print one error line.

Each attack is loaded in a process of its own, which may take 20 seconds, and 600 MB more than a valid small file.
This file is also the script that starts these processes: after it has imported all modules, it forks one for each line
of its standard input, which is [folder, init_from] as JSON. It prints [exit status, peak memory in MB] as JSON.
"""
import copyreg
import io
import json
import logging
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import zipfile

import pytest

from models import make_gpt, save_checkpoint, save_meta
from project import PROJECT
from sampling.checkpoints.build import build_gpt
from sampling.checkpoints.huggingface import load_huggingface
from sampling.checkpoints.nanogpt import load_nanogpt
from sampling.inputs.tokenizer_choice import load_tokenizer
from sampling.outputs.console import report_user_errors, setup_console

MAX_MB, MAX_SECONDS = 600, 20
MAX_ADDRESS_SPACE = 2**33 # limits the damage that a failing test can do
CONTROL_CHARS = re.compile("[\x00-\x1f\x7f-\x9f]") # control characters, which can move the cursor


def load(folder, init_from):
    """Load the model that init_from names in this folder, or the checkpoint in out. Standard error is a file there."""
    os.chdir(folder)
    sys.path.insert(0, ".")
    os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS)) # of processor time
    signal.alarm(10 * MAX_SECONDS) # also if it only waits
    setup_console()
    logging.getLogger("sampling").setLevel(logging.ERROR)
    with report_user_errors():
        checkpoint = load_nanogpt("out") if init_from == "resume" else load_huggingface(init_from)
        build_gpt(checkpoint)
        load_tokenizer(checkpoint)


@pytest.fixture(scope="session")
def attack(tiktoken_cache, tmp_path_factory, valid_checkpoint):
    """attack(folder, message, init_from) loads folder/out in a process of its own, and asserts that it prints one error
    line with this message, stays within the limits, and runs no code."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TIKTOKEN_CACHE_DIR": str(tiktoken_cache), "CUDA_VISIBLE_DEVICES": "",
           "PYTHONPATH": str(PROJECT)}
    process = subprocess.Popen([sys.executable, __file__], cwd=PROJECT, env=env, text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)

    def run(folder, init_from="resume"):
        print(json.dumps([str(folder), init_from]), file=process.stdin, flush=True)
        status, peak = json.loads(process.stdout.readline())
        return status, (folder / "stderr").read_text(errors="replace"), peak

    def check(folder, message="", init_from="resume"):
        before = set(os.listdir(folder))
        status, stderr, peak = run(folder, init_from)
        assert set(os.listdir(folder)) - before <= {"stderr"}, "the attack has run its code"
        assert peak < valid_peak + MAX_MB
        assert (status, stderr.count("\n"), stderr[:7]) == (1, 1, "error: "), (status, stderr[-2000:])
        assert message in stderr and "out" in stderr and not CONTROL_CHARS.search(stderr[:-1]), stderr
        assert len(stderr) < 3000

    valid = tmp_path_factory.mktemp("valid")
    write_settled(valid / "out" / "ckpt.pt", valid_checkpoint)
    save_meta(valid / "out" / "meta.pkl")
    *result, valid_peak = run(valid)
    assert result == [0, ""]
    yield check
    process.communicate()


# ---- files

def write_settled(path, content):
    """Write a file that looks as if nobody had changed it for years: a damaged one is refused without waiting."""
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
    content, out = zipfile.ZipFile(io.BytesIO(valid_checkpoint)), io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in content.namelist():
            record = content.read(name)
            archive.writestr(name, with_entry(record, key, piece) if name.endswith("data.pkl") else record)
    return out.getvalue()


def write_attack(place, piece, folder, valid_checkpoint):
    """Write files with this piece of pickle to folder/out. Return the init_from for it.

    place: "model" or another entry of a ckpt.pt, "stoi" or "x" of "meta.pkl", or "hf" for a pytorch_model.bin.
    """
    out = folder / "out"
    save_meta(out / "meta.pkl")
    (folder / "imported.py").write_text("import os; os.mkdir('ran')")
    kind, _, key = place.rpartition(" ")
    if kind == "hf":
        (out / "config.json").write_text('{"model_type": "gpt2"}')
        write_settled(out / "pytorch_model.bin", poison(valid_checkpoint, key, piece))
        return "out"
    if kind == "meta.pkl":
        write_settled(out / "meta.pkl", with_entry((out / "meta.pkl").read_bytes(), key, piece))
        write_settled(out / "ckpt.pt", valid_checkpoint)
    else:
        write_settled(out / "ckpt.pt", poison(valid_checkpoint, key, piece))
    return "resume"


# ---- hand-written pickles: opcodes that leave one value on the stack

def value(anything):
    """Plain data, as pickle writes it."""
    return pickle.dumps(anything, 2)[2:-1]


def call(function, *arguments):
    """The result of a function call, by GLOBAL and REDUCE."""
    return b"c" + function.replace(" ", "\n").encode() + b"\n(" + b"".join(arguments) + b"tR"


def tensor(size, stride=None, offset=0, key="0", kind="torch FloatStorage"):
    """A tensor as torch.save writes it. Pieces of pickle may stand in the place of the first four."""
    size, stride, offset, key = (part if isinstance(part, bytes) else value(part)
                                 for part in (size, stride or (1,) * len(size), offset, key))
    storage = (b"(" + value("storage") + b"c" + kind.replace(" ", "\n").encode() + b"\n" + key + value("cpu") + value(1)
               + b"tQ")
    return call("torch._utils _rebuild_tensor_v2", storage, offset, size, stride, value(False),
                call("collections OrderedDict"))


if __name__ == "__main__":
    copyreg.add_extension("os", "mkdir", 0x12) # for attacks by EXT1
    pickle.loads(b"\x82\x12.") # pickle now knows this code without asking for the name
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            load(*json.loads(line))
            os._exit(0) # sys.exit would take a second to free what was imported
        _, status, used = os.wait4(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_maxrss / 1024]), flush=True)
