"""exact=True in sample.py: nanoGPT's text in every dtype."""
import json

import pytest
import torch

from model import GPT
from models import CHARS, make_gpt, save_checkpoint
from oracles import nanogpt_generate
from project import RULE

RUN = "--start=O", "--num_samples=3", "--max_new_tokens=30", "--device=cpu", "--exact"


@pytest.fixture
def folder(tmp_path):
    """A folder with a checkpoint in out/. Its block_size is 16."""
    save_checkpoint(tmp_path / "out", make_gpt())
    return tmp_path


def nanogpt_output(dtype):
    """What nanoGPT prints: it seeds, initialises a model, loads the weights, and generates one sample after another."""
    expected = make_gpt()
    torch.manual_seed(1337)
    model = GPT(expected.config)
    model.load_state_dict(expected.state_dict())
    idx = torch.tensor([[CHARS.index("O")]])
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        samples = [nanogpt_generate(model.eval(), idx, 30, 0.8, 200)[0].tolist() for _ in range(3)]
    return "".join("".join(CHARS[i] for i in ids) + f"\n{RULE}\n" for ids in samples)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_script_prints_nanogpts_samples(run_script, folder, dtype):
    done = run_script(*RUN, f"--dtype={dtype}", cwd=folder)
    assert done.returncode == 0 and done.stdout == nanogpt_output(getattr(torch, dtype)), done.stderr


def test_a_run_can_be_resumed(run_script, folder):
    run = *RUN, "--dtype=bfloat16"
    printed = run_script(*run, "--out_file=a.jsonl", cwd=folder).stdout
    assert printed == nanogpt_output(torch.bfloat16)
    whole = (folder / "a.jsonl").read_bytes()
    assert json.loads(whole.splitlines()[0])["settings"]["exact"] is True
    (folder / "a.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:1]))
    done = run_script(*run, "--out_file=a.jsonl", cwd=folder)
    assert done.returncode == 0 and (folder / "a.jsonl").read_bytes() == whole
    refused = run_script(*run, "--exact=False", "--out_file=a.jsonl", cwd=folder)
    assert refused.returncode == 1 and "exact is True there, and None here" in refused.stderr


def test_a_session_refuses_what_nanogpt_lacks_and_goes_on(run_script, folder):
    done = run_script(*RUN, "--dtype=bfloat16", "--interactive", cwd=folder, stdin=b":top_p=0.9\n:temperature=0\n:again\n:again\n")
    assert done.stdout == nanogpt_output(torch.bfloat16)
    assert done.stderr.count("error: exact=True does only what nanoGPT does") == 2
