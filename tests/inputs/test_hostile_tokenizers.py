"""Hostile tokenizer files: each gives a one-line error, quickly and with little memory."""
import json
import time
import tracemalloc

import pytest
from tokenizers import Tokenizer

from sampling.inputs.hf_tokenizer import LLAMA3, HFTokenizer

SIZE = 290
VOCAB = {"ab": 0} | {chr(96 + i): i for i in range(1, SIZE)}
BPE = {"type": "BPE", "vocab": VOCAB, "merges": [["a", "b"]]}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0]] + [[chr(96 + i), -1.0] for i in range(1, SIZE)]}
WORD_PIECE = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "vocab": VOCAB,
              "max_input_chars_per_word": 100}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def steps(part, *steps):
    return {part: {"type": "Sequence", f"{part.replace('_', '')}s": list(steps)}}


HOSTILE = {
    # what a text could become
    "doubling-replaces": steps("normalizer", *[DOUBLE] * 16),
    "many-steps": steps("normalizer", *[DOUBLE | {"content": "b"}] * 100),
    "bytes-of-bytes": steps("pre_tokenizer", *[{"type": "ByteLevel", "use_regex": False}] * 16),
    "empty-pattern": steps("normalizer", DOUBLE | {"pattern": {"String": ""}}),
    "strip-both-ends": steps("decoder", {"type": "Strip", "content": "a", "start": 2, "stop": 2}),
    "across-tokens": steps("decoder", {"type": "Fuse"}, DOUBLE | {"pattern": {"String": "ab"}}),
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
    "wide-tree-of-added-tokens": {"added_tokens": [{"id": i + SIZE, "content": f"{i:0999}"} for i in range(2000)]},
    "added-over-another": {"added_tokens": [{"id": 3, "content": "<a>"}]}, "escape-code": {"model": {"type": "\x1b\n"}},
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


@pytest.mark.parametrize("model, ids", [(UNIGRAM, [1, 2, 3]), (WORD_PIECE, [1]), (BPE | {"dropout": 0.9}, [0, 3])],
                         ids=["unigram", "wordpiece", "dropout"])
def test_the_unchanged_tokenizers_load_without_what_changes_a_prompt(model, ids, tmp_path):
    split = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
    whole = Tokenizer.from_str(json.dumps({"model": model} | steps("pre_tokenizer", split)))
    whole.enable_padding(pad_to_multiple_of=2**40)
    whole.enable_truncation(1)
    content = json.loads(whole.to_str())
    del content["model"]["type"] # as in older files
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert all(HFTokenizer(tmp_path / "tokenizer.json", 300).encode("abc") == ids for _ in range(5))
