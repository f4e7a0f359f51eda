"""The page of samples in Chromium: its look, its safety, its size, and its tooltips."""
from itertools import pairwise

import pytest

from pages import HOSTILE, SHOWN, make_page, make_token, make_tokens, write_lines, write_page

LUMINANCE_JS = """
const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1})
const context = canvas.getContext('2d', {willReadFrequently: true})
const linear = value => value / 255 <= .04045 ? value / 255 / 12.92 : ((value / 255 + .055) / 1.055) ** 2.4
const luminanceOf = color => { // WCAG's relative luminance
  context.fillStyle = color
  context.fillRect(0, 0, 1, 1)
  const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map(linear)
  return .2126 * r + .7152 * g + .0722 * b
}
const backgroundOf = element => {
  const color = getComputedStyle(element).backgroundColor
  return /^rgba.*, 0\\)$/.test(color) ? backgroundOf(element.parentElement) : color
}
"""
slow = pytest.mark.slow


def evaluate(page, script):
    """Evaluate JavaScript that may use LUMINANCE_JS."""
    return page.evaluate(f"() => {{ {LUMINANCE_JS}; return {script} }}")


@slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(view, scheme, tmp_path):
    files = [write_lines(tmp_path / name, [make_tokens(7)], seed=seed) for seed, name in enumerate("ab")]
    page = view(make_page(tmp_path / "page.html", *files), color_scheme=scheme)
    page.locator("summary").click()
    page.locator(".token").nth(3).hover()
    pairs = evaluate(page, """[...document.body.querySelectorAll('*')]
        .filter(e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())).filter(e => e.checkVisibility())
        .map(e => [e.className || e.tagName, luminanceOf(getComputedStyle(e).color), luminanceOf(backgroundOf(e))])""")
    names = {"H1", "H2", "H3", "SUMMARY", "DD", "p6", "token p6", "BDI", "SPAN", "finish"}
    assert names <= {name for name, *_ in pairs}
    legend = [background for name, _, background in pairs if len(name) == 2 and name[0] == "p"]
    assert legend == sorted(legend, reverse=scheme == "light") and len(legend) == 7 # likely to unlikely
    steps = [(max(pair) + 0.05) / (min(pair) + 0.05) for pair in pairwise(legend)]
    assert min(steps) > {"light": 1.08, "dark": 1.15}[scheme] # neighbours differ, more so where all is dark
    assert all((max(a, b) + 0.05) / (min(a, b) + 0.05) >= 4.5 for _, a, b in pairs), pairs


@slow
def test_hostile_text_is_shown_and_the_page_allows_no_other_script_style_or_request(view, tmp_path):
    samples = [[make_token(HOSTILE, 0.5, **{HOSTILE: 0.2}), make_token("x", 0.01)]]
    page = view(write_page(tmp_path / "page.html", samples, prompt=HOSTILE, id=HOSTILE, checkpoint={"path": HOSTILE}))
    page.locator(".token").first.hover()
    assert page.locator("img, svg").count() == 0 and "<svg onload=hacked=1>" in page.title()
    assert page.locator(".text b").text_content() == SHOWN
    assert page.locator(".token").all_text_contents() == [SHOWN, "x"]
    assert view.errors == [] # so far, the browser has refused nothing
    requests = []
    page.on("request", lambda request: requests.append(request))
    refused = page.evaluate("""async () => {
      const refused = []
      addEventListener('securitypolicyviolation', event => refused.push(event.effectiveDirective))
      for (const [name, properties] of [['script', {text: 'hacked = 1'}], ['img', {src: 'https://evil.test/x'}],
                                        ['style', {textContent: 'body { display: none }'}]])
        document.body.append(Object.assign(document.createElement(name), properties))
      await fetch('https://evil.test/x').catch(() => 0)
      await new Promise(resolve => setTimeout(resolve, 100))
      return refused.sort()
    }""")
    assert refused == ["connect-src", "img-src", "script-src-elem", "style-src-elem"]
    assert page.evaluate("typeof hacked") == "undefined" and page.locator("h1").is_visible()
    assert all(request.failure == "csp" for request in requests), requests
    view.errors.clear() # the browser reports its refusals there


