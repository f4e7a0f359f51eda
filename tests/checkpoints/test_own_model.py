"""A model.py that its user has edited, which --model_file runs."""
import os
import sys
from unittest.mock import Mock

import pytest
import torch

import sampling
from engines import ON_GPU, TOKENIZER
from forks import (
    EQUAL,
    FORKS,
    FORWARD,
    HARMLESS,
    HEAD,
    INITIALISED,
    NORM,
    OTHERS,
    OURS,
    after,
    edit,
    fork_text,
    trained,
)
from models import CHARS, save_meta
from sampling.backends import backend

OWN = "--model_file=model.py"


@pytest.mark.parametrize("name", [
    "RoPE", "rows that see each other", "a mask", "LoRA merged in eval", "a counter of calls",
    *EQUAL, "other definitions, and comments"])
def test_model_file_gives_the_text_of_nanogpts_loop_over_that_file(fork, sample, name):
    path = fork(*FORKS[name])
    done = sample(OWN)
    assert done.stdout == fork_text(path)
    assert "model.py runs itself" in done.stderr
    assert ("although it computes what nanoGPT's own does" in done.stderr) == (name in HARMLESS)
    assert ("depends on earlier calls" in done.stderr) == (name == "a counter of calls")


# ---- the file

def test_a_package_finds_its_neighbours_and_not_ours(fork, sample, tmp_path):
    """It prints, and has relative imports, and a config and a package with the names of ours."""
    path = fork(*OTHERS["SiLU"])
    source = path.read_text()
    package = tmp_path / "clone/gpt"
    (package / "sampling").mkdir(parents=True)
    names = "config.py", "sampling/__init__.py", "configurator.py"
    for file, content in {
        "__init__.py": "from .model import GPT, GPTConfig\n",
        "layers.py": "from torch.nn import SiLU\nprint('layers')\n",
        "model.py": "from .layers import SiLU\n" + source.replace("nn.SiLU", "SiLU"),
        "plain.py": "import config, sampling, configurator\n"
                    "config.NAME, sampling.NAME, configurator.NAME\n" + source,
        **dict.fromkeys(names, "NAME = 1"),
    }.items():
        (package / file).write_text(content)
    for file in ".", "clone/gpt", "clone/gpt/model.py", "clone/gpt/plain.py":
        done = sample(f"--model_file={file}")
        assert done.stdout == fork_text(path), done.stderr
    assert not list((tmp_path / "clone").rglob("__pycache__"))


@pytest.mark.parametrize("file, added", [
    ("model_1.5.py", ""),
    ("gpt-1.0/model.py", "from .layers import nothing\n"),
    ("src/model.py", "from src.layers import nothing\n"),
    ("model.py", "'''\nfrom ............. import nothing'''\n"),
    ("model.py", "import os\nos.chdir('/')\n__file__ = 5\n"),
])
def test_a_file_may_have_any_name_and_place_and_change_its_process(fork, sample, file, added):
    path = fork(*OTHERS["SiLU"])
    text = fork_text(path)
    place = path.parent / file
    place.parent.mkdir(exist_ok=True)
    (place.parent / "layers.py").write_text("nothing = None\n")
    place.write_text(f"{added}{path.read_text()}")
    done = sample(f"--model_file={file}")
    sys.modules.pop("model", None) # hypothesis looks at the __file__ of each
    assert done.stdout == text, done.stderr


def test_a_warning_says_that_an_edited_generate_is_not_called_where_the_class_is(fork, sample):
    path = fork(*HARMLESS["generate"])
    path.rename(path.with_name("gpt.py"))
    path.write_text("from gpt import GPT, GPTConfig\n")
    assert "gpt.py: its generate was edited, and is not called" in sample(OWN).stderr


def test_a_class_of_another_name_in_another_file_runs_itself(fork, sample):
    path = fork(*OTHERS["SiLU"])
    text = fork_text(path)
    source = path.read_text().replace("GPTConfig", "Config").replace("GPT", "Net")
    path.with_name("net.py").write_text(source)
    path.write_text("from net import Config as GPTConfig, Net as GPT\n")
    assert sample(OWN).stdout == text


BAD = [ # a part of model.py, what takes its place, and what the error says after its name
    (OURS, "import nothing_here",
     ", line 1: import: ModuleNotFoundError: No module named 'nothing_here'"),
    (OURS, "class GPT(", ", line 1: import: SyntaxError: '(' was never closed"),
    (OURS, "\n\nexit()", ", line 3: import: SystemExit"),
    (OURS, "class E(BaseException):\n    def __str__(self): raise self\nraise E",
     ", line 3: import: model.E: <exception str() failed>"),
    (OURS, "class Transformer: pass\nclass GPTConfig: pass",
     " has no class GPT, only these classes: Transformer, GPTConfig; write"),
    (OURS, f"{OURS}\ndef GPT(config): pass", ": GPT must make a torch.nn.Module; got NoneType"),
    ("n_embd: int", "width: int", ": GPTConfig with the fields of the checkpoint (n_layer, n_"),
    ("self.init_weights()", "raise KeyError('x')", ": GPT: KeyError: 'x'"),
    ("4 * config.n_embd", "5 * config.n_embd",
     ": the tensors of the checkpoint do not fit its GPT (6 differ): "
     "transformer.h.0.mlp.c_fc.weight: (96, 24) instead of (120, 24)"),
    ("start = 0 if", "exit(3) if", ": forward: SystemExit: 3"),
    (HEAD, "return self.lm_head(x)[:, -1], None",
     ": forward returns [1, 61] for token ids [1, 8]; it must return"),
    (HEAD, "return None, None",
     ": forward returns NoneType for token ids [1, 8]; it must return logits"),
    (NORM, "x * torch.nan", ": forward returns logits that are NaN or infinite"),
    (*after(INITIALISED, "self.config = None\n\n"),
     ": its GPTConfig needs block_size, how many tokens a window has"),
]


