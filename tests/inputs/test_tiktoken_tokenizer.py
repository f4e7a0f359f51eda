"""TiktokenTokenizer, GPT-2's byte-pair encoding, and where its vocabulary comes from."""
import hashlib
import random

import pytest
import tiktoken

from hf_tokenizers import random_texts
from project import GPT2_FILES
from sampling.inputs.tiktoken_tokenizer import TiktokenTokenizer, from_json


@pytest.fixture
def tokenizer_json(tiktoken_cache, needs_gpt2_encoding, tmp_path):
    """GPT-2's tokenizer.json, as far as it is read."""
    vocab = (tiktoken_cache / GPT2_FILES["encoder.json"]).read_text()
    (tmp_path / "tokenizer.json").write_text(f'{{"model": {{"vocab": {vocab}}}}}')
    return tmp_path / "tokenizer.json"


@pytest.fixture
def fill_cache(tmp_path, monkeypatch, tokenizer_json):
    """There is no network, and no vocabulary in tiktoken's cache. This function puts one in Hugging Face's cache."""
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, "gpt2", raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr("tiktoken.load.read_file", lambda url: (_ for _ in ()).throw(ConnectionError("no network")))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def fill(repository):
        for name, text in ("refs/main", "1234"), ("snapshots/1234/tokenizer.json", tokenizer_json.read_text()):
            path = tmp_path / f"models--{repository}" / name
            path.parent.mkdir(parents=True)
            path.write_text(text)
    return fill


def test_text_is_encoded_as_by_gpt2(gpt2_encoding):
    tokenizer = TiktokenTokenizer()
    assert tokenizer.encode("Hello world<|endoftext|>") == [15496, 995, 50256] and tokenizer.size == 50257
    assert tokenizer.decode([15496, 50257, 50303, 995, 222]) == "Hello\ufffd\ufffd world\ufffd" # 222 is no character
    ids, decode = tokenizer.encode("🙂"), tokenizer.incremental_decoder()
    assert len(ids) > 1 and [decode(i) for i in ids] == [""] * (len(ids) - 1) + ["🙂"]
    assert decode(ids[0], True) == "\ufffd"
    with pytest.raises(ValueError, match="not valid UTF-8 at character 2"):
        tokenizer.encode("a\udcff")


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_tokenizer_json_gives_the_same_ids_and_bytes(count, gpt2_encoding, tokenizer_json):
    ours, theirs, rng = from_json(tokenizer_json), tiktoken.get_encoding("gpt2"), random.Random(1)
    assert [ours.decode_single_token_bytes(i) for i in range(50257)] == theirs.decode_tokens_bytes(range(50257))
    for text in random_texts("gpt2", count):
        text += rng.choice(["", "  x", " \n\n a", "'ll 123'S", "ﷺ" * 5])
        assert ours.encode(text, allowed_special="all") == theirs.encode(text, allowed_special="all")


def test_hugging_faces_cache_comes_before_downloads(fill_cache):
    fill_cache("openai-community--gpt2")
    for name in "gpt2", "r50k_base":
        assert TiktokenTokenizer(name, log=pytest.fail).encode("Hello world") == [15496, 995]


def test_each_failure_is_said_once_and_the_error_says_what_to_get(fill_cache, tokenizer_json):
    tokenizer_json.write_text(tokenizer_json.read_text().replace('"Hello": 15496', '"Hello": 15497'))
    fill_cache("gpt2")
    lines = []
    with pytest.raises(ValueError, match="set TIKTOKEN_CACHE_DIR to that folder") as error:
        TiktokenTokenizer(log=lines.append)
    assert [line.split(" failed (")[0] for line in lines] == [f"GPT-2's encoding: {source}" for source in (
        "tokenizer.json in Hugging Face's cache", "tiktoken's download", "the download from Hugging Face's hub")]
    assert "does not have GPT-2's vocabulary" in lines[0] and "ConnectionError: no network" in lines[1]
    for name, cached_name in GPT2_FILES.items():
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        assert url in str(error.value) and hashlib.sha1(url.encode()).hexdigest() == cached_name in str(error.value)
    with pytest.raises(ValueError, match=r"get https://\S+/encodings/cl100k_base\.tiktoken, save it as 9b5ad71b2ce5"):
        TiktokenTokenizer("cl100k_base", lines.append)
