"""A training overwrites its ckpt.pt while it is loaded: a load gets one whole save, or says that it is written."""
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import pytest
import torch

from models import make_gpt, make_transformers_gpt2, save_checkpoint
from project import PROJECT
from sampling.checkpoints import checkpoint as checkpoints
from sampling.checkpoints.nanogpt import load_by_name, load_nanogpt

WRITER = """
import itertools, sys, time, torch
path, pause = sys.argv[1], float(sys.argv[2])
content = torch.load(path, weights_only=True)
for i in itertools.count(1):
    for tensor in content["model"].values():
        tensor.fill_(i)
    torch.save(content | {"iter_num": i}, path)
    print(flush=True)
    time.sleep(pause)
"""


@pytest.mark.parametrize("pause", [0.05, 0.3], ids=["quick", "slow"])
def test_a_load_beside_a_writer_is_one_whole_save(pause, tmp_path):
    """The writer saves again and again: every number of save i is i."""
    path = save_checkpoint(tmp_path, make_gpt(n_embd=64), optimizer={"state": torch.zeros(2 * 10**6)})
    iterations = set()
    command = [sys.executable, "-c", WRITER, path, str(pause)]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE) as writer:
        writer.stdout.readline()
        for _ in range(10):
            loaded = load_nanogpt(path, log=lambda text: None)
            assert all(torch.all(tensor == loaded.iter_num) for tensor in loaded.state_dict.values())
            iterations.add(loaded.iter_num)
            time.sleep(0.03)
        writer.kill()
    assert len(iterations) > 1


def test_a_file_that_is_never_complete_is_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "MAX_WAIT", 0.2)
    path, log = save_checkpoint(tmp_path, make_gpt()), []
    with pytest.raises(ValueError, match=r"ckpt.pt is being written, and was never complete for 0.2 seconds"):
        load_nanogpt(path, lambda weight: os.utime(path) or weight, log=log.append)
    assert log == [f"{path} is being written: waiting"]


@pytest.mark.parametrize("name", ["ckpt.pt", "model.safetensors"])
def test_a_file_that_is_completed_meanwhile_loads(name, tmp_path):
    if name == "ckpt.pt":
        save_checkpoint(tmp_path, make_gpt())
    else:
        make_transformers_gpt2(vocab_size=300).save_pretrained(tmp_path)
    path, log = tmp_path / name, []
    content = path.read_bytes()
    path.write_bytes(content[:-100])

    def complete(line):
        log.append(line)
        path.write_bytes(content)
    loaded = load_by_name(tmp_path, log=complete)
    assert log == [f"{path} is being written: waiting", loaded.describe()]


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(b""), os.utime], ids=["cut", "time"])
def test_a_file_that_changes_while_its_tensors_are_read_is_read_again(change, tmp_path):
    path, log = save_checkpoint(tmp_path, make_gpt()), []
    content, converted = path.read_bytes(), []
    os.utime(path, (0, 0)) # long before

    def convert(weight):
        converted.append(weight.shape)
        if len(converted) == 3:
            change(path)
        return weight

    def restore(line):
        log.append(line)
        path.write_bytes(content)
    load_nanogpt(path, convert, log=restore)
    assert len(converted) > 9 and "waiting" in log[0] and "iteration 100" in log[1]


def test_a_file_that_is_removed_while_it_is_being_written_may_come_back(tmp_path):
    path = save_checkpoint(tmp_path, make_gpt())
    complete = path.read_bytes()
    path.write_bytes(complete[:1000])

    def replace(line):
        if "waiting" in line:
            path.unlink()
            Timer(0.3, lambda: path.write_bytes(complete)).start()
    assert load_nanogpt(tmp_path, log=replace).config.n_layer == 2


def test_a_damaged_file_that_nobody_has_changed_lately_is_an_error_at_once(tmp_path):
    path = save_checkpoint(tmp_path, make_gpt())
    path.write_bytes(path.read_bytes()[:-100])
    os.utime(path, (time.time() - 11,) * 2)
    with pytest.raises(ValueError, match="it is damaged or incomplete"):
        load_nanogpt(path, log=pytest.fail)


def test_the_file_is_closed_and_never_mapped(tmp_path):
    """Windows lets nobody write an open file, and a mapped page of a file that was cut kills the process."""
    path, model = save_checkpoint(tmp_path, make_gpt()), make_gpt()
    state_dict = load_nanogpt(path, log=lambda text: None).state_dict
    path.write_bytes(b"")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state_dict.items())
    if sys.platform == "linux":
        open_files = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        assert str(path) not in open_files and str(path) not in Path("/proc/self/maps").read_text()


PROGRAM = """
import re, sys, torch
from sampling.checkpoints.nanogpt import load_nanogpt
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1000
before, convert = peak(), (lambda weight: weight.to(torch.int8)) if len(sys.argv) > 2 else None
load_nanogpt(sys.argv[1], convert, log=lambda text: None)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("options, limit", [([], 105), (["int8"], 40)], ids=["float32", "int8"])
def test_loading_keeps_one_copy_and_one_weight_to_convert(options, limit, tmp_path):
    model = make_gpt(n_embd=512, n_head=4, n_layer=6) # 76 MB, the largest weight 4 MB
    path = save_checkpoint(tmp_path, model, optimizer={"state": torch.zeros(10**8, dtype=torch.uint8)})
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"} # else freed tensors may leave holes in the heap, or not
    done = subprocess.run([sys.executable, "-c", PROGRAM, path, *options], cwd=PROJECT, env=env, capture_output=True,
                          check=True)
    assert 18 < float(done.stdout) < limit
