"""The file with the HTML page of samples."""
import html
import math
import re

import pytest

from pages import HOSTILE, RUN_INFO, SAMPLES, SHOWN, finished_sample, make_token, write_page
from sampling.outputs.html import HtmlWriter
from sampling.params import Prompt, Sample, SampleRequest, Token


def test_a_sample_is_written_to_the_file_immediately(tmp_path):
    writer = HtmlWriter(tmp_path / "page.html", RUN_INFO)
    assert not (tmp_path / "page.html").read_bytes() # if a run dies while it loads the model, the same command works again
    for index, tokens in enumerate(SAMPLES):
        writer.write(finished_sample(index, "a < b", tokens, "stop"))
        assert (tmp_path / "page.html").read_bytes().count(b"</article>\n") == index + 1
    writer.close()
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.endswith("</main>\n</body>\n</html>\n")
    assert text.count("<b>a &lt; b</b>") == 4 and text.count("2 tokens, stopped at a stop text") == 1
    assert "<title>Samples from out-letters</title>" in text
    assert "<dt>start</dt><dd>&#x27;ROMEO:\\n&#x27;</dd>" in text


@pytest.mark.parametrize("model, title", [("out-letters", "out-letters"), ("/home/me/out-letters", "out-letters"), ("/home/me/out/", "out"),
                                          ("openai-community/gpt2", "openai-community/gpt2"), ("/", "a model"), ("", "a model")])
def test_the_title_names_the_model_without_an_absolute_path(tmp_path, model, title):
    page = write_page(tmp_path / "page.html", [], run_info={"model": model}).read_text(encoding="utf-8")
    assert f"<title>Samples from {title}</title>" in page and f"<h1>Samples from {title}</h1>" in page


