"""load_tokenizer finds the tokenizer of a checkpoint, or uses the one that the user names."""
import pickle
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch

from hf_tokenizers import save_tokenizer
from model import GPTConfig
from models import CHARS, make_gpt, save_checkpoint, save_meta
from sampling.checkpoints.checkpoint import Checkpoint
from sampling.inputs.tokenizer import load_tokenizer

GPT2 = "GPT-2's encoding"


def load(folder, dataset, vocab_size, tokenizer=None, log=pytest.fail, is_huggingface=False, settings=None):
    """The tokenizer of a checkpoint in this folder, whose training had these settings."""
    checkpoint = Checkpoint("ckpt.pt", GPTConfig(vocab_size=vocab_size), {}, folder, is_huggingface=is_huggingface,
                            raw_config={"dataset": dataset} | (settings or {}))
    return load_tokenizer(checkpoint, log, tokenizer)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, gpt2_encoding):
    """The working directory. cl100k_base and o200k_base are small encodings, since the real ones are not here."""
    monkeypatch.chdir(tmp_path)
    for name in "cl100k_base", "o200k_base":
        ranks = {bytes([i]): i for i in range(256)}
        encoding = tiktoken.Encoding(name, pat_str=".", mergeable_ranks=ranks, special_tokens={"<|x|>": 100276})
        monkeypatch.setitem(tiktoken.registry.ENCODINGS, name, encoding)
    return tmp_path


@pytest.mark.parametrize("dataset", [None, 5, "x" * 100_000, "x" * 300, "a\0b"], ids=lambda dataset: repr(dataset)[:20])
def test_gpt2s_encoding_is_used_unnamed_for_gpt2s_vocabulary_alone(dataset):
    lines = []
    for is_huggingface in False, True:
        for vocab_size in 50257, 50258, 50304, 51200:
            assert load(Path("out"), dataset, vocab_size, None, lines.append, is_huggingface).source == GPT2
        for vocab_size in 61, 50256, 50305, 65536, 100352:
            with pytest.raises(ValueError, match=f"50257 tokens, but the model has {vocab_size}.*--tokenizer=NAME"):
                load(Path("out"), dataset, vocab_size, is_huggingface=is_huggingface)
    assert lines == ["ckpt.pt has no tokenizer of its own: using GPT-2's encoding"] * 4
    with pytest.raises(ValueError, match=f"^neither meta.pkl nor tokenizer.json is in {Path('out').absolute()}/"):
        load(Path("out"), dataset, 61)


def test_the_first_folder_with_a_tokenizer_has_it(here):
    """The likelier files are written later, so each wins over those before it."""
    out, beside, letters = here / "project" / "out", here / "project" / "data" / "letters", Path("data", "letters")
    size = save_tokenizer("byte-level", beside)
    out.mkdir()
    assert load(out, "letters", size).source == str(beside / "tokenizer.json")
    save_tokenizer("byte-level", out)
    assert load(out, "letters", size).source == str(out / "tokenizer.json")
    for folder in beside, letters, out:
        save_meta(folder / "meta.pkl")
        assert load(out, "letters", len(CHARS)).source == str(folder / "meta.pkl")
    assert load(out, "letters", size, is_huggingface=True).source == str(out / "tokenizer.json")
    (out / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 50257})) # for GPT-2's tokens
    assert load(out, "letters", len(CHARS)).source == str(letters / "meta.pkl")
    assert load(out, "nothing", size).source == str(out / "tokenizer.json")


def test_a_vocabulary_outside_of_the_data_folder_is_refused(here):
    (here / "data" / "a").mkdir(parents=True)
    for save in lambda folder: save_tokenizer("words", folder), lambda folder: save_meta(folder / "meta.pkl"):
        save(here / "elsewhere")
        for dataset in "../elsewhere", "a/../../elsewhere", str(here / "elsewhere"):
            with pytest.raises(ValueError, match="outside of data/; if it is the right file, copy it to the folder of"):
                load(here / "project" / "out", dataset, len(CHARS))


def test_a_tokenizer_that_is_named_is_believed():
    meta = {"tokenizer": "tiktoken", "tiktoken_encoding": "cl100k_base", "itos": {0: "!"}}
    assert load(Path(), None, 100277, settings=meta).source == "tiktoken's cl100k_base"
    Path("meta.pkl").write_bytes(pickle.dumps(meta))
    assert load(Path(), None, 100277).source == "tiktoken's cl100k_base"


