"""The daemon's page in a real browser, over a real daemon."""

from __future__ import annotations

import re
import tempfile
from contextlib import contextmanager

import pytest

import tierstore
from tests.browser import state, wait_live, wait_until
from tests.daemons import SPEC, pages_of
from tierstore.keys import Identity
from tierstore.testing.processes import DaemonProcess, free_port

TOKEN = "a-token-of-24-characters"
HOSTILE = "<img src=x onerror=\"document.title='taken'\">\u202e<script>alert(1)</script>"
SYSTEM = list(range(1000, 1000 + 4 * SPEC.chunk_tokens))


def prompt(number):
    """A prompt of its own behind the shared system prompt."""
    return SYSTEM + list(range(10_000 * (number + 1), 10_000 * (number + 1) + 2 * SPEC.chunk_tokens))


def save(store, tokens):
    assert store.save(tokens, pages_of(tokens)).wait(30) == len(tokens)


def load(store, tokens):
    hit = store.lookup(tokens)
    buffers = [bytearray(SPEC.page_bytes) for _ in range(-(-hit.tokens // SPEC.chunk_tokens))]
    assert store.load(hit, buffers).wait(30).tokens == hit.tokens
    return hit.tokens


class Daemon(DaemonProcess):
    def __init__(self, directory, *options, **more):
        self.port = free_port()
        self.page = f"http://127.0.0.1:{self.port}/"
        super().__init__(directory, f"--metrics-port={self.port}", *options, **more)

    def connect(self, model="m"):
        store = tierstore.connect(self.url, SPEC, identity=Identity.of(SPEC, model=model), lookup_s=30.0)
        assert store.wait_connected(30)
        return store


@contextmanager
def running(*options):
    """A daemon in a directory of its own, whose path is short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="ts") as directory:
        process = Daemon(directory, *options).start()
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def daemon():
    with running() as process:
        yield process


@pytest.fixture(scope="module")
def found():
    """A daemon that has pages of models with names that somebody thought about."""
    with running() as process:
        for model in (HOSTILE, "m" * 300):
            with process.connect(model) as store:
                save(store, SYSTEM)
                load(store, SYSTEM)
        yield process


def open_page(visit, daemon, **options):
    with daemon.connect():  # it listens by now
        pass
    page = visit(daemon.page, **options)
    wait_live(page)
    return page


def table(page, title):
    """The rows of a table, as text."""
    rows = page.get_by_role("table", name=title, exact=True).locator("tbody tr")
    return [row.locator("td").all_inner_texts() for row in rows.all()]


def test_it_shows_what_a_daemon_does_while_it_does_it(visit, daemon):
    page = open_page(visit, daemon)
    assert page.get_by_text("No prefix has been found yet.").is_visible()
    meter = page.get_by_role("meter", name=re.compile("^host"))
    with daemon.connect() as store:
        for number in range(3):
            save(store, prompt(number))
        page.locator(".meter .text", has_text="10 pages").first.wait_for()  # 4 shared and 2 of each
        assert int(meter.get_attribute("aria-valuenow")) == round(100 * 10 * SPEC.page_bytes / (4 << 20))
        for number in range(3):
            assert load(store, prompt(number)) == len(prompt(number))
        page.locator("#tiles", has_text="100.0 % since the start").wait_for()
        asked = 3 * len(prompt(0))
        page.locator("tbody", has_text=f"{asked:,}").first.wait_for()
        assert [row[1:3] for row in table(page, "Tenants")] == [[f"{asked:,}", "100.0 %"]]
        tokens = page.locator('[data-plot="tokens"] [role="img"]')
        assert "requested" in tokens.get_attribute("aria-label")
        assert page.locator('[data-plot="curve"] [role="img"]').get_attribute("aria-label").count("%") > 5
        busiest = page.get_by_role("table", name="Busiest prefixes").locator("tbody tr").first
        busiest.filter(has_text="3").wait_for()
        cells = busiest.locator("td").all_inner_texts()
        assert cells[1:4] + cells[5:] == ["m", "–", str(len(SYSTEM)), "3", "host"]
    assert page.locator("#conditions li").all_inner_texts() == [
        "✓ daemon serves",
        "✓ disk tier read and written",
    ]


def test_a_daemon_that_dies_is_noticed_and_the_next_one_is_found(visit, daemon):
    page = open_page(visit, daemon)
    pid = daemon.process.pid
    assert f"pid {pid}," in page.locator("#about").inner_text()
    daemon.kill()
    page.locator('#link[data-state="lost"]', has_text="trying again").wait_for()
    assert page.locator("#about").inner_text().count(f"pid {pid},") == 1  # what was last known stays
    daemon.start()
    wait_live(page)
    page.locator("#about", has_text=f"pid {daemon.process.pid},").wait_for()


def test_off_loopback_it_asks_for_the_token(visit, tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    with running("--metrics-host=0.0.0.0", f"--dashboard-token={file}") as daemon:
        with daemon.connect():
            pass
        page = visit(daemon.page)
        page.get_by_label("Token").fill("not the token at all")
        page.get_by_role("button").click()
        page.get_by_text("The token is wrong.").wait_for()
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button").click()
        wait_live(page)
        assert page.url == f"{daemon.page}dashboard/"
        (cookie,) = page.context.cookies()
        assert cookie["httpOnly"]
        assert TOKEN not in cookie["value"]
        other = visit(f"{daemon.page}?token={TOKEN}")
        wait_live(other)
        assert other.url == f"{daemon.page}dashboard/"


def test_names_are_text_whatever_they_are(visit, found):
    page = open_page(visit, found)
    page.get_by_role("table", name="Busiest prefixes").wait_for()
    shown = [row[1] for row in table(page, "Busiest prefixes")]
    assert HOSTILE.replace("\u202e", "\\u202e") in shown
    assert page.title() == "tierstore daemon"
    assert page.locator("img, table script").count() == 0


def test_it_fits_on_a_phone_by_day_and_by_night(visit, found):
    page = open_page(visit, found, width=320, height=640, color_scheme="light", device_scale_factor=2)
    page.get_by_role("table", name="Busiest prefixes").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    canvas = page.locator('[data-plot="tokens"] canvas')
    assert canvas.bounding_box()["width"] <= 320
    page.set_viewport_size({"width": 640, "height": 320})  # it is turned
    wait_until(page, "document.querySelector('[data-plot=tokens] canvas').clientWidth > 400")
    assert page.evaluate("document.documentElement.scrollWidth") <= 640
    ground = "getComputedStyle(document.body).backgroundColor"
    by_day = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    wait_until(page, f"{ground} !== {by_day!r}")
    canvas.wait_for()  # drawn anew, in other colours


def test_nothing_is_said_by_colour_alone(visit, found):
    page = open_page(visit, found, forced_colors="active")
    for condition in page.locator("#conditions li").all():
        assert condition.inner_text()[0] in "✓!✕"
    for plot in page.locator(".plot").all():
        dashes = [line.get_attribute("stroke-dasharray") for line in plot.locator(".legend line").all()]
        assert len(set(dashes)) == len(dashes)
        assert plot.get_by_role("img").get_attribute("aria-label")
    assert state(page) == page.locator("#link").inner_text() == "live"
