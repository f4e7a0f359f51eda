"""CharTokenizer, which has one token per character and reads its vocabulary from meta.pkl."""
import pickle
import re
import tracemalloc

import pytest

from models import CHARS, save_meta
from pickled_call import CreatesFile
from sampling.inputs.char_tokenizer import CharTokenizer


@pytest.fixture
def tokenizer(tmp_path):
    save_meta(tmp_path / "meta.pkl")
    return CharTokenizer(tmp_path / "meta.pkl")


@pytest.mark.parametrize("text", ["Hello", "\n", CHARS, CHARS[::-1] * 3], ids=repr)
def test_encoded_text_decodes_to_the_same_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.size == len(CHARS)


def test_unknown_ids_decode_to_replacement_characters(tokenizer):
    assert tokenizer.decode([20, len(CHARS), 10**9, 21]) == f"{CHARS[20]}\ufffd\ufffd{CHARS[21]}"
    decode = tokenizer.incremental_decoder()
    assert decode(20) == CHARS[20] and decode(10**9) == decode(10**9, True) == "\ufffd"


@pytest.mark.parametrize("text, message", [
    ("aé€é", r"lacks: 'é' at 2, 4; '€' at 3 \(counted from 1\); it has"),
    ("7" * 9, r"'7' at 1, 2, 3 \.\.\."),
    ("a\\nb", r"'\\\\' at 2 .*for a newline pass --start='\"\\n\"'"),
    ("a\r\nb", r"'\\r' at 2 .*plain newlines"),
    ("0123456789", "; 5 more"),
], ids=repr)
def test_the_error_names_unknown_characters(tokenizer, text, message):
    with pytest.raises(ValueError, match=message):
        tokenizer.encode(text)


def test_the_other_letter_case_is_suggested(tmp_path):
    save_meta(tmp_path / "meta.pkl", "abc")
    with pytest.raises(ValueError, match=r"'A' at 1 .*it has 'a'"):
        CharTokenizer(tmp_path / "meta.pkl").encode("Abc")


def test_refusing_a_long_prompt_of_unknown_characters_takes_little_memory(tokenizer):
    tracemalloc.start()
    with pytest.raises(ValueError, match=re.escape("'é' at 1, 3, 5 ...; 'ü' at 2, 4, 6 ... (counted from 1)")):
        tokenizer.encode("éü" * 500_000)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_vocabulary_runs_no_code(protocol, tmp_path):
    content = pickle.dumps({"stoi": {"a": 0}, "itos": {0: CreatesFile(tmp_path / "ran")}}, protocol=protocol)
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.system, which could run code"):
        CharTokenizer(tmp_path / "meta.pkl")
    assert not (tmp_path / "ran").exists()
    pickle.loads(content) # the attack itself works
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [
    b"", b"hello", pickle.dumps([1]), pickle.dumps({}), pickle.dumps({"stoi": {}, "itos": {}}), pickle.dumps({"stoi": 3, "itos": {}}),
    pickle.dumps({"stoi": {"a": "b"}, "itos": {0: "a"}}), pickle.dumps({"stoi": {"a": -1}, "itos": {0: "a"}}),
    pickle.dumps({"stoi": {"a": 0}, "itos": {0: 1}}), pickle.dumps({"stoi": {"a": True}, "itos": {0: "a"}}),
], ids=repr)
def test_a_file_without_a_vocabulary_is_refused(content, tmp_path):
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "meta.pkl"))):
        CharTokenizer(tmp_path / "meta.pkl")


@pytest.mark.parametrize("stoi, itos, conflict", [
    ({"a": 0, "b": 0}, {0: "a"}, None), # two characters share an id
    ({"a": 0}, {0: "a", 1: "a"}, None), # two ids share a character
    ({"a": 0, "b": 1}, ["a", "b"], None),
    ({"a": 0, "b": 1}, {0: "b", 1: "a"}, "'[ab]'"),
    ({"a": 0}, {0: "b"}, "'b'"),
], ids=str)
def test_stoi_and_itos_must_agree(tmp_path, stoi, itos, conflict):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"stoi": stoi, "itos": itos}))
    if conflict is None:
        assert CharTokenizer(tmp_path / "meta.pkl").encode("a") == [0]
    else:
        with pytest.raises(ValueError, match=f"damaged: stoi and itos disagree about {conflict}"):
            CharTokenizer(tmp_path / "meta.pkl")
