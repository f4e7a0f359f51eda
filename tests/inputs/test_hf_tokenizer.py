"""The tokenizers of Hugging Face folders, compared with transformers."""
import random

import pytest

from hf_tokenizers import MAKE, random_texts, save_tokenizer, write_json
from sampling.inputs.hf_tokenizer import HFTokenizer, find_tokenizer


def load_theirs(folder):
    from transformers import AutoTokenizer  # it takes seconds
    return AutoTokenizer.from_pretrained(folder)


def load(folder, vocab_size=10**6):
    return HFTokenizer(find_tokenizer(folder), vocab_size)


def stream(tokenizer, ids, prompt_ids=()):
    """The texts of these ids, token by token.

    Each peek says what a token would add, and changes nothing.
    """
    decode = tokenizer.decoder(prompt_ids)
    texts = []
    for i, token_id in enumerate(ids, 1):
        is_last = i == len(ids)
        peeked = decode.peek(token_id, is_last)
        decode.peek(ids[0], is_last)
        assert decode(token_id, is_last) == peeked
        texts.append(peeked)
    return texts


def decode(tokenizer, ids, prompt_ids=()):
    """The text of these ids, which must be the same token by token."""
    text = "".join(stream(tokenizer, ids, prompt_ids))
    if not prompt_ids:
        assert tokenizer.decode(ids) == text
    return text


def assert_same_as_transformers(folder):
    theirs = load_theirs(folder)
    ours = load(folder)
    for text in random_texts("files", 100):
        text = "a" + text
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids, text


@pytest.mark.parametrize("kind", MAKE)
def test_texts_and_ids_are_those_of_transformers(kind, tmp_path):
    save_tokenizer(kind, tmp_path)
    theirs = load_theirs(tmp_path)
    ours = load(tmp_path)
    rng = random.Random(300)
    for text in random_texts("texts", 300):
        ids = theirs(text, add_special_tokens=False).input_ids
        if not ids:
            with pytest.raises(ValueError, match="has no tokens"):
                ours.encode(text)
            continue
        assert ours.encode(text) == ids, text
        assert decode(ours, ids) == theirs.decode(ids), text
        ids = rng.choices(range(ours.size), k=rng.randrange(1, 30))
        assert decode(ours, ids) == theirs.decode(ids), ids
        prompt_ids = ours.encode(text + rng.choice(["", "a" * 100, " world" * 40]) + ".")
        # A byte belongs to the prompt's last bytes, and "replace" changes the prompt.
        if kind != "replace" and not theirs.convert_ids_to_tokens(ids[0]).startswith("<0x"):
            joined = ours.decode(prompt_ids) + decode(ours, ids, prompt_ids)
            assert joined == theirs.decode(prompt_ids + ids)
    known = ours.encode("world")
    for unknown in ours.size, 10**6:
        assert decode(ours, [*known, unknown, *known]).count("\ufffd") == 1
    with pytest.raises(ValueError, match="not valid UTF-8 at character 2"):
        ours.encode("a\udcff")


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_bytes_of_a_character_come_with_the_last_of_them(kind, tmp_path):
    save_tokenizer(kind, tmp_path)
    tokenizer = load(tmp_path)
    ids = tokenizer.encode("的" * 500)
    texts = stream(tokenizer, ids)
    assert "".join(texts).strip() == "的" * 500
    assert max(map(len, texts)) <= 30
    never_a_character = stream(tokenizer, ids[-1:] * 1000) # some text must come all the same
    assert "".join(never_a_character[:-1]).count("\ufffd") > 900
    for byte in ids[-3:]:
        assert tokenizer.num_bytes([byte]) == 1
    *begin, end, a = tokenizer.encode("b🦖a")
    assert decode(tokenizer, [end, a], begin) == "🦖a", "it began in the prompt"
    assert decode(tokenizer, [end], [*begin, end]) == "\ufffd", "the prompt's character is whole"
    assert decode(tokenizer, [a], tokenizer.encode("\ufffd") * 30) == "a"


