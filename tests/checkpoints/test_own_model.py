"""A model.py that its user has edited, which --model_file runs."""

import pytest
import torch

import sampling
from engines import ON_GPU
from forks import EQUAL, HEAD, OTHERS, OURS, edit, fork_text, load_fork
from models import CHARS, make_gpt, save_meta
from oracles import nanogpt_generate
from project import RULE
from sampling.checkpoints.build import count_init_draws


@pytest.mark.parametrize("name", [*OTHERS, *EQUAL])
def test_model_file_gives_the_text_of_nanogpts_loop_over_that_file(fork, sample, tmp_path, name):
    path = fork(*(OTHERS | EQUAL)[name])
    for temperature, *more in [0.8], [0], [0.8, "--batch_size=1"]:
        done = sample("--model_file=model.py", f"--temperature={temperature}", *more)
        assert done.stdout == fork_text(path, tmp_path / "out", "The ", 3, 22, temperature=temperature, top_k=20)
        runs_itself = name in OTHERS or bool(more)
        assert ("model.py runs itself" in done.stderr) == runs_itself
        assert ("model.py computes what GPT-2 does" in done.stderr) != runs_itself




# ---- the file

def test_a_package_finds_its_neighbours_and_not_ours(fork, sample, tmp_path):
    """Relative imports, a config and a package with the names of ours, a dataclass of another module; and it prints."""
    path = fork(*OTHERS["SiLU"])
    expected = fork_text(path, tmp_path / "out", "The ", 3, 22, temperature=0.8, top_k=20)
    package = tmp_path / "clone/gpt"
    (package / "sampling").mkdir(parents=True)
    (package / "__init__.py").write_text("from .model import GPT, GPTConfig\n")
    (package / "layers.py").write_text("from torch.nn import SiLU\nprint('layers')\n")
    (package / "model.py").write_text("from .layers import SiLU\n" + path.read_text().replace("nn.SiLU", "SiLU"))
    for name in "config.py", "sampling/__init__.py", "configurator.py":
        (package / name).write_text(f"NAME = {name!r}\n")
    names = "import config, sampling, configurator\nconfig.NAME, sampling.NAME, configurator.NAME\n"
    (package / "plain.py").write_text(names + path.read_text())
    for file in "clone/gpt", "clone/gpt/model.py", "clone/gpt/plain.py":
        done = sample(f"--model_file={file}")
        assert done.stdout == expected, done.stderr
    assert not list((tmp_path / "clone").rglob("__pycache__"))


BAD = [ # what stands in model.py, and what the error says after its name
    ("import nothing_here", ", line 1: import: ModuleNotFoundError: No module named 'nothing_here'"),
    ("class GPT(", ", line 1: import: SyntaxError: '(' was never closed"),
    ("\n\nexit()", ", line 3: import: SystemExit"),
    ("class Transformer: pass\nclass GPTConfig: pass", " has no class GPT, but Transformer, GPTConfig: write"),
    (("n_embd: int", "width: int"), ": GPTConfig with the fields of the checkpoint (n_layer, n_"),
    (("self.init_weights()", "raise KeyError('x')"), ": GPT: KeyError: 'x'"),
    (("4 * config.n_embd", "5 * config.n_embd"), ": the tensors of the checkpoint do not fit its GPT (6 differ): "
     "transformer.h.0.mlp.c_fc.weight: (96, 24) instead of (120, 24)"),
    (("start = 0 if", "exit(3) if"), ": forward: SystemExit: 3"),
    ((HEAD, "return self.lm_head(x)[:, -1], None"), ": forward returns [1, 61] for token ids [1, 1]; it must return"),
    ((HEAD, "return None, None"), ": forward returns NoneType for token ids [1, 1]; it must return logits"),
    (("x = self.transformer.ln_f(x)", "x = x * torch.nan"), ": forward returns logits that are NaN or infinite"),
    (("self.init_weights()\n\n", "self.init_weights()\n        self.config = None\n\n"),
     ": its GPTConfig needs block_size, how many tokens a window has"),
]


@pytest.mark.parametrize("content, message", BAD, ids=range(len(BAD)))
def test_a_bad_file_gets_one_line_that_names_it_and_its_line(fork, sample, tmp_path, content, message):
    path = fork(*EQUAL["unchanged"])
    path.write_text(content if isinstance(content, str) else OURS.replace(*content))
    done = sample("--model_file=model.py")
    assert done.returncode == 1 and not done.stdout
    *_, line = done.stderr.splitlines()
    assert line.startswith(f"error: {path}") and "Traceback" not in done.stderr
    assert message in line


# ---- what a model that runs itself can do, and what not

def test_score_is_the_loss_of_training_also_if_only_that_is_scaled(fork, run_script, tmp_path):
    path = fork("logits = self.lm_head(x)", "logits = 0.5 * self.lm_head(x)")
    gpt = load_fork(path).GPT
    content = torch.load(tmp_path / "out/ckpt.pt", weights_only=True)
    model = gpt(load_fork(path).GPTConfig(**content["model_args"]))
    model.load_state_dict(content["model"])
    ids = torch.tensor([[CHARS.index(char) for char in "The quick fox"]])
    _, loss = model.eval()(ids[:, :-1], ids[:, 1:])
    for prompt, nats in ("The quick fox", loss), ("Th", model(ids[:, :1], ids[:, 1:2])[1]):
        done = run_script("--out_dir=out", "--model_file=model.py", f"--start={prompt}", "--score", cwd=tmp_path)
        assert f"{nats:.4f} nats a token" in done.stdout, done.stderr


