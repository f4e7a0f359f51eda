"""Models with vocabularies as people have them, sampled by the script: the text is nanoGPT's."""
import json
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig
from models import nanogpt_args, save_checkpoint, save_repeating
from oracles import nanogpt_samples
from sampling.inputs.tiktoken_tokenizer import TiktokenTokenizer


def make_model(num_symbols, vocab_size):
    """A random model that never says a token from num_symbols on, as after training."""
    generator = torch.Generator().manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=32, vocab_size=vocab_size, bias=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            else:
                parameter.fill_(name.endswith("weight") or name == "transformer.ln_f.bias")
        head = model.lm_head.weight
        head[num_symbols:] = -4.0
        head[:num_symbols] -= head[:num_symbols].mean(1, keepdim=True)
    return model


def sample(run_script, folder, start, **settings):
    arguments = [f"--{name}={value}" for name, value in {"max_new_tokens": 40, "device": "cpu", **settings}.items()]
    done = run_script(f"--out_dir={folder}", f"--start={start}", "--num_samples=1", *arguments)
    assert done.returncode == 0, done.stderr
    return done


def meta_of(symbols, stoi=dict, itos=dict, key=int, value=int, text=str):
    """A meta.pkl for these symbols, with a stoi and an itos of these types, whose ids and symbols have these types."""
    items = [(key(i), text(symbol)) for i, symbol in enumerate(symbols)]
    return {"stoi": stoi((text(symbol), value(i)) for i, symbol in enumerate(symbols)), "counts": np.ones(5),
            "itos": itos(items) if itos is dict else itos(symbols)}


LETTERS, WORDS, FIVE = list("\nabcdefghijklmnopqrstuvwxyz"), ["\n", "e4", "e5", "Nf3", " ", "x"], list("\n abc")


@pytest.mark.parametrize("symbols, vocab_size, start, types, text", [ # the text, if nanoGPT itself was asked
    (LETTERS, 64, "a", {}, "agpxxkrpxgmsrcyrkp\nhpyhhyvbfz\ngy\nfzzcgsum\n"),
    (WORDS, 6, "x", {}, "xNf3e5 e5Nf3e5e5Nf3 e4Nf3xe5Nf3  xe4e4Nf3  xe4\n e4e5e4    \ne4Nf3e4e4 \n\n"),
    (FIVE, 5, "a", dict(key=np.int64, value=np.int64), "a   cccccccccccccccccccccccccccc ccc  cc \n"),
    (FIVE, 8, "b", dict(key=np.uint16, value=np.int32, text=np.str_), None), (WORDS, 64, " ", dict(itos=list), None),
    (FIVE, 50304, "ab", dict(stoi=OrderedDict, itos="".join), None)])
def test_the_text_is_nanogpts(run_script, tmp_path, symbols, vocab_size, start, types, text):
    model, meta = make_model(len(symbols), vocab_size), meta_of(symbols, **types)
    save_checkpoint(tmp_path, model, meta=False)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    ids, = nanogpt_samples(nanogpt_args(model.config), model.state_dict(), 1337,
                           [symbols.index(char) for char in start], 1, 40, temperature=0.8, top_k=200)
    joined = "".join(meta["itos"][i] for i in ids) # as nanoGPT decodes
    done = sample(run_script, tmp_path, start)
    assert done.stdout == f"{joined}\n---------------\n" and text in (None, f"{joined}\n")
    assert f"{tmp_path / 'meta.pkl'}: {len(symbols)} " in done.stderr


@pytest.mark.parametrize("char", ["😀", "é\u0301", "🦖"])
def test_alternatives_are_decoded_after_the_bytes_of_a_character(run_script, gpt2_encoding, tmp_path, char):
    ids = TiktokenTokenizer().encode(char)
    save_repeating(tmp_path, ids, 50257)
    done = sample(run_script, tmp_path, char, temperature=0, logprobs=2, out_file="-", max_new_tokens=4 * len(ids) - 1)
    line = json.loads(done.stdout)
    assert line["version"] == 3 and line["text"] == char * 3 + TiktokenTokenizer().decode(ids[:-1])
    for token in line["logprobs"]["content"]:
        own = token["top_logprobs"][0]
        assert (own["id"], own["token"], own["logprob"]) == (token["id"], token["token"], token["logprob"])
