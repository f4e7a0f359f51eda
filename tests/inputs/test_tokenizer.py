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
from sampling.inputs.tokenizer_choice import load_tokenizer


def load(folder, dataset, vocab_size, tokenizer=None, is_huggingface=False, settings=None):
    """The tokenizer of a checkpoint in this folder, whose training had these settings."""
    checkpoint = Checkpoint("ckpt.pt", GPTConfig(vocab_size=vocab_size), {}, folder, is_huggingface=is_huggingface,
                            raw_config={"dataset": dataset} | (settings or {}))
    return load_tokenizer(checkpoint, tokenizer)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, gpt2_encoding):
    """The working directory. cl100k_base is a small encoding, since the real one is not here."""
    monkeypatch.chdir(tmp_path)
    ranks = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding("small", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|x|>": 100276})
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "cl100k_base", encoding)
    return tmp_path


@pytest.mark.parametrize("dataset", [None, 5, "x" * 100_000, "x" * 300, "a\0b"], ids=lambda dataset: repr(dataset)[:20])
def test_gpt2s_encoding_is_used_unnamed_for_gpt2s_vocabulary_alone(dataset, here, messages):
    for is_huggingface in False, True:
        for vocab_size in 50257, 50258, 50304, 51200:
            found = load(Path("out"), dataset, vocab_size, is_huggingface=is_huggingface)
            assert found.encode("Hello") == [15496] and messages.pop() == "GPT-2's encoding: 50257 tokens"
        for vocab_size in 61, 50256, 50305, 65536, 100352:
            with pytest.raises(ValueError, match=f"^no tokenizer is in {here}/out.* model has {vocab_size}; pass"):
                load(Path("out"), dataset, vocab_size, is_huggingface=is_huggingface)
    assert messages == ["ckpt.pt has no tokenizer of its own: using GPT-2's encoding"] * 4


def test_the_first_folder_with_a_tokenizer_has_it(here, messages):
    """The likelier files are written later, so each wins over those before it."""
    out, beside, letters = here / "project" / "out", here / "project" / "data" / "letters", Path("data", "letters")
    size = save_tokenizer("byte-level", beside)
    assert load(out, "letters", size).source == str(beside / "tokenizer.json")
    save_tokenizer("byte-level", out)
    assert load(out, "letters", size).source == str(out / "tokenizer.json")
    for folder in beside, letters, out:
        save_meta(folder / "meta.pkl")
        assert load(out, "letters", len(CHARS)).source == str(folder / "meta.pkl")
        assert messages[-1] == f"{folder / 'meta.pkl'}: {len(CHARS)} characters"
    assert load(out, "letters", size, is_huggingface=True).source == str(out / "tokenizer.json")
    (out / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 50257})) # for GPT-2's tokens
    assert load(out, "letters", len(CHARS)).source == str(letters / "meta.pkl")


@pytest.mark.parametrize("meta", [{}, {"itos": {0: "a"}, "vocab_size": 50257}], ids=str)
def test_a_damaged_vocabulary_is_not_replaced_by_gpt2s_encoding(meta, here):
    (here / "meta.pkl").write_bytes(pickle.dumps(meta))
    with pytest.raises(ValueError, match=r"cannot read .*meta\.pkl: its stoi is not a dict, but None"):
        load(here, None, 50257)


def test_nothing_is_read_outside_of_the_data_folder(here, messages):
    (here / "data" / "a").mkdir(parents=True)
    save_meta(here / "elsewhere" / "meta.pkl")
    (here / "elsewhere" / "tokenizer_config.json").write_text('{"tokenizer_class": "Secret"}')
    for dataset in "../elsewhere", "a/../../elsewhere", str(here / "elsewhere"):
        with pytest.raises(ValueError, match=r"^no tokenizer is in (?!.*elsewhere)"):
            load(here / "project" / "out", dataset, len(CHARS))
        assert f"names {dataset!r} as its data set, which is outside of data/" in messages.pop()


@pytest.mark.parametrize("meta, error", [
    ({"tokenizer": "tiktoken", "tiktoken_encoding": "cl100k_base", "itos": {0: "!"}}, None),
    ({"tokenizer": "tiktoken", "tiktoken_encoding": "my_own"}, "'my_own' in tiktoken_encoding"),
    ({"tokenizer": "sentencepiece", "stoi": {"a": 0}, "itos": {0: "a"}}, "'sentencepiece' in tokenizer"),
    ({"tiktoken_encoding": "cl100k_base", "has_additional_tokens": True}, "in has_additional_tokens"),
    ({"tokenizer": {"type": "bpe"}, "stoi": {"a": 0}}, "'a dict' in tokenizer")], ids=str)
