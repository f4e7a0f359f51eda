"""The page of samples in Chromium: its look, its safety, its size, and its tooltips."""
import re
from itertools import pairwise

import pytest

from pages import HOSTILE, SHOWN, make_page, make_token, make_tokens, write_lines, write_page

LUMINANCE_JS = """
const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1})
const context = canvas.getContext('2d', {willReadFrequently: true})
const linear = value => {
  const part = value / 255
  return part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4
}
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
# [name, luminance of the text, luminance of the background] of each element with a visible text.
COLOURS_JS = """
const hasText = e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())
return [...document.body.querySelectorAll('*')]
  .filter(e => hasText(e) && e.checkVisibility())
  .map(e => [
    e.className || e.tagName,
    luminanceOf(getComputedStyle(e).color),
    luminanceOf(backgroundOf(e)),
  ])
"""
# What the page refuses.
VIOLATIONS_JS = """async () => {
  const refused = []
  addEventListener('securitypolicyviolation', event => refused.push(event.effectiveDirective))
  const add = (name, properties) =>
    document.body.append(Object.assign(document.createElement(name), properties))
  add('script', {text: 'hacked = 1'})
  add('img', {src: 'https://evil.test/x'})
  add('style', {textContent: 'body { display: none }'})
  await fetch('https://evil.test/x').catch(() => 0)
  await new Promise(resolve => setTimeout(resolve, 100))
  return refused.sort().join(' ')
}"""
slow = pytest.mark.slow


def evaluate(page, script):
    """Run JavaScript that may use LUMINANCE_JS."""
    return page.evaluate(f"() => {{ {LUMINANCE_JS} {script} }}")


def edges(page, side, elements=".token"):
    """Where this side of each of these elements is in the window."""
    return page.evaluate(f"[...document.querySelectorAll('{elements}')]"
                         f".map(e => e.getBoundingClientRect().{side})")


def write_runs(folder, *runs):
    """Write the page of several runs, each a list of samples."""
    files = [write_lines(folder / f"{i}.jsonl", runs[i], seed=i) for i in range(len(runs))]
    return make_page(folder / "runs.html", *files)


def contrast(a, b):
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


@slow
@pytest.mark.parametrize("scheme, least_step", [("light", 1.08), ("dark", 1.15)])
def test_all_text_has_enough_contrast(view, tmp_path, scheme, least_step):
    """Neighbours in the legend differ, more so where all is dark."""
    page = view(write_runs(tmp_path, [make_tokens(7)], [make_tokens(7)]), color_scheme=scheme)
    page.locator("summary").click()
    page.locator(".token").nth(3).hover()
    colours = evaluate(page, COLOURS_JS)
    names = {name for name, _, _ in colours}
    assert names >= {"H1", "H2", "H3", "SUMMARY", "DD", "p6", "token p6", "BDI", "SPAN", "finish"}
    for colour in colours:
        assert contrast(*colour[1:]) >= 4.5, colour
    legend = [background for name, _, background in colours if re.fullmatch("p[0-6]", name)]
    assert len(legend) == 7
    assert legend == sorted(legend, reverse=scheme == "light") # likely to unlikely
    assert min(contrast(a, b) for a, b in pairwise(legend)) > least_step


@slow
def test_hostile_text_is_shown_and_no_other_script_style_or_request_is_allowed(view, tmp_path):
    samples = [[make_token(HOSTILE, 0.5, **{HOSTILE: 0.2}), make_token("x", 0.01)]]
    page = view(write_page(tmp_path / "page.html", samples, prompt=HOSTILE, id=HOSTILE,
                           checkpoint={"path": HOSTILE}))
    page.locator(".token").first.hover()
    assert "<svg onload=hacked=1>" in page.title()
    assert page.locator(".token").all_text_contents() == [SHOWN, "x"]
    assert view.errors == [] # so far, the browser has refused nothing
    refused = page.evaluate(VIOLATIONS_JS)
    assert refused == "connect-src img-src script-src-elem style-src-elem"
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("h1").is_visible()
    view.errors.clear() # the browser reports its refusals there


@slow
def test_a_screen_reader_reads_continuous_text(view):
    samples = [make_tokens(200, seed) for seed in range(6)]
    page = view(samples)
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    by_id = {node["nodeId"]: node for node in nodes}

    def read(node):
        """The node and all below it, in reading order."""
        yield node
        for child in node["childIds"]:
            yield from read(by_id[child])
    tree = [node for node in read(nodes[0]) if not node["ignored"]]

    def names(role):
        return [node["name"]["value"] for node in tree if node["role"]["value"] == role]
    text = "ROMEO:\n" + "".join(token.text for token in samples[0])
    assert "".join(names("StaticText")).count(text) == 6 # also far from the window
    titles = [f"Sample {n}" for n in range(6)]
    assert names("article") == titles
    assert names("heading") == ["Samples from out-letters", *titles]
    assert names("banner")
    assert names("main")


def test_a_sample_gets_token_elements_when_it_comes_near_the_window(view):
    page = view([make_tokens(50)] * 1000)
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    page.wait_for_selector("article:last-child .token", state="attached")
    assert 100 <= page.locator(".token").count() <= 5000


def test_all_samples_are_printed_in_colour(view):
    page = view([make_tokens(300, seed) for seed in range(20)], color_scheme="dark")
    count = "document.querySelectorAll('article:has(.token)').length"
    page.evaluate(f"addEventListener('beforeprint', () => numPrinted = {count})")
    assert page.evaluate(count) < 20
    assert page.pdf().startswith(b"%PDF")
    assert page.evaluate("numPrinted") == 20
    page.emulate_media(media="print")
    paper, strongest = evaluate(page, """
