"""A model.py near a checkpoint, which is only read: what is known needs no flag, and what is not
is an error.
"""
import re
import shutil

import pytest

from forks import EQUAL, HARMLESS, OTHERS, OURS, edit
from models import make_gpt, save_checkpoint
from project import PROJECT
from sampling.checkpoints import model_source
from script_process import run_python

NANOGPT = "--model_file=nanogpt"


@pytest.mark.parametrize("name", [*OTHERS, *EQUAL])
def test_an_edited_model_py_is_an_error_without_the_flag_that_names_both_ways_out(
        fork, sample, name):
    path = fork(*(OTHERS | EQUAL)[name])
    done = sample()
    assert done.returncode == 1
    assert done.stdout == ""
    units = rf"{path} is not nanoGPT's model.py \(it differs in (MLP|Block|CausalSelf|GPT\.)"
    ways = rf"pass --model_file={path}, which runs it; .*pass --model_file=nanogpt"
    assert re.search(f"error: {units}.*{ways}\n", done.stderr)
    done = sample(NANOGPT)
    assert done.returncode == 0 or "tensors do not fit the model" in done.stderr


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_edits_need_no_flag(fork, sample, name):
    """If our own model.py needs one, it computes something new: add its digests to KNOWN."""
    fork(*HARMLESS[name])
    done = sample()
    assert done.returncode == 0, done.stderr
    count = done.stderr.count("its generate was edited, and is not called")
    assert done.stderr.count("model.py") == count == (name == "generate")


@pytest.mark.parametrize("statement, difference", [
    ("F.layer_norm = print", "line"),
    ("class MLP(MLP):\n    forward = None", "MLP"),
    ("MLP = Block", "line"),
    ("from layers import *", "layers"),
    ("from math import MLP", "MLP"),
    ("from .layers import Other", ".layers.Other"),
    ("import patches", "patches"),
    ("import colorsys", "colorsys"), # a neighbour of that name hides Python's own
    ("import sys\nsys.modules['math'] = F", "line"),
    ("torch.set_default_dtype(torch.half)", "line"),
    ("for block in [Block]:\n    block.forward = None", "line"),
    ("try:\n    import fast as F\nexcept ImportError: pass", "fast"),
    ("try:\n    pass\nexcept ImportError:\n    MLP = Block", "line"),
    ("_ = setattr(MLP, 'forward', None)", "line"),
    ("@torch.set_default_device\ndef unused():\n    pass", "line"),
    ("@torch.set_default_device('cpu')\ndef unused():\n    pass", "line"),
    ("class Unused:\n    MLP.forward = None", "line"),
    ("def unused(x=setattr(MLP, 'forward', None)):\n    pass", "line"),
    ("def unused() -> setattr(MLP, 'forward', None):\n    pass", "line"),
    ("assert setattr(MLP, 'forward', None)", "line"),
    ("if setattr(MLP, 'forward', None):\n    pass", "line"),
    ("Net = GPT\ndef GPT(config):\n    return Net(config)", "GPT"),
    ("if __name__ != '__main__':\n    MLP = Block", "line"),
    ("if __name__ == '__main__':\n    pass\nelse:\n    MLP = Block", "line"),
    ("if __name__ == '__main__':\n    MLP.forward = None", None),
    ("import os, sys, typing, numpy\nsys.path.append('.')", None),
    ("device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')", None),
    ("def unused(x: MLP = None):\n    x.forward = setattr(MLP, 'forward', None)", None),
])
def test_statements_count_if_they_can_change_the_model(tmp_path, statement, difference):
    (tmp_path / "colorsys.py").touch()
    path = edit(tmp_path, OURS, f"{OURS}\n{statement}\n")
    differences = model_source.read_source(path).differences
    assert difference in differences[0] if difference else not differences


