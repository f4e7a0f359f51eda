"""The script with hostile and damaged files: it prints one error line, runs no code, and prints no control characters."""
import random

import pytest
import torch

from attacks import needs_linux, write_attack
from models import make_gpt, save_checkpoint, save_meta
from pickle_code import TUPLES, as_key, call, nested, value
from sampling.checkpoints.build import build_gpt
from sampling.checkpoints.nanogpt import load_checkpoint
from sampling.inputs.tokenizer import load_tokenizer

pytest_plugins = ["attacks"]
RAN = value("ran")

HOSTILE = {
    "code-in-ckpt.pt": ("ckpt.pt", b"cos\nmkdir\n(" + RAN + b"tR"),
    "code-in-an-old-ckpt.pt": ("old ckpt.pt", b"ctypes\nSimpleNamespace\n)R}" + value("__setstate__") + b"cos\nmkdir\nsb" + RAN + b"b"),
    "code-in-pytorch_model.bin": ("pytorch_model.bin", value("os") + value("mkdir") + b"\x93" + RAN + b"\x85R"),
    "code-in-meta.pkl": ("meta.pkl", b"cbuiltins\nbytes\ncbuiltins\nmap\ncos\nmkdir\n](" + RAN + b"e\x86\x81\x85\x81"),
    "bomb-in-ckpt.pt": ("ckpt.pt", call("builtins bytearray", value(2**31))),
    "bomb-in-meta.pkl": ("meta.pkl", b"]r\x00\x00\x00\x10"),
    "tuples-in-ckpt.pt": ("ckpt.pt", as_key(nested(TUPLES))),
}
QUICK = {"code-in-ckpt.pt", "code-in-pytorch_model.bin", "code-in-meta.pkl"} # checkpoints/test_attacks.py has the others without the script


@needs_linux
@pytest.mark.parametrize("kind, payload", [pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in HOSTILE.items()])
def test_the_script_refuses_hostile_pickles(kind, payload, run_script, valid_checkpoint, tmp_path):
    init_from = write_attack(kind, payload, tmp_path, valid_checkpoint)
    done = run_script("--out_dir=out" if init_from == "resume" else f"--init_from={init_from}", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "ran").exists()
    loaded = ["out/ck"] if kind == "meta.pkl" else [] # the checkpoint beside it
    assert [line[:6] for line in done.stderr.splitlines()] == ["settin", *loaded, "error:"]


def loads(folder):
    """Whether the checkpoint and the vocabulary in this folder load."""
    try:
        checkpoint = load_checkpoint(folder)
        build_gpt(checkpoint)
        load_tokenizer(checkpoint, log=lambda text: None)
        return True
    except (ValueError, OSError):
        return False


DAMAGED = [("ckpt.pt", True, "bit"), ("meta.pkl", True, "cut"), ("ckpt.pt", True, "cut"), ("ckpt.pt", False, "bit"), ("ckpt.pt", False, "cut"), ("meta.pkl", True, "bit")]


@pytest.mark.parametrize("name, zipped, damage", [pytest.param(*case, marks=pytest.mark.slow if i > 1 else ()) for i, case in enumerate(DAMAGED)])
def test_the_script_runs_or_prints_one_error_line_with_a_damaged_file(name, zipped, damage, run_script, tmp_path):
    """checkpoints/test_damaged_files.py has many more cases. The first one here loads, the second one does not."""
    path = save_checkpoint(tmp_path, make_gpt(n_layer=1, n_head=1, n_embd=4, block_size=4, vocab_size=5), meta=False)
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=zipped)
    save_meta(tmp_path / "meta.pkl", "\nabcd")
    rng, content = random.Random(f"{name} {zipped} {damage}"), bytearray((tmp_path / name).read_bytes())
    if damage == "cut":
        content = content[:rng.randrange(len(content))]
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    (tmp_path / name).write_bytes(content)
    loadable = loads(tmp_path)
    done = run_script(f"--out_dir={tmp_path}", "--num_samples=1", "--max_new_tokens=3", "--device=cpu")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr and (done.returncode, len(errors)) == ((0, 0) if loadable else (1, 1))
