"""A server over a real engine, on a thread of this process, and OpenAI's client for it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import openai
import uvicorn
from starlette.types import ASGIApp

from tierstore.testing.clock import wait_until
from tierstore_engine.engine import Engine, EngineStats
from tierstore_engine.server.app import ApiServer
from tierstore_engine.server.chat import ChatTemplate
from tierstore_engine.server.defaults import OPENAI_DEFAULTS, SamplingDefaults
from tierstore_engine.server.settings import ServerSettings

WAIT_S = 60.0  # for what happens at once on a machine that is not busy


def clients_of(url: str) -> tuple[openai.OpenAI, httpx.Client]:
    """OpenAI's client and a plain one. Both read no certificates, which take 50 ms a client."""
    plain, of_openai = (httpx.Client(base_url=url, timeout=WAIT_S, verify=False) for _ in range(2))
    client = openai.OpenAI(
        base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=WAIT_S, http_client=of_openai
    )
    return client, plain


class LiveApp:
    """An application that answers at ``url``; ``opened`` makes it, on the thread that it is for."""

    def __init__(self, opened: Callable[[], AbstractAsyncContextManager[ASGIApp]]) -> None:
        self._opened = opened
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._begun.wait(WAIT_S)
        self.client, self.http = clients_of(self.url)

    async def _main(self) -> None:
        async with self._opened() as app:
            config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
            self._uvicorn = uvicorn.Server(config)
            self._uvicorn.capture_signals = _no_signals  # type: ignore[method-assign]
            self._begun.set()
            await self._uvicorn.serve(sockets=[self._listener])

    def close(self) -> None:
        self.client.close()
        self.http.close()
        self._uvicorn.should_exit = True
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


class Live(LiveApp):
    """A server over an engine."""

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate | None,
        *,
        defaults: SamplingDefaults = OPENAI_DEFAULTS,
        **settings: Any,
    ) -> None:
        self.settings = ServerSettings(model_name="tiny", port=0, **settings)
        self.own_engine = engine
        self._template = template
        self._defaults = defaults
        super().__init__(self._serving)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[ASGIApp]:
        self.server = ApiServer(self.own_engine, self.settings, self._template, self._defaults)
        yield self.server.app
        self.server.close()

    def stats(self) -> EngineStats:
        """The engine's, between two of its steps."""
        found: list[EngineStats] = []
        done = threading.Event()
        self.server.engine.post(lambda engine: (found.append(engine.stats()), done.set()))
        assert done.wait(WAIT_S)
        return found[0]

    def idle(self) -> bool:
        """Whether nothing is under way, and every page is where it belongs."""
        stats = self.stats()
        nothing = not (stats.waiting or stats.admitted or self.server.admission.requests)
        return nothing and stats.available_pages == stats.total_pages and not self.server.admission.tokens

    def wait_until_idle(self) -> None:
        wait_until(self.idle)


class _no_signals:
    """uvicorn's own handlers belong on the main thread."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
