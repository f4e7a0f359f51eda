"""Hostile tokenizer files: each gives a one-line error, quickly and with little memory."""
import copy
import json
import os
import random

import pytest

from attacks import named_cases, needs_linux

pytest_plugins = ["attacks"]
pytestmark = needs_linux

SIZE = 290 # the model has 300
BPE = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "decoder": None,
       "model": {"type": "BPE", "vocab": {"ab": 0} | {chr(96 + i): i for i in range(1, SIZE)}, "merges": [["a", "b"]]}}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0]] + [[chr(96 + i), -1.0] for i in range(1, SIZE)]}
WORD_PIECE = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
              "vocab": BPE["model"]["vocab"]}


def changed(path, value):
    """The file with another value at this path."""
    content = copy.deepcopy(BPE)
    *parents, last = path.split(".")
    inner = content
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return json.dumps(content)


def normalizer(*steps):
    return changed("normalizer", {"type": "Sequence", "normalizers": list(steps)})


def pre_tokenizer(*steps):
    return changed("pre_tokenizer", {"type": "Sequence", "pretokenizers": list(steps)})


def added(*tokens):
    return changed("added_tokens", [{"id": token_id, "content": content, "special": True} for token_id, content in tokens])


def nested(levels):
    """Sequences in sequences."""
    step = {"type": "NFC"}
    for _ in range(levels):
        step = {"type": "Sequence", "normalizers": [step]}
    return step


