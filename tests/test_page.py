"""The page of samples as a file."""
import html
import math
import re

import pytest
from page import Page

from pages import ABOUT, HOSTILE, SAMPLES, SHOWN, add, token, write


def test_a_sample_is_in_the_file_at_once(tmp_path):
    page = Page(tmp_path / "page.html", ABOUT)
    assert not (tmp_path / "page.html").read_bytes() # so that a run that dies while loading can start again
    for number, tokens in enumerate(SAMPLES):
        add(page, number, "a < b", tokens, "stop")
        assert (tmp_path / "page.html").read_bytes().count(b"</article>\n") == number + 1
    page.close()
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.endswith("</main>\n</body>\n</html>\n")
    assert text.count("<b>a &lt; b</b>") == 4 and text.count("2 tokens, stopped at a stop sequence") == 1
    assert "<title>Samples from out-letters</title>" in text
    assert "<dt>start</dt><dd>&#x27;ROMEO:\\n&#x27;</dd>" in text


@pytest.mark.parametrize("left", [
    pytest.param(lambda whole, ends: whole, id="whole"),
    pytest.param(lambda whole, ends: whole[:ends[1]], id="no-end"),
    pytest.param(lambda whole, ends: whole[:ends[2]], id="one-too-many"),
    pytest.param(lambda whole, ends: whole[:ends[2] - 1], id="no-newline"),
    pytest.param(lambda whole, ends: whole[:ends[1] + 9], id="half-a-tag"),
    pytest.param(lambda whole, ends: whole[:(ends[1] + ends[2]) // 2], id="half-a-sample"),
])
def test_resuming_gives_the_same_bytes(tmp_path, left):
    whole = write(tmp_path / "whole.html", SAMPLES).read_bytes()
    ends = [end.end() for end in re.finditer(b"</article>\n", whole)]
    path = tmp_path / "page.html"
    path.write_bytes(left(whole, ends))
    write(path, SAMPLES[:2], first=2, close=False)
    assert path.read_bytes() == whole[:ends[1]]
    assert write(path, SAMPLES, first=2).read_bytes() == whole


def test_an_empty_page_is_one_too(tmp_path):
    (tmp_path / "page.html").touch()
    assert write(tmp_path / "page.html", [], about={}).read_bytes().startswith(b"<!DOCTYPE html>")


@pytest.mark.parametrize("there, kept, said", [
    (lambda page: b"mine", 0, "is there already, and nothing is overwritten: move it, or give html_file another name"),
    (lambda page: page, 0, "is there already"),
    (lambda page: b"mine", 1, "first 1 samples, as out_file does, and has 0"),
    (lambda page: b"", 1, "and has 0"),
    (lambda page: b"<p>" + page, 1, "and has 0"),
    (lambda page: page.replace(b"default-src 'none'", b"default-src *"), 1, "and has 0"),
    (lambda page: page.replace(b'"sample-2"', b'"sample-7"'), 2, "and has 1"),
    (lambda page: page, 5, "first 5 samples, as out_file does, and has 4"),
    (lambda page: page[:-45], 4, "and has 3"),
    (lambda page: page.replace(b"out-letters", b"out-lettres"), 2, "the page of this very run and hold its first 2 samples"),
    (None, 1, "and has 0"),
], ids=["a-file", "a-page", "no-page", "empty", "prefixed", "another-version", "gap", "too-few", "half", "another-run", "missing"])
def test_what_is_there_stays(tmp_path, there, kept, said):
    path = tmp_path / "page.html"
    page = write(path, SAMPLES).read_bytes()
    path.unlink() if there is None else path.write_bytes(there(page))
    with pytest.raises(ValueError, match=re.escape(f"{path} ") + ".*" + re.escape(said)):
        Page(path, ABOUT, kept=kept)
    assert (path.read_bytes() if there else None) == (there(page) if there else None)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_folder_is_no_file(tmp_path, kept):
    with pytest.raises(ValueError, match="is no file"):
        Page(tmp_path, ABOUT, kept=kept)


def test_hostile_text_stays_in_its_place(tmp_path):
    page = Page(tmp_path / "page.html", {HOSTILE: HOSTILE, "model": HOSTILE})
    add(page, 0, HOSTILE, [token(HOSTILE, 0.5, **{HOSTILE: 0.2})], "length")
    page.close()
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script>") == 2
    assert not re.search("<(img|svg)", text) and text.count("</article>") == 1
    article = next(line for line in text.split("\n") if line.startswith("<article"))
    assert html.unescape(re.search("<b>(.*)</b>", article)[1]) == SHOWN


def test_improbable_numbers_are_written(tmp_path):
    path = write(tmp_path / "page.html", [[("a", -math.inf, [("b", math.nan), ("c", 1e-7), ("d", -0.0)])]])
    assert '[[1,99999,"b",99999,"c",0,"d",0]]' in path.read_text()
