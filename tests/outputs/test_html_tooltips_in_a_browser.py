"""The tooltips of the HTML page of samples in Chromium, with a pointer, a keyboard and a finger."""
import pytest

from pages import finished_sample, make_token, make_tokens
from sampling.outputs.html import HtmlWriter


def test_hovering_shows_the_alternatives(view):
    page = view([[make_token("a", 0.5, a=0.5, b=0.25), make_token("\n", 0.0004, **{" ": 0.9, "\t\u202e": 0.05}), make_token("c", 0.2, d=0.3, c=0.2)]])
    details = page.get_by_role("tooltip")
    assert details.count() == 0
    page.locator(".token").nth(2).hover()
    assert details.locator("li").all_inner_texts() == ["d\n30.0%", "c\n20.0%"]
    assert details.locator(".sampled").inner_text() == "c\n20.0%"
    details.hover() # the tooltip stays while the pointer is on it
    assert details.count() == 1
    page.keyboard.press("Escape")
    assert details.count() == 0
    left, top, width = page.evaluate("(({left, top, width}) => [left, top, width])(document.querySelectorAll('.token')[1].getBoundingClientRect())")
    assert width == 0
    page.mouse.click(left + 8, top + 8) # the newline symbol; the list contains the sampled token even if it is not among the most likely
    assert details.locator("li").all_inner_texts() == ["␣\n90.0%", "⇥⟨202E⟩\n5.0%", "↵\n0.04%"]
    page.locator("h1").hover()
    assert details.count() == 0


@pytest.mark.slow
def test_the_tooltip_is_next_to_its_token(view):
    page = view([make_tokens(100)], viewport={"width": 400, "height": 500})
    places = page.evaluate("""() => [...document.querySelectorAll('.token')].map(token => {
      scrollTo(0, scrollY + token.getBoundingClientRect().top - (token.textContent.length % 2 ? 10 : 300))
      token.click()
      const [line, details] = [[...token.getClientRects()].at(-1), document.querySelector('#details').getBoundingClientRect()]
      return [token.getClientRects().length, details.top, Math.max(line.top - details.bottom, details.top - line.bottom)]
    })""")
    assert {lines for lines, *_ in places} == {1, 2} # a token's space may stay at the end of the previous line
    assert all(top >= 0 and 0 <= gap <= 8 for _, top, gap in places), places


@pytest.mark.slow
def test_the_keyboard_moves_from_token_to_token_and_announces_each(view):
    page = view([[make_token("a", 0.5, a=0.5, **{" \n": 0.25}), make_token("b\n", 0.25), make_token("c", 0.125)], make_tokens(300)],
                viewport={"width": 400, "height": 500})
    status = page.get_by_role("status")
    page.keyboard.press("Tab") # the settings
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Tokens of sample 0"
    for key, announced in [("ArrowRight", "a 50.0%; others: space new line 25.0%"), ("ArrowRight", "b new line 25.0%"),
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
    page.keyboard.press("Escape")
    assert page.get_by_role("tooltip").count() == 0


@pytest.mark.slow
def test_a_character_of_several_tokens_is_one_element(view):
    page = view([[make_token("", 0.1), make_token("", 0.5, **{"": 0.7, "�": 0.5, "a": 0.2}), make_token("😀", 0.5, **{"": 0.5, "😃": 0.4}), make_token("x", 0.9), make_token("", 0.3)]])
    assert page.locator(".token").all_text_contents() == ["😀", "x", ""]
    assert "p4" in page.locator(".token").first.get_attribute("class") # 0.1 * 0.5 * 0.5
    page.locator(".token").first.hover()
    assert page.get_by_role("tooltip").locator("li").all_inner_texts() == ["(no text)\n10.0%", "(no text)\n70.0%", "(no text)\n50.0%", "a\n20.0%", "😀\n50.0%", "😃\n40.0%"]


@pytest.mark.slow
def test_arrow_keys_work_while_the_page_scrolls_under_the_pointer(view):
    page = view([make_tokens(300)], viewport={"width": 400, "height": 500})
    page.locator(".token").nth(20).click()
    for number in range(21, 60): # this scrolls the page
        page.keyboard.press("ArrowRight")
        page.evaluate("new Promise(requestAnimationFrame)")
        assert f" w{number} " in page.get_by_role("status").text_content()
    page.wait_for_timeout(150)
    assert page.locator(".current").inner_text().strip() == "w59"


@pytest.mark.slow
def test_the_sample_with_the_current_token_keeps_its_token_elements(view):
    page = view([make_tokens(500)] * 30)
    page.locator(".token").nth(3).click()
    page.evaluate("scrollTo(0, 1e6)")
    page.wait_for_selector("article:last-child .token", state="attached")
    page.keyboard.press("ArrowRight")
    assert "w4" in page.get_by_role("status").text_content()


@pytest.mark.slow
def test_a_phone_scrolls_only_vertically(view, tmp_path):
    writer = HtmlWriter(tmp_path / "page.html", {"start": "x" * 300, "model": "/" * 300})
    writer.write(finished_sample(0, "y" * 300, [*make_tokens(60), make_token("z" * 300, 0.1, **{"v" * 300: 0.2}), make_token("\n", 0.5)]))
    writer.close()
    page = view(tmp_path / "page.html", viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True, color_scheme="dark")
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
