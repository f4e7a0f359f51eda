"""CharTokenizer looks up characters or bytes in meta.pkl, and joins the texts there."""
import pickle
from collections import OrderedDict

import numpy as np
import pytest

from sampling.inputs.char_tokenizer import CharTokenizer, read_meta

WORDS = {"\n": 0, "e4": 1, "Nf3": 2, " ": 3, "x": 4}
BYTES = {"tokenizer": "byte", "vocab_size": 256, "itos": {i: bytes([i]) for i in range(256)}}


def load(folder, meta):
    """The tokenizer of a meta.pkl with this content."""
    path = folder / "meta.pkl"
    path.write_bytes(meta if isinstance(meta, bytes) else pickle.dumps(meta))
    return CharTokenizer(path, read_meta(path))


def test_a_byte_order_mark_that_the_vocabulary_lacks_is_left_out(tmp_path):
    stoi = {"a": 0}
    assert load(tmp_path, {"stoi": stoi}).encode("\ufeffa") == [0]
    stoi["\ufeff"] = 1
    assert load(tmp_path, {"stoi": stoi}).encode("\ufeffa") == [1, 0]


def test_longer_texts_are_joined_but_never_looked_up(tmp_path):
    tokenizer = load(tmp_path, {"stoi": WORDS, "itos": [*WORDS]})
    assert tokenizer.encode("x \n") == [4, 3, 0]
    assert tokenizer.decode([1, 4, 2, 9]) == "e4xNf3\ufffd"
    assert tokenizer.missing_from("4xN\n?!") == {"?", "!"}
    assert load(tmp_path, {"stoi": {"▁the": 0, "a": 1}}).decode([0, 1]) == "▁thea"


def test_a_token_of_several_characters_in_a_prompt_gets_one_warning(tmp_path, messages):
    tokenizer = load(tmp_path, {"stoi": {"O": 0, "n": 1, "On": 2}})
    assert [tokenizer.encode(text) for text in ("n", "On", "On")] == [[1], [0, 1], [0, 1]]
    assert messages == [
        f"the prompt has tokens of several characters in {tmp_path}/meta.pkl, but each character "
        "of a prompt is looked up alone, as in nanoGPT"]


def test_the_first_token_without_a_text_gets_a_warning(tmp_path, messages):
    tokenizer = load(tmp_path, {"stoi": {"a": 0, "b": 2}})
    assert [tokenizer.decode(ids) for ids in ([0, 2], [1], [3])] == ["ab", "\ufffd", "\ufffd"]
    assert messages == [f"{tmp_path}/meta.pkl has no text for token 1: such tokens become U+FFFD; "
                        "if it is not the model's own, pass another tokenizer"]


@pytest.mark.parametrize("meta", [
    {"stoi": {i: i for i in range(256)}},
    BYTES,
    {"stoi": {bytes([i]): i for i in range(256)}, "tokenizer": "byte-level"},
])
def test_a_vocabulary_of_bytes_encodes_utf_8(tmp_path, meta):
    tokenizer = load(tmp_path, meta)
    assert tokenizer.encode("öß🙂") == [*"öß🙂".encode()]
    assert tokenizer.decode([*"Größe".encode(), 0xE2, 300, 0xE2]) == "Größe\ufffd\ufffd\ufffd"
    assert tokenizer.missing_from("öß") is None, "bytes may form any character"


@pytest.mark.parametrize("prompt, ids, text", [
    ("🙂".encode()[:3], [0x82, 65], "🙂A"),
    (b"a\xe2", [0x82, 0xAC], "€"),
    (b"a\xe2\x82", [65], "A"), # not \ufffdA
    ("€".encode(), [0xAC, 65], "\ufffdA"),
    ("\ufffd".encode(), [65], "A"),
    (b"", [*"🙂A".encode()], "🙂A"),
])
def test_a_character_that_begins_in_the_prompt_comes_whole(tmp_path, prompt, ids, text):
    decode = load(tmp_path, BYTES).decoder([*prompt])
    found = ""
    for i in ids:
        peeked = decode.peek(i)
        decode.peek(ids[0], True) # which changes nothing
        assert decode(i) == peeked
        found += peeked
    assert found == text


@pytest.mark.parametrize("stoi, text, message", [
    ({"a": 0, "\n": 1}, "aé€é",
     r"characters that .*meta.pkl lacks: 'é' at 2; '€' at 3; it has '\\na'$"),
    ({"a": 0, "n": 1}, "a\\n",
     r"'\\\\' at 2; it has 'an'; for a newline pass start='\"\\n\"'$"),
    (WORDS, "xe4", r"'e' at 2; '4' at 3; it has '\\n x'$"),
    ({"the": 0, "of": 1, ".": 2}, "\n",
     r"'\\n' at 1; it has '\.'; its tokens are words, but .*: pass start='\.' or the like$"),
    ({97: 0}, "aé", "lacks: 195 at 2; 169 at 3; it has b'a'$"),
    # It is decomposed.
    ({"é": 0, "a": 1}, "ae\u0301", "save the prompt in Unicode's form NFC, here 'aé'"),
])
def test_the_error_names_unknown_characters(stoi, text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, {"stoi": stoi}).encode(text)


@pytest.mark.parametrize("stoi, itos", [
    ({}, ("a",)),
    ({}, {0: "a", 1: "a"}), # two ids share a character
    ({"b": 0}, "a"), # two characters share an id
    ({"[PAD]": 1}, {0: "a"}),
    (OrderedDict(b=1), "ab"),
    ({np.str_("b"): np.int32(1)}, {np.uint16(0): np.str_("a")}),
])
def test_vocabularies_that_are_odd_but_clear_are_used(tmp_path, stoi, itos):
    tokenizer = load(tmp_path, {"stoi": {"a": 0} | stoi, "itos": itos, "counts": np.ones(5)})
    assert tokenizer.encode("a") == [0]
    assert tokenizer.decode([0]) == "a"


def test_a_vocabulary_may_encode_nothing(tmp_path):
    assert load(tmp_path, {"stoi": {}, "itos": [65, 0xFF]}).decode([0, 1]) == "A\ufffd"


@pytest.mark.parametrize("meta, message", [
    ({"stoi": {"a": 0, b"a": 1}}, "must map texts or bytes"),
    ({"stoi": {256: 0}}, "must map texts or bytes"),
    ({"stoi": {"a": -1}}, "must map texts or bytes"),
    ({"stoi": {}}, "must map texts or bytes"),
    ({"stoi": 3}, "its stoi is not a dict, but 3"),
    ({"stoi": {"a": 0}, "itos": 1}, "its itos is not a dict, but 1"),
    ([1], "it holds list"),
    (b"hello", "damaged or incomplete"),
    (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
    (b"N" * 2**23 + b".", "it has more than 8388608 bytes"),
])
def test_what_is_no_vocabulary_is_refused(meta, message, tmp_path):
    with pytest.raises(ValueError, match=f"meta.pkl.*{message}"): # test_attacks.py has more
        load(tmp_path, meta)
