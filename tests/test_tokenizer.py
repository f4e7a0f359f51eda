"""Text <-> token ids."""
import os
import pickle
import re
import tracemalloc

import pytest
from tokenizer import CharTokenizer, GPT2Tokenizer, load_tokenizer

from conftest import CHARS, save_meta


@pytest.fixture
def letters_table(tmp_path):
    save_meta(tmp_path / "meta.pkl")
    return CharTokenizer(tmp_path / "meta.pkl")


@pytest.mark.parametrize("text", ["Hello", "\n", CHARS, CHARS[::-1] * 3], ids=repr)
def test_characters_there_and_back(letters_table, text):
    assert letters_table.decode(letters_table.encode(text)) == text
    assert letters_table.size == len(CHARS)


@pytest.mark.parametrize("text", ["Hello, I'm a language model,", "\n\n  x = 1\t# é 中文 🙂", "a<|endoftext|>b", " ", "\r\n"], ids=repr)
def test_gpt2_there_and_back(gpt2_encoding, text):
    tokenizer = GPT2Tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.size == 50257


def test_gpt2_ids_are_gpt2s(gpt2_encoding):
    assert GPT2Tokenizer().encode("Hello world<|endoftext|>") == [15496, 995, 50256]


def test_unknown_ids_show_as_replacement_characters(gpt2_encoding, letters_table):
    assert letters_table.decode([20, len(CHARS), 10**9, 21]) == f"{CHARS[20]}��{CHARS[21]}"
    assert GPT2Tokenizer().decode([15496, 50257, 50303, 995]) == "Hello�� world"
    assert GPT2Tokenizer().decode([222]) == "�" # a token that is part of a character


@pytest.mark.parametrize("text, said", [
    ("aé€é", r"lacks: 'é' at 2, 4; '€' at 3 \(counted from 1\); it has"),
    ("7" * 9, r"'7' at 1, 2, 3 \.\.\."),
    ("a\\nb", r"'\\\\' at 2 .*for a newline pass --start='\"\\n\"'"),
    ("a\r\nb", r"'\\r' at 2 .*plain newlines"),
    ("0123456789", "; 5 more"),
], ids=repr)
def test_lacking_characters_are_named(letters_table, text, said):
    with pytest.raises(ValueError, match=said):
        letters_table.encode(text)


def test_another_case_is_suggested(tmp_path):
    save_meta(tmp_path / "meta.pkl", "abc")
    with pytest.raises(ValueError, match=r"'A' at 1 .*it has 'a'"):
        CharTokenizer(tmp_path / "meta.pkl").encode("Abc")


def test_text_that_is_no_unicode_is_refused(gpt2_encoding):
    with pytest.raises(ValueError, match="not valid UTF-8 at character 2"):
        GPT2Tokenizer().encode("a\udcff")


class Runs:
    """Pickles as a call that leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_table_runs_nothing(protocol, tmp_path):
    content = pickle.dumps({"stoi": {"a": 0}, "itos": {0: Runs(tmp_path / "ran")}}, protocol=protocol)
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
def test_what_is_no_table_is_refused(content, tmp_path):
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "meta.pkl"))):
        CharTokenizer(tmp_path / "meta.pkl")


def test_where_a_table_is_looked_for(tmp_path, monkeypatch, gpt2_encoding):
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("out", "letters", 50304).source == "GPT-2's encoding"
    save_meta(tmp_path / "data" / "letters" / "meta.pkl")
    assert load_tokenizer("out", "letters", len(CHARS)).source == os.path.join("data", "letters", "meta.pkl")
    save_meta(tmp_path / "out" / "meta.pkl")
    assert load_tokenizer("out", "letters", len(CHARS)).source == os.path.join("out", "meta.pkl")
    assert load_tokenizer(None, None, 50257).source == "GPT-2's encoding"


@pytest.mark.parametrize("vocab_size, fits", [(len(CHARS) - 1, False), (len(CHARS), True), (64, True), (50304, False)])
def test_a_table_must_fit_its_network(vocab_size, fits, tmp_path):
    save_meta(tmp_path / "meta.pkl")
    if fits:
        load_tokenizer(tmp_path, None, vocab_size)
    else:
        with pytest.raises(ValueError) as error:
            load_tokenizer(tmp_path, None, vocab_size)
        for said in str(tmp_path / "meta.pkl"), str(len(CHARS)), str(vocab_size):
            assert said in str(error.value)


def test_gpt2_without_its_files_says_which(tmp_path, monkeypatch):
    import tiktoken
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})

    def no_network(*args, **kwargs):
        raise ConnectionError("no network")
    monkeypatch.setattr("tiktoken.load.read_file", no_network)
    with pytest.raises(ValueError) as error:
        GPT2Tokenizer()
    for said in "vocab.bpe", "encoder.json", "TIKTOKEN_CACHE_DIR", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee":
        assert said in str(error.value)


def test_a_long_prompt_in_another_script_takes_no_memory_to_refuse(letters_table):
    tracemalloc.start()
    with pytest.raises(ValueError, match=re.escape("'é' at 1, 3, 5 ...; 'ü' at 2, 4, 6 ... (counted from 1)")):
        letters_table.encode("éü" * 500_000)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_cache_without_room_is_named(vocabulary, tmp_path, monkeypatch):
    """Where the encoding can be downloaded but not kept."""
    import tiktoken.load
    from tiktoken.registry import ENCODINGS
    files = {name: (vocabulary / digest).read_bytes() for name, digest in (
        ("vocab.bpe", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"), ("encoder.json", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"))}
    monkeypatch.setattr(tiktoken.load, "read_file", lambda address: files[address.rpartition("/")[2]])
    monkeypatch.delitem(ENCODINGS, "gpt2", raising=False)
    (tmp_path / "cache").symlink_to("/dev/full")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"could not be downloaded and kept \(\w+Error (File exists|Not a directory)\)"):
        GPT2Tokenizer()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "new"))
    assert GPT2Tokenizer().decode([15496]) == "Hello"
    assert {file.read_bytes() for file in (tmp_path / "new").iterdir()} == set(files.values())
