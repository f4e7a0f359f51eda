"""load_tokenizer finds the tokenizer of a checkpoint."""
import os
import pickle
from pathlib import Path

import pytest

from hf_tokenizers import save_tokenizer
from models import CHARS, save_meta
from sampling.checkpoints.checkpoint import Checkpoint
from sampling.inputs.tokenizer import load_tokenizer


def load(folder, dataset, vocab_size):
    """The tokenizer of a checkpoint with these fields."""
    return load_tokenizer(Checkpoint("ckpt.pt", {}, {}, vocab_size, folder=folder, dataset=dataset), log=lambda text: None)


def test_meta_pkl_is_searched_in_the_checkpoints_folder_and_then_in_data(tmp_path, monkeypatch, gpt2_encoding):
    monkeypatch.chdir(tmp_path)
    out = Path("out")
    assert load(out, "letters", 50304).source == "GPT-2's encoding"
    save_meta(tmp_path / "data" / "letters" / "meta.pkl")
    assert load(out, "letters", len(CHARS)).source == os.path.join("data", "letters", "meta.pkl")
    save_meta(tmp_path / "out" / "meta.pkl")
    assert load(out, "letters", len(CHARS)).source == os.path.join("out", "meta.pkl")
    assert load(Path("empty"), None, 50257).source == "GPT-2's encoding"


@pytest.mark.parametrize("dataset", [5, None, ["letters"], "x" * 100_000, "no/such", "", ".", "a\0b", "\x1b[31m"], ids=lambda dataset: repr(dataset)[:20])
def test_gpt2s_encoding_is_used_if_dataset_is_not_a_usable_name(tmp_path, monkeypatch, gpt2_encoding, dataset):
    monkeypatch.chdir(tmp_path)
    assert load(Path("out"), dataset, 50304).source == "GPT-2's encoding"


def test_a_data_folder_beside_out_dir_comes_last(tmp_path, monkeypatch, gpt2_encoding):
    project, out = tmp_path / "project", tmp_path / "project" / "out"
    out.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    size = save_tokenizer("byte-level", project / "data" / "letters")
    assert load(out, "letters", size).source == str(project / "data" / "letters" / "tokenizer.json")
    save_meta(project / "data" / "letters" / "meta.pkl")
    for folder in out, Path("project", "out"):
        assert load(folder, "letters", len(CHARS)).source == str(project / "data" / "letters" / "meta.pkl")
    with monkeypatch.context() as inside:
        inside.chdir(out)
        assert load(Path(), "letters", len(CHARS)).source == str(project / "data" / "letters" / "meta.pkl")
    save_meta(tmp_path / "data" / "letters" / "meta.pkl")
    assert load(out, "letters", len(CHARS)).source == os.path.join("data", "letters", "meta.pkl")


@pytest.mark.parametrize("dataset", ["../elsewhere", "a/../../elsewhere"])
def test_a_vocabulary_outside_of_the_data_folder_beside_out_dir_is_refused(tmp_path, monkeypatch, dataset):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "project" / "data" / "a").mkdir(parents=True)
    save_meta(tmp_path / "project" / "elsewhere" / "meta.pkl")
    with pytest.raises(ValueError, match=r"outside of data/; if it is the right file, copy it to the folder of ckpt\.pt"):
        load(tmp_path / "project" / "out", dataset, len(CHARS))


def test_a_damaged_tokenizer_is_named_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_text("{")
    for folder in Path(), tmp_path, Path("..", tmp_path.name):
        with pytest.raises(ValueError) as error:
            load(folder, None, 61)
        assert str(error.value).count("cannot read") == 1 and str(error.value).startswith(f"cannot read {folder / 'tokenizer.json'}: ")


@pytest.mark.parametrize("dataset", ["../elsewhere", "a/../../elsewhere", "absolute"])
def test_a_vocabulary_outside_of_the_data_folder_is_refused(tmp_path, monkeypatch, dataset):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "a").mkdir(parents=True)
    save_meta(tmp_path / "elsewhere" / "meta.pkl")
    with pytest.raises(ValueError, match=r"outside of data/; if it is the right file, copy it to the folder of ckpt\.pt"):
        load(Path("out"), str(tmp_path / "elsewhere") if dataset == "absolute" else dataset, len(CHARS))


