"""Which files of a folder make its tokenizer, and what the settings beside them change."""
import json
import random
from pathlib import Path

import pytest

from hf_tokenizers import MAKE, random_texts, save_tokenizer
from project import GPT2_FILES
from sampling.inputs.gpt2_tokenizer import GPT2Tokenizer
from sampling.inputs.hf_tokenizer import HFTokenizer
from sampling.inputs.tokenizer_files import find_tokenizer

AUTO_MAP = {"auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}}


def write(folder, **files):
    """Write JSON files, and others from text."""
    for name, content in files.items():
        name = name.replace("_txt", ".txt") if name.endswith("_txt") else f"{name}.json"
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def load(folder, vocab_size=10**6):
    return HFTokenizer(find_tokenizer(folder), vocab_size)


def same_as_transformers(folder):
    """Whether the tokenizer in a folder encodes texts as transformers does."""
    from transformers import AutoTokenizer
    theirs, ours = AutoTokenizer.from_pretrained(folder), load(folder)
    return all(ours.encode("a" + text) == theirs("a" + text, add_special_tokens=False).input_ids for text in random_texts("files", 100))


@pytest.fixture
def byte_level(tmp_path):
    """A folder with vocab.json and merges.txt alone."""
    MAKE["byte-level"]().model.save(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["vocab.txt", "vocab.json", "tokenizer.json"])
def test_the_newest_kind_of_file_is_read(name, tmp_path):
    for path in ["vocab.txt", "vocab.json", "tokenizer.json"]:
        (tmp_path / path).touch()
        if path == name:
            break
    assert find_tokenizer(tmp_path) == tmp_path / name


def test_a_folder_without_files_has_no_tokenizer(tmp_path):
    assert find_tokenizer(tmp_path) is find_tokenizer(tmp_path / "nowhere") is None
    write(tmp_path, tokenizer_config={"model_max_length": 1024}, added_tokens={})
    assert find_tokenizer(tmp_path) is None


@pytest.mark.parametrize("name, message", [
    ("merges.txt", "needs a vocab.json in the same folder"), ("spiece.model", "SentencePiece"), ("tokenizer.model", "SentencePiece"), ("sentencepiece.bpe.model", "SentencePiece")])
def test_files_that_cannot_be_read_are_named(name, message, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(ValueError) as error:
        find_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("content, message", [(b"{}" + b" " * 2**24, "it has more than 16 MiB; without indentation it may be small enough"),
                                              (b'{"model": ', "it is damaged, or not JSON")], ids=["large", "truncated"])
def test_a_file_that_cannot_be_parsed_gets_advice(content, message, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^cannot read {tmp_path}/tokenizer.json: {message}"):
        HFTokenizer(find_tokenizer(tmp_path), 10)


@pytest.mark.parametrize("settings", [AUTO_MAP, {"tokenizer_class": "ByT5Tokenizer"}], ids=["code", "class"])
def test_settings_that_ask_for_a_tokenizer_without_files_are_refused(settings, tmp_path):
    write(tmp_path, tokenizer_config=settings)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json asks for '.*', but the folder has neither"):
        find_tokenizer(tmp_path)


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_half_a_tokenizer_is_refused(missing, byte_level):
    (byte_level / missing).unlink()
    with pytest.raises(ValueError) as error:
        load(byte_level)
    assert str(byte_level / "merges.txt") in str(error.value)


def test_a_folder_that_asks_for_code_is_read_without_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path) # the code would write to the working directory
    save_tokenizer("byte-level", tmp_path)
    before = load(tmp_path).encode("Hello world")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write(tmp_path, tokenizer_config=settings | AUTO_MAP)
    (tmp_path / "code.py").write_text("open('ran', 'w')")
    assert load(tmp_path).encode("Hello world") == before and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("settings", [
    {}, {"tokenizer_class": "GPT2Tokenizer"}, {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}, {"eos_token": "world"},
    {"eos_token": {"content": "world", "__type": "AddedToken", "lstrip": True, "rstrip": False, "normalized": True, "single_word": False}},
    {"additional_special_tokens": ["world", "Welt"]}, {"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "rstrip": True, "special": True}}},
], ids=["none", "class", "prefix-space", "text", "object", "list", "by-id"])
@pytest.mark.parametrize("new", [True, False], ids=["tokenizer.json", "older-files"])
def test_settings_mean_what_they_mean_to_transformers(settings, new, byte_level):
    if new:
        MAKE["byte-level"]().save(str(byte_level / "tokenizer.json"))
    write(byte_level, tokenizer_config=settings, config={"model_type": "gpt2"})
    assert same_as_transformers(byte_level)


@pytest.mark.parametrize("settings", [{"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}, {"unk_token": "[MASK]"}], ids=str)
def test_settings_of_a_vocab_txt(settings, tmp_path):
    save_tokenizer("vocab-txt", tmp_path)
    write(tmp_path, tokenizer_config={"tokenizer_class": "BertTokenizer"} | settings)
    assert same_as_transformers(tmp_path)


def test_added_tokens_beside_the_older_files(byte_level):
    size = load(byte_level).size
    write(byte_level, added_tokens={"<pad>": size + 1, "<sep>": size}, special_tokens_map={"sep_token": "<sep>"}, config={"model_type": "gpt2"})
    assert load(byte_level).encode("a<sep><pad>")[1:] == [size, size + 1]
    assert load(byte_level).size == size + 2
    assert same_as_transformers(byte_level)


def test_added_tokens_that_the_model_lacks_are_plain_text(byte_level):
    """Many tokenizers have a padding token that their model was not trained with."""
    size = load(byte_level).size
    write(byte_level, added_tokens={"<pad>": size})
    tokenizer = load(byte_level, vocab_size=size)
    assert tokenizer.size == size and tokenizer.decode(tokenizer.encode("<pad>")) == "<pad>" and len(tokenizer.encode("<pad>")) > 1


@pytest.mark.parametrize("main, class_name", [("vocab.json", "CLIPTokenizer"), ("vocab.txt", "BertJapaneseTokenizer")])
def test_older_files_of_other_classes_are_refused(main, class_name, tmp_path):
    write(tmp_path, tokenizer_config={"tokenizer_class": class_name})
    (tmp_path / main).write_text("{}")
    with pytest.raises(ValueError, match=f"'{class_name}' needs a tokenizer.json, not {main}"):
        load(tmp_path)


@pytest.mark.slow
def test_a_large_tokenizer_is_read(tmp_path):
    """One of 250,000 tokens, with indents as save_pretrained writes it."""
    vocab = {f"token{i}": i for i in range(250_000)}
    content = {"version": "1.0", "added_tokens": [], "model": {"type": "WordPiece", "unk_token": "token0", "continuing_subword_prefix": "##",
                                                              "max_input_chars_per_word": 100, "vocab": vocab}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=2))
    assert load(tmp_path).size == 250_000 and load(tmp_path).encode("token249999") == [249_999]


def test_the_older_files_may_have_the_line_ends_of_windows(byte_level):
    text = "Hello world, Größe"
    before = load(byte_level).encode(text)
    merges = Path(byte_level / "merges.txt")
    merges.write_bytes(merges.read_bytes().replace(b"\n", b"\r\n"))
    assert load(byte_level).encode(text) == before


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_gpt2s_own_files_give_gpt2s_encoding(count, tiktoken_cache, gpt2_encoding, tmp_path):
    (tmp_path / "vocab.json").write_bytes((tiktoken_cache / GPT2_FILES["encoder.json"]).read_bytes())
    (tmp_path / "merges.txt").write_bytes((tiktoken_cache / GPT2_FILES["vocab.bpe"]).read_bytes())
    ours, theirs, rng = load(tmp_path, 50257), GPT2Tokenizer(), random.Random(1)
    assert ours.size == 50257
    for text in filter(None, random_texts("gpt2", count)):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids and ours.decode(ids) == text
        ids = [rng.randrange(50300) for _ in range(20)]
        assert ours.decode(ids) == theirs.decode(ids)
