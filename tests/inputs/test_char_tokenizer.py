"""CharTokenizer, which looks up each character or byte in meta.pkl, and joins the texts there, as nanoGPT does."""
import json
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch

from models import CHARS, nanogpt_args, save_checkpoint, save_repeating
from oracles import nanogpt_samples
from sampling.inputs.char_tokenizer import CharTokenizer
from sampling.inputs.tiktoken_tokenizer import TiktokenTokenizer
from sampling.model import GPT, GPTConfig

WORDS = {"\n": 0, "e4": 1, "Nf3": 2, " ": 3, "x": 4}
BYTES = {"tokenizer": "byte", "vocab_size": 256, "itos": {i: bytes([i]) for i in range(256)}}


def load(folder, meta):
    """The tokenizer of a meta.pkl with this content."""
    (folder / "meta.pkl").write_bytes(meta if isinstance(meta, bytes) else pickle.dumps(meta))
    return CharTokenizer(folder / "meta.pkl")


def test_text_is_encoded_character_by_character(tmp_path):
    tokenizer = load(tmp_path, {"stoi": {char: i for i, char in enumerate(CHARS)}, "itos": dict(enumerate(CHARS))})
    assert tokenizer.decode(tokenizer.encode(CHARS[::-1])) == CHARS[::-1] and tokenizer.size == len(CHARS)
    assert tokenizer.decode([20, len(CHARS), 21]) == f"{CHARS[20]}\ufffd{CHARS[21]}"
    decode = tokenizer.incremental_decoder()
    assert decode(20) == CHARS[20] and decode(10**9) == decode(10**9, True) == "\ufffd"


def test_longer_texts_are_joined_but_never_looked_up(tmp_path):
    tokenizer = load(tmp_path, {"stoi": WORDS, "itos": [*WORDS]})
    assert tokenizer.encode("x \n") == [4, 3, 0] and tokenizer.decode([1, 4, 2, 9]) == "e4xNf3\ufffd"
    assert (tokenizer.unit, tokenizer.size) == ("tokens", 5)
    assert load(tmp_path, {"stoi": {"▁the": 0, "a": 1}}).decode([0, 1]) == "▁thea"


@pytest.mark.parametrize("meta", [
    {"stoi": {i: i for i in range(256)}}, BYTES,
    {"stoi": {bytes([i]): i for i in range(256)}, "tokenizer": "byte-level"}], ids=["ints", "named", "bytes"])
def test_a_vocabulary_of_bytes_encodes_utf_8(tmp_path, meta):
    tokenizer = load(tmp_path, meta)
    assert (tokenizer.encode("öß🙂"), tokenizer.size, tokenizer.unit) == ([*"öß🙂".encode()], 256, "bytes")
    assert tokenizer.decode([*"Größe".encode(), 0xE2, 300, 0xE2]) == "Größe\ufffd\ufffd\ufffd"
    with pytest.raises(ValueError, match="not valid UTF-8 at character 2"):
        tokenizer.encode("a\udcff")


@pytest.mark.parametrize("prompt, ids, text", [
    ("🙂".encode()[:3], [0x82, 65], "🙂A"), (b"a\xe2", [0x82, 0xAC], "€"), (b"a\xe2\x82", [65], "A"), # not \ufffdA
    ("€".encode(), [0xAC, 65], "\ufffdA"), ("\ufffd".encode(), [65], "A"),
    (b"", [*"🙂A".encode()], "🙂A")], ids=str)
def test_a_character_that_begins_in_the_prompt_comes_whole(tmp_path, prompt, ids, text):
    decode = load(tmp_path, BYTES).incremental_decoder([*prompt])
    peeked = [(decode.peek(i), decode.peek(ids[0], True), decode.peek(i), decode(i)) for i in ids]
    assert "".join(found for *_, found in peeked) == text and all(a == b == c for a, _, b, c in peeked)


@pytest.mark.parametrize("stoi, text, message", [
    ({"a": 0, "\n": 1}, "aé€é", r"characters that .*meta.pkl lacks: 'é' at 2; '€' at 3; it has '\\na'$"),
    ({"a": 0, "n": 1}, "a\\n", r"'\\\\' at 2; it has 'an'; for a newline pass --start='\"\\n\"'$"),
    (WORDS, "xe4", r"'e' at 2; '4' at 3; it has '\\n x', and longer tokens, which no prompt has, such as 'e4'$"),
    ({97: 0}, "aé", "lacks: 195 at 2; 169 at 3; it has b'a'$")], ids=ascii)
def test_the_error_names_unknown_characters(stoi, text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, {"stoi": stoi}).encode(text)


@pytest.mark.parametrize("stoi, itos", [
    ({}, ("a",)), ({}, {0: "a", 1: "a"}), ({"b": 0}, "a"), ({"[PAD]": 1}, {0: "a"})], ids=repr)
def test_vocabularies_that_are_odd_but_clear_are_used(tmp_path, stoi, itos):
    """Two ids share a character, two characters share an id, or a token is special."""
    tokenizer = load(tmp_path, {"stoi": {"a": 0} | stoi, "itos": itos})
    assert tokenizer.encode("a") == [0] and tokenizer.decode([0]) == "a"
    assert load(tmp_path, {"stoi": {}, "itos": [65, 0xFF]}).decode([0, 1]) == "A\ufffd", "it encodes nothing"


@pytest.mark.parametrize("meta, message", [
    ({"stoi": {"a": 0}, "itos": {1: "a"}}, "damaged: stoi and itos disagree about 'a'"),
    ({"stoi": {"e4": 0, "e5": 1}, "itos": {0: "e4", 1: "e6"}}, "damaged: stoi and itos disagree about 'e6'"),
    *[({"stoi": stoi}, "must map texts or bytes")
      for stoi in [{"a": 0, b"a": 1}, {256: 0}, {"a": -1}, {"a": 2**63}, {}]],
    ({"stoi": 3}, "its stoi is not a dict, but 3"), ({"stoi": {"a": 0}, "itos": 1}, "its itos is not a dict, but 1"),
    ([1], "it holds list"), (b"hello", "damaged or incomplete"),
    (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
], ids=str)
def test_what_is_no_vocabulary_is_refused(meta, message, tmp_path): # checkpoints/test_attacks.py has more
    with pytest.raises(ValueError, match=f"meta.pkl.*{message}"):
        load(tmp_path, meta)


# ---- vocabularies as people have them, sampled by the script: the text is nanoGPT's

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


LETTERS, MOVES, FIVE = list("\nabcdefghijklmnopqrstuvwxyz"), ["\n", "e4", "e5", "Nf3", " ", "x"], list("\n abc")


@pytest.mark.parametrize("symbols, vocab_size, start, types, text", [ # the text, if nanoGPT itself was asked
    (LETTERS, 64, "a", {}, "agpxxkrpxgmsrcyrkp\nhpyhhyvbfz\ngy\nfzzcgsum\n"),
    (MOVES, 6, "x", {}, "xNf3e5 e5Nf3e5e5Nf3 e4Nf3xe5Nf3  xe4e4Nf3  xe4\n e4e5e4    \ne4Nf3e4e4 \n\n"),
    (FIVE, 5, "a", dict(key=np.int64, value=np.int64), "a   cccccccccccccccccccccccccccc ccc  cc \n"),
    (FIVE, 8, "b", dict(key=np.uint16, value=np.int32, text=np.str_), None), (MOVES, 64, " ", dict(itos=list), None),
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
