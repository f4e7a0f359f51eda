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
from models import save_checkpoint, save_repeating
from oracles import nanogpt_samples


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


LETTERS, WORDS, FIVE = list("\nabcdefghijklmnopqrstuvwxyz"), ["\n", "e4", "e5", "Nf3", " ", "x"], list("\n abc")


def meta_of(symbols, stoi=dict, itos=dict):
    return {"vocab_size": len(symbols), "stoi": stoi((symbol, i) for i, symbol in enumerate(symbols)),
            "itos": itos(enumerate(symbols)) if itos is dict else itos(symbols)}


def numpy_meta(symbols, key=np.int64, value=np.int64, text=str):
    return {"stoi": {text(symbol): value(i) for i, symbol in enumerate(symbols)}, "counts": np.ones(5),
            "itos": {key(i): text(symbol) for i, symbol in enumerate(symbols)}}


VOCABULARIES = { # name -> symbols, tokens of the model, meta.pkl, prompt, text if nanoGPT itself was asked
    "padded-to-64": (LETTERS, 64, meta_of(LETTERS), "a", "agpxxkrpxgmsrcyrkp\nhpyhhyvbfz\ngy\nfzzcgsum\n"),
    "padded-to-128": (LETTERS, 128, meta_of(LETTERS), "hello", None),
    "3-in-64": (list("abc"), 64, meta_of("abc"), "cab", None),
    "5-in-50304": (FIVE, 50304, meta_of(FIVE), "a", None),
    "words": (WORDS, 6, meta_of(WORDS), "x",
              "xNf3e5 e5Nf3e5e5Nf3 e4Nf3xe5Nf3  xe4e4Nf3  xe4\n e4e5e4    \ne4Nf3e4e4 \n\n"),
    "notes": (["C4 ", "D#4 ", "r", "|", "E"], 64, meta_of(["C4 ", "D#4 ", "r", "|", "E"], itos=list), "r|", None),
    "pieces": (["▁the", "▁", "e", "ing"], 4, meta_of(["▁the", "▁", "e", "ing"], itos=tuple), "e▁", None),
    "text-and-ordered": (FIVE, 5, meta_of(FIVE, stoi=OrderedDict, itos="".join), "ab", None),
    "numpy-ids": (FIVE, 5, numpy_meta(FIVE), "a", "a   cccccccccccccccccccccccccccc ccc  cc \n"),
    "numpy-texts": (FIVE, 8, numpy_meta(FIVE, text=np.str_), "b", None),
    "numpy-int32": (FIVE, 64, numpy_meta(FIVE, np.uint16, np.int32), "c", None),
    "default-dict": (WORDS, 6, meta_of(WORDS, stoi=lambda pairs: defaultdict(int, pairs)), " ", None),
}


@pytest.mark.parametrize(("symbols", "vocab_size", "meta", "start", "text"), VOCABULARIES.values(), ids=VOCABULARIES)
def test_the_text_is_nanogpts(run_script, tmp_path, symbols, vocab_size, meta, start, text):
    model = make_model(len(symbols), vocab_size)
    save_checkpoint(tmp_path, model, meta=False)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    args = {name: getattr(model.config, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    ids, = nanogpt_samples(args, model.state_dict(), 1337, [symbols.index(char) for char in start], 1, 40,
                           temperature=0.8, top_k=200)
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
    before, after = theirs.decode(ids), theirs.decode(ids + tokens)
    assert after == before + line["text"] or kind == "whole-text"


@pytest.mark.parametrize("char", ["😀", "語", "é\u0301", "🦖", "字"])
def test_alternatives_are_decoded_after_the_bytes_of_a_character(run_script, gpt2_encoding, tmp_path, char):
    from sampling.inputs.tiktoken_tokenizer import TiktokenTokenizer
    ids = TiktokenTokenizer().encode(char)
    save_repeating(tmp_path, ids, 50257)
    done = sample(run_script, tmp_path, char, temperature=0, logprobs=2, out_file="-", max_new_tokens=4 * len(ids) - 1)
    line = json.loads(done.stdout)
    assert line["version"] == 3 and line["text"] == char * 3 + TiktokenTokenizer().decode(ids[:-1])
    for token in line["logprobs"]["content"]:
        own = token["top_logprobs"][0]
        assert (own["id"], own["token"], own["logprob"]) == (token["id"], token["token"], token["logprob"])
