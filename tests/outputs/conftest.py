"""Fixtures of the tests of outputs."""
import shutil

import pytest

from pages import write_page

CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
OPTIONS = ["--no-sandbox", "--disable-gpu", "--force-renderer-accessibility"] # the last as with a screen reader


@pytest.fixture(scope="session")
def browser():
    if not CHROMIUM:
        pytest.skip("no Chromium here")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started, started.chromium.launch(executable_path=CHROMIUM, args=OPTIONS) as it:
        yield it


@pytest.fixture
def view(browser, tmp_path):
    """Opens a page of samples in a window: view(samples, **options). The test fails if the page reported an error."""
    pages, errors = [], []

    def view(samples, **options):
        path = samples if hasattr(samples, "as_uri") else write_page(tmp_path / "page.html", samples)
        page = browser.new_page(**{"viewport": {"width": 1000, "height": 800}, **options})
        pages.append(page)
        page.set_default_timeout(5000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text))
        page.goto(path.as_uri())
        page.wait_for_selector(".token", state="attached")
        return page
    view.errors = errors
    yield view
    for page in pages:
        page.close()
    assert errors == []