def test_what_needs_a_cache_or_weights_of_gpt2_is_one_line(fork, sample):
    fork(*OTHERS["SiLU"])
    for flag, message in ("--dtype=int8", "dtype=int8 needs a model that computes what GPT-2 does, and that of model.py"
                          ), ("--context_shift", "context_shift=True shortens a cache"):
        done = sample("--model_file=model.py", flag)
        assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(f"error: {message}")
    done = sample("--model_file=model.py", "--init_from=gpt2")
    assert done.returncode == 2 and "model_file is for a ckpt.pt: leave out init_from" in done.stderr


def test_a_forward_without_targets_is_sampled_and_cannot_be_scored(fork, sample, run_script, tmp_path):
    path = fork("def forward(self, idx, targets=None, ", "def forward(self, idx, ")
    path.write_text(path.read_text().replace("if targets is None:", "if True:"))
    done = sample("--model_file=model.py")
    assert done.stdout == fork_text(path, tmp_path / "out", "The ", 3, 22, temperature=0.8, top_k=20)
    done = run_script("--out_dir=out", "--model_file=model.py", "--start=The ", "--score", cwd=tmp_path)
    assert done.returncode == 1 and "unexpected keyword argument 'targets'" in done.stderr.splitlines()[-1]


def test_a_model_that_cuts_the_padding_of_its_vocabulary_runs_itself(fork, sample, tmp_path):
    fork(HEAD, "return self.lm_head(x[:, -1:])[..., :60], None")
    save_meta(tmp_path / "out/meta.pkl", CHARS[:60])
    done = sample("--model_file=model.py")
    assert done.returncode == 0 and "runs itself" in done.stderr


def test_a_resumed_run_notices_an_edit_of_the_file_or_of_its_neighbour(fork, sample, tmp_path):
    path = fork(*OTHERS["SiLU"])
    path.write_text("from size import SIZE\n" + path.read_text())
    (tmp_path / "size.py").write_text("SIZE = 1\n")
    assert sample("--model_file=model.py", "--out_file=out.jsonl").returncode == 0
    lines = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "out.jsonl").write_text("".join(lines.splitlines(True)[:1]))
    assert sample("--model_file=model.py", "--out_file=out.jsonl").returncode == 0
    assert (tmp_path / "out.jsonl").read_text() == lines
    (tmp_path / "size.py").write_text("SIZE = 2\n")
    assert "the checkpoint's checksum" in sample("--model_file=model.py", "--out_file=out.jsonl").stderr


def test_a_forward_that_draws_and_a_seed_of_its_own_get_a_line(fork, sample):
    fork("x = self.transformer.drop(x)", "x = F.dropout(x, 0.1)")
    assert "forward draws random numbers, so the samples cannot be nanoGPT's" in sample("--model_file=model.py").stderr
    fork("self.init_weights()\n\n", "torch.manual_seed(5)\n\n")
    assert "sets the seed itself, so the samples are not those" in sample("--model_file=model.py").stderr


def test_programs_and_sessions_load_a_changed_file_anew_and_two_files_do_not_meet(fork, tmp_path, run_script):
    path = fork(*OTHERS["SiLU"])
    other = tmp_path / "other"
    other.mkdir()
    state = torch.get_rng_state()
    texts = []
    for folder, change in (tmp_path, "SiLU"), (other, "post-norm"), (tmp_path, "ReLU squared"), (tmp_path, "SiLU"):
        file = edit(folder, *OTHERS[change])
        gpt = sampling.load(tmp_path / "out", device="cpu", model_file=file)
        texts.append([sample.text for sample in gpt.generate(["The ", "A"], max_new_tokens=20, num_samples=2)])
    assert texts[0] == texts[3] and len({*map(str, texts)}) == 3
    assert torch.equal(state, torch.get_rng_state()), "a program's own random numbers stay"
    typed = b"The \n:reload\nThe \n"
    done = run_script("--out_dir=out", f"--model_file={path}", "--interactive", "--max_new_tokens=20", cwd=tmp_path,
                      stdin=typed)
    assert done.stdout.count(texts[0][0]) == 1 and done.stderr.count("runs itself") == 2


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_batch_size_1_the_text_is_that_of_nanogpts_operations(fork, tmp_path, run_script, device, dtype):
    """Bit for bit, inside and past the window, also where a file computes what GPT-2 does."""
    path = fork(*EQUAL["unchanged"])
    done = run_script("--out_dir=out", "--model_file=model.py", "--batch_size=1", "--start=The ", "--num_samples=1",
                      "--max_new_tokens=30", f"--dtype={dtype}", f"--device={device}", cwd=tmp_path)
    gpt = make_gpt()
    gpt.load_state_dict(torch.load(tmp_path / "out/ckpt.pt", weights_only=True)["model"])
    gpt.to(device)
    torch.manual_seed(1337)
    advance = count_init_draws(gpt.state_dict()) if device == "cpu" else 0
    torch.empty(advance, dtype=torch.int32).random_()
    idx = torch.tensor([[CHARS.index(char) for char in "The "]], device=device)
    with torch.no_grad(), torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32"):
        idx = nanogpt_generate(gpt, idx, 30, 0.8, 200)
    assert done.stdout == "".join(CHARS[i] for i in idx[0]) + f"\n{RULE}\n", (path, done.stderr)
