"""A browser and a server for the tests of the page."""

import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from .fake_server import FakeServer, serving

# Before their first import, so that a failed assertion in them shows its values.
pytest.register_assert_rewrite(f"{__package__}.visit", f"{__package__}.walks")

from .visit import Visit  # noqa: E402

ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 30_000  # milliseconds


def chromium():
    """Path of the browser; ``None`` if there is none."""
    named = os.environ.get("DRAFTWISE_CHROMIUM")
    if named:
        return named
    found = (shutil.which(name) for name in NAMES)
    usual = "/usr/bin/chromium"
    return usual if Path(usual).is_file() else next(filter(None, found), None)


def missing(what):
    """Skip the tests, but fail in continuous integration."""
    if os.environ.get("CI"):
        pytest.fail(f"the page cannot be tested: {what}")
    pytest.skip(what)


# A browser's event loop runs until the browser is closed. It must end with these modules.
@pytest.fixture(scope="module")
def browser():
    path = chromium()
    if path is None:
        missing("no Chromium found; name one in DRAFTWISE_CHROMIUM")
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def fake():
    with serving(FakeServer()) as server:
        yield server


@pytest.fixture
def base_url(fake):
    return fake.url


@pytest.fixture
def new_visit(browser, base_url):
    """Create visits; at the end, check their console messages and requests to other hosts."""
    visits, contexts = [], []

    def make(**options):
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        context = browser.new_context(**options)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        visits.append(Visit(context.new_page(), base_url))
        return visits[-1]

    yield make
    for context in contexts:
        context.close()
    for visit in visits:
        visit.check()


@pytest.fixture
def visit(new_visit):
    """A visit with all settings shown."""
    return new_visit().open().ready().unfold()
