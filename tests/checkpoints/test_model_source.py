"""A model.py near a checkpoint, which is only read: what is known needs no flag, and what is not
is an error.
"""
import re
import shutil

import pytest

from forks import EQUAL, FORWARD, HARMLESS, OTHERS, OURS, edit, fork_text
from models import make_gpt, save_checkpoint
from project import PROJECT
from sampling.checkpoints import model_source
from sampling.checkpoints.nanogpt import find_source
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


def test_the_flag_for_nanogpts_own_model_py_leaves_an_edited_one_alone(fork, sample):
    fork(*OTHERS["SiLU"])
    assert sample(NANOGPT).returncode == 0


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_edits_need_no_flag(fork, sample, name):
    """If our own model.py needs one, it computes something new: add its digests to KNOWN."""
    fork(*HARMLESS[name])
    done = sample()
    assert done.returncode == 0, done.stderr
    count = done.stderr.count("its generate was edited, and is not called")
    assert done.stderr.count("model.py") == count == (name == "generate")


@pytest.mark.parametrize("statement, difference", [
    ("MLP = Block", "MLP"),
    ("class MLP(MLP):\n    forward = None", "MLP"),
    ("def dataclass(config): return config", "dataclass"),
    ("def print(*_): pass", "line"),
    ("__builtins__ = {}", "line"),
    ("F.layer_norm = print", "line"),
    ("from layers import *", "layers"),
    ("from math import *", "math.*"),
    ("from math import MLP", "MLP"),
    ("from torch import sum", "torch.sum"),
    ("from .layers import Other", ".layers.Other"),
    ("import patches as nn, torch.nn as nn", "nn"),
    ("import sys\nsys.modules['math'] = F", "line"),
    ("torch.set_default_dtype(torch.half)", "line"),
    ("print(MLP := Block)", "line"),
    ("if (MLP := Block): pass", "line"),
    ("if __name__ != '__main__':\n    MLP = Block", "line"),
    ("if __name__ == '__main__':\n    pass\nelse:\n    MLP = Block", "line"),
    ("for MLP in [Block]: pass", "line"),
    ("with open('x') as MLP: pass", "line"),
    ("try:\n    pass\nexcept ImportError:\n    MLP = Block", "line"),
    ("match Block:\n    case MLP: pass", "line"),
    ("del MLP", "line"),
    ("X = [0 for nn.GELU in [nn.SiLU]]", "line"),
    ("X = lambda: 0", "line"),
    ("import ctypes\nX = '%(x.so)s' % ctypes.pydll", "line"), # loads x.so
    ("X = MLP.forward = None", "line"),
    ("@torch.set_default_device\ndef unused(): pass", "line"),
    ("def unused(x=setattr(MLP, 'forward', None)): pass", "line"),
    ("def unused() -> setattr(MLP, 'forward', None): pass", "line"),
    ("async def unused(): pass", "line"),
    ("class Unused:\n    MLP.forward = None", "line"),
    ("class Unused:\n    class MLP: pass", "line"),
    ("class Unused(metaclass=print): pass", "line"),
    ("class Unused(type): pass", "line"),
    ("from enum import Enum\nclass Unused(Enum): pass", "line"),
    ("@torch.compile\nclass Unused: pass", "line"),
    ("class Unused:\n    def __init_subclass__(cls): nn.GELU = nn.SiLU", "line"),
    ("if __name__ == '__main__':\n    MLP.forward = None", None),
])
def test_a_statement_is_a_difference_unless_nothing_of_it_can_run(tmp_path, statement, difference):
    path = edit(tmp_path, OURS, f"{OURS}\n{statement}\n")
    differences = model_source.read_source(path).differences
    assert difference in differences[0] if difference else not differences


CONFIG = "class GPTConfig:"


def method(text):
    """The change that adds a method to GPT."""
    return "    def init_weights(", f"    {text}\n    def init_weights("


@pytest.mark.parametrize("part, replacement, difference", [
    (*method("def eval(self): pass"), "GPT.eval"),
    (*method("def lm_head(self, x): pass"), "GPT.lm_head"),
    (*method("def __len__(self): return 0"), "GPT.__len__"),
    (*method("def forward(self, idx): pass"), "GPT.forward"), # one more
    (*method("@property\n    def unused(self): pass"), "GPT.unused"),
    (*method("def classmethod(function): pass"), "GPT.classmethod"),
    (*method("def unused(self, x=print()): pass"), "GPT.unused"),
    (*method("async def eval(self): pass"), "GPT"),
    (*method("dump_patches = True"), "GPT"),
    ("device, linear_dtype(self))", "device, print() or linear_dtype(self))", "GPT.new_cache"),
    ("        self.seq_len = 0", "        self.seq_len = print() or 0", "KVCache"),
    (*method("def unused(self, x: ctypes.pydll['x.so']): pass"), "GPT.unused"),
    ("        x = x + self.attn(",
     "        if __name__ == '__main__': yield\n        x = x + self.attn(", "Block"),
    ("x = x + self.attn(", "list(map(print, []))\n        x = x + self.attn(", "Block"),
    (FORWARD, FORWARD.replace("idx", "idx: print()"), "GPT.forward"),
    ("@dataclass\n", "@torch.no_grad()\n@dataclass\n", "GPTConfig"),
    (CONFIG, "class GPTConfig(Block):", "GPTConfig"),
    (CONFIG, f"{CONFIG}\n    def __post_init__(self): self.n_head = 2", "GPTConfig"),
    ("n_head: int = 12", "n_head: InitVar[int] = 12", "GPTConfig"),
    ("n_head: int = 12", "n_head: int = print()", "GPTConfig"),
    ('gelu: str = "none"', 'gelu: str = "tanh"', "GPTConfig"),
])
def test_each_part_of_a_unit_counts_and_each_name_that_runs(
        tmp_path, part, replacement, difference):
    path = edit(tmp_path, part, replacement)
    assert difference in model_source.read_source(path).differences


