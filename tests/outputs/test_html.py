"""The page of samples: what it is made of, and how it compares runs."""
import html
import json
import math
import re
from pathlib import Path

import pytest

from pages import (
    HOSTILE,
    SHOWN,
    finished_sample,
    make_page,
    make_token,
    make_tokens,
    write_lines,
    write_page,
)
from sampling.outputs.jsonl import Run
from sampling.samples import Token
from script_process import run_python


def make_by_command(*arguments, **settings):
    return run_python("-m", "sampling.outputs.html", *arguments, **settings)


def read(page):
    return page.read_text(encoding="utf-8")


def data_of(page):
    """The token data of each sample of a page."""
    return [json.loads(data) for data in re.findall('/json">(.+?)</script>', read(page))]


def headings_of(page):
    """The headings of the samples in each row of a page of several runs."""
    _, *rows = read(page).split("<section>")
    return [re.findall("<h[23].*?>(.*?)</h", row) for row in rows]


PARTS = [ # of a page
    "<title>Samples from out-letters</title>",
    "<b>a &lt; b</b>",
    "<dt>temperature</dt><dd>0.8</dd>",
    "<dt>iteration</dt><dd>100</dd>",
    "<dt>validation loss</dt><dd>1.5000</dd>",
    "how likely the model found it, at temperature 1.",
    '<article id="sample-1" aria-labelledby="title-1">',
    '<h2 id="title-1">Sample 1, id {&quot;x&quot;: ',
    "1 token, stopped at the length limit",
]


def test_a_page_holds_the_samples_and_the_settings_of_a_file(tmp_path):
    samples = [make_tokens(2), make_tokens(1)]
    page = write_page(tmp_path / "a.html", samples, prompt="a < b", id={"x": "é"})
    text = read(page)
    for part in PARTS:
        assert part in text
    assert "<dt>file" not in text
    assert text.endswith("</main>\n</body>\n</html>\n")
    assert [len(tokens) for tokens in data_of(page)] == [2, 1]


def test_a_sample_without_log_probabilities_is_plain_text_with_their_mean(tmp_path):
    likely = make_token("a", 0.9)
    unlikely = make_token("b", 0.1) # 0.9 * 0.1 = 0.3 * 0.3
    page = write_page(tmp_path / "a.html", [[likely, unlikely], []], logprobs=None)
    assert re.findall('class="finish">(.*?)<', read(page)) == [
        "2 tokens, stopped at the length limit, geometric mean probability 30%",
        "0 tokens, stopped at the length limit"]
    assert "<span>ab</span>" in read(page)
    assert data_of(page) == []


def test_several_runs_stand_side_by_side_with_the_settings_that_differ(tmp_path, monkeypatch):
    for name in "hot", "cold":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "hot")
    hot = write_lines(Path("a.jsonl"), [make_tokens(1), make_tokens(2)],
                      temperature=1.5, checkpoint={"path": "gpt2"})
    cold = write_lines(Path("../cold/a.jsonl"), [make_tokens(3), make_tokens(4), make_tokens(5)],
                       logprobs=2)
    page = make_page(tmp_path / "a.html", hot, cold)
    hot_label = "hot/a.jsonl, gpt2, temperature 1.5"
    cold_label = "cold/a.jsonl, out-letters, temperature 0.8"
    assert headings_of(page) == [
        ["Sample 0", hot_label, cold_label],
        ["Sample 1", hot_label, cold_label],
        ["Sample 2", cold_label]]
    assert [len(tokens) for tokens in data_of(page)] == [1, 3, 2, 4, 5]
    text = read(page)
    assert "<title>Comparison of samples from gpt2, out-letters</title>" in text
    assert text.count("<b>ROMEO:") == 3
    assert "<dt>temperature</dt><dd>1.5 · 0.8</dd>" in text
    assert "<dt>seed</dt><dd>1</dd>" in text # the same in both
    ids = re.findall(r' id="(.*?)"', text)
    assert len(ids) == len(set(ids))


