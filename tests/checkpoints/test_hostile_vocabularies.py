"""Hostile vocabularies in meta.pkl, and dataset names that lead to other files, are refused."""
import sys
import unicodedata

import pytest

from attacks import needs_linux, write_attack
from models import make_gpt, save_checkpoint, save_meta
from pickle_code import value

pytest_plugins = ["attacks"]
pytestmark = needs_linux


@pytest.mark.parametrize("meta", [
    {"stoi": {"a": 2**40}, "itos": {0: "a"}}, {"stoi": {"a": 10**4000}, "itos": {0: "a"}}, {"stoi": {"x" * 10**6: 60}, "itos": {60: "x" * 10**6}}, {"stoi": {"a" * 10**6: 0}, "itos": {0: "a"}},
    {"stoi": {"a": 0}, "itos": [None]}, {"stoi": [["a", 0]] * 10, "itos": {0.0: "a"}}, {"stoi": "abc", "itos": "abc"}, {"stoi": {"a": 0, "b": 0}, "itos": {0: "b", 1: "a"}},
    {"stoi": {"\x1b[31m": 0, "b": 0}, "itos": {0: "b", 1: "\x1b[31m"}}, {"stoi": {"a": 0}}, ["stoi", "itos"], {"stoi": {"a": 0}, "itos": {0: "a"}},
], ids=["far-id", "long-id", "long-text", "long-character", "none", "float-id", "text", "disagreeing", "escape-codes", "half", "list", "too-small"])
def test_hostile_vocabularies_are_refused(meta, assert_refused, valid_checkpoint, tmp_path):
    assert_refused("out/meta.pkl", write_attack("meta.pkl", value(meta), tmp_path, valid_checkpoint))


@pytest.mark.slow
def test_a_vocabulary_of_all_characters_loads(load_in_subprocess, tmp_path):
    """It is the largest vocabulary that a real data set can have."""
    chars = "".join(char for char in map(chr, range(sys.maxunicode)) if unicodedata.category(char) not in ("Cn", "Co", "Cs"))
    save_checkpoint(tmp_path / "out", make_gpt(vocab_size=len(chars), n_embd=2, n_layer=1), meta=False)
    save_meta(tmp_path / "out" / "meta.pkl", chars)
    assert load_in_subprocess(tmp_path)[:2] == (0, "")


@pytest.mark.parametrize("dataset", ["../elsewhere", "x/../../elsewhere", "absolute"])
def test_a_vocabulary_outside_of_the_data_folder_is_refused(dataset, assert_refused, tmp_path):
    dataset = str(tmp_path / "elsewhere") if dataset == "absolute" else dataset
    save_meta(tmp_path / "elsewhere" / "meta.pkl")
    (tmp_path / "data" / "x").mkdir(parents=True)
    save_checkpoint(tmp_path / "out", make_gpt(), meta=False, config={"dataset": dataset})
    assert_refused("outside of data/")


@pytest.mark.parametrize("dataset", ["a\0b", "\x1b[31m", "x" * 10**6, 5, ["x"], "", "."], ids=lambda name: repr(name)[:20])
def test_an_invalid_dataset_name_has_no_vocabulary(dataset, assert_refused, tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt(), meta=False, config={"dataset": dataset})
    assert_refused("GPT-2's encoding has 50257 tokens, but the model has 61")