@pytest.mark.parametrize("part, replacement, message", BAD)
def test_a_bad_file_gets_one_line_that_names_it_and_its_line(
        fork, sample, part, replacement, message):
    path = fork()
    edit(path.parent, part, replacement)
    done = sample(OWN)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    *_, line = done.stderr.splitlines()
    assert line.startswith(f"error: {path}")
    assert message in line


# ---- what a model that runs itself can do, and what not

def test_score_is_the_loss_of_training_also_if_only_that_is_scaled(fork, tmp_path):
    path = fork("logits = self.lm_head(x)", "logits = 0.5 * self.lm_head(x)")
    gpt = sampling.load(tmp_path / "out", "cpu", model_file=path)
    for text in "The quick fox", "Th":
        ids = torch.tensor([TOKENIZER.encode(text)])
        _, loss = trained(path)(ids[:, :-1], ids[:, 1:])
        assert gpt.score(text).nats_per_token == pytest.approx(loss.item(), abs=1e-4)


@pytest.mark.parametrize("flag, message", [
    ("--dtype=int8",
     "dtype=int8 needs nanoGPT's own model: leave out dtype"),
    ("--context_shift", "context_shift=True shortens a cache"),
    ("--model_file=pipe.py", "model_file "),
    ("--model_file=/", "there is no model_file /model.py"),
    ("--model_file=nanogpt",
     "model_file=nanogpt is nanoGPT's own model.py, but here is a file or folder of that name: "
     "for that, pass --model_file=./nanogpt"),
    ("--init_from=gpt2", "model_file is for a ckpt.pt: leave out init_from"),
])
def test_what_a_model_file_cannot_do_is_one_line(fork, sample, tmp_path, flag, message):
    fork(*OTHERS["SiLU"])
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "nanogpt").mkdir()
    done = sample(OWN, flag)
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"error: {message}")


def test_a_forward_without_targets_is_sampled_and_cannot_be_scored(fork, sample, tmp_path):
    path = fork(FORWARD, "def forward(self, idx,")
    path.write_text("targets = None\n" + path.read_text())
    assert sample(OWN).stdout == fork_text(path)
    gpt = sampling.load(tmp_path / "out", "cpu", model_file=path)
    with pytest.raises(ValueError, match="unexpected keyword argument 'targets'"):
        gpt.score("The ")


def test_a_model_that_cuts_the_padding_of_its_vocabulary_runs_itself(fork, sample, tmp_path):
    fork(HEAD, "return self.lm_head(x[:, -1:])[..., :60], None")
    save_meta(tmp_path / "out/meta.pkl", CHARS[:60])
    done = sample(OWN)
    assert done.returncode == 0
    assert "runs itself" in done.stderr


def test_a_resumed_run_notices_an_edit_of_the_file_or_of_its_neighbour(fork, sample, tmp_path):
    path = fork(*OTHERS["SiLU"])
    path.write_text("from size import SIZE\n" + path.read_text())
    neighbour = tmp_path / "size.py"
    neighbour.write_text("SIZE = 1\n")
    run = OWN, "--out_file=out.jsonl"
    sample(*run)
    assert "is complete" in sample(*run).stderr
    neighbour.write_text("SIZE = 2\n")
    assert "the checkpoint's checksum" in sample(*run).stderr


@pytest.mark.parametrize("change, message", [
    (("x = self.transformer.drop(x)", "x = F.dropout(x, 0.1)"),
     "forward draws random numbers, or depends on earlier calls, so the text of its own"),
    ((INITIALISED, "torch.manual_seed(0)\n\n"),
     "sets the seed itself, so the samples are not those"),
])
def test_a_forward_that_draws_and_a_seed_of_its_own_get_a_line(fork, sample, change, message):
    fork(*change)
    assert message in sample(OWN).stderr


def test_a_program_loads_a_changed_file_anew_and_two_files_do_not_meet(fork, tmp_path):
    fork()
    other = tmp_path / "other"
    other.mkdir()
    state = torch.get_rng_state()
    texts = []
    for name, folder in ("SiLU", tmp_path), ("post-norm", other), ("ReLU squared", tmp_path):
        gpt = sampling.load(tmp_path / "out", "cpu", model_file=edit(folder, *OTHERS[name]))
        sample, = gpt.generate("The ", max_new_tokens=20)
        texts.append(sample.text)
    assert len({*texts}) == 3
    assert torch.equal(state, torch.get_rng_state()), "a program's own random numbers stay"


@pytest.mark.parametrize("head", [
    "self.lm_head(x)", "F.linear(x, self.lm_head.weight)",
    "F.linear(input=x, weight=self.lm_head.weight)", "F.linear(x, self.lm_head.weight.T.clone().T)",
])
def test_samples_that_share_a_batch_use_the_quicker_product(fork, sample, monkeypatch, head):
    path = fork(HEAD, f"return {head}, None")
    product = Mock(wraps=backend.many_rows_linear)
    monkeypatch.setattr(backend, "uses_onednn", True)
    monkeypatch.setattr(backend, "many_rows_linear", product)
    assert sample(OWN, "--batch_size=1").stdout == fork_text(path)
    assert not product.called, "nanoGPT's own operators"
    assert sample(OWN).stdout == fork_text(path)
    assert product.called


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_batch_size_1_the_text_is_nanogpts_in_any_dtype(fork, sample, device, dtype):
    path = fork()
    done = sample(OWN, "--batch_size=1", f"--dtype={dtype}", f"--device={device}")
    assert done.stdout == fork_text(path, device, dtype == "bfloat16"), done.stderr