@pytest.mark.parametrize("kind, settings", [
    ("older-files", {}),
    ("older-files", {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}),
    ("older-files", {
        "eos_token": "world", "additional_special_tokens": ["Welt", "Straße", "coração"]}),
    ("older-files", {"eos_token": {
        "content": "world", "__type": "AddedToken", "lstrip": True, "rstrip": False,
        "normalized": True, "single_word": False}}),
    ("older-files", {"added_tokens_decoder": {
        "0": {"content": "<|endoftext|>", "rstrip": True, "special": True}}}),
    ("vocab-txt", {
        "tokenizer_class": "BertTokenizer", "do_lower_case": False, "strip_accents": False}),
    ("vocab-txt", {
        "tokenizer_class": "BertTokenizer", "unk_token": "[MASK]",
        "tokenize_chinese_chars": False}),
])
def test_settings_mean_what_they_mean_to_transformers(kind, settings, tmp_path):
    save_tokenizer(kind, tmp_path)
    write_json(tmp_path, tokenizer_config=settings, config={"model_type": "gpt2"})
    assert_same_as_transformers(tmp_path)
    if kind == "older-files":
        MAKE["byte-level"]().save(str(tmp_path / "tokenizer.json"))
        assert_same_as_transformers(tmp_path)


def test_added_tokens_beside_the_older_files(tmp_path):
    size = save_tokenizer("older-files", tmp_path)
    write_json(tmp_path, added_tokens={"<pad>": size + 1, "<sep>": size},
               special_tokens_map={"sep_token": "<sep>"})
    assert load(tmp_path).encode("a<sep><pad>")[1:] == [size, size + 1]
    assert_same_as_transformers(tmp_path)
    tokenizer = load(tmp_path, vocab_size=size) # a model that was not trained with them
    assert tokenizer.size == size
    assert tokenizer.decode(tokenizer.encode("<pad>")) == "<pad>"


def load_model(folder, parts, **model):
    """The tokenizer of a tokenizer.json of byte pairs, with these parts of its own."""
    ours = {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3}, "merges": [["a", "b"]]}
    write_json(folder, tokenizer={"model": ours | model, **parts})
    return load(folder)


def test_dropout_is_left_out(tmp_path):
    """What else would change a prompt is left out, too: the kind byte-level."""
    tokenizer = load_model(tmp_path, {}, dropout=0.9)
    for _ in range(9):
        assert tokenizer.encode("abcab") == [3, 2, 3]


def test_the_text_of_a_decoder_that_may_change_all_tokens_comes_whole(tmp_path):
    replace = {"pattern": {"String": "a"}, "content": "A"} # which names no type
    tokenizer = load_model(tmp_path, {"decoder": replace})
    assert stream(tokenizer, [3, 2]) == ["", tokenizer.text_of([3, 2])]


ADDED = {"id": 1, "content": "<a>"}
SPLIT = {
    "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
STRIP = {"type": "Strip", "content": "a", "start": 1, "stop": 1}
PREFIX = {"vocab": {"a": 0, "b": 1, "ab": 2, "##b": 3}, "continuing_subword_prefix": "##"}
NO_MERGE = "cannot read .*its merge .* does not fit its vocabulary"


@pytest.mark.parametrize("parts, model, message", [
    ({}, {"merges": [["a", "b"], ["ab", "a"]]}, NO_MERGE),
    ({}, {"merges": ["a b"], **PREFIX}, NO_MERGE),
    ({}, {"merges": ["ab"]}, "cannot read .*damaged or incomplete"),
    ({}, {"vocab": {"a": 0, "b": 0, "ab": 1}},
     "cannot read .*its vocabulary .* gives two tokens the same id"),
    ({"added_tokens": [ADDED]}, {}, "cannot read .*the id 1 of its added token '<a>' is another"),
    ({"pre_tokenizer": SPLIT}, {}, "the tokenizer's library failed: .*retry-limit"),
    ({"decoder": STRIP}, {}, "the tokenizer's library failed: "),
])
def test_a_damaged_vocabulary_and_an_error_of_the_library_are_one_line(
        parts, model, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        tokenizer = load_model(tmp_path, parts, **model)
        tokenizer.decode(tokenizer.encode("a" * 40 + "c")[:1])
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name, content, settings, message", [
    ("spiece.model", "", {}, "has spiece.model, but no tokenizer.json; transformers may"),
    ("vocab.json", "{}", {}, "merges.txt: it is missing"),
    ("vocab.txt", "a", {"tokenizer_class": "BertJapaneseTokenizer"},
     "'BertJapaneseTokenizer' needs a tokenizer.json"),
    ("vocab.txt", "version https://git-lfs.github.com/spec/v1\n", {},
     "cannot read .*vocab.txt: .* pointer of Git LFS"),
    ("vocab.txt", "a", {"added_tokens_decoder": {"9" * 5000: {"content": "<a>"}}},
     "damaged .*Exceeds the limit"),
])
def test_files_that_cannot_be_read_are_named(name, content, settings, message, tmp_path):
    assert find_tokenizer(tmp_path) is None
    write_json(tmp_path, tokenizer_config=settings)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path)
    assert str(tmp_path) in str(error.value)
