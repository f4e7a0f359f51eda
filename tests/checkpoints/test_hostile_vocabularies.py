"""Hostile vocabularies in meta.pkl are refused."""
import sys
import unicodedata

import pytest

from attacks import named_cases, needs_linux, write_attack
from models import make_gpt, save_checkpoint, save_meta
from pickle_code import value

pytest_plugins = ["attacks"]
pytestmark = needs_linux


HOSTILE = {
    "far-id": {"stoi": {"a": 2**40}, "itos": {0: "a"}}, "long-id": {"stoi": {"a": 10**4000}, "itos": {0: "a"}}, "long-text": {"stoi": {"x" * 10**6: 60}, "itos": {60: "x" * 10**6}},
    "long-character": {"stoi": {"a" * 10**6: 0}, "itos": {0: "a"}}, "none": {"stoi": {"a": 0}, "itos": [None]}, "float-id": {"stoi": [["a", 0]] * 10, "itos": {0.0: "a"}},
    "text": {"stoi": "abc", "itos": "abc"}, "disagreeing": {"stoi": {"a": 0, "b": 0}, "itos": {0: "b", 1: "a"}}, "escape-codes": {"stoi": {"\x1b[31m": 0, "b": 0}, "itos": {0: "b", 1: "\x1b[31m"}},
    "half": {"stoi": {"a": 0}}, "list": ["stoi", "itos"], "too-small": {"stoi": {"a": 0}, "itos": {0: "a"}},
}


@pytest.mark.parametrize("meta", named_cases(HOSTILE, quick={"far-id", "long-id", "long-text", "long-character", "escape-codes"}))
def test_hostile_vocabularies_are_refused(meta, assert_refused, valid_checkpoint, tmp_path):
    assert_refused("out/meta.pkl", write_attack("meta.pkl", value(meta), tmp_path, valid_checkpoint))


@pytest.mark.slow
def test_a_vocabulary_of_all_characters_loads(load_in_subprocess, tmp_path):
    """It is the largest vocabulary that a real data set can have."""
    chars = "".join(char for char in map(chr, range(sys.maxunicode)) if unicodedata.category(char) not in ("Cn", "Co", "Cs"))
    save_checkpoint(tmp_path / "out", make_gpt(vocab_size=len(chars), n_embd=2, n_layer=1), meta=False)
    save_meta(tmp_path / "out" / "meta.pkl", chars)
    assert load_in_subprocess(tmp_path)[:2] == (0, "")