@slow
def test_a_screen_reader_reads_continuous_text(view):
    samples = [make_tokens(200, seed) for seed in range(6)]
    page = view(samples)
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    by_id = {node["nodeId"]: node for node in nodes}

    def read(node):
        """The node and all below it in reading order, as (role, name)."""
        if not node["ignored"]:
            yield node["role"]["value"], node["name"]["value"]
        if node["ignored"] or node["role"]["value"] != "StaticText":
            for child in node.get("childIds", []):
                yield from read(by_id[child])
    tree = list(read(nodes[0]))
    text = "".join(name for role, name in tree if role == "StaticText")
    assert text.count("ROMEO:\n" + "".join(token.text for token in samples[0])) == 6 # also far from the window
    assert {"banner", "main"} <= {role for role, _ in tree}
    names = [f"Sample {n}" for n in range(6)]
    assert [name for role, name in tree if role == "article"] == names
    assert [name for role, name in tree if role == "heading"] == ["Samples from out-letters", *names]


def test_a_sample_gets_token_elements_when_it_comes_near_the_window(view):
    page = view([make_tokens(50)] * 1000)
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    page.wait_for_selector("article:last-child .token", state="attached")
    assert 100 <= page.locator(".token").count() <= 5000


def test_all_samples_are_printed_in_colour(view):
    page = view([make_tokens(300, seed) for seed in range(20)], color_scheme="dark")
    count = "[...document.querySelectorAll('article')].filter(article => article.querySelector('.token')).length"
    page.evaluate(f"addEventListener('beforeprint', () => numPrinted = {count})")
    assert page.evaluate(count) < 20
    assert page.pdf().startswith(b"%PDF")
    assert page.evaluate("numPrinted") == 20
    page.emulate_media(media="print")
    paper, strongest = evaluate(page, """[document.body, document.querySelector('.p6')]
        .map(element => luminanceOf(backgroundOf(element)))""")
    assert paper > 0.9 and 0.3 < strongest < 0.6


@pytest.mark.parametrize("width, num_columns", [(1200, 2), (400, 1)])
def test_runs_stand_side_by_side_where_there_is_room(view, tmp_path, width, num_columns):
    files = [write_lines(tmp_path / name, [make_tokens(60)] * (2 + seed), seed=seed) for seed, name in enumerate("ab")]
    page = view(make_page(tmp_path / "page.html", *files), viewport={"width": width, "height": 900})
    lefts = page.evaluate("[...document.querySelectorAll('article')].map(e => e.getBoundingClientRect().left)")
    assert len(lefts) == 5 and len(set(lefts)) == num_columns
    assert lefts[1] == lefts[4] # a sample that only the second run has
    assert page.locator(".legend").count() == 1
    page.goto(write_page(tmp_path / "plain.html", [make_tokens(1)], logprobs=None).as_uri())
    assert page.locator(".legend").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_hovering_shows_the_alternatives(view):
    page = view([[make_token("a", 0.5, a=0.5, b=0.25), make_token("\n", 0.0004, **{" ": 0.9, "\t\u202e": 0.05}),
                  make_token("c  d", 0.2, d=0.3, c=0.2, **{"c  d": 0.2})]])
    assert page.locator(".text p").inner_text() == "ROMEO:\na\nc  d"
    details = page.get_by_role("tooltip")
    assert details.count() == 0
    page.locator(".token").nth(2).hover()
    assert details.locator("li").all_inner_texts() == ["d\n30.0%", "c\n20.0%", "c␣␣d\n20.0%"]
    assert details.locator(".sampled").inner_text() == "c␣␣d\n20.0%"
    details.hover() # the tooltip stays while the pointer is on it
    assert details.count() == 1
    page.keyboard.press("Escape")
    assert details.count() == 0
    left, top, width = page.evaluate("""(({left, top, width}) => [left, top, width])(
        document.querySelectorAll('.token')[1].getBoundingClientRect())""")
    assert width == 0
    page.mouse.click(left + 8, top + 8) # the sign of the newline, which is not among the most likely
    assert details.locator("li").all_inner_texts() == ["␣\n90.0%", "⇥⟨202E⟩\n5.0%", "↵\n0.04%"]
    page.locator("h1").hover()
    assert details.count() == 0


def test_the_tooltip_covers_two_lines(view):
    lines = [make_token(f"line {i}\n", 0.01, **{f"other {k}": 0.1 for k in range(5)}) for i in range(6)]
    page = view([lines])
    page.locator(".token").nth(5).hover()
    assert page.get_by_role("tooltip").locator("li").count() == 6
    bottoms = page.evaluate("[...document.querySelectorAll('.token')].map(e => e.getBoundingClientRect().bottom)")
    box = page.get_by_role("tooltip").bounding_box()
    assert bottoms[2] <= box["y"] and box["y"] + box["height"] <= bottoms[5]


