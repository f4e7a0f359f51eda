"""model.py: nanoGPT's model, whose KV cache changes no text. The file can be copied and used alone."""
import subprocess
import sys

import pytest
import torch

from models import SHAPE, make_gpt, random_prompt
from oracles import nanogpt_generate
from project import PROJECT


def test_the_file_works_alone_in_an_empty_folder(tmp_path):
    (tmp_path / "model.py").write_bytes((PROJECT / "model.py").read_bytes())
    code = ("import torch; from model import *; gpt = GPT(GPTConfig(block_size=4, n_layer=1)); "
            "print(gpt.generate(torch.tensor([[1, 2]]), 5, 0.8, 3).shape)")
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.stderr) == ("torch.Size([1, 7])\n", "")


@pytest.mark.parametrize("length", [1, 16, 40]) # block_size is 16
@pytest.mark.parametrize("temperature, top_k, bias", [(1.0, None, False), (2.0, 99, True)])
def test_text_is_nanogpts_inside_and_past_block_size(length, temperature, top_k, bias):
    gpt, idx = make_gpt(bias=bias), random_prompt(length, rows=3)
    before = idx.clone()
    torch.manual_seed(3)
    expected = nanogpt_generate(gpt, idx, 24, temperature, top_k)
    torch.manual_seed(3)
    assert torch.equal(gpt.generate(idx, 24, temperature, top_k), expected) and torch.equal(idx, before)


def test_the_model_reads_each_token_once_until_the_window_moves():
    gpt, lengths, idx = make_gpt(), [], random_prompt(13)
    gpt.transformer.h[0].register_forward_hook(lambda module, args, output: lengths.append(args[0].size(1)))
    assert torch.equal(gpt.generate(idx, 0), idx) and lengths == []
    gpt.generate(idx, 6)
    assert lengths == [13, 1, 1, 1, 16, 16], "nothing follows the last token"


def test_targets_give_the_logits_of_all_positions_and_the_loss():
    gpt, idx, targets = make_gpt(), random_prompt(9, 2), random_prompt(9, 2, seed=1)
    targets[0, :4] = -1
    logits, loss = gpt(idx, targets)
    logprobs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(loss, -logprobs[targets >= 0].mean())
    last, none = gpt(idx)
    assert logits.shape == (2, 9, SHAPE["vocab_size"]) and none is None
    torch.testing.assert_close(last, logits[:, -1:])


def test_more_than_block_size_tokens_raise():
    gpt = make_gpt()
    cache = gpt.new_cache(1, 16)
    cache.seq_len = 16
    for idx, past in (random_prompt(17), None), (random_prompt(1), cache):
        with pytest.raises(ValueError, match="cannot process 17 tokens: block_size is 16"):
            gpt(idx, cache=past)
