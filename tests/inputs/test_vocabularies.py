"""Models with vocabularies as people have them, sampled by the script: the text is nanoGPT's, or that of tokenizers."""
import json
import pickle
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from hf_tokenizers import save_tokenizer
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
NOTES, PIECES = ["C4 ", "D#4 ", "r", "|", "E"], ["▁the", "▁", "e", "ing"]


@pytest.mark.parametrize("symbols, vocab_size, start, types, text", [ # the text, if nanoGPT itself was asked
    (LETTERS, 64, "a", {}, "agpxxkrpxgmsrcyrkp\nhpyhhyvbfz\ngy\nfzzcgsum\n"), (LETTERS, 128, "hello", {}, None),
    ([*"abc"], 64, "cab", {}, None), (FIVE, 50304, "a", {}, None),
    (WORDS, 6, "x", {}, "xNf3e5 e5Nf3e5e5Nf3 e4Nf3xe5Nf3  xe4e4Nf3  xe4\n e4e5e4    \ne4Nf3e4e4 \n\n"),
    (NOTES, 64, "r|", dict(itos=list), None), (PIECES, 4, "e▁", dict(itos=tuple), None),
    (FIVE, 5, "ab", dict(stoi=OrderedDict, itos="".join), None),
    (FIVE, 5, "a", dict(key=np.int64, value=np.int64), "a   cccccccccccccccccccccccccccc ccc  cc \n"),
    (FIVE, 8, "b", dict(key=np.int64, value=np.int64, text=np.str_), None),
    (FIVE, 64, "c", dict(key=np.uint16, value=np.int32), None),
    (WORDS, 6, " ", dict(stoi=lambda pairs: defaultdict(int, pairs)), None)])
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


@pytest.mark.parametrize("kind", ["split-empty", "split-dot", "ctc", "no-accents", "whole-text", "prefix"])
def test_the_text_of_a_tokenizer_json_is_that_of_the_library(run_script, tmp_path, kind):
    size = save_tokenizer(kind, tmp_path)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    save_checkpoint(tmp_path, make_model(size, size), meta=False)
    line = json.loads(sample(run_script, tmp_path, "hello the", out_file="-", logprobs=0).stdout)
    ids, tokens = theirs.encode("hello the").ids, [token["id"] for token in line["logprobs"]["content"]]
    assert theirs.decode(ids + tokens) == theirs.decode(ids) + line["text"] or kind == "whole-text"


@pytest.mark.parametrize("char", ["😀", "語", "é\u0301", "🦖", "字"])
def test_alternatives_are_decoded_after_the_bytes_of_a_character(run_script, gpt2_encoding, tmp_path, char):
    ids = TiktokenTokenizer().encode(char)
    save_repeating(tmp_path, ids, 50257)
    done = sample(run_script, tmp_path, char, temperature=0, logprobs=2, out_file="-", max_new_tokens=4 * len(ids) - 1)
    line = json.loads(done.stdout)
    assert line["version"] == 3 and line["text"] == char * 3 + TiktokenTokenizer().decode(ids[:-1])
    for token in line["logprobs"]["content"]:
        own = token["top_logprobs"][0]
        assert (own["id"], own["token"], own["logprob"]) == (token["id"], token["token"], token["logprob"])
