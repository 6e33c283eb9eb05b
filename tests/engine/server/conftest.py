"""A server over a real engine. Its packages are optional: without them the modules here are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import chromium, visit
from tierstore_engine.engine import Engine

if TYPE_CHECKING:
    from .live import Live


__all__ = ["chromium", "serve", "visit"]


@pytest.fixture
def serve() -> Iterator[Callable[..., Live]]:
    """Starts a server over an engine, in which nothing may be left after the test. ``owned`` closes the
    engine then too: otherwise a later test on the same daemon gets this test's mapping of the arena."""
    from tierstore_engine.server.chat import PLAIN, ChatTemplate

    from .live import Live

    started: list[Live] = []
    closed: list[Engine] = []

    def start(engine: Engine, *, template: str | None = "", owned: bool = False, **settings: Any) -> Live:
        chat = None if template is None else ChatTemplate(template or PLAIN)
        started.append(Live(engine, chat, **settings))
        closed.extend([engine] if owned else [])
        return started[-1]

    yield start
    for live in started:
        live.wait_until_idle()
        live.close()
    for engine in closed:
        engine.close()