@pytest.mark.parametrize("flag, status, message", [
    ("--seed=1", 1, "was edited: restore it (git checkout model.py)"),
    (NANOGPT, 1, "was edited: restore it (git checkout model.py)"),
    ("--model_file=project/model.py", 0, "runs itself"),
])
def test_an_edit_of_this_projects_model_py_is_never_followed_by_some_backends_only(
        fork, tmp_path, flag, status, message):
    """A short run would follow it, and a long one not."""
    fork().unlink()
    project = tmp_path / "project"
    shutil.copytree(PROJECT / "sampling", project / "sampling")
    for name in "sample.py", "configurator.py":
        shutil.copy(PROJECT / name, project)
    edit(project, *OTHERS["SiLU"])
    done = run_python(project / "sample.py", "--out_dir=out", "--max_new_tokens=3", flag,
                      cwd=tmp_path, status=status)
    assert message in done.stderr


HOSTILE = [
    b"import os\nos.system('touch harm')\nclass GPT: pass",
    b"class GPT:\n  x = (\0)",
    b"\xff\xfeclass GPT: pass",
    b"class GPT:\n x = " + b"-" * 10_000 + b"1",
    b"class GPT: pass\n" + b"#" * 2**17,
    b"class GPT: pass\nimport a" + b".a" * 50,
    b"class GPT: pass\nfrom a" + b" \\\n.a" * 50 + b" import a",
    b"class GPT: x = f'{",
]


@pytest.mark.parametrize("content", HOSTILE)
def test_a_strangers_model_py_beside_a_checkpoint_is_never_run(fork, sample, tmp_path, content):
    fork().unlink()
    (tmp_path / "out/model.py").write_bytes(content)
    done = sample()
    assert done.returncode == 1
    assert "is not nanoGPT's model.py" in done.stderr
    assert done.stderr.count("\n") < 4
    assert sample(NANOGPT).returncode == 0
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("content, counts", [
    ("from gpt import GPT, GPTConfig", True),
    ("from gpt import *", True),
    ("class NanoGPT: pass\nGPT = NanoGPT", True),
    ("def __getattr__(name): return getattr(gpt, name)", True),
    ("import sys, gpt\nsys.modules[__name__] = gpt", True),
    ("class Bigram: pass # no GPT", False),
])
def test_a_model_py_counts_if_it_has_a_gpt_from_anywhere(fork, sample, tmp_path, content, counts):
    fork()
    (tmp_path / "out/model.py").write_text(content)
    assert sample().returncode == counts


def test_a_model_py_counts_near_out_dir_and_in_a_clone(fork, sample, run_script, tmp_path):
    path = fork(*OTHERS["SiLU"])
    shutil.copytree(tmp_path / "out", tmp_path / "runs/a/b")
    link = tmp_path.with_suffix(".link")
    link.symlink_to(tmp_path / "out")
    for done in (
            sample(),
            sample("--out_dir=runs/a/b/ckpt.pt"), # the working directory's
            run_script(f"--out_dir={link}", cwd="/")):
        assert f"error: {path} is not" in done.stderr
    elsewhere = tmp_path.with_suffix(".scratch")
    shutil.move(tmp_path / "out", elsewhere)
    flag = f"--out_dir={elsewhere}"
    assert sample(flag).returncode == 0
    (tmp_path / "train.py").touch()
    assert f"error: {path} is not" in sample(flag).stderr
    (tmp_path / "train.py").unlink()
    path.rename(tmp_path / "runs/model.py")
    assert sample("--out_dir=runs/a/b").returncode == 0, "too far away"
    package = tmp_path / "runs/a/model"
    package.mkdir()
    (package / "__init__.py").write_text("from .gpt import GPT, GPTConfig")
    assert f"error: {package} is not" in sample("--out_dir=runs/a/b").stderr


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_that_drops_while_it_samples_needs_the_file_unless_dropout_is_0(
        tmp_path, sample, monkeypatch, dropout):
    """The digest of this project's attention stands for that of nanoGPT's from March 2023."""
    *_, ours = model_source.KNOWN["CausalSelfAttention"].split()
    monkeypatch.setattr(model_source, "DROPS_WHILE_SAMPLING", ours)
    edit(tmp_path, "", "")
    save_checkpoint(tmp_path / "out", make_gpt(dropout=dropout))
    done = sample()
    assert done.returncode == bool(dropout)
    assert ("differs in dropout while it samples" in done.stderr) == bool(dropout)
