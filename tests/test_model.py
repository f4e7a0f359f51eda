"""model.py: nanoGPT's model, whose KV cache changes no text. The file can be used alone."""
import shutil

import pytest
import torch

from models import SHAPE, make_gpt, random_prompt
from oracles import nanogpt_generate
from project import PROJECT
from script_process import run_forked


def test_the_file_works_alone_in_an_empty_folder(tmp_path):
    shutil.copy(PROJECT / "model.py", tmp_path)
    code = """
import sys, torch
sys.path.insert(0, "")
sys.modules["sampling"] = None # an import of it fails
from model import *
gpt = GPT(GPTConfig(block_size=4, vocab_size=5, n_layer=1, n_head=1, n_embd=8))
print(gpt.generate(torch.tensor([[1, 2]]), 5, 0.8, 3).shape)
"""
    done = run_forked(code, script="-c", cwd=tmp_path)
    assert done.stdout == "torch.Size([1, 7])\n"
    assert done.stderr == ""


@pytest.mark.parametrize("length", [1, 16, 40]) # block_size is 16
@pytest.mark.parametrize("temperature, top_k, bias", [(1.0, None, False), (2.0, 99, True)])
def test_text_is_nanogpts_inside_and_past_block_size(length, temperature, top_k, bias):
    gpt = make_gpt(bias=bias)
    idx = random_prompt(length, rows=3)
    torch.manual_seed(3)
    expected = nanogpt_generate(gpt, idx, 24, temperature, top_k)
    torch.manual_seed(3)
    assert torch.equal(gpt.generate(idx, 24, temperature, top_k), expected)
    assert torch.equal(idx, random_prompt(length, rows=3)), "it is not changed"


def test_the_model_reads_each_token_once_until_the_window_moves():
    gpt = make_gpt()
    lengths = []
    gpt.transformer.wte.register_forward_hook(
        lambda module, arguments, output: lengths.append(output.size(1)))
    gpt.generate(random_prompt(13), 6)
    assert lengths == [13, 1, 1, 1, 16, 16], "nothing follows the last token"


def test_targets_give_the_logits_of_all_positions_and_the_loss():
    gpt = make_gpt()
    idx = random_prompt(9, 2)
    targets = random_prompt(9, 2, seed=1)
    targets[0, :4] = -1
    logits, loss = gpt(idx, targets)
    assert logits.shape == (2, 9, SHAPE["vocab_size"])
    probs = logits.softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(loss, -probs[targets >= 0].log().mean())
    last, none = gpt(idx)
    assert none is None
    torch.testing.assert_close(last, logits[:, -1:])


@pytest.mark.parametrize("num_cached, num_new", [(0, 17), (16, 1)])
def test_more_than_block_size_tokens_raise(num_cached, num_new):
    gpt = make_gpt()
    cache = gpt.new_cache(1, 16)
    cache.seq_len = num_cached
    with pytest.raises(ValueError, match="cannot process 17 tokens: block_size is 16"):
        gpt(random_prompt(num_new), cache=cache)
