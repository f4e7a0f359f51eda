"""User errors of every kind. Each ends the script with one line that says what is wrong, what is allowed, what to do.

Tests of validation, the configurator, prompts and checkpoints have more cases without the script.
"""
import pytest
import torch

from attacks import call, needs_linux, value, write_attack
from models import make_gpt, save_checkpoint

pytest_plugins = ["attacks"]
WRONG_SETTINGS = [ # an argument, a part of the error line: exit status 2
    ("-p", "unknown setting -p; did you mean start?"),
    ("bad.py", "error: bad.py: top_k must be from 1 to 10**9, or None or 0 for every token; got -5"),
]
UNUSABLE = [ # arguments, a part of the error line: exit status 1
    ("--device=cuda", "device=cuda is not available here; found: cpu"),
    ("--start=FILE:-", "is empty"),
    ("--start=LINES:lines.txt", "lines.txt, line 3: the prompt has characters"),
    ("--out_dir=bare", "GPT-2's encoding has 50257 tokens"),
    ("--out_dir=nan --temperature=0", "NaN or infinite"),
    ("--init_from=no/such/model", "error: 'no/such/model' is neither a folder here nor a Hugging Face id"),
    ("--init_from=gpt2", "could not get 'gpt2'"),
    ("--init_from=out", "for a ckpt.pt pass --out_dir=out"),
    ("--out_file=no/such/a.jsonl", "cannot write 'no/such/a.jsonl': there is no folder /"),
]


@pytest.fixture(scope="module")
def bad_input_folder(tmp_path_factory):
    """A folder with a valid checkpoint in out/ and all files that the tables name."""
    folder, model = tmp_path_factory.mktemp("bad"), make_gpt()
    save_checkpoint(folder / "out", model)
    (folder / "bad.py").write_text("top_k = -5\n")
    (folder / "lines.txt").write_text("good\n\nso \N{EURO SIGN}\n", encoding="utf-8")
    save_checkpoint(folder / "bare", model, meta=False)
    is_nan = {"transformer.ln_f.bias": torch.full((24,), torch.nan)}
    save_checkpoint(folder / "nan", model, model=model.state_dict() | is_nan)
    return folder


@pytest.mark.parametrize("arguments, status, message", [
    *((arguments, 2, message) for arguments, message in WRONG_SETTINGS),
    *((arguments, 1, message) for arguments, message in UNUSABLE)])
def test_bad_input_is_one_error_line(run_script, bad_input_folder, arguments, status, message):
    done = run_script("--out_dir=out", "--device=cpu", "--num_samples=1", *arguments.split(), cwd=bad_input_folder)
    *others, error = done.stderr.splitlines()
    assert done.returncode == status and done.stdout == ""
    assert error.startswith("error: ") and message in error
    assert not any("rror" in line for line in others) and (status == 1 or not others)


@needs_linux
def test_the_script_runs_nothing_in_a_hostile_pickle(run_script, valid_checkpoint, tmp_path):
    for place, status in ("x", 0), ("model", 1): # beside the model, and instead of it
        write_attack(place, call("os mkdir", value("ran")), tmp_path, valid_checkpoint)
        done = run_script("--out_dir=out", "--num_samples=1", cwd=tmp_path)
        assert done.returncode == status and not (tmp_path / "ran").exists()
    assert done.stdout == "" and "error: cannot read out/ckpt.pt: " in done.stderr and "os.mkdir" in done.stderr
