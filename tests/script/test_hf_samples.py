"""The script with models that have a tokenizer of their own."""
import json
import shutil

import pytest
import torch

from hf_tokenizers import KINDS, save_tokenizer
from models import make_gpt, make_transformers_gpt2, save_checkpoint
from project import RULE

FAST = "--num_samples=1", "--max_new_tokens=8", "--device=cpu"


def save_model(kind, folder):
    """Write a model with such a tokenizer to a folder. Returns the model and the tokenizer, as transformers loads them."""
    from transformers import AutoTokenizer
    size = save_tokenizer(kind, folder)
    model = make_transformers_gpt2(vocab_size=size, n_positions=64)
    model.save_pretrained(folder)
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in ("wordpiece", "unigram") else pytest.mark.slow) for kind in KINDS])
def test_samples_are_the_text_of_transformers(kind, run_script, tmp_path):
    model, tokenizer = save_model(kind, tmp_path / "model")
    prompt = tokenizer("The world is", add_special_tokens=False, return_token_type_ids=False, return_tensors="pt")
    torch.manual_seed(3)
    expected = [tokenizer.decode(model.generate(**prompt, do_sample=True, max_new_tokens=25, temperature=0.8, top_k=50, eos_token_id=None, pad_token_id=0)[0],
                                 clean_up_tokenization_spaces=False) for _ in range(3)]
    done = run_script(f"--init_from={tmp_path / 'model'}", "--start=The world is", "--num_samples=3", "--max_new_tokens=25", "--seed=3",
                  "--top_k=50", "--device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{text}\n{RULE}\n" for text in expected)
    assert "GPT-2's encoding" not in done.stderr


@pytest.mark.parametrize("place", ["out", "data/letters"])
def test_a_ckpt_pt_with_a_tokenizer_beside_it_or_in_its_data_set(place, run_script, tmp_path):
    size = save_tokenizer("byte-level", tmp_path / place)
    save_checkpoint(tmp_path / "out", make_gpt(vocab_size=size), meta=False)
    done = run_script("--out_dir=out", "--start=Hello world", *FAST, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("Hello world"), done.stderr


def test_a_stop_text_ends_a_sample(run_script, tmp_path):
    save_model("wordpiece", tmp_path / "model")
    arguments = f"--init_from={tmp_path / 'model'}", "--start=the world", "--num_samples=1", "--max_new_tokens=60", "--device=cpu"
    whole = run_script(*arguments).stdout
    stop = whole[len("the world"):].split()[5]
    assert run_script(*arguments, f"--stop={stop}").stdout == whole[:whole.index(stop, len("the world"))] + f"\n{RULE}\n"


def test_a_model_without_a_tokenizer_gets_gpt2s_and_a_line_that_says_so(run_script, gpt2_folder):
    done = run_script(f"--init_from={gpt2_folder}", *FAST)
    assert done.returncode == 0 and f"{gpt2_folder} has no tokenizer of its own: using GPT-2's encoding" in done.stderr


def test_gpt2_with_its_own_tokenizer_needs_no_files_of_tiktoken(run_script, tmp_path):
    save_model("byte-level", tmp_path / "model")
    (tmp_path / "empty").mkdir()
    done = run_script(f"--init_from={tmp_path / 'model'}", "--start=Hello", *FAST, TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"), HF_HUB_OFFLINE="1")
    assert done.returncode == 0 and done.stdout.startswith("Hello"), done.stderr


def test_a_tokenizer_that_cannot_be_read_is_named(run_script, gpt2_folder, tmp_path):
    shutil.copytree(gpt2_folder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"model": {"type": "Made up"}}))
    done = run_script(f"--init_from={tmp_path / 'model'}", *FAST)
    assert done.returncode == 1 and done.stdout == ""
    assert f"error: cannot read {tmp_path / 'model' / 'tokenizer.json'}: its model has the type 'Made up'" in done.stderr
