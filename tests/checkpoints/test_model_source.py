"""A model.py near a checkpoint, which is only read: what is known needs no flag, and what is not
is an error.
"""
import re
import shutil
import sys

import pytest

from forks import EQUAL, HARMLESS, OTHERS, OURS, edit, fork_text
from project import PROJECT
from sampling.checkpoints import model_source
from script_process import run_program

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
    ("from layers import MLP", "MLP"),
    ("torch.set_default_dtype(torch.half)", "line"),
    ("for block in [Block]:\n    block.forward = None", "line"),
    ("try:\n    import fast as F\nexcept ImportError: pass", "F"),
])
def test_statements_that_change_the_model_from_outside_its_classes_are_differences(
        tmp_path, statement, difference):
    path = edit(tmp_path, OURS, f"{OURS}\n{statement}\n")
    assert difference in model_source.read_source(path).differences[0]


def test_the_digests_of_this_projects_model_py_are_up_to_date():
    differences = model_source.read_source(PROJECT / "model.py").differences
    assert not differences, "it computes something new: add the digests to KNOWN"


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
    done = run_program(sys.executable, project / "sample.py", "--out_dir=out",
                       "--max_new_tokens=3", flag, cwd=tmp_path, status=status)
    assert message in done.stderr


def test_nanogpts_older_gelu_is_used_for_its_model_py(fork, sample, monkeypatch):
    """Of a file all of whose units are known, with the function of nanoGPT's older versions."""
    path = fork("self.gelu(self.c_fc(x))", "new_gelu(self.c_fc(x))")
    added = "\n\ndef new_gelu(x):\n    return F.gelu(x, approximate='tanh')\n"
    path.write_text(path.read_text() + added)
    monkeypatch.setattr(model_source, "fingerprint", lambda part: "digest")
    known = dict.fromkeys(model_source.KNOWN, "digest")
    monkeypatch.setattr(model_source, "KNOWN", known)
    done = sample()
    assert "is nanoGPT's from before June 2023: using its GELU, the tanh form" in done.stderr
    assert done.stdout == fork_text(path)


HOSTILE = [
    b"import os\nos.system('touch harm')\nclass GPT: pass",
    b"class GPT:\n  x = (\0)",
    b"\xff\xfeclass GPT: pass",
    b"class GPT:\n x = " + b"-" * 10_000 + b"1",
    b"class GPT: pass\n" + b"#" * 2**20,
    b"class GPT: x = f'{",
]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_a_strangers_model_py_beside_a_checkpoint_is_never_run(fork, sample, tmp_path, content):
    fork().unlink()
    (tmp_path / "out/model.py").write_bytes(content)
    done = sample()
    assert done.returncode == 1
    assert "is not nanoGPT's model.py" in done.stderr
    assert done.stderr.count("\n") < 4
    assert sample(NANOGPT).returncode == 0
    assert not (tmp_path / "harm").exists()


def test_only_a_model_py_with_a_class_gpt_near_out_dir_counts(fork, sample, run_script, tmp_path):
    path = fork()
    (tmp_path / "out/model.py").write_text("from elsewhere import GPT\nclass Bigram: pass\n")
    assert sample().returncode == 0
    edit(tmp_path, *OTHERS["SiLU"])
    shutil.copytree(tmp_path / "out", tmp_path / "runs/a/b")
    link = tmp_path.with_suffix(".link")
    link.symlink_to(tmp_path / "out")
    for done in (
            sample(),
            sample("--out_dir=runs/a/b/ckpt.pt"), # the working directory's
            run_script(f"--out_dir={link}", cwd="/")):
        assert f"error: {path} is not" in done.stderr
    path.rename(tmp_path / "runs/model.py")
    assert sample("--out_dir=runs/a/b").returncode == 0, "too far away"
