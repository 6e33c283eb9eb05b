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
    """Starts a server over an engine; when the test is over nothing may be left in it."""
    from tierstore_engine.server.chat import PLAIN, ChatTemplate

    from .live import Live

    started: list[Live] = []

    def start(engine: Engine, *, template: str | None = "", **settings: Any) -> Live:
        chat = None if template is None else ChatTemplate(template or PLAIN)
        started.append(Live(engine, chat, **settings))
        return started[-1]

    yield start
    for live in started:
        live.wait_until_idle()
        live.close()
