"""GPT2Tokenizer, GPT-2's byte-pair encoding."""
import pytest

from project import GPT2_FILES
from sampling.inputs.gpt2_tokenizer import GPT2Tokenizer


@pytest.mark.parametrize("text", ["Hello, I'm a language model,", "\n\n  x = 1\t# é 中文 🙂", "a<|endoftext|>b", " ", "\r\n"], ids=repr)
def test_encoded_text_decodes_to_the_same_text(gpt2_encoding, text):
    tokenizer = GPT2Tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.size == 50257


def test_ids_equal_gpt2s(gpt2_encoding):
    assert GPT2Tokenizer().encode("Hello world<|endoftext|>") == [15496, 995, 50256]


def test_unknown_ids_decode_to_replacement_characters(gpt2_encoding):
    assert GPT2Tokenizer().decode([15496, 50257, 50303, 995]) == "Hello\ufffd\ufffd world"
    assert GPT2Tokenizer().decode([222]) == "\ufffd" # a token that is part of a character


def test_a_character_is_decoded_with_its_last_token(gpt2_encoding):
    tokenizer = GPT2Tokenizer()
    ids = tokenizer.encode("🙂")
    decode = tokenizer.incremental_decoder()
    assert len(ids) > 1 and [decode(i) for i in ids] == [""] * (len(ids) - 1) + ["🙂"]
    decode = tokenizer.incremental_decoder()
    assert decode(ids[0], True) == "\ufffd"


def test_text_that_is_not_valid_unicode_is_refused(gpt2_encoding):
    with pytest.raises(ValueError, match="not valid UTF-8 at character 2"):
        GPT2Tokenizer().encode("a\udcff")


def test_the_error_explains_that_the_cache_cannot_be_written(tiktoken_cache, needs_gpt2_encoding, tmp_path, monkeypatch):
    """The encoding can be downloaded, but not saved."""
    import tiktoken.load
    from tiktoken.registry import ENCODINGS
    files = {name: (tiktoken_cache / cached_name).read_bytes() for name, cached_name in GPT2_FILES.items()}
    monkeypatch.setattr(tiktoken.load, "read_file", lambda address: files[address.rpartition("/")[2]])
    monkeypatch.delitem(ENCODINGS, "gpt2", raising=False)
    (tmp_path / "cache").symlink_to("/dev/full")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"could not be downloaded and saved \(\w+Error (File exists|Not a directory)\)"):
        GPT2Tokenizer()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "new"))
    assert GPT2Tokenizer().decode([15496]) == "Hello"
    assert {file.read_bytes() for file in (tmp_path / "new").iterdir()} == set(files.values())