@pytest.mark.parametrize("meta, named", [
    ({"tokenizer": "tiktoken", "tiktoken_encoding": "my_own"}, "'my_own' in tiktoken_encoding"),
    ({"tokenizer": "sentencepiece", "stoi": {"a": 0}, "itos": {0: "a"}}, "'sentencepiece' in tokenizer"),
    ({"tiktoken_encoding": "gpt2", "has_additional_tokens": True}, "with has_additional_tokens"),
    ({"tokenizer": {"type": "bpe"}, "stoi": {"a": 0}}, "'a dict' in tokenizer")])
def test_a_named_tokenizer_that_cannot_be_read_is_an_error(meta, named):
    for content, settings in (meta, {}), ({}, meta):
        Path("meta.pkl").write_bytes(pickle.dumps(content))
        with pytest.raises(ValueError, match=f"names a tokenizer that cannot be read, .*{named}; pass --tokenizer"):
            load(Path(), None, 50304, settings=settings)


@pytest.mark.parametrize("name, vocab_size, source", [
    ("gpt2", 65536, GPT2), ("cl100k_base", 100352, "tiktoken's cl100k_base"), ("words", None, "words/tokenizer.json"),
    ("words/tokenizer.json", None, "words/tokenizer.json"), ("other", 64, "other/meta.pkl")])
def test_a_named_tokenizer_wins_over_what_is_found(name, vocab_size, source):
    for folder in "out", "other":
        save_meta(Path(folder, "meta.pkl"))
    size = save_tokenizer("words", Path("words"))
    tokenizer = load(Path("out"), None, vocab_size or size, name)
    assert tokenizer.source == source and tokenizer.decode(tokenizer.encode("world")) == "world"


@pytest.mark.parametrize("name, vocab_size, message", [
    (None, 50304, f"out/meta.pkl has {len(CHARS)} tokens, but the model has 50304"), (None, 60, "the model has 60, so"),
    ("o200k_base", 200018, "o200k_base has 200019 tokens, but the model has 200018"), ("gpt2", 61, "has 50257 tokens"),
    ("gpt3", 50257, "r50k_base, .* a meta.pkl; got 'gpt3'$"), ("GPT2", 50257, "got 'GPT2'; did you mean gpt2?"),
    ("empty", 50257, "got 'empty', a folder without a tokenizer"), ("a.md", 61, "got 'a.md', a file of another kind"),
    ("config.json", 61, "cannot read config.json: it has no model, so it is not a tokenizer.json"),
    ("meta.pkl", 50257, "has no stoi, and names no tokenizer")])
def test_what_is_no_tokenizer_of_this_model_is_an_error(name, vocab_size, message):
    Path("empty").mkdir()
    Path("a.md").touch()
    Path("config.json").write_text("{}")
    Path("meta.pkl").write_bytes(pickle.dumps({"vocab_size": 50257}))
    save_meta(Path("out", "meta.pkl"))
    with pytest.raises(ValueError, match=message):
        load(Path("out"), None, vocab_size, name)


@pytest.mark.parametrize("name", ["other", "gpt2", "bytes"])
def test_lists_and_tensors_are_decoded_alike(name):
    save_meta(Path("other", "meta.pkl"))
    size = save_tokenizer("byte-level", Path("bytes"))
    tokenizer = load(Path("out"), None, {"other": len(CHARS), "gpt2": 50304, "bytes": size}[name], name)
    ids = tokenizer.encode("hello world")
    assert type(ids) is list and all(type(i) is int for i in ids)
    for convert in list, torch.tensor, lambda ids: np.array(ids, dtype=np.uint16):
        assert tokenizer.decode(convert([*ids, 60_000])) == "hello world\ufffd" and tokenizer.decode(convert([])) == ""
    for ids in torch.ones(1, 2, dtype=torch.long), np.ones((1, 2), dtype=int):
        with pytest.raises((ValueError, TypeError)):
            tokenizer.decode(ids)


def test_the_script_takes_a_tokenizer(run_script, tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt(vocab_size=300), meta=False)
    (tmp_path / "bytes.pkl").write_bytes(pickle.dumps({"tokenizer": "byte"}))
    arguments = f"--out_dir={tmp_path / 'out'}", "--start=Hé ", "--num_samples=1", "--max_new_tokens=5"
    done = run_script(*arguments)
    assert done.returncode == 1 and "error: neither meta.pkl" in done.stderr and "--tokenizer=NAME|FILE" in done.stderr
    done = run_script(*arguments, f"--tokenizer={tmp_path / 'bytes.pkl'}")
    assert done.returncode == 0 and done.stdout.startswith("Hé ") and "trailing space" not in done.stderr
    done = run_script(*arguments, "--tokenizer=")
    assert done.returncode == 2 and "tokenizer must be an encoding of tiktoken" in done.stderr