def test_a_tokenizer_that_is_named_is_believed(meta, error):
    for content, settings in (meta, {}), ({"vocab_size": 100277}, meta):
        Path("meta.pkl").write_bytes(pickle.dumps(content))
        if error:
            with pytest.raises(ValueError, match=f"names a tokenizer that cannot be read, .*{error}; pass --tokenizer"):
                load(Path(), None, 100277, settings=settings)
        else:
            assert load(Path(), None, 100277, settings=settings).source == "tiktoken's cl100k_base"


@pytest.mark.parametrize("name, vocab_size, source", [
    ("gpt2", 65536, "GPT-2's encoding"), ("cl100k_base", 100352, "tiktoken's cl100k_base"),
    ("words", None, "words/tokenizer.json"), ("words/tokenizer.json", None, "words/tokenizer.json"),
    ("other", 64, "other/meta.pkl")])
def test_a_named_tokenizer_wins_over_what_is_found(name, vocab_size, source):
    for folder in "out", "other":
        save_meta(Path(folder, "meta.pkl"))
    size = save_tokenizer("words", Path("words"))
    tokenizer = load(Path("out"), None, vocab_size or size, name)
    ids = tokenizer.encode("world")
    assert tokenizer.source == source and tokenizer.decode(ids) == "world"
    assert tokenizer.decode(torch.tensor(ids)) == tokenizer.decode(np.array(ids, np.uint16)) == "world"


@pytest.mark.parametrize("name, vocab_size, message", [
    (None, 60, f"out/meta.pkl has {len(CHARS)} tokens, but the model has 60, so it is not the tokenizer of this model"),
    ("cl100k_base", 100276, "cl100k_base has 100277 tokens, but the model has 100276"), ("gpt2", 61, "50257 tokens"),
    ("GPT2", 50257, "there is no tokenizer 'GPT2'; did you mean gpt2.; pass --tokenizer=NAME"),
    ("cl100k", 50257, "there is no tokenizer 'cl100k'; did you mean cl100k_base"), ("gpt2", 50256, "50257 tokens"),
    ("gpt3", 50257, "there is no tokenizer 'gpt3'; did .*; pass .* r50k_base, .*, a tokenizer.json or its folder"),
    ("empty", 50257, "there is no tokenizer 'empty'"), ("a.md", 61, "there is no tokenizer 'a.md'"),
    ("config.json", 61, "cannot read config.json: it has no model, so it is not a tokenizer.json"),
    ("meta.pkl", 50257, "has no stoi, and names no tokenizer")])
def test_what_is_no_tokenizer_of_this_model_is_an_error(name, vocab_size, message):
    Path("empty").mkdir()
    for file, content in ("a.md", b""), ("config.json", b"{}"), ("meta.pkl", pickle.dumps({"vocab_size": 50257})):
        Path(file).write_bytes(content)
    save_meta(Path("out", "meta.pkl"))
    with pytest.raises(ValueError, match=message):
        load(Path("out"), None, vocab_size, name)


@pytest.mark.parametrize("name, vocab_size, warning", [
    (None, 64, None), (None, 122, None), (None, 128, "meta.pkl has 61 tokens, but the model has 128; the rest may be"),
    (None, 50304, "model has 50304; the rest may be padding; if the model was trained on GPT-2's tokens, pass --token"),
    ("gpt2", 65536, None), ("gpt2", 200_000, "GPT-2's encoding has 50257 tokens, but the model has 200000"),
    ("words", 5000, "words/tokenizer.json has 75 tokens, but the model has 5000")])
def test_a_padded_vocabulary_is_the_models_and_gets_a_warning_if_it_is_mostly_padding(name, vocab_size, warning,
                                                                                     caplog):
    save_meta(Path("out", "meta.pkl"))
    save_tokenizer("words", Path("words"))
    load(Path("out"), None, vocab_size, name)
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(found) == bool(warning) and (warning or "") in "".join(found)


def test_the_script_takes_a_tokenizer(run_script, tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt(vocab_size=300), meta=False)
    (tmp_path / "bytes.pkl").write_bytes(pickle.dumps({"tokenizer": "byte"}))
    done = run_script("--out_dir=out", "--start=Hé ", "--num_samples=1", "--max_new_tokens=5", "--tokenizer=bytes.pkl",
                      cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("Hé ")
