"""The page of samples: what it is made of, and how it compares runs."""
import html
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pages import HOSTILE, RUN, SHOWN, finished_sample, make_page, make_token, make_tokens, write_lines, write_page
from project import PROJECT
from sampling.outputs.html import short_names
from sampling.outputs.jsonl import Run
from sampling.params import Token


def make_by_command(*arguments):
    return subprocess.run([sys.executable, "-m", "sampling.outputs.html", *map(str, arguments)], cwd=PROJECT,
                          capture_output=True, text=True)


def data_of(page):
    """The token data of each sample of a page."""
    return [json.loads(data) for data in re.findall('/json">(.+?)</script>', page.read_text(encoding="utf-8"))]


def test_a_page_holds_the_samples_and_the_settings_of_a_file(tmp_path):
    page = write_page(tmp_path / "a.html", [make_tokens(2), make_tokens(1)], prompt="a < b", id={"x": "é"})
    text = page.read_text(encoding="utf-8")
    assert text.count("<b>a &lt; b</b>") == 2 and "1 token, stopped at the length limit" in text
    assert "<title>Samples from out-letters</title>" in text and "<dt>temperature</dt><dd>0.8</dd>" in text
    assert "<dt>iteration</dt><dd>100</dd>" in text and "<dt>file" not in text
    assert "<dt>validation loss</dt><dd>1.5000</dd>" in text
    assert '<article id="sample-1" aria-labelledby="title-1"><h2 id="title-1">Sample 1, id {&quot;x&quot;: ' in text
    assert text.endswith("</main>\n</body>\n</html>\n") and [len(tokens) for tokens in data_of(page)] == [2, 1]


@pytest.mark.parametrize("paths, names", [
    (["/home/me/out-letters/ckpt.pt"], ["out-letters"]), (["ckpt.pt"], ["a model"]), (["log/model.pt"], ["model.pt"]),
    (["/a/x.jsonl", "/b/y.jsonl"], ["x.jsonl", "y.jsonl"]), (["/a/x.jsonl", "/b/x.jsonl"], ["a/x.jsonl", "b/x.jsonl"]),
    (["gpt2", "me/gpt2"], ["gpt2", "me/gpt2"]), (["../old/ckpt.pt", "old/ckpt.pt"], ["old", "old"])], ids=str)
def test_files_and_models_have_names_as_short_as_tells_them_apart(paths, names):
    assert short_names(paths) == names


def test_a_sample_without_log_probabilities_is_plain_text_and_has_their_geometric_mean(tmp_path):
    samples = [[make_token("a", 0.9), make_token("b", 0.1)], []] # 0.9 * 0.1 = 0.3 * 0.3
    page = write_page(tmp_path / "a.html", samples, logprobs=None)
    text = page.read_text(encoding="utf-8")
    assert re.findall('class="finish">(.*?)<', text) == [
        "2 tokens, stopped at the length limit, geometric mean probability 30%",
        "0 tokens, stopped at the length limit"]
    assert data_of(page) == [] and "<span>ab</span>" in text


def test_several_runs_stand_side_by_side_with_the_settings_that_differ(tmp_path, monkeypatch):
    for name in "hot", "cold":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "hot")
    hot = write_lines(Path("a.jsonl"), [make_tokens(1), make_tokens(2)], temperature=1.5, checkpoint={"path": "gpt2"})
    cold = write_lines(Path("../cold/a.jsonl"), [make_tokens(3), make_tokens(4), make_tokens(5)], logprobs=2)
    page = make_page(tmp_path / "a.html", hot, cold)
    text = page.read_text(encoding="utf-8")
    labels = ["hot/a.jsonl, gpt2, temperature 1.5", "cold/a.jsonl, out-letters, temperature 0.8"]
    assert [re.findall("<h[23].*?>(.*?)</h", row) for row in text.split("<section>")[1:]] == [
        ["Sample 0", *labels], ["Sample 1", *labels], ["Sample 2", labels[1]]]
    assert "<title>Comparison of samples from gpt2, out-letters</title>" in text
    assert [len(tokens) for tokens in data_of(page)] == [1, 3, 2, 4, 5] and text.count("<b>ROMEO:") == 3
    ids = re.findall(r' id="(.*?)"', text)
    assert len(ids) == len(set(ids))