return ['body', '.p6'].map(name => luminanceOf(backgroundOf(document.querySelector(name))))""")
    assert paper > 0.9
    assert 0.3 < strongest < 0.6


@pytest.mark.parametrize("width, num_columns", [(1200, 2), (400, 1)])
def test_runs_stand_side_by_side_where_there_is_room(view, tmp_path, width, num_columns):
    sample = make_tokens(60)
    path = write_runs(tmp_path, [sample] * 2, [sample] * 3)
    page = view(path, viewport={"width": width, "height": 900})
    lefts = edges(page, "left", "article")
    assert len(lefts) == 5
    assert len(set(lefts)) == num_columns
    assert lefts[1] == lefts[4] # a sample that only the second run has
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_a_page_has_a_legend_if_it_has_probabilities(view, tmp_path):
    page = view([make_tokens(1)])
    assert page.locator(".legend").count() == 1
    page.goto(write_page(tmp_path / "plain.html", [make_tokens(1)], logprobs=None).as_uri())
    assert page.locator(".legend").count() == 0


def test_hovering_shows_the_alternatives(view):
    page = view([[
        make_token("a", 0.5, a=0.5, b=0.25),
        make_token("\n", 0.0004, **{" ": 0.9, "\t\u202e": 0.05}),
        make_token("c  d", 0.2, d=0.3, c=0.2, **{"c  d": 0.2}),
    ]])
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
    # The sign of the newline, which is not among the most likely, takes no room.
    assert edges(page, "width")[1] == 0
    page.mouse.click(edges(page, "left")[1] + 8, edges(page, "top")[1] + 8)
    texts = details.locator("li").all_inner_texts()
    assert texts == ["␣\n90.0%", "⇥⟨202E⟩\n5.0%", "↵\n0.04%"]
    page.locator("h1").hover()
    assert details.count() == 0


KEYS = [ # a key, and what a screen reader announces
    ("ArrowRight", "a 50.0%; others: space new line 25.0%"),
    ("ArrowRight", "b new line 25.0%"),
    ("ArrowRight", "c 12.5%"),
    ("ArrowRight", "c 12.5%"),
    ("ArrowLeft", "b new line 25.0%"),
    ("ArrowLeft", "a 50.0%"),
    ("ArrowDown", "c 12.5%"),
    ("ArrowUp", "a 50.0%"),
    ("End", "c"),
    ("Home", "a"),
]


@slow
def test_the_keyboard_moves_from_token_to_token_and_announces_each(view):
    tokens = [
        make_token("a", 0.5, a=0.5, **{" \n": 0.25}),
        make_token("b\n", 0.25),
        make_token("c", 0.125),
    ]
    page = view([tokens, make_tokens(300)], viewport={"width": 400, "height": 500})
    details = page.get_by_role("tooltip")
    status = page.get_by_role("status")
    page.keyboard.press("Tab") # the settings
    page.keyboard.press("Tab")
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label == "Tokens of sample 0"
    for key, announced in KEYS:
        page.keyboard.press(key)
        assert status.text_content().strip().startswith(announced), key
        assert details.count() == page.locator(".token.current").count() == 1
    page.keyboard.press("End")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowLeft") # shows the last current token again
    assert status.text_content() == "c 12.5%"
    page.keyboard.press("Tab")
    assert details.count() == 0
    page.keyboard.press("ArrowRight")
    page.keyboard.press("End") # the page scrolls down to it
    assert "w299" in status.text_content()
    assert edges(page, "bottom", ".current")[0] <= 500


@slow
def test_a_character_of_several_tokens_is_one_element(view):
    page = view([[
        make_token("", 0.1),
        make_token("", 0.5, **{"": 0.7, "�": 0.5, "a": 0.2}),
        make_token("😀", 0.5, **{"": 0.5, "😃": 0.4}),
        make_token("x", 0.9),
        make_token("", 0.3),
    ]])
    tokens = page.locator(".token")
    assert tokens.all_text_contents() == ["😀", "x", ""]
    assert "p4" in tokens.first.get_attribute("class") # 0.1 * 0.5 * 0.5
    tokens.first.hover()
    assert page.get_by_role("tooltip").locator("li").all_inner_texts() == [
        "(no text)\n10.0%",
        "(no text)\n70.0%", "(no text)\n50.0%", "a\n20.0%",
        "😀\n50.0%", "😃\n40.0%"]


@slow
def test_a_phone_scrolls_only_vertically(view, tmp_path):
    wide = make_token("z" * 300, 0.1, **{"v" * 300: 0.2})
    tokens = [*make_tokens(60), wide, make_token("\n", 0.5)]
    path = write_page(tmp_path / "page.html", [tokens], prompt="y" * 300, stop="x" * 300,
                      checkpoint={"path": "m" * 300})
    page = view(path, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    details = page.get_by_role("tooltip")
    page.locator("summary").tap()
    for index in 5, 29, 30, 31, 60, 61:
        page.locator(".token").nth(index).dispatch_event("click")
        assert details.count() == 1
        assert page.evaluate("document.documentElement.scrollWidth") == 360
    token = page.locator(".token").nth(20)
    token.tap()
    assert "w20" in details.inner_text()
    page.locator(".text b").tap()
    assert details.count() == 0
    token.dispatch_event("pointermove", {"pointerType": "touch"}) # a finger that scrolls
    assert details.count() == 0
    token.dispatch_event("pointermove", {"pointerType": "mouse"})
    assert details.count() == 1