def random_pieces(count, length):
    letters = bytes(97 + i % 26 for i in range(256)) # a to z
    pieces = random.Random(1).randbytes(count * length).translate(letters).decode()
    return [[pieces[i:i + length], -1.0] for i in range(0, len(pieces), length)]


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLE = replace({"String": "a"}, "aa")
HOSTILE = {
    # what a text could become
    "doubling-replaces": normalizer(*[DOUBLE] * 16), "many-replaces": normalizer(*[DOUBLE] * 100),
    "long-replacement": normalizer(replace({"String": "a"}, "a" * 10**6)), "empty-pattern": normalizer(replace({"String": ""}, "a")),
    "many-ligatures": normalizer(*[replace({"String": "a"}, "ﷺ"), {"type": "NFKC"}] * 8),
    "bytes-of-bytes": pre_tokenizer(*[{"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}] * 16),
    "long-prepend": normalizer({"type": "Prepend", "prepend": "a" * 10**6}), "sequences-of-nothing": normalizer(*[{"type": "Sequence", "normalizers": []}] * 1000),
    "doubling-decoders": changed("decoder", {"type": "Sequence", "decoders": [DOUBLE] * 16}),
    # expressions and tables
    "endless-expression": pre_tokenizer({"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}),
    "huge-expression": normalizer(replace({"Regex": "(((a{1,1000}){1,1000}){1,1000})"}, "b")),
    "broken-expression": normalizer(replace({"Regex": "("}, "b")), "expression-decoder": changed("decoder", replace({"Regex": "(a|a)*"}, "")),
    "precompiled": normalizer({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "precompiled-terabytes": normalizer({"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
    "ctc": changed("decoder", {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}),
    "overlapping-strip": changed("decoder", {"type": "Strip", "content": " ", "start": 2**63, "stop": 2**63}),
    "no-suffix": changed("decoder", {"type": "BPEDecoder", "suffix": ""}),
    "fixed-length": pre_tokenizer({"type": "FixedLength", "length": 0}),
    # models
    "short-merge": changed("model", BPE["model"] | {"continuing_subword_prefix": "####"}),
    "merge-inside-a-character": changed("model", BPE["model"] | {"continuing_subword_prefix": "#", "merges": [["a", "é"]]}),
    "cyclic-merges": changed("model.merges", [["a", "b"], ["ab", "a"], ["aba", "ab"]]), "empty-merges": changed("model.merges", [["a", ""]] * 1000),
    "merges-of-three": changed("model.merges", ["a b c"]), "many-merges": lambda: changed("model.merges", [["a", "b"]] * 600_000),
    "one-id-twice": changed("model.vocab", BPE["model"]["vocab"] | {"xy": 0}), "negative-id": changed("model.vocab", BPE["model"]["vocab"] | {"xy": -1}),
    "far-id": changed("model.vocab", BPE["model"]["vocab"] | {"xy": 2**31 - 1}), "farther-id": changed("model.vocab", {"a": 2**64}), "float-id": changed("model.vocab", BPE["model"]["vocab"] | {"xy": 0.5}),
    "no-vocabulary": changed("model.vocab", {}), "vocabulary-of-lists": changed("model.vocab", [[["a"]]] * 1000),
    "long-token": lambda: changed("model.vocab", BPE["model"]["vocab"] | {"a" * 10**7: SIZE}), "surrogate": changed("model.vocab", BPE["model"]["vocab"] | {"\ud800": SIZE}),
    "wide-tree": lambda: changed("model", UNIGRAM | {"vocab": random_pieces(15_000, 1000)}), "empty-piece": changed("model", UNIGRAM | {"vocab": [*UNIGRAM["vocab"], ["", 0.0]]}),
    "infinite-score": changed("model", UNIGRAM | {"vocab": [*UNIGRAM["vocab"], ["xy", float("inf")]]}),
    "not-a-score": changed("model", UNIGRAM | {"vocab": [*UNIGRAM["vocab"], ["xy", float("nan")]]}), "far-unknown": changed("model", UNIGRAM | {"unk_id": 10**6}),
    "long-words": changed("model", WORD_PIECE | {"max_input_chars_per_word": 2**62}), "no-unknown": changed("model", WORD_PIECE | {"unk_token": "[UNK]"}),
    "unknown-model": changed("model", {"type": "Lattice"}), "no-model": changed("model", None),
    # added tokens
    "100000-added-tokens": lambda: added(*[(i + SIZE, f"<{i}>") for i in range(100_000)]), "added-id-twice": added((SIZE, "<a>"), (SIZE, "<b>")),
    "added-twice": added((SIZE, "<a>"), (SIZE + 1, "<a>")), "added-over-another": added((3, "<a>")), "added-elsewhere": added((5, "a")),
    "added-after-a-gap": added((SIZE + 5, "<a>")), "empty-added": added((SIZE, "")), "long-added": added((SIZE, "a" * 10**6)), "added-text-id": added((str(SIZE), "<a>")),
    # JSON
    "deep": lambda: "[" * 10**6, "many-lists": lambda: '{"a": [' + "[]," * 5 * 10**6 + "1]}", "many-texts": lambda: '{"a": [' + '"\u0100",' * 3 * 10**6 + "1]}",
    "many-numbers": lambda: '{"a": [' + "1.0," * 4 * 10**6 + "1]}", "too-long": lambda: "{" + " " * 2**24 + "}", "list": "[]", "null": "null", "empty": "", "utf-16": "\ufeff{}",
    "escape-codes": changed("model", {"type": "\x1b[31m\n\r"}), "a-million-digits": '{"model": {"vocab": {"a": ' + "9" * 10**6 + "}}}",
}
QUICK = ["doubling-replaces", "bytes-of-bytes", "endless-expression", "precompiled-terabytes", "short-merge", "one-id-twice", "wide-tree", "infinite-score",
         "100000-added-tokens", "added-id-twice", "many-lists", "escape-codes", "overlapping-strip"]


@pytest.mark.parametrize("content", named_cases(HOSTILE, QUICK))
def test_hostile_tokenizers_are_refused(content, assert_refused, hf_copy):
    content = content() if callable(content) else content
    (hf_copy / "tokenizer.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    assert_refused("out", "out")


@pytest.mark.parametrize("content", [json.dumps(BPE), changed("model", UNIGRAM), changed("model", WORD_PIECE), changed("model", BPE["model"] | {"dropout": 0.5}),
                                     normalizer(replace({"String": " "}, "▁")), added((SIZE, "<a>"), (SIZE + 1, "<b>")), changed("normalizer", nested(100))],
                         ids=["bpe", "unigram", "wordpiece", "dropout", "replace", "added", "sequences"])
def test_the_unchanged_tokenizers_load(content, load_in_subprocess, hf_copy):
    """Otherwise, a fault in the unchanged file could make the tests above pass."""
    (hf_copy / "tokenizer.json").write_text(content)
    assert load_in_subprocess(hf_copy.parent, "out")[:2] == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("content", [HOSTILE["doubling-replaces"], HOSTILE["100000-added-tokens"], HOSTILE["wide-tree"]], ids=["text", "added", "tree"])
def test_hostile_tokenizers_beside_a_ckpt_pt_are_refused(content, assert_refused, valid_checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ckpt.pt").write_bytes(valid_checkpoint)
    (tmp_path / "out" / "tokenizer.json").write_text(content() if callable(content) else content)
    assert_refused("out/tokenizer.json")


@pytest.mark.parametrize("change", [
    {"padding": {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": 2**40, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}},
    {"truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 2**40}},
    {"post_processor": {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}},
], ids=["padding-to-terabytes", "truncation", "post-processor"])
def test_settings_that_would_change_a_prompt_are_dropped(change, tmp_path):
    from sampling.inputs.hf_tokenizer import HFTokenizer
    (tmp_path / "tokenizer.json").write_text(json.dumps(BPE | change))
    assert HFTokenizer(tmp_path / "tokenizer.json", 300).encode("abc") == [0, 3]


@pytest.mark.parametrize("name, content", [
    ("merges.txt", b"a\n" * 1000), ("merges.txt", b"\xff\xfe"), ("merges.txt", b"a b\n" * (2**20 + 1)), ("vocab.json", b"[]"), ("vocab.json", b'{"a": "b"}'),
    ("added_tokens.json", b'{"<a>": 290, "<b>": 290}'), ("added_tokens.json", b'{"<a>": []}'), ("special_tokens_map.json", b"[" * 10**6),
    ("tokenizer_config.json", b'{"added_tokens_decoder": {"a": 5}}'), ("tokenizer_config.json", b'{"tokenizer_class": "Made\\u001b[31mUp"}'),
    ("tokenizer_config.json", b'{"added_tokens_decoder": {"' + b"9" * 5000 + b'": {"content": "<a>"}}}'),
    ("tokenizer_config.json", b'{"add_prefix_space": {"a": 1}}'),
], ids=["lines-of-one", "utf-16", "many-lines", "list", "text-id", "id-twice", "list-id", "deep", "number", "class", "long-id", "no-bool"])
def test_hostile_older_files_are_refused(name, content, assert_refused, hf_copy):
    (hf_copy / "vocab.json").write_text(json.dumps(BPE["model"]["vocab"]))
    (hf_copy / "merges.txt").write_text("#version: 0.2\na b\n")
    (hf_copy / name).write_bytes(content)
    assert_refused("out", "out")


@pytest.mark.parametrize("target", ["/dev/zero", "fifo", "nowhere", "folder"])
def test_links_to_anything_but_a_file_are_not_read(target, assert_refused, hf_copy):
    os.mkfifo(hf_copy / "fifo")
    (hf_copy / "folder").mkdir()
    (hf_copy / "tokenizer.json").symlink_to(target)
    assert_refused("out/tokenizer.json is missing, or not a regular file", "out")
