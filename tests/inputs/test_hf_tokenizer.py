"""The tokenizers of Hugging Face folders, compared with transformers."""
import json
import random

import pytest
from transformers import AutoTokenizer

from hf_tokenizers import KINDS, MAKE, random_texts, save_tokenizer
from sampling.inputs.hf_files import find_tokenizer
from sampling.inputs.hf_tokenizer import HFTokenizer


def load(folder, vocab_size=10**6):
    return HFTokenizer(find_tokenizer(folder), vocab_size)


def stream(tokenizer, ids, prompt_ids=()):
    """The text of these ids, token by token."""
    decode = tokenizer.incremental_decoder(prompt_ids)
    return "".join(decode(token_id, i == len(ids) - 1) for i, token_id in enumerate(ids))


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def assert_same_as_transformers(folder):
    theirs, ours = AutoTokenizer.from_pretrained(folder), load(folder)
    for text in random_texts("files", 100):
        assert ours.encode("a" + text) == theirs("a" + text, add_special_tokens=False).input_ids, text


@pytest.mark.parametrize("count", [300, pytest.param(5_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_ids_are_those_of_transformers(kind, count, tmp_path):
    save_tokenizer(kind, tmp_path)
    theirs, ours, rng = AutoTokenizer.from_pretrained(tmp_path), load(tmp_path), random.Random(count)
    for text in random_texts(f"texts {count}", count):
        if ids := theirs(text, add_special_tokens=False).input_ids:
            assert ours.encode(text) == ids, text
            assert ours.decode(ids) == stream(ours, ids) == theirs.decode(ids), text
        else:
            with pytest.raises(ValueError, match="has no tokens"):
                ours.encode(text)
        ids = [rng.randrange(ours.size) for _ in range(rng.randrange(1, 30))]
        assert ours.decode(ids) == stream(ours, ids) == theirs.decode(ids), ids
        prompt_ids = ours.encode(text + rng.choice(["", "a" * 100, " world" * 40]) + ".")
        if not theirs.convert_ids_to_tokens(ids[:1])[0].startswith("<0x"): # else it belongs to the prompt's last bytes
            assert ours.decode(prompt_ids) + stream(ours, ids, prompt_ids) == theirs.decode(prompt_ids + ids)
    known = ours.encode("world")
    for ids in [*known, ours.size, *known], [*known, 10**6, *known]:
        assert stream(ours, ids) == ours.decode(ids) and ours.decode(ids).count("\ufffd") == 1
    with pytest.raises(ValueError, match="not valid UTF-8 at character 2"):
        ours.encode("a\udcff")


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_bytes_of_a_character_come_with_the_last_of_them(kind, tmp_path):
    save_tokenizer(kind, tmp_path)
    tokenizer = load(tmp_path)
    for text, longest in ("🦖", 2), ("的" * 500, 30):
        ids, decode = tokenizer.encode(text), tokenizer.incremental_decoder()
        texts = [decode(token_id, i == len(ids) - 1) for i, token_id in enumerate(ids)]
        assert "".join(texts).strip() == text and max(map(len, texts)) <= longest and len(ids) > 1
        assert tokenizer.incremental_decoder(ids)(ids[-1], True) == "\ufffd", "no token continues a prompt's character"
    texts = [decode(ids[-1]) for _ in range(1000)] # which never form a character: some text must come all the same
    assert "".join(texts).count("\ufffd") > 900


@pytest.mark.parametrize("kind, settings", [
    ("older-files", {}), ("older-files", {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}),
    ("older-files", {"eos_token": "world", "additional_special_tokens": ["Welt", "Straße", "coração"]}),
    ("older-files", {"eos_token": {"content": "world", "__type": "AddedToken", "lstrip": True, "rstrip": False,
                                   "normalized": True, "single_word": False}}),
    ("older-files", {"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "rstrip": True, "special": True}}}),
    ("vocab-txt", {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "strip_accents": False}),
    ("vocab-txt", {"tokenizer_class": "BertTokenizer", "unk_token": "[MASK]", "tokenize_chinese_chars": False}),
], ids=str)
def test_settings_mean_what_they_mean_to_transformers(kind, settings, tmp_path):
    save_tokenizer(kind, tmp_path)
    write(tmp_path, tokenizer_config=settings, config={"model_type": "gpt2"})
    assert_same_as_transformers(tmp_path)
    if kind == "older-files":
        MAKE["byte-level"]().save(str(tmp_path / "tokenizer.json"))
        assert_same_as_transformers(tmp_path)


def test_added_tokens_beside_the_older_files(tmp_path):
    size = save_tokenizer("older-files", tmp_path)
    write(tmp_path, added_tokens={"<pad>": size + 1, "<sep>": size}, special_tokens_map={"sep_token": "<sep>"})
    assert load(tmp_path).encode("a<sep><pad>")[1:] == [size, size + 1]
    assert_same_as_transformers(tmp_path)
    tokenizer = load(tmp_path, vocab_size=size) # a model that was not trained with them
    assert tokenizer.size == size and tokenizer.decode(tokenizer.encode("<pad>")) == "<pad>"


@pytest.mark.parametrize("name, content, settings, message", [
    ("spiece.model", "", {}, "has spiece.model, but no tokenizer.json; transformers may"),
    ("README.md", "", {"tokenizer_class": "ByT5Tokenizer"}, "asks for 'ByT5Tokenizer', but the folder has"),
    ("vocab.json", "{}", {}, "merges.txt is missing"),
    ("vocab.txt", "a", {"tokenizer_class": "BertJapaneseTokenizer"}, "'BertJapaneseTokenizer' needs a tokenizer.json"),
    ("vocab.txt", "a", {"added_tokens_decoder": {"9" * 5000: {"content": "<a>"}}}, "cannot read .*: Exceeds the limit"),
    ("vocab.txt", "a\n" * (2**20 + 1), {}, "it has more than 1048576 values or lines"),
    ("tokenizer.json", "{}" + " " * 2**24, {}, "it has more than 16 MiB; without indentation it may be small enough"),
], ids=lambda value: str(value)[:30])
def test_files_that_cannot_be_read_are_named(name, content, settings, message, tmp_path):
    assert find_tokenizer(tmp_path) is None
    write(tmp_path, tokenizer_config=settings)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path)
    assert str(tmp_path) in str(error.value)