def test_a_sample_beside_others_begins_no_empty_line(view, tmp_path):
    files = [write_lines(tmp_path / name, [[make_token("\n", 0.5), *make_tokens(2)]]) for name in "ab"]
    compared, alone = make_page(tmp_path / "a.html", *files), make_page(tmp_path / "b.html", files[0])
    for path, is_same_line in (compared, True), (alone, False):
        tops = view(path).evaluate("[...document.querySelectorAll('.token')].map(e => e.getBoundingClientRect().top)")
        assert (abs(tops[0] - tops[1]) < 9) == is_same_line


@slow
def test_the_keyboard_moves_from_token_to_token_and_announces_each(view):
    page = view([[make_token("a", 0.5, a=0.5, **{" \n": 0.25}), make_token("b\n", 0.25), make_token("c", 0.125)],
                 make_tokens(300)], viewport={"width": 400, "height": 500})
    status = page.get_by_role("status")
    page.keyboard.press("Tab") # the settings
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Tokens of sample 0"
    for key, announced in [
            ("ArrowRight", "a 50.0%; others: space new line 25.0%"), ("ArrowRight", "b new line 25.0%"),
            ("ArrowRight", "c 12.5%"), ("ArrowRight", "c 12.5%"), ("ArrowLeft", "b new line 25.0%"),
            ("ArrowLeft", "a 50.0%"), ("ArrowDown", "c 12.5%"), ("ArrowUp", "a 50.0%"), ("End", "c"), ("Home", "a")]:
        page.keyboard.press(key)
        assert status.text_content().strip().startswith(announced), key
        assert page.get_by_role("tooltip").count() == page.locator(".token.current").count() == 1
    page.keyboard.press("End")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowLeft") # shows the last current token again
    assert status.text_content() == "c 12.5%"
    page.keyboard.press("Tab")
    assert page.get_by_role("tooltip").count() == 0
    page.keyboard.press("ArrowRight")
    page.keyboard.press("End") # the page scrolls down to it
    assert "w299" in status.text_content()
    assert page.evaluate("document.querySelector('.current').getBoundingClientRect().bottom <= innerHeight")


@slow
def test_a_character_of_several_tokens_is_one_element(view):
    page = view([[make_token("", 0.1), make_token("", 0.5, **{"": 0.7, "�": 0.5, "a": 0.2}),
                  make_token("😀", 0.5, **{"": 0.5, "😃": 0.4}), make_token("x", 0.9), make_token("", 0.3)]])
    assert page.locator(".token").all_text_contents() == ["😀", "x", ""]
    assert "p4" in page.locator(".token").first.get_attribute("class") # 0.1 * 0.5 * 0.5
    page.locator(".token").first.hover()
    assert page.get_by_role("tooltip").locator("li").all_inner_texts() == [
        "(no text)\n10.0%", "(no text)\n70.0%", "(no text)\n50.0%", "a\n20.0%", "😀\n50.0%", "😃\n40.0%"]


@slow
def test_a_phone_scrolls_only_vertically(view, tmp_path):
    long = [*make_tokens(60), make_token("z" * 300, 0.1, **{"v" * 300: 0.2}), make_token("\n", 0.5)]
    path = write_page(tmp_path / "page.html", [long], prompt="y" * 300, stop="x" * 300, checkpoint={"path": "m" * 300})
    page = view(path, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True, color_scheme="dark")
    page.locator("summary").tap()
    for index in [5, 29, 30, 31, 60, 61]:
        page.locator(".token").nth(index).dispatch_event("click")
        assert page.get_by_role("tooltip").count() == 1
        assert page.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth]") == [360, 360]
    page.locator(".token").nth(20).tap()
    assert "w20" in page.get_by_role("tooltip").inner_text()
    page.locator(".text b").tap()
    assert page.get_by_role("tooltip").count() == 0
    page.locator(".token").nth(20).dispatch_event("pointermove", {"pointerType": "touch"}) # a finger that scrolls
    assert page.get_by_role("tooltip").count() == 0
    page.locator(".token").nth(20).dispatch_event("pointermove", {"pointerType": "mouse"})
    assert page.get_by_role("tooltip").count() == 1
