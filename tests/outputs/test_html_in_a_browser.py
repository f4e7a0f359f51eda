"""The HTML page of samples in Chromium: its look, its safety and its size. Another file tests the tooltips."""
import re
from itertools import pairwise

import pytest

from pages import HOSTILE, PROBABILITIES, SHOWN, finished_sample, make_token, make_tokens, write_page
from sampling.outputs.html import HtmlWriter

LUMINANCE_JS = """
const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d', {willReadFrequently: true})
const luminanceOf = color => { // WCAG's relative luminance
  canvas.fillStyle = color
  canvas.fillRect(0, 0, 1, 1)
  const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(v => v / 255 <= .04045 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4)
  return .2126 * r + .7152 * g + .0722 * b
}
const isTransparent = color => /^rgba.*, 0\\)$/.test(color)
const backgroundOf = element => isTransparent(getComputedStyle(element).backgroundColor) ? backgroundOf(element.parentElement) : getComputedStyle(element).backgroundColor
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_less_likely_tokens_have_a_stronger_background(view, scheme):
    page = view([[make_token(f"{p} ", p) for p in PROBABILITIES]], color_scheme=scheme)
    luminances = page.evaluate(f"() => {{ {LUMINANCE_JS}; return [document.body, ...document.querySelectorAll('.token')].map(e => luminanceOf(backgroundOf(e))) }}")
    assert luminances[0] == luminances[1] # a likely token has none
    assert all(b < a if scheme == "light" else b > a for a, b in pairwise(luminances[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(view, scheme):
    page = view([make_tokens(7)], color_scheme=scheme)
    page.locator("summary").click()
    page.locator(".token").nth(3).hover()
    pairs = page.evaluate(f"""() => {{ {LUMINANCE_JS}
      return [...document.body.querySelectorAll('*')].filter(e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()))
        .filter(e => e.checkVisibility()).map(e => [e.className || e.tagName, luminanceOf(getComputedStyle(e).color), luminanceOf(backgroundOf(e))])
    }}""")
    assert {"H1", "H2", "SUMMARY", "DD", "p6", "token p6", "BDI", "SPAN", "finish"} <= {name for name, *_ in pairs}
    assert all((max(a, b) + 0.05) / (min(a, b) + 0.05) >= 4.5 for _, a, b in pairs), pairs


@pytest.mark.slow
def test_hostile_text_runs_no_code_and_makes_no_request(view, tmp_path):
    writer = HtmlWriter(tmp_path / "page.html", {HOSTILE: HOSTILE, "model": HOSTILE})
    writer.write(finished_sample(0, HOSTILE, [make_token(HOSTILE, 0.5, **{HOSTILE: 0.2}), make_token("x", 0.01)]))
    writer.close()
    page = view(tmp_path / "page.html", bypass_csp=True) # the escaping alone must be sufficient
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.route("**", lambda route: route.abort() if "evil" in route.request.url else route.continue_())
    page.reload()
    page.wait_for_selector(".token")
    page.locator(".token").first.hover()
    page.wait_for_timeout(100)
    assert requests == [(tmp_path / "page.html").as_uri()]
    assert page.evaluate("typeof hacked") == "undefined" and page.locator("img, svg").count() == 0
    assert page.locator(".text p").text_content() == SHOWN + SHOWN + "x"
    assert page.locator(".token").all_text_contents() == [SHOWN, "x"]
    assert page.title().startswith("Samples from </script><script>hacked=1")


@pytest.mark.slow
def test_the_page_allows_no_other_script_style_or_request(view):
    page = view([make_tokens(3)])
    requests = []
    page.on("request", lambda request: requests.append(request))
    refused = page.evaluate("""async () => {
      const refused = []
      addEventListener('securitypolicyviolation', event => refused.push(event.effectiveDirective))
      for (const [name, properties] of [['script', {text: 'hacked = 1'}], ['style', {textContent: 'body { display: none }'}],
                                        ['img', {src: 'https://evil.test/x'}]])
        document.body.append(Object.assign(document.createElement(name), properties))
      await fetch('https://evil.test/x').catch(() => 0)
      await new Promise(resolve => setTimeout(resolve, 100))
      return refused.sort()
    }""")
    assert refused == ["connect-src", "img-src", "script-src-elem", "style-src-elem"]
    assert page.evaluate("typeof hacked") == "undefined" and page.locator("h1").is_visible()
    assert all(request.failure == "csp" for request in requests), requests
    view.errors.clear() # the browser reports its refusals there


@pytest.mark.slow
def test_spaces_and_newlines_are_preserved(view):
    page = view([[make_token("a  b\n", 0.5), make_token("\n", 0.5), make_token("   c\td ", 0.5)]])
    assert page.locator(".text p").inner_text() == "ROMEO:\na  b\n\n   c\td "


@pytest.mark.slow
def test_a_screen_reader_reads_continuous_text(chromium, view):
    samples = [make_tokens(200, seed) for seed in range(6)]
    page = view(samples, chromium("--force-renderer-accessibility")) # as with a screen reader
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    by_id = {node["nodeId"]: node for node in nodes}

    def read(node):
        """The node and all below it in reading order, as (role, name, whether it can have the focus)."""
        if not node["ignored"]:
            states = {p["name"]: p["value"].get("value") for p in node.get("properties", [])}
            yield node["role"]["value"], node["name"]["value"], bool(states.get("focusable"))
        if node["ignored"] or node["role"]["value"] != "StaticText":
            for child in node.get("childIds", []):
                yield from read(by_id[child])
    tree = list(read(nodes[0]))
    text = "".join(name for role, name, _ in tree if role == "StaticText")
    assert text.count("ROMEO:\n" + "".join(token.text for token in samples[0])) == 6 # also samples outside of the window
    assert {"banner", "main"} <= {role for role, *_ in tree}
    assert [name for role, name, _ in tree if role == "article"] == [f"Sample {n}" for n in range(6)]
    assert [name for role, name, _ in tree if role == "heading"] == ["Samples from out-letters", *(f"Sample {n}" for n in range(6))]
    assert [name for role, name, focus in tree if focus][1:] == ["Settings", *(f"Tokens of sample {n}" for n in range(6))]


@pytest.mark.slow
def test_only_samples_near_the_window_have_token_elements(view, tmp_path):
    head, article, tail = re.split("(<article.*</article>\n)", write_page(tmp_path / "one.html", [make_tokens(500)]).read_text())
    articles = (re.sub('(sample|title)-1"', rf'\1-{number}"', article) for number in range(1, 1001))
    (tmp_path / "page.html").write_text(head + "".join(articles) + tail)
    page = view(tmp_path / "page.html")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def get_metric(name):
        page.evaluate("gc()")
        page.wait_for_timeout(300)
        return next(metric["value"] for metric in session.send("Performance.getMetrics")["metrics"] if metric["name"] == name)
    assert get_metric("LayoutObjects") < 8000 # samples far from the window have no layout
    before = get_metric("Nodes")
    most = page.evaluate("""async () => {
      let most = 0
      for (let step = 0; step <= 30; step++) {
        scrollTo(0, document.documentElement.scrollHeight * step / 30)
        await new Promise(requestAnimationFrame)
        await new Promise(requestAnimationFrame)
        most = Math.max(most, document.getElementsByClassName('token').length)
      }
      return most
    }""")
    page.wait_for_selector("article:last-child .token", state="attached")
    assert 500 <= most <= 5000
    assert page.locator("article").first.locator(".token").count() == 0
    assert get_metric("Nodes") < before + 10_000 # the tokens of samples that were scrolled past are removed


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_all_samples_are_printed_in_colour(view, scheme):
    page = view([make_tokens(300, seed) for seed in range(20)], color_scheme=scheme)
    count = "[...document.querySelectorAll('article')].filter(article => article.querySelector('.token')).length"
    page.evaluate(f"addEventListener('beforeprint', () => numPrinted = {count})")
    assert page.evaluate(count) < 20
    assert page.pdf().startswith(b"%PDF")
    assert page.evaluate("numPrinted") == 20
    page.wait_for_timeout(300)
    assert page.evaluate(count) < 20 # as before
    page.emulate_media(media="print")
    adjust, details, luminances = page.evaluate(f"""() => {{ {LUMINANCE_JS}
      return [['.token', '.legend li'].map(name => getComputedStyle(document.querySelector(name)).printColorAdjust),
              getComputedStyle(document.querySelector('#details')).display, [document.body, document.querySelector('.p6')].map(e => luminanceOf(backgroundOf(e)))] }}""")
    assert adjust == ["exact", "exact"] and details == "none"
    assert luminances[0] > 0.9 and 0.3 < luminances[1] < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("end", ["<p lang", "w2", "application", "other2", "</article>\n", None])
def test_a_truncated_page_shows_its_complete_samples(view, tmp_path, end):
    whole = write_page(tmp_path / "page.html", [make_tokens(5), make_tokens(5)]).read_bytes()
    second = whole.index(b'<article id="sample-1"')
    (tmp_path / "page.html").write_bytes(whole[:whole.index(end.encode(), second) + len(end)] if end else whole[:second + 9])
    page = view(tmp_path / "page.html")
    assert page.locator("article").first.locator(".token").count() == 5
    assert "ROMEO" in page.locator("article").first.inner_text()
