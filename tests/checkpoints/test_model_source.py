"""A model.py near a checkpoint, which is only read: what is known needs no flag, and what is not is an error."""
import re
import shutil
import subprocess
import sys

import pytest

from forks import EQUAL, HARMLESS, OTHERS, OURS, edit, fork_text
from project import PROJECT
from sampling.checkpoints import model_source


@pytest.mark.parametrize("name", [*OTHERS, *EQUAL])
def test_an_edited_model_py_is_an_error_without_the_flag_that_names_both_ways_out(fork, sample, name):
    path = fork(*(OTHERS | EQUAL)[name])
    done = sample()
    if name in ("unchanged", "prints"):
        assert done.returncode == 0
    else:
        assert done.returncode == 1 and not done.stdout
        units = rf"{path} is not nanoGPT's model.py \(it differs in (MLP|Block|CausalSelfAttention|GPT\.)"
        ways = rf"pass --model_file={path}, which runs it; .*pass --model_file=nanogpt"
        assert re.search(f"error: {units}.*{ways}\n", done.stderr)
    as_nanogpt = sample("--model_file=nanogpt")
    assert as_nanogpt.returncode == 0 or "tensors do not fit the model" in as_nanogpt.stderr


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_edits_need_no_flag(fork, sample, name):
    fork(*HARMLESS[name])
    done = sample()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("model.py") == done.stderr.count("its generate was edited, and is not called") == (
        name == "generate")


MODULE_LEVEL = {
    "F.layer_norm = print": "line", "class MLP(MLP):\n    forward = None": "MLP", "MLP = Block": "line",
    "from layers import *": "layers", "from layers import MLP": "MLP", "torch.set_default_dtype(torch.half)": "line",
    "for block in [Block]:\n    block.forward = None": "line",
    "try:\n    import fast as F\nexcept ImportError: pass": "F",
}


@pytest.mark.parametrize("statement", MODULE_LEVEL)
def test_statements_that_change_the_model_from_outside_its_classes_are_differences(tmp_path, statement):
    (tmp_path / "model.py").write_text(f"{OURS}\n{statement}\n")
    source = model_source.read_source(tmp_path / "model.py")
    assert MODULE_LEVEL[statement] in source.differences[0]


def test_the_digests_of_this_projects_model_py_are_up_to_date():
    source = model_source.read_source(PROJECT / "model.py")
    assert not source.differences, "model.py computes something new: add the digests of these units to KNOWN"


def test_an_edit_of_this_projects_own_model_py_is_never_followed_by_some_backends_only(fork, sample, tmp_path):
    """A short run would follow it, and a long one not."""
    fork(*EQUAL["unchanged"])
    project = tmp_path / "project"
    shutil.copytree(PROJECT / "sampling", project / "sampling")
    for name in "sample.py", "configurator.py":
        shutil.copy(PROJECT / name, project)
    (tmp_path / "model.py").unlink()
    edit(project, *OTHERS["SiLU"])
    command = [sys.executable, project / "sample.py", "--out_dir=out", "--max_new_tokens=3", "--device=cpu"]
    for flags, status in ([], 1), (["--model_file=nanogpt"], 1), ([f"--model_file={project}/model.py"], 0):
        done = subprocess.run([*command, *flags], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert status == 0 or "was edited: restore it (git checkout model.py)" in done.stderr
    assert "runs itself" in done.stderr


def test_nanogpts_older_gelu_is_used_for_its_model_py(fork, sample, monkeypatch, tmp_path):
    """Of a file all of whose units are known, with the function that nanoGPT's older versions had."""
    path = fork("self.gelu(self.c_fc(x))", "new_gelu(self.c_fc(x))")
    path.write_text(path.read_text() + "\n\ndef new_gelu(x):\n    return F.gelu(x, approximate='tanh')\n")
    monkeypatch.setattr(model_source, "fingerprint", lambda part: part if isinstance(part, str) else "digest")
    monkeypatch.setattr(model_source, "KNOWN", {unit: f"{known} digest" for unit, known in model_source.KNOWN.items()})
    done = sample()
    assert "is nanoGPT's from before June 2023: using its GELU, the tanh form" in done.stderr
    assert done.stdout == fork_text(path, tmp_path / "out", "The ", 3, 22, temperature=0.8, top_k=20)


HOSTILE = [
    b"import os\nos.system('touch harm')\nclass GPT: pass", b"class GPT:\n  x = (\0)", b"\xff\xfeclass GPT: pass",
    b"class GPT:\n x = " + b"-" * 10_000 + b"1", b"class GPT: pass\n" + b"#" * 2**20, b"class GPT: x = f'{",
]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_a_strangers_model_py_beside_a_checkpoint_is_never_run(fork, sample, tmp_path, content):
    fork(*EQUAL["unchanged"]).unlink()
    (tmp_path / "out/model.py").write_bytes(content)
    done = sample()
    assert done.returncode == 1 and "is not nanoGPT's model.py" in done.stderr and done.stderr.count("\n") < 4
    assert sample("--model_file=nanogpt").returncode == 0
    assert not (tmp_path / "harm").exists()


def test_only_a_model_py_with_a_class_gpt_near_out_dir_counts(fork, sample, run_script, tmp_path):
    fork(*EQUAL["unchanged"])
    (tmp_path / "out/model.py").write_text("from elsewhere import GPT\nclass Bigram: pass\n")
    assert sample().returncode == 0
    edit(tmp_path, *OTHERS["SiLU"])
    assert f"error: {tmp_path}/model.py is not" in sample().stderr
    nested = tmp_path / "runs/a/b"
    shutil.copytree(tmp_path / "out", nested)
    assert f"error: {tmp_path}/model.py is not" in sample(f"--out_dir={nested}").stderr, "the working directory's"
    assert f"error: {tmp_path}/model.py is not" in sample("--out_dir=runs/a/b/ckpt.pt").stderr
    link = tmp_path.parent / f"{tmp_path.name}.link"
    link.symlink_to(tmp_path / "out")
    assert f"error: {tmp_path}/model.py is not" in run_script(f"--out_dir={link}", cwd="/").stderr
    shutil.move(tmp_path / "model.py", tmp_path / "runs/model.py")
    assert sample("--out_dir=runs/a/b").returncode == 0, "too far away"