@pytest.mark.parametrize("id, shown", [(None, "Sample 5"), (7, "Sample 5, id 7"), ("a<b", "Sample 5, id a&lt;b"), ({"x": ["é"]}, "Sample 5, id {&quot;x&quot;: [&quot;é&quot;]}"), (0, "Sample 5, id 0")], ids=repr)
def test_a_sample_has_the_number_and_the_id_of_the_file(tmp_path, id, shown):
    writer = HtmlWriter(tmp_path / "page.html", RUN_INFO)
    writer.write(Sample(SampleRequest(5, Prompt("O", id), []), [], "stop"))
    writer.close()
    assert f'<article id="sample-5" aria-labelledby="title-5"><h2 id="title-5">{shown}</h2>' in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("truncate", [
    pytest.param(lambda whole, ends: whole, id="whole"),
    pytest.param(lambda whole, ends: whole[:ends[1]], id="no-end"),
    pytest.param(lambda whole, ends: whole[:ends[2]], id="one-too-many"),
    pytest.param(lambda whole, ends: whole[:ends[2] - 1], id="no-newline"),
    pytest.param(lambda whole, ends: whole[:ends[1] + 9], id="half-a-tag"),
    pytest.param(lambda whole, ends: whole[:(ends[1] + ends[2]) // 2], id="half-a-sample"),
])
def test_a_resumed_page_has_the_same_bytes(tmp_path, truncate):
    whole = write_page(tmp_path / "whole.html", SAMPLES).read_bytes()
    ends = [end.end() for end in re.finditer(b"</article>\n", whole)]
    path = tmp_path / "page.html"
    path.write_bytes(truncate(whole, ends))
    write_page(path, SAMPLES[:2], num_saved=2, close=False)
    assert path.read_bytes() == truncate(whole, ends) # the page changes with the first sample, or when it is closed
    write_page(path, SAMPLES[:3], num_saved=2, close=False)
    assert path.read_bytes() == whole[:ends[2]]
    assert write_page(path, SAMPLES, num_saved=2).read_bytes() == whole


@pytest.mark.parametrize("truncate", [
    pytest.param(lambda whole, ends: whole[:ends[0]], id="a-sample"),
    pytest.param(lambda whole, ends: whole[:ends[0] - 20], id="part-of-a-sample"),
    pytest.param(lambda whole, ends: whole[:whole.index(b"<article") + 3], id="part-of-a-tag"),
    pytest.param(lambda whole, ends: whole[:whole.index(b"<article")], id="head"),
    pytest.param(lambda whole, ends: whole[:90], id="part-of-the-head"),
])
def test_an_unfinished_page_begins_anew_only_with_an_out_file(tmp_path, truncate):
    whole = write_page(tmp_path / "whole.html", SAMPLES).read_bytes()
    path, unfinished = tmp_path / "page.html", truncate(whole, [end.end() for end in re.finditer(b"</article>\n", whole)])
    path.write_bytes(unfinished)
    with pytest.raises(ValueError, match="exists already"):
        write_page(path, SAMPLES, num_saved=None)
    assert path.read_bytes() == unfinished
    assert write_page(path, SAMPLES, num_saved=0).read_bytes() == whole


def test_a_page_may_have_no_samples(tmp_path):
    (tmp_path / "page.html").touch()
    assert write_page(tmp_path / "page.html", [], run_info={}).read_bytes().startswith(b"<!DOCTYPE html>")


@pytest.mark.parametrize("existing, num_saved, message", [
    (lambda page: b"mine", 0, "exists already, and nothing is overwritten: give html_file another name, or replace it with --overwrite"),
    (lambda page: page, 0, "exists already"),
    (lambda page: page.partition(b"</main>")[0].replace(b"out-letters", b"out-lettres"), 0, "exists already"),
    (lambda page: page.partition(b'<article id="sample-2"')[0], 0, "exists already"),
    (lambda page: page.partition(b'<article id="sample-1"')[0].replace(b'"sample-0"', b'"sample-7"'), 0, "exists already"),
    (lambda page: b"mine", 1, "out_file holds 1 sample, but the page holds 0"),
    (lambda page: b"", 1, "but the page holds 0"),
    (lambda page: b"<p>" + page, 1, "but the page holds 0"),
    (lambda page: page.replace(b"default-src 'none'", b"default-src *"), 1, "but the page holds 0"),
    (lambda page: page.replace(b'"sample-1"', b'"sample-7"'), 2, "but the page holds 1"),
    (lambda page: page, 5, "out_file holds 5 samples, but the page holds 4"),
    (lambda page: page[:-45], 4, "but the page holds 3"),
    (lambda page: page.replace(b"out-letters", b"out-lettres"), 2, "the page of this run. out_file holds 2 samples, but"),
    (None, 1, "but the page holds 0"),
], ids=["a-file", "a-page", "another-unfinished-run", "two-samples", "another-first-sample", "no-page", "empty", "prefixed", "another-version", "gap", "too-few", "half", "another-run", "missing"])
def test_any_other_file_is_refused_and_stays_unchanged(tmp_path, existing, num_saved, message):
    path = tmp_path / "page.html"
    page = write_page(path, SAMPLES).read_bytes()
    path.unlink() if existing is None else path.write_bytes(existing(page))
    with pytest.raises(ValueError, match=re.escape(f"{path} ") + ".*" + re.escape(message)):
        HtmlWriter(path, RUN_INFO, num_saved)
    assert (path.read_bytes() if path.exists() else None) == (existing(page) if existing else None)


@pytest.mark.parametrize("num_saved", [0, 1])
def test_a_folder_is_refused(tmp_path, num_saved):
    with pytest.raises(ValueError, match="is not a regular file"):
        HtmlWriter(tmp_path, RUN_INFO, num_saved)


def test_hostile_text_is_escaped(tmp_path):
    writer = HtmlWriter(tmp_path / "page.html", {HOSTILE: HOSTILE, "model": HOSTILE})
    writer.write(finished_sample(0, HOSTILE, [make_token(HOSTILE, 0.5, **{HOSTILE: 0.2})]))
    writer.close()
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script>") == 2
    assert not re.search("<(img|svg)", text) and text.count("</article>") == 1
    article = next(line for line in text.split("\n") if line.startswith("<article"))
    assert html.unescape(re.search("<b>(.*)</b>", article)[1]) == SHOWN


def test_extreme_logprobs_are_written(tmp_path):
    improbable = Token(0, "a", -math.inf, (("b", math.nan), ("c", 1e-7), ("d", -0.0)))
    path = write_page(tmp_path / "page.html", [[improbable]])
    assert '[[1,99999,"b",99999,"c",0,"d",0]]' in path.read_text()


def test_lengths_are_in_utf_16_units_as_in_javascript(tmp_path):
    path = write_page(tmp_path / "page.html", [[make_token("😀é", 1.0), make_token("", 1.0)]])
    assert "[[3,0],[0,0]]" in path.read_text(encoding="utf-8")
