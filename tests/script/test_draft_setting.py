"""The setting draft: the same output as without it, and a line that says how many proposals were accepted."""
import re

import pytest
import torch

from models import make_gpt, save_checkpoint
from project import RULE

RUN = "--max_new_tokens=14", "--num_samples=3", "--batch_size=1", "--start=A", "--device=cpu", "--top_k=20"
ACCEPTED = re.compile(r"^acceptance rate of the draft: \d+ % \((\d+) of (\d+) tokens\)$", re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A deep model, and a draft of only its first layer. The other layers change little, so most proposals are right."""
    folder = tmp_path_factory.mktemp("models")
    model, draft = make_gpt(n_layer=12), make_gpt(n_layer=1)
    weights = draft.state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in weights:
                tensor.copy_(weights[name])
            elif "c_proj" in name:
                tensor.mul_(0.02)
    save_checkpoint(folder / "model", model)
    save_checkpoint(folder / "draft", draft)
    save_checkpoint(folder / "other", make_gpt(seed=2, n_layer=1))
    save_checkpoint(folder / "larger", make_gpt(vocab_size=70), meta=False)
    return folder


@pytest.fixture(scope="module")
def plain(run_script, folder):
    """The output without a draft."""
    return run_script(f"--out_dir={folder / 'model'}", *RUN).stdout


@pytest.mark.parametrize("draft", ["draft", "draft/ckpt.pt", pytest.param("other", marks=pytest.mark.slow)])
def test_the_output_is_the_same_and_a_line_counts_proposals(run_script, folder, plain, draft):
    done = run_script(f"--out_dir={folder / 'model'}", *RUN, f"--draft={folder / draft}")
    assert done.returncode == 0 and done.stdout == plain and plain.count(RULE) == 3, done.stderr
    accepted, proposed = map(int, ACCEPTED.search(done.stderr).groups())
    assert 0 < accepted <= proposed and (draft == "other" or accepted > 10)


def test_a_hugging_face_folder_may_be_a_draft(run_script, gpt2_folder):
    run = f"--init_from={gpt2_folder}", "--max_new_tokens=10", "--num_samples=1", "--start=Hello", "--device=cpu"
    done = run_script(*run, f"--draft={gpt2_folder}")
    assert done.stdout == run_script(*run).stdout and "the draft is off: its steps take too long" in done.stderr


def test_a_session_prints_the_same_samples(run_script, folder):
    run = f"--out_dir={folder / 'model'}", *RUN, "--interactive"
    typed = b"A\nO\n:temperature=1.5\n:again\n:stop=e\nThe\n"
    done = run_script(*run, f"--draft={folder / 'draft'}", stdin=typed)
    assert done.stdout == run_script(*run, stdin=typed).stdout and ACCEPTED.search(done.stderr)


def test_a_run_may_be_resumed_with_another_draft_or_without_one(run_script, folder, tmp_path, plain):
    out_file = tmp_path / "samples.jsonl"
    run = f"--out_dir={folder / 'model'}", *RUN, f"--out_file={out_file}", "--logprobs=1"
    assert run_script(*run).returncode == 0
    expected = out_file.read_bytes()
    lines = expected.splitlines(keepends=True)
    out_file.write_bytes(lines[0])
    for num_saved, draft in enumerate(["draft", "other"], start=1):
        done = run_script(*run, f"--num_samples={num_saved + 1}", f"--draft={folder / draft}")
        assert done.returncode == 0 and ACCEPTED.search(done.stderr), done.stderr
    assert out_file.read_bytes() == expected


@pytest.mark.parametrize("arguments, message", [
    (["--draft={}/larger"], "has a vocabulary of 70 tokens, but the model has 61: the two must be equal"),
    (["--draft={}/nothing/x"], "cannot load draft="),
    (["--draft=a b"], "error: cannot load draft=a b: 'a b' is neither a folder here nor a Hugging Face id such as gpt2 or user/model"),
    (["--draft=int8", "--dtype=int8"], "draft=int8 is the model itself if dtype=int8: leave out draft, or use dtype=float32"),
], ids=str)
def test_a_draft_that_cannot_work_gets_one_line(run_script, folder, arguments, message):
    done = run_script(f"--out_dir={folder / 'model'}", *RUN, *(argument.format(folder) for argument in arguments), HF_HUB_OFFLINE="1")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode in (1, 2) and len(errors) == 1 and message in errors[0]
