"""CharTokenizer, which reads its vocabulary of characters or bytes from meta.pkl."""
import pickle

import pytest

from models import CHARS
from sampling.inputs.char_tokenizer import CharTokenizer


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


@pytest.mark.parametrize("meta", [
    {"stoi": {i: i for i in range(256)}},
    {"stoi": {bytes([i]): i for i in range(256)}, "itos": [bytes([i]) for i in range(256)], "tokenizer": "byte-level"},
    {"tokenizer": "byte", "vocab_size": 256, "itos": {i: bytes([i]) for i in range(256)}},
], ids=["ints", "list", "named"])
def test_a_vocabulary_of_bytes_encodes_utf_8(tmp_path, meta):
    tokenizer, text = load(tmp_path, meta), "Größe 🙂"
    ids = tokenizer.encode(text)
    assert ids == list(text.encode()) and tokenizer.size == 256 and tokenizer.decode(ids) == text
    decode = tokenizer.incremental_decoder()
    assert [decode(i) for i in ids[-4:]] == ["", "", "", "🙂"]
    assert tokenizer.decode([65, 0xE2, 300, 0xE2]) == "A\ufffd\ufffd\ufffd"
    with pytest.raises(ValueError, match="not valid UTF-8 at character 2"):
        tokenizer.encode("a\udcff")


@pytest.mark.parametrize("stoi, text, message", [
    ({"a": 0, "\n": 1}, "aé€é", r"characters that .*meta.pkl lacks: 'é' at 2; '€' at 3; it has '\\na'$"),
    ({"a": 0, "n": 1}, "a\\n", r"'\\\\' at 2; it has 'an'; for a newline pass --start='\"\\n\"'$"),
    ({97: 0}, "aé", "lacks: 195 at 2; 169 at 3; it has b'a'$")], ids=ascii)
def test_the_error_names_unknown_characters(stoi, text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, {"stoi": stoi}).encode(text)


def test_vocabularies_that_are_odd_but_clear_are_used(tmp_path):
    """Two characters share an id, two ids share a character, or some tokens are special."""
    for stoi, itos in ({"b": 0}, {0: "a"}), ({}, {0: "a", 1: "a"}), ({"<|endoftext|>": 1, "[PAD]": 2}, ["a"]):
        assert load(tmp_path, {"stoi": {"a": 0} | stoi, "itos": itos}).encode("a") == [0]


@pytest.mark.parametrize("meta, message", [
    ({"stoi": {"a": 0}, "itos": {1: "a"}}, "damaged: stoi and itos disagree about 'a'"),
    ({"stoi": {"a": 0}, "itos": {0: "b"}}, "damaged: stoi and itos disagree about 'b'"),
    ({"stoi": {"a": 0, "▁t": 1}}, "'▁t' of several characters.*--tokenizer=NAME"),
    *[({"stoi": stoi}, "must map characters or bytes") for stoi in [{"a": 0, b"a": 1}, {256: 0}, {"a": -1}, {}]],
    ({"stoi": 3}, "stoi or itos is not a dict"), ([1], "cannot read .*: it holds a list"),
    (b"hello", "cannot read .*: .*damaged or incomplete"),
], ids=str)
def test_what_is_no_vocabulary_is_refused(meta, message, tmp_path): # checkpoints/test_attacks.py has more
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path, meta)
    assert str(tmp_path / "meta.pkl") in str(error.value)
