"""The lines of JSON that hold samples, and how a run recognises its own."""
import json
from dataclasses import replace

import pytest

import pages
from models import make_gpt, save_checkpoint
from pages import CHECKPOINT_ID, make_token
from sampling.outputs.jsonl import Run, read_records, run_settings
from sampling.samples import Prompt, Sample, Token
from sampling.settings import RESULT_FIELDS

SETTINGS = {"seed": 1, "stop": []}
SAMPLE = Sample(1, Prompt("é", 5, other_fields={"label": [1], "none": None}), [])
LIKELY = [
    make_token("a", 0.5, a=0.5, b=0.25, c=0.125),
    make_token("", 0.7),
    make_token("é\n", 0.0004, x=0.9),
]


def line_of(tokens, sample=SAMPLE, **more):
    finished = replace(sample, tokens=tokens, finish_reason="length")
    return Run(CHECKPOINT_ID, SETTINGS | more).line(finished)


def test_a_line_has_the_fields_of_the_prompt_then_those_of_the_sample():
    line = json.loads(line_of(LIKELY))
    assert " ".join(line) == (
        "version index prompt_index sample_index prompt id label none text num_tokens "
        "finish_reason cumulative_logprob seed checkpoint settings")
    assert line["text"] == "aé\n"
    assert line["checkpoint"] == CHECKPOINT_ID
    assert line["settings"] == SETTINGS
    # No prompt may have these.
    assert line.keys() - {"prompt", "id", "label", "none"} <= RESULT_FIELDS


@pytest.mark.parametrize("char", ["\ud800", "\x85", "\u2028", "\u2029"])
def test_a_lone_surrogate_and_what_may_end_a_line_are_escapes(char):
    line = line_of([make_token(char, 0.5)], Sample(0, Prompt(char), []))
    assert len(line.decode().splitlines()) == 1
    assert f'"prompt": "\\u{ord(char):04x}"'.encode() in line
    record = json.loads(line)
    assert record["prompt"] == record["text"] == char


def test_equivalent_settings_are_equal():
    def kept(**changes):
        return run_settings(pages.SETTINGS | changes, "cuda", "bfloat16")
    found = kept(stop="e")
    # The last two change no text.
    assert found == kept(stop=["e"], top_k=0, top_p=1.0, min_p=0.0, draft=False, batch_size=3)
    expected = dict(device="cuda", dtype="bfloat16", stop='["e"]', top_k=0, top_p=1.0, min_p=0.0)
    assert found | expected == found
    # With one prompt, a later run may add samples to the file. With several prompts, num_samples
    # must stay the same.
    assert "num_samples" not in found
    assert kept(start="LINES:a")["num_samples"] == 2


def test_a_log_probability_has_three_decimals_however_large():
    large = line_of([Token(0, "x", -1000.1234)] * 2)
    assert json.loads(large)["cumulative_logprob"] == -2000.247
    assert b'"cumulative_logprob": 0.0,' in line_of([Token(0, "x", -1e-9)])


A = {"id": 0, "token": "a", "logprob": -0.693}
B = {"id": 1, "token": "b", "logprob": -1.386}
X = {"id": 0, "token": "x", "logprob": -0.105}


@pytest.mark.parametrize("logprobs, expected", [(0, [[], [], []]), (2, [[A, B], [], [X]])])
def test_logprobs_adds_each_token_and_the_most_likely_ones(logprobs, expected):
    content = json.loads(line_of(LIKELY, logprobs=logprobs))["logprobs"]["content"]
    assert content[1] == {"id": 0, "token": "", "logprob": -0.357}
    assert [token.get("top_logprobs", []) for token in content] == expected


def types_of(value, name="line"):
    """The type of each field in a value, and of the items of each list."""
    if isinstance(value, dict):
        for key, field in value.items():
            yield from types_of(field, f"{name}.{key}")
    elif isinstance(value, list):
        for item in value or [None]:
            yield from types_of(item, f"{name}[]")
    else:
        yield name, type(value)


SHORT = "--num_samples=1 --max_new_tokens=3 "
SCORE = "--score --start=T "
RUNS = [
    SHORT,
    SHORT + "--top_k=None --top_p=0.9 --min_p=0.1 --temperature=1 --repetition_penalty=2",
    SHORT + "--stop=e",
    SHORT + "--stop=['e','x'] --logprobs=0 --top_p=1",
    SHORT + "--logprobs=2",
    SHORT + "--out_dir=out",
    SHORT + "--max_new_tokens=0 --logprobs=1",
    SCORE,
    SCORE + "--logprobs=0",
    SCORE + "--logprobs=2 --start=The",
]


def test_a_field_has_one_type_in_the_lines_of_all_runs(run_script, char_checkpoint, tmp_path):
    """So the lines of runs with other settings are one table for pandas, polars and datasets."""
    save_checkpoint(tmp_path / "out", make_gpt(), best_val_loss=None, iter_num=None)
    types = {}
    for arguments in RUNS:
        done = run_script(f"--out_dir={char_checkpoint}", "--out_file=-", "--device=cpu",
                          *arguments.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        for name, kind in types_of(json.loads(done.stdout)):
            assert kind is not type(None), (arguments, name)
            assert kind is types.setdefault(name, kind), (arguments, name)


@pytest.mark.parametrize("changes, message", [
    ({"settings": {"seed": 2, "stop": []}},
     ", is from another run: seed is 2 there, and 1 here; give the file another name, run with "
     "--seed=2, or replace it with --overwrite"),
    ({"checkpoint": {"crc32": "1"}},
     ", is from another run: the checkpoint's checksum is '1' there, and '00000000'"),
    ({"checkpoint": {"crc32": "1"}, "the checkpoint's checksum": 1},
     ", is from another run: the checkpoint's checksum is '1' there, and '00000000'"),
    ({"index": 2}, ": the line of sample 1 is missing before it: put that back, or remove it and"),
    ({"index": 0}, ": it is doubled, or moved: sample 0 comes before sample 1, which should be"),
    ({"more": 1}, ", is from another run: more is 1 there, and None here"),
    ({"text": None}, ": it is damaged, or was edited: remove it"),
    ({"checkpoint": None}, ": it is damaged, or was edited: remove it and all lines after it"),
    ({"version": 3}, ": another version of sample.py wrote it: run that version, or give another"),
])
def test_a_line_of_another_run_is_refused_with_the_first_difference(tmp_path, changes, message):
    path = tmp_path / "a.jsonl"
    run = Run(CHECKPOINT_ID, SETTINGS)
    line = json.loads(line_of(LIKELY))
    run.check(line | {"text": "b"}, SAMPLE, "")
    path.write_text(json.dumps(line | changes))
    with pytest.raises(ValueError) as error:
        for where, _, _, record in read_records(path):
            run.check(record, SAMPLE, where)
    assert str(error.value).startswith(f"{path}, line 1{message}")


LINE = line_of(LIKELY)
EDITED = "it is damaged, or was edited: remove it and"
FOREIGN = "another program, or an editor, wrote"


@pytest.mark.parametrize("line, message", [
    (LINE[:90] + b"\n", EDITED),
    (LINE.replace(b"a", b"\xff"), EDITED),
    (LINE[:-3] + b', "more": ' + b"[" * 10**5 + b"\n", EDITED),
    (b"my notes\n", FOREIGN),
    (b'{"note": 1}\n', FOREIGN),
    (b"5", FOREIGN),
])
def test_a_damaged_line_or_a_note_is_not_called_one_of_another_version(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + line)
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: {message}"):
        list(read_records(path))
