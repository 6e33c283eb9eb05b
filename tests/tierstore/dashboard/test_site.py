"""Who may see the page: what an attacker would try, without sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tierstore.dashboard.site import Site, WebRequest, read_token
from tierstore.errors import UsageError

TOKEN = "a-token-of-24-characters"
ROOT = Path(__file__).parents[3]


def site(host="127.0.0.1", token=None):
    return Site(host, token, title="tierstore daemon", how="say --dashboard-token FILE")


def ask(site, target="/dashboard/", *, method="GET", body=b"", host="localhost:9464", **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return site.answer(WebRequest(method, target, {"host": host} | named, body))


def test_the_root_leads_to_the_page():
    for path in ("/", "/dashboard"):
        answer = ask(site(), path)
        assert (answer.status, answer.headers["Location"]) == (307, "dashboard/")
    assert ask(site(), "/metrics") is None


def test_every_file_that_the_page_names_is_there():
    page = ask(site())
    assert page.status == 200
    assert b"<script src=" in page.body
    for name in ("page.js", "page.css", "icon.svg", "uPlot-1.6.32.iife.min.js", "uPlot-1.6.32.min.css"):
        assert name.encode() in page.body
        assert ask(site(), f"/dashboard/{name}").status == 200


@pytest.mark.parametrize(
    "name", ["page.html", "token.html", "uPlot-LICENSE", "../site.py", "%2e%2e/site.py", "x"]
)
def test_nothing_else_is(name):
    assert ask(site(), f"/dashboard/{name}").status == 404


def test_no_answer_lets_another_script_run_or_another_page_frame_it():
    answers = [
        ask(site(), "/dashboard/"),
        ask(site(token=TOKEN), "/dashboard/"),
        ask(site(), "/dashboard/nothing"),
    ]
    for answer in answers:
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy


@pytest.mark.parametrize(
    "host", ["evil.example:9464", "127.0.0.1.evil.example", "user@127.0.0.1", "[::1", "10.0.0.1"]
)
def test_at_loopback_only_this_machine_is_named(host):
    assert ask(site(), host=host).status == 421
    assert site().refusal(WebRequest("GET", "/metrics", {"host": host})) is not None


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:9464", "[::1]:9464", ""])
def test_these_names_are_this_machine(host):
    assert ask(site(), host=host).status == 200


def test_off_loopback_any_name_will_do_for_who_has_the_token():
    there = site("0.0.0.0", TOKEN)
    answer = ask(there, "/dashboard/feed", host="gpu-7:9464", authorization=f"Bearer {TOKEN}")
    assert (answer.status, answer.follows) == (200, True)


def test_off_loopback_without_a_token_it_says_how_to_have_one():
    answer = ask(site("0.0.0.0"), host="gpu-7")
    assert (answer.status, answer.body.count(b"\n")) == (403, 1)
    assert b"--dashboard-token" in answer.body


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer nearly-the-right-token"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": TOKEN},
        {"cookie": "tierstore=1; x"},
        {"cookie": f"token={TOKEN}"},
        {"cookie": '\x00=;;;"'},
    ],
)
def test_without_the_token_there_is_no_feed(headers):
    for host in ("0.0.0.0", "127.0.0.1"):
        there = site(host, TOKEN)
        assert ask(there, "/dashboard/feed", **headers).status == 401
        page = ask(there, **headers)
        assert page.status == 401
        assert b'type="password"' in page.body


def test_the_token_is_given_once_and_a_cookie_stands_for_it():
    there = site("0.0.0.0", TOKEN)
    typed = ask(there, method="POST", body=f"token={TOKEN}".encode(), origin="http://localhost:9464")
    linked = ask(there, f"/dashboard/?token={TOKEN}")
    for answer in (typed, linked):
        assert (answer.status, answer.headers["Location"]) == (303, ".")
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert TOKEN not in cookie
        pair = cookie.partition(";")[0]
        assert ask(there, "/dashboard/feed", cookie=f"other=1; {pair}").status == 200
        assert ask(site("0.0.0.0", TOKEN + "2"), "/dashboard/feed", cookie=pair).status == 401
    wrong = ask(there, method="POST", body=b"token=nearly-the-right-token")
    assert wrong.status == 401
    assert "Set-Cookie" not in wrong.headers
    assert ask(there, method="POST", body=b"\xff\xfe=&&&").status == 401


def test_other_sites_cannot_take_places_or_log_in():
    for headers in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "cors"},
        {"sec_fetch_site": "same-site", "sec_fetch_mode": "no-cors"},
    ):
        assert ask(site(), "/dashboard/feed", **headers).status == 403
        assert ask(site(token=TOKEN), method="POST", body=f"token={TOKEN}".encode(), **headers).status == 403
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert ask(site(), **link).status == 200
    assert ask(site(), "/dashboard/feed", origin="http://localhost:9464").status == 200


def test_a_token_that_can_be_guessed_is_refused(tmp_path):
    file = tmp_path / "token"
    file.write_text("short\n")
    with pytest.raises(UsageError, match="at least 16"):
        read_token(file)
    with pytest.raises(UsageError, match="cannot read"):
        read_token(tmp_path / "none")
    file.write_text(f" {TOKEN}\n")
    assert read_token(file) == TOKEN


def test_the_page_is_in_the_wheel():
    files = {each.distribution_path for each in WheelBuilder(str(ROOT)).recurse_included_files()}
    assets = {
        f"tierstore/dashboard/assets/{path.name}" for path in (ROOT / "tierstore/dashboard/assets").iterdir()
    }
    assert "tierstore/dashboard/assets/uPlot-LICENSE" in assets
    assert assets <= files
