"""The engine's page: in a real browser over a real engine, and who may see it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs pip install -e '.[dev]'")
pytest.importorskip("uvicorn")

from tests.browser import wait_live
from tests.engine.stored import Stored
from tierstore.dashboard.feed import MOST_VIEWERS
from tierstore_engine.drafting import PromptLookupDrafter
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import Completion, FinishReason, RequestId, RequestMetrics
from tierstore_engine.server.dashboard import Lately

from .live import Live

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


def complete(live: Live) -> None:
    live.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
    )


def test_it_shows_the_queue_the_latencies_and_the_cache(
    tiny: LoadedModel,
    stored_engine: Callable[..., Stored],
    serve: Callable[..., Live],
    visit: Callable[..., Any],
) -> None:
    live = serve(stored_engine(tiny, drafter=PromptLookupDrafter(tokens=4)).engine)
    page = visit(f"{live.url}/")
    wait_live(page)
    assert page.url == f"{live.url}/dashboard/"
    assert page.title() == "tierstore engine"
    assert page.locator("#conditions li").first.inner_text() == "✓ engine serves"
    tiles = page.locator("#tiles > div")
    complete(live)
    complete(live)  # its prompt is in HBM now
    tiles.filter(has_text="Prompts from the cache").filter(has_text="hbm").wait_for()
    for label in ("Time to first token", "Time between tokens"):
        tiles.filter(has_text=label).filter(has_text="within").filter(has_not_text="–").wait_for()
    stats = live.stats()
    assert stats.drafted_tokens
    tiles.filter(has_text=f"{stats.drafted_tokens:,} drafted").wait_for()
    tiles.filter(has_text=f"{stats.steps:,} steps").wait_for()
    assert page.get_by_role("meter", name="batch 0.0 %").is_visible()
    assert page.locator('[data-plot="drafts"]').is_visible()
    page.set_viewport_size({"width": 320, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_with_an_api_key_it_asks_for_that(
    tiny: LoadedModel, engine_of: Callable[..., Engine], serve: Callable[..., Live], visit: Callable[..., Any]
) -> None:
    live = serve(engine_of(tiny), api_key="key")
    assert live.http.get("/dashboard/").status_code == 401
    assert live.http.get("/dashboard/feed").status_code == 401
    page = visit(live.url)
    page.get_by_label("Token").fill("key")
    page.get_by_role("button").click()
    wait_live(page)


def test_missed_tokens_of_an_embedded_store_by_reason(
    tiny: LoadedModel, stored_engine: Callable[..., Stored], serve: Callable[..., Live]
) -> None:
    live = serve(stored_engine(tiny).engine)
    complete(live)
    rows: list[list[str]] = []
    with live.http.stream("GET", "/dashboard/feed") as answer:
        lines = answer.iter_lines()
        while not rows:
            if next(lines) == "event: sample":
                view = json.loads(next(lines).removeprefix("data: "))[2]
                [rows] = [
                    each["rows"]
                    for each in view["tables"]
                    if each["title"] == "Missed tokens by reason, last hour"
                ]
    assert rows[0][0] == "never saved"


def test_requests_that_are_no_viewers(
    tiny: LoadedModel, engine_of: Callable[..., Engine], serve: Callable[..., Live]
) -> None:
    live = serve(engine_of(tiny))
    assert live.http.get("/dashboard/page.js").status_code == 200
    assert live.http.get("/dashboard/none").status_code == 404
    assert live.http.get("/dashboard/", headers={"Host": "evil.example"}).status_code == 421
    assert live.http.get("/dashboard/feed", headers={"Origin": "http://evil.example"}).status_code == 403
    assert live.http.post("/dashboard/", content=b"x" * 2000).status_code == 413
    assert live.http.put("/dashboard/").status_code == 405
    assert 'endpoint="dashboard",status="421"' in live.http.get("/metrics").text


def test_places_come_back_when_viewers_leave(
    tiny: LoadedModel, engine_of: Callable[..., Engine], serve: Callable[..., Live]
) -> None:
    live = serve(engine_of(tiny))
    with contextlib.ExitStack() as viewers:
        lines = []  # kept: whoever drops one hangs up
        for _ in range(MOST_VIEWERS):
            answer = viewers.enter_context(live.http.stream("GET", "/dashboard/feed"))
            assert answer.status_code == 200
            lines.append(answer.iter_lines())
            assert next(lines[-1]) == "retry: 1000"
        assert live.http.get("/dashboard/feed").status_code == 503
    status = 503
    while status != 200:
        with live.http.stream("GET", "/dashboard/feed") as answer:
            status = answer.status_code


def test_latencies_are_those_of_the_last_minute() -> None:
    now = [0.0]
    lately = Lately(clock=lambda: now[0])
    for ttft_s in (1.0, 2.0):
        metrics = RequestMetrics(
            prompt_tokens=10, reused_by_tier={"hbm": 4, "disk": 2}, ttft_s=ttft_s, itl_s=(0.1, ttft_s)
        )
        lately.ended([Completion(RequestId(1), "x", (1,), FinishReason.LENGTH, metrics)])
        now[0] += 40.0
    assert (lately.ttft_s(), lately.itl_s()) == ([2.0], [0.1, 2.0])
    assert (lately.prompt_tokens, dict(lately.cached_tokens)) == (20, {"hbm": 8, "disk": 4})
    now[0] += 30.0
    assert lately.ttft_s() == []
