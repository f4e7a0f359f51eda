"""Hostile tokenizer files: each gives a one-line error, quickly and with little memory."""
import json
import time
import tracemalloc

import pytest

from sampling.inputs.hf_tokenizer import LLAMA3, HFTokenizer

SIZE = 290
VOCAB = {"ab": 0} | {chr(96 + i): i for i in range(1, SIZE)}
BPE = {"type": "BPE", "vocab": VOCAB, "merges": [["a", "b"]]}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0]] + [[chr(96 + i), -1.0] for i in range(1, SIZE)]}
WORD_PIECE = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "vocab": VOCAB,
              "max_input_chars_per_word": 100}


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def steps(part, *steps):
    return {part: {"type": "Sequence", f"{part.replace('_', '')}s": list(steps)}}


def added(*tokens):
    return {"added_tokens": [{"id": token_id, "content": content} for token_id, content in tokens]}


HOSTILE = {
    # what a text could become
    "doubling-replaces": steps("normalizer", *[replace({"String": "a"}, "aa")] * 16),
    "many-steps": steps("normalizer", *[replace({"String": "a"}, "b")] * 100),
    "bytes-of-bytes": steps("pre_tokenizer", *[{"type": "ByteLevel", "use_regex": False}] * 16),
    "empty-pattern": steps("normalizer", replace({"String": ""}, "a")),
    "strip-both-ends": steps("decoder", {"type": "Strip", "content": "a", "start": 2, "stop": 2}),
    "across-tokens": steps("decoder", {"type": "Fuse"}, replace({"String": "ab"}, "c")),
    "endless-expression": steps("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+$"}}),
    "precompiled-terabytes": steps("normalizer", {"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
    # models
    "merge-inside-a-character": {"model": BPE | {"continuing_subword_prefix": "#", "merges": [["a", "é"]]}},
    "merge-of-nothing": {"model": BPE | {"merges": [["a", "b"], ["ab", "a"]]}},
    "no-vocabulary": {"model": BPE | {"vocab": {}}}, "far-id": {"model": BPE | {"vocab": VOCAB | {"xy": 2**40}}},
    "one-id-twice": {"model": BPE | {"vocab": VOCAB | {"xy": 0}}},
    "long-token": {"model": BPE | {"vocab": VOCAB | {"a" * 10**6: SIZE}}},
    "wide-tree": {"model": UNIGRAM | {"vocab": [[f"{i:0999}", -1.0] for i in range(2000)]}},
    "long-words": {"model": WORD_PIECE | {"max_input_chars_per_word": 2**62}},
    # added tokens and JSON
    "wide-tree-of-added-tokens": added(*[(i + SIZE, f"{i:0999}") for i in range(2000)]),
    "long-added-token": added((SIZE, "a" * 10**6)), "added-over-another": added((3, "<a>")),
    "added-text-id": added(("5", "<a>")), "escape-codes": {"model": {"type": "\x1b[31m\n\r"}},
    "deep": '{"a":' * 10**5, "many-lists": '{"a": [' + "[]," * 5 * 10**6 + "1]}",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_tokenizers_are_refused(content, tmp_path, capfd):
    text = content if isinstance(content, str) else json.dumps({"model": BPE} | content)
    (tmp_path / "tokenizer.json").write_text(text)
    begin = time.process_time()
    tracemalloc.start()
    with pytest.raises(ValueError) as error:
        HFTokenizer(tmp_path / "tokenizer.json", 300)
    assert tracemalloc.get_traced_memory()[1] < 100_000_000 and time.process_time() - begin < 5
    tracemalloc.stop()
    assert str(error.value).isprintable() and str(tmp_path) in str(error.value) and capfd.readouterr() == ("", "")


PADDING = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": 2**40, "pad_id": 0, "pad_type_id": 0,
           "pad_token": "a"}


@pytest.mark.parametrize("change, ids", [
    ({"model": UNIGRAM}, [1, 2, 3]), ({"model": WORD_PIECE}, [1]), ({"model": BPE | {"dropout": 0.9}}, [0, 3]),
    (steps("pre_tokenizer", {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False})
     | {"truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0},
        "padding": PADDING}, [0, 3]),
], ids=["unigram", "wordpiece", "dropout", "all-else"])
def test_the_unchanged_tokenizers_load_without_what_changes_a_prompt(change, ids, tmp_path):
    content = {"model": BPE} | change
    for model in content["model"], {name: value for name, value in content["model"].items() if name != "type"}:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"model": model})) # older files have no type
        assert all(HFTokenizer(tmp_path / "tokenizer.json", 300).encode("abc") == ids for _ in range(5))


@pytest.mark.parametrize("name, content", [
    ("merges.txt", b"a\n"), ("merges.txt", b"a b\n" * (2**20 + 1)),
    ("vocab.json", b'{"a": 4294967296, "b": 1, "ab": 2}'), ("added_tokens.json", b'{"<a>": 290, "<b>": 290}'),
    ("tokenizer_config.json", b'{"added_tokens_decoder": {"' + b"9" * 5000 + b'": {"content": "<a>"}}}'),
], ids=lambda content: str(content)[:40])
def test_hostile_older_files_are_refused(name, content, tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps(VOCAB))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        HFTokenizer(tmp_path / "vocab.json", 300)
    assert len(str(error.value)) < 1000
