"""TiktokenTokenizer, GPT-2's byte-pair encoding, and where its vocabulary comes from."""
import hashlib

import pytest
import tiktoken

from hf_tokenizers import gpt2_tokenizer_json, random_texts
from project import GPT2_FILES
from sampling.inputs.tokenizer_choice import TiktokenTokenizer, load_encoding


@pytest.fixture
def leave_hub_cache(tmp_path, monkeypatch, gpt2_encoding, tiktoken_cache):
    """A function that leaves a tokenizer in Hugging Face's cache, none in tiktoken's, and no network."""
    def leave(repository, content):
        monkeypatch.delitem(tiktoken.registry.ENCODINGS, "gpt2", raising=False)
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
        monkeypatch.setattr("tiktoken.load.read_file", lambda url: (_ for _ in ()).throw(ConnectionError("no network")))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        for name, text in ("refs/main", "1234"), ("snapshots/1234/tokenizer.json", content):
            path = tmp_path / f"models--{repository}" / name
            path.parent.mkdir(parents=True)
            path.write_text(text)
    return leave


def test_text_is_encoded_as_by_gpt2(gpt2_encoding):
    tokenizer = TiktokenTokenizer()
    assert tokenizer.encode("Hello world<|endoftext|>") == [15496, 995, 50256] and tokenizer.size == 50257
    assert tokenizer.decode([15496, 50257, 50303, 995, 222]) == "Hello\ufffd\ufffd world\ufffd" # 222 is no character
    with pytest.raises(ValueError, match="not valid UTF-8 at character 2"):
        tokenizer.encode("a\udcff")
    with pytest.raises(ValueError, match=r"Regex error.*; mostly because of a million blanks in a row: shorten"):
        tokenizer.encode(f"a{' ' * 3_000_000}b")


def test_hugging_faces_cache_has_the_same_encoding_and_is_before_downloads(leave_hub_cache, tiktoken_cache, messages):
    theirs = TiktokenTokenizer()
    leave_hub_cache("openai-community--gpt2", gpt2_tokenizer_json(tiktoken_cache))
    ours, other = load_encoding("gpt2"), load_encoding("r50k_base") # two names of one encoding
    assert messages == [] and other.source == ours.source
    assert [ours.decode([i]) for i in range(50304)] == [theirs.decode([i]) for i in range(50304)]
    assert ours.size == theirs.size
    for text in random_texts("gpt2", 300):
        assert ours.encode(text + " \n\n a'll 123'S") == theirs.encode(text + " \n\n a'll 123'S")


def test_each_failure_is_said_once_and_the_error_says_what_to_get(leave_hub_cache, messages):
    leave_hub_cache("gpt2", "{}")
    with pytest.raises(ValueError, match="set TIKTOKEN_CACHE_DIR to that folder") as error:
        load_encoding("gpt2")
    assert [line.split(": ")[1] for line in messages] == [
        "tokenizer.json in Hugging Face's cache failed (RejectedFileError",
        "tiktoken's download failed (ConnectionError",
        "the download from Hugging Face's hub failed (LocalEntryNotFoundError"]
    assert "it has no model" in messages[0] and messages[1].endswith(": no network)")
    for name, cached_name in GPT2_FILES.items():
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        assert url in str(error.value) and hashlib.sha1(url.encode()).hexdigest() == cached_name in str(error.value)
