"""Chromium, if there is one. What goes wrong in a page is an error of the test that opened it."""

from __future__ import annotations

import shutil

import pytest

_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 60_000  # for what happens within two seconds on a machine that is not busy


@pytest.fixture(scope="module")
def chromium():
    """Of one module: while it is there, nothing else on this thread may have an event loop."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Opens pages, each as a visitor of its own."""
    contexts, complaints = [], []

    def open_(url, *, width=1280, height=900, **options):
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: _note(message, complaints))
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


def _note(message, complaints):
    """What the page itself got wrong: that a server is away, or wants a token, is not that."""
    if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
        complaints.append(message.text)


def state(page) -> str:
    return page.locator("#link").get_attribute("data-state")


def wait_live(page) -> None:
    page.locator('#link[data-state="live"]').wait_for()


def wait_until(page, expression) -> None:
    """playwright's own way would have the page evaluate text, which its policy forbids."""
    for _ in range(WAIT_MS // 20):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"this does not come true: {expression}")