def test_other_prompts_stand_below_each_other_and_checkpoints_of_one_file_beside_each_other(tmp_path):
    lines = [write_lines(tmp_path / "part", [make_tokens(1)], **run).read_bytes() for run in (
        {}, {"checkpoint": {"iter_num": 200, "val_loss": 1.25, "crc32": "1"}}, {"prompt": "KING:"},
        {"checkpoint": {"iter_num": 200, "crc32": "2", "path": "../out-letters/ckpt.pt"}})] # of the same name
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    rows = make_page(tmp_path / "a.html", tmp_path / "a.jsonl").read_text(encoding="utf-8").split("<section>")[1:]
    headings = [re.findall("<h3.*?>(.*?)</h", row) for row in rows]
    assert headings == [["iteration 100, validation loss 1.5000", "iteration 200, validation loss 1.2500",
                         "iteration 200, validation loss 1.5000"], ["iteration 100, validation loss 1.5000"]]


def test_hostile_text_is_escaped(tmp_path):
    token = make_token(HOSTILE, 0.5, **{HOSTILE: 0.2})
    hostile = dict(prompt=HOSTILE, id=HOSTILE, checkpoint={"path": HOSTILE, "iter_num": HOSTILE}, stop=[HOSTILE])
    one = write_lines(tmp_path / "a.jsonl", [[token]], **hostile)
    two = write_lines(tmp_path / "b.jsonl", [[token]], **{**hostile, "checkpoint": {"path": HOSTILE + "2"}, HOSTILE: 1})
    for files, num_scripts in ([one], 2), ([one, two], 3):
        text = make_page(tmp_path / "a.html", *files).read_text(encoding="utf-8")
        assert text.count("<script") == text.count("</script>") == num_scripts
        assert not re.search("<(img|svg)", text) and text.count("</article>") == len(files)
        assert html.unescape(re.search("<b>(.*?)</b>", text)[1]) == SHOWN


def test_numbers_of_tokens_are_short_and_lengths_those_of_javascript(tmp_path):
    improbable = Token(0, "a", -math.inf, (Token(1, "b", math.nan), Token(2, "c", 1e-7), Token(3, "d", -0.0)))
    page = write_page(tmp_path / "a.html", [[improbable], [make_token("😀é", 1.0), make_token("", 1.0)]])
    assert data_of(page) == [[[1, 99999, "b", 99999, "c", 0, "d", 0]], [[3, 0], [0, 0]]]


def test_a_page_is_made_later_from_files(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", [make_tokens(2), make_tokens(1)])
    expected = make_page(tmp_path / "b.html", lines).read_bytes()
    lines.write_bytes(lines.read_bytes() + b'{"version": 5, "ind') # of a run that was killed
    for _ in range(2): # an earlier page is replaced
        done = make_by_command(lines, tmp_path / "a.html")
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr == (f"{lines}, line 3 is truncated, so it is left out\n"
                               f"{tmp_path / 'a.html'}: 2 samples\n")
    assert (tmp_path / "a.html").read_bytes() == expected
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "a.html", "b.html"}
    assert b"how likely the model found it, at temperature 1." in expected


def test_help_is_help():
    done = make_by_command("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "the page: samples.jsonl [more.jsonl ...] page.html" in done.stdout


@pytest.mark.parametrize("content, page, message", [
    (Run({}, RUN).line(finished_sample(0, "O", [])).replace(b'"text"', b'"test"'), "new.html",
     "sample 0 lacks a field, or has a wrong one"),
    (b"", "mine.html", "mine.html is not a page of samples, so it is not replaced"),
    (None, "new.html", "error: there is no file '"),
    (b"", "new.html", "new.html is not written, because there is no sample to show"),
], ids=["no-text", "not-a-page", "no-file", "no-sample"])
def test_a_wrong_file_or_page_is_one_line_and_changes_nothing(tmp_path, content, page, message):
    (tmp_path / "mine.html").write_text("<!DOCTYPE html>mine")
    if content is not None:
        (tmp_path / "a.jsonl").write_bytes(content)
    done = make_by_command(tmp_path / "a.jsonl", tmp_path / page)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1
    assert (tmp_path / "mine.html").read_text() == "<!DOCTYPE html>mine" and not list(tmp_path.glob("new*"))