@pytest.mark.parametrize("vocab_size, fits", [(len(CHARS) - 1, False), (len(CHARS), True), (64, True), (50304, False)])
def test_a_vocabulary_must_fit_its_model(vocab_size, fits, tmp_path):
    save_meta(tmp_path / "meta.pkl")
    if fits:
        load(tmp_path, None, vocab_size)
    else:
        with pytest.raises(ValueError) as error:
            load(tmp_path, None, vocab_size)
        for part in str(tmp_path / "meta.pkl"), str(len(CHARS)), str(vocab_size):
            assert part in str(error.value)


def test_the_error_for_a_missing_vocabulary_names_its_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="50257 tokens, but the model has 61") as error:
        load(Path("out"), "letters", 61)
    with pytest.raises(ValueError) as long:
        load(Path("out"), "x" * 100_000, 61)
    assert len(str(long.value)) < 500
    assert f"(neither meta.pkl nor tokenizer.json is in out{os.sep}, {os.path.join('data', 'letters', '')})" in str(error.value)
    with pytest.raises(ValueError) as error:
        load(tmp_path / "a" / "out", "letters", 61)
    assert f", {os.path.join('data', 'letters', '')}, {tmp_path / 'a' / 'data' / 'letters'}{os.sep})" in str(error.value)


def test_a_vocabulary_comes_before_a_tokenizer_and_that_before_gpt2s_encoding(tmp_path, monkeypatch, gpt2_encoding):
    monkeypatch.chdir(tmp_path)
    out, letters = Path("out"), Path("data", "letters")
    size = save_tokenizer("byte-level", letters)
    assert load(out, "letters", size).source == str(letters / "tokenizer.json")
    save_tokenizer("byte-level", out)
    assert load(out, "letters", size).source == str(out / "tokenizer.json")
    save_meta(letters / "meta.pkl")
    assert load(out, "letters", len(CHARS)).source == str(letters / "meta.pkl")


def test_a_meta_pkl_without_a_vocabulary_is_ignored(tmp_path, monkeypatch, gpt2_encoding):
    monkeypatch.chdir(tmp_path)
    out, letters = Path("out"), Path("data", "letters")
    out.mkdir()
    (out / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 50257}))
    assert load(out, "letters", 50304).source == "GPT-2's encoding"
    size = save_tokenizer("byte-level", out)
    assert load(out, "letters", size).source == str(out / "tokenizer.json")
    save_meta(letters / "meta.pkl")
    assert load(out, "letters", len(CHARS)).source == str(letters / "meta.pkl")


def load_huggingface(folder, vocab_size):
    """The tokenizer of a Hugging Face model in a folder, and what it logs."""
    lines = []
    tokenizer = load_tokenizer(Checkpoint("someone/model", {}, {}, vocab_size, folder=folder, is_huggingface=True), lines.append)
    return tokenizer, lines


def test_a_hugging_face_model_has_its_own_tokenizer_or_gpt2s_encoding(tmp_path, gpt2_encoding):
    save_meta(tmp_path / "meta.pkl") # which is not for such a model
    tokenizer, lines = load_huggingface(tmp_path, 50257)
    assert tokenizer.source == "GPT-2's encoding" and lines == ["someone/model has no tokenizer of its own: using GPT-2's encoding"]
    size = save_tokenizer("unigram", tmp_path)
    tokenizer, lines = load_huggingface(tmp_path, size)
    assert tokenizer.source == str(tmp_path / "tokenizer.json") and lines == []


def test_the_advice_for_a_hugging_face_model_is_to_copy_its_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"copy the tokenizer\.json that the model was trained with"):
        load_huggingface(tmp_path, 30_000)


def test_a_tokenizer_that_cannot_be_read_is_never_replaced(tmp_path, gpt2_encoding):
    (tmp_path / "tokenizer.json").write_text("{}")
    for load_it in (lambda: load_huggingface(tmp_path, 50257), lambda: load(tmp_path, None, 50257)):
        with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json"):
            load_it()


def test_a_tokenizer_outside_of_data_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    save_tokenizer("byte-level", tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"outside of data/; if it is the right file, copy it to the folder of ckpt\.pt"):
        load(Path("out"), "../elsewhere", 400)