def test_checkpoints_of_one_file_stand_side_by_side_and_other_prompts_below(tmp_path):
    path = tmp_path / "a.jsonl"
    same_name = {"iter_num": 200, "crc32": "2", "path": "../out-letters/ckpt.pt"}
    lines = b""
    for run in [
        {},
        {"checkpoint": {"iter_num": 200, "val_loss": 1.25, "crc32": "1"}},
        {"prompt": "KING:"},
        {"checkpoint": same_name},
    ]:
        lines += write_lines(path, [make_tokens(1)], **run).read_bytes()
    path.write_bytes(lines)
    first = "iteration 100, validation loss 1.5000"
    assert headings_of(make_page(tmp_path / "a.html", path)) == [
        ["Sample 0", first, "iteration 200, validation loss 1.2500",
         "iteration 200, validation loss 1.5000"],
        ["Sample 0", first]]


@pytest.mark.parametrize("num_files", [1, 2])
def test_hostile_text_is_escaped(tmp_path, num_files):
    token = make_token(HOSTILE, 0.5, **{HOSTILE: 0.2})
    files = []
    for number in range(num_files):
        differs = HOSTILE + str(number)
        files.append(write_lines(tmp_path / f"{number}.jsonl", [[token]], prompt=HOSTILE,
                                 id=HOSTILE, checkpoint={"path": differs}, **{HOSTILE: differs}))
    text = read(make_page(tmp_path / "a.html", *files))
    assert text.count("<script") == text.count("</script>") == num_files + 1
    assert text.count("</article>") == num_files
    assert not re.search("<(img|svg)", text)
    prompt = re.search("<b>(.*?)</b>", text)[1]
    assert html.unescape(prompt) == SHOWN


def test_the_data_has_short_numbers_and_the_lengths_of_javascript(tmp_path):
    top = Token(1, "b", math.nan), Token(2, "c", 1e-7), Token(3, "d", -0.0)
    improbable = Token(0, "a", -math.inf, top)
    texts = [make_token("😀é", 1.0), make_token("", 1.0)]
    page = write_page(tmp_path / "a.html", [[improbable], texts])
    assert data_of(page) == [[[1, 99999, "b", 99999, "c", 0, "d", 0]], [[3, 0], [0, 0]]]


def test_a_page_is_made_later_from_files(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", [make_tokens(2), make_tokens(1)])
    page = make_page(tmp_path / "b.html", lines)
    expected = page.read_bytes()
    with open(lines, "ab") as file:
        file.write(b'{"version": 5, "ind') # of a run that was killed
    done = make_by_command(lines, page)
    assert done.stdout == ""
    assert done.stderr == (
        f"{lines}, line 3 is truncated, so it is left out\n{page}: 2 samples\n")
    assert page.read_bytes() == expected
    assert set(tmp_path.iterdir()) == {lines, page}
    usage = "the page: samples.jsonl [more.jsonl ...] page.html"
    assert usage in make_by_command("--help").stdout


LINE = Run({}, {}).line(finished_sample(0, "O", []))


@pytest.mark.parametrize("content, page, message", [
    (LINE.replace(b'"text"', b'"test"'), "new.html",
     "a.jsonl, line 1: it is damaged, or was edited"),
    (LINE.replace(b'"length"', b'"long"'), "new.html",
     "sample 0 lacks a field, or has a wrong one"),
    (b"", "mine.html", "mine.html is not a page of samples, so it is not replaced"),
    (None, "new.html", "error: there is no file '"),
    (b"", "new.jsonl", "give one or more files of samples, and the page: "),
    (b"", "new.html", "new.html is not written, because there is no sample to show"),
])
def test_a_wrong_file_or_page_is_one_line_and_changes_nothing(tmp_path, content, page, message):
    mine = tmp_path / "mine.html"
    mine.write_text("<!DOCTYPE html>mine")
    if content is not None:
        (tmp_path / "a.jsonl").write_bytes(content)
    line, = make_by_command(tmp_path / "a.jsonl", tmp_path / page, status=1).stderr.splitlines()
    assert message in line
    assert mine.read_text() == "<!DOCTYPE html>mine"
    assert not list(tmp_path.glob("new*"))