@pytest.mark.parametrize("name", ["profile.py", "profile.pyc", "profile/__init__.pyc"])
def test_a_neighbour_that_python_would_load_for_one_of_its_modules_is_a_difference(tmp_path, name):
    path = edit(tmp_path, "import math", "import cProfile\nimport math")
    assert not model_source.read_source(path).differences
    neighbour = tmp_path / name # cProfile imports it
    neighbour.parent.mkdir(exist_ok=True)
    neighbour.touch()
    name = name.partition("/")[0]
    assert model_source.read_source(path).differences == [f"its neighbour {name}"]


def test_an_edit_of_this_projects_model_py_runs_whatever_the_length(fork, tmp_path):
    edited = fork(*OTHERS["SiLU"])
    expected = fork_text(edited, num_tokens=60)
    project = tmp_path / "project"
    shutil.copytree(PROJECT / "sampling", project / "sampling")
    for name in "sample.py", "configurator.py":
        shutil.copy(PROJECT / name, project)
    path = edited.rename(project / "model.py")
    run = project / "sample.py", "--out_dir=out", "--start=The ", "--num_samples=2", "--top_k=20"
    done = run_python(*run, "--max_new_tokens=60", cwd=tmp_path)
    assert f"warning: {path} was edited (MLP), so it runs itself" in done.stderr
    assert done.stdout == expected


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


@pytest.mark.parametrize("content", [
    "from gpt import GPT, GPTConfig",
    "from gpt import *",
    "class NanoGPT: pass\nGPT = NanoGPT",
    "def __getattr__(name): return getattr(gpt, name)",
    "import sys, gpt\nsys.modules[__name__] = gpt",
    "import torch # no GPT",
])
def test_a_model_py_without_nanogpts_class_is_another_one(tmp_path, content):
    (tmp_path / "model.py").write_text(content)
    assert model_source.read_source(tmp_path / "model.py").differences


def test_a_model_py_counts_up_from_out_dir_and_in_a_clone(fork, sample, run_script, tmp_path):
    path = fork(*OTHERS["SiLU"])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/train.py").write_text("from model import GPTConfig, GPT") # a copy
    (tmp_path / "runs/model.py").write_text("NAME = 'no model'")
    shutil.copytree(tmp_path / "out", tmp_path / "runs/a/b")
    link = tmp_path.with_suffix(".link")
    link.symlink_to(tmp_path / "out")
    for done in (
            sample(),
            run_script(f"--out_dir={tmp_path}/runs/a/b/ckpt.pt", cwd="/"),
            run_script(f"--out_dir={link}", cwd="/")):
        assert f"error: {path} is not" in done.stderr
    elsewhere = tmp_path.with_suffix(".scratch")
    shutil.move(tmp_path / "out", elsewhere)
    flag = f"--out_dir={elsewhere}"
    assert sample(flag).returncode == 0
    (tmp_path / "train.py").touch()
    assert f"error: {path} is not" in sample(flag).stderr
    package = tmp_path / "runs/a/model"
    package.mkdir()
    (package / "__init__.py").write_text("from .gpt import GPT, GPTConfig")
    assert f"error: {package} is not" in sample("--out_dir=runs/a/b").stderr


@pytest.mark.parametrize("script, line, file", [
    ("train.py", "from model_silu import GPTConfig, GPT", "model_silu.py"),
    ("sample.py", "from model_silu import GPTConfig, Net as GPT", "model_silu.py"),
    ("sample.py", "from nets.silu import (\n    GPT,\n)", "nets/silu.py"),
    ("sample.py", "import gpt_silu", "gpt_silu.py"),
    ("train.py", "import silu as model", "silu.py"),
    ("train.py", "if True:\n    from silu import *", "silu/__init__.py"),
    ("train.py", "from nets.gpt import GPT", "nets/__init__.py"), # which runs first
])
def test_the_module_counts_from_which_a_script_imports_its_gpt(tmp_path, script, line, file):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    edit(tmp_path, *OTHERS["SiLU"]).rename(path)
    edit(tmp_path, "", "") # it is not used
    (tmp_path / script).write_text(f"import os\n{line}\n")
    named = path.parent if path.stem == "__init__" else path
    with pytest.raises(ValueError, match=f"^{named} is not nanoGPT's"):
        find_source(tmp_path / "out/ckpt.pt")


def test_a_train_py_may_have_the_gpt_itself(tmp_path):
    path = edit(tmp_path, *OTHERS["SiLU"]).rename(tmp_path / "train.py")
    with pytest.raises(ValueError, match=f"^{path} is not nanoGPT's"):
        find_source(tmp_path / "out/ckpt.pt")


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
