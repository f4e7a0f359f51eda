"""The tokenizers of Hugging Face folders, compared with transformers."""
import json
import random

import pytest
from transformers import AutoTokenizer

from hf_tokenizers import MAKE, random_texts, save_tokenizer
from sampling.inputs.hf_tokenizer import HFTokenizer, find_tokenizer


def load(folder, vocab_size=10**6):
    return HFTokenizer(find_tokenizer(folder), vocab_size)


def stream(tokenizer, ids, prompt_ids=()):
    """The texts of these ids, token by token. Each peek says what a token would add, and changes nothing."""
    decode, texts = tokenizer.decoder(prompt_ids), []
    for i, token_id in enumerate(ids):
        is_last = i == len(ids) - 1
        peeked = [decode.peek(other, is_last) for other in (token_id, ids[0], token_id)]
        texts.append(decode(token_id, is_last))
        assert peeked[0] == peeked[-1] == texts[-1]
    return texts


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def assert_same_as_transformers(folder):
    theirs, ours = AutoTokenizer.from_pretrained(folder), load(folder)
    for text in random_texts("files", 100):
        assert ours.encode("a" + text) == theirs("a" + text, add_special_tokens=False).input_ids, text


@pytest.mark.parametrize("kind", MAKE)
def test_texts_and_ids_are_those_of_transformers(kind, tmp_path):
    save_tokenizer(kind, tmp_path)
    theirs, ours, rng = AutoTokenizer.from_pretrained(tmp_path), load(tmp_path), random.Random(300)
    for text in random_texts("texts", 300):
        if ids := theirs(text, add_special_tokens=False).input_ids:
            assert ours.encode(text) == ids, text
            assert ours.decode(ids) == "".join(stream(ours, ids)) == theirs.decode(ids), text
        else:
            with pytest.raises(ValueError, match="has no tokens"):
                ours.encode(text)
        ids = [rng.randrange(ours.size) for _ in range(rng.randrange(1, 30))]
        assert ours.decode(ids) == "".join(stream(ours, ids)) == theirs.decode(ids), ids
        prompt_ids = ours.encode(text + rng.choice(["", "a" * 100, " world" * 40]) + ".")
        if not theirs.convert_ids_to_tokens(ids[:1])[0].startswith("<0x"): # else it belongs to the prompt's last bytes
            joined = ours.decode(prompt_ids) + "".join(stream(ours, ids, prompt_ids))
            assert joined == theirs.decode(prompt_ids + ids) or kind == "replace" # which changes the prompt
    known = ours.encode("world")
    for ids in [*known, ours.size, *known], [*known, 10**6, *known]:
        assert "".join(stream(ours, ids)) == ours.decode(ids) and ours.decode(ids).count("\ufffd") == 1
    with pytest.raises(ValueError, match="not valid UTF-8 at character 2"):
        ours.encode("a\udcff")


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_bytes_of_a_character_come_with_the_last_of_them(kind, tmp_path):
    save_tokenizer(kind, tmp_path)
    tokenizer = load(tmp_path)
    ids = tokenizer.encode("的" * 500)
    texts = stream(tokenizer, ids)
    assert "".join(texts).strip() == "的" * 500 and max(map(len, texts)) <= 30
    never_a_character = stream(tokenizer, ids[-1:] * 1000) # some text must come all the same
    assert "".join(never_a_character[:-1]).count("\ufffd") > 900
    ids = tokenizer.encode("🦖")
    assert stream(tokenizer, ids[-1:], ids) == ["\ufffd"], "no token continues a prompt's character"
    ids = tokenizer.encode("🦖a")
    assert "".join(stream(tokenizer, ids[2:], ids[:2])).endswith("🦖a"), "it began in the prompt"
    assert stream(tokenizer, ids[-1:], tokenizer.encode("\ufffd") * 30) == ["a"]
    for first in tokenizer.encode("的")[-3:]: # a byte each
        assert tokenizer.num_bytes([first]) == 1


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


def write_model(folder, **parts):
    """A tokenizer.json of byte pairs, with these parts of its own."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3}, "merges": [["a", "b"]]}
    write(folder, tokenizer={"added_tokens": []} | parts | {"model": model | parts.get("model", {})})


def test_dropout_is_left_out(tmp_path): # and so is what else would change a prompt: the kind byte-level
    write_model(tmp_path, model={"dropout": 0.9})
    assert all(load(tmp_path).encode("abcab") == [3, 2, 3] for _ in range(9))
    write_model(tmp_path, decoder={"pattern": {"String": "a"}, "content": "A"}) # no type
    assert "".join(stream(load(tmp_path), [3, 2])) == load(tmp_path).text_of([3, 2])


ADDED = {"id": 4, "content": "<a>"} | dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("parts, message", [
    *(({"model": {"merges": [["a", "b"], merge]}}, "cannot read .*its merge .* does not fit its vocabulary")
      for merge in (["ab", "a"], ["b", "x"], "a bb", "b a")),
    *(({"model": {"vocab": {"a": 0, "b": 1, "ab": 2, "##b": 3}, "merges": [merge], "continuing_subword_prefix": "##"}},
       "cannot read .*its merge .* does not fit its vocabulary") for merge in ("a b", "a ##a", "a ##")),
    ({"model": {"merges": ["ab"]}}, "cannot read .*damaged or incomplete"),
    ({"model": {"vocab": {"a": 0, "b": 0, "ab": 1}}}, "cannot read .*its vocabulary .* gives two tokens the same id"),
    ({"added_tokens": [ADDED | {"id": 1}]}, "cannot read .*the id 1 of its added token '<a>' is another"),
    ({"pre_tokenizer": SPLIT}, "the tokenizer's library failed: .*retry-limit"),
    ({"decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 1}}, "the tokenizer's library failed: "),
], ids=str)
def test_a_damaged_vocabulary_and_an_error_of_the_library_are_one_line(parts, message, tmp_path):
    write_model(tmp_path, **parts)
    with pytest.raises(ValueError, match=message) as error:
        tokenizer = load(tmp_path)
        tokenizer.decode(tokenizer.encode("a" * 40 + "c")[:1])
    assert str(error.value).isprintable()


def test_a_huge_file_is_refused_before_it_takes_the_memory(tmp_path):
    for name in "tokenizer.json", "vocab.txt":
        with open(tmp_path / name, "wb") as file:
            file.truncate(2**36) # of zeros that take no place
        with pytest.raises(ValueError, match=f"cannot read {tmp_path}/{name}: it has more than 67108864 bytes"):
            HFTokenizer(tmp_path / name, 300)


@pytest.mark.parametrize("name, content, settings, message", [
    ("spiece.model", "", {}, "has spiece.model, but no tokenizer.json; transformers may"),
    ("vocab.json", "{}", {}, "merges.txt: it is missing"),
    ("vocab.txt", "a", {"tokenizer_class": "BertJapaneseTokenizer"}, "'BertJapaneseTokenizer' needs a tokenizer.json"),
    ("vocab.txt", "version https://git-lfs.github.com/spec/v1\n", {}, "cannot read .*vocab.txt: .* pointer of Git LFS"),
    ("vocab.txt", "a", {"added_tokens_decoder": {"9" * 5000: {"content": "<a>"}}}, "damaged .*Exceeds the limit"),
], ids=lambda value: str(value)[:30])
def test_files_that_cannot_be_read_are_named(name, content, settings, message, tmp_path):
    assert find_tokenizer(tmp_path) is None
    write(tmp_path, tokenizer_config=settings)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path)
    assert str(tmp_path) in str(error.value)
