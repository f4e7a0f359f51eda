"""Fixtures of the tests of outputs."""
import shutil

import pytest

from pages import write_page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
# The last one is as with a screen reader.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--force-renderer-accessibility"]


@pytest.fixture(scope="session")
def browser():
    if not CHROMIUM:
        pytest.skip("no Chromium here")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)


@pytest.fixture
def view(browser, tmp_path):
    """Opens a page in a window: view(samples, **options), or view(path, **options).

    The test fails if the page reported an error.
    """
    pages = []
    errors = []

    def view(shown, **options):
        if isinstance(shown, list):
            shown = write_page(tmp_path / "page.html", shown)
        page = browser.new_page(**{"viewport": {"width": 1000, "height": 800}, **options})
        pages.append(page)
        page.set_default_timeout(5000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text))
        page.goto(shown.as_uri())
        page.wait_for_selector(".token", state="attached")
        return page
    view.errors = errors
    yield view
    for page in pages:
        page.close()
    assert errors == []
