"""Real engines over a real daemon, and the proxy before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
from starlette.types import ASGIApp

from tests.engine.server.live import Live, LiveApp
from tierstore_engine.build import build_engine, load_model
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.server.chat import PLAIN, ChatTemplate
from tierstore_proxy.app import Proxy
from tierstore_proxy.settings import ProxySettings
from tierstore_tools.vllm.daemon import ServeProcess

from .scripted import Script, Scripted


class LiveProxy(LiveApp):
    """A proxy that answers at ``url``."""

    def __init__(self, **settings: Any) -> None:
        self.settings = ProxySettings(**settings)
        super().__init__(self._serving)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[ASGIApp]:
        self.proxy = Proxy(self.settings)
        self.proxy.start()
        yield self.proxy.app
        await asyncio.wait_for(self.proxy.close(), 60)

    def ways(self) -> dict[str, int]:
        """How many requests went which way."""
        return {
            line.split('"')[1]: int(float(line.split()[-1]))
            for line in self.http.get("/metrics").text.splitlines()
            if line.startswith("tierstore_proxy_ways_total") and not line.endswith(" 0.0")
        }

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"tierstore_proxy_{name}"))


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    return load_model("tiny", device="cpu")


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def daemon(closing: ExitStack) -> Callable[[], ServeProcess]:
    """Starts daemons."""
    return lambda: closing.enter_context(ServeProcess(disk=False))


@pytest.fixture
def engine(closing: ExitStack, tiny: LoadedModel) -> Callable[..., Live]:
    """Starts engines' servers; when the test is over nothing may be left in one."""

    def start(store: str | None = None, **settings: Any) -> Live:
        built = build_engine(tiny, pool_pages=128, store=store)
        closing.callback(built.close)
        live = Live(built, ChatTemplate(PLAIN), **settings)
        closing.callback(live.close)
        closing.callback(live.wait_until_idle)
        return live

    return start


@pytest.fixture
def scripted(closing: ExitStack) -> Callable[[Script], Scripted]:
    """Starts engines that do as they are told."""

    def start(script: Script) -> Scripted:
        engine = Scripted(script)
        closing.callback(engine.close)
        return engine

    return start


@pytest.fixture
def proxy(closing: ExitStack) -> Callable[..., LiveProxy]:
    """Starts proxies, which end before the engines that they are before."""

    def start(**settings: Any) -> LiveProxy:
        live = LiveProxy(**settings)
        closing.callback(live.close)
        return live

    return start
