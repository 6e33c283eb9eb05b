"""The HTTP server of ``tierstore llama``: every path of llama-server, and ``/tierstore/metrics``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TextIO

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tierstore_engine.server.admission import Admission
from tierstore_engine.server.http import Exchange, Handler, MeteredRoute
from tierstore_proxy.llama.cache import SlotCache, SlotUse
from tierstore_proxy.llama.metrics import LlamaMetrics, LlamaOutcome
from tierstore_proxy.llama.requests import LlamaRequest, moves_cells
from tierstore_proxy.llama.settings import LlamaSettings
from tierstore_proxy.passing import HOP_BY_HOP, api_error, pass_through, while_connected
from tierstore_proxy.serving import serve_proxy
from tierstore_proxy.upstream import Upstream

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_NOT_UPWARDS = HOP_BY_HOP | {"host", "content-length", "expect"}

_log = logging.getLogger(__name__)


class LlamaProxy:
    """llama-server's API, with prompts from the store. Used on one event loop, from :meth:`start` to
    :meth:`close`."""

    def __init__(self, settings: LlamaSettings) -> None:
        self.settings = settings
        self.admission = Admission(settings)
        self.metrics = LlamaMetrics()
        self._upstream = Upstream(settings.url, "llama-server")
        self.cache = SlotCache(settings, self._upstream, self.metrics)
        host = settings.address[0] if settings.api_key is None else None

        def endpoint(name: str, handler: Handler, *, public: bool = False) -> MeteredRoute:
            key = None if public else settings.api_key
            return MeteredRoute(name, handler, self.metrics, api_key=key, host=host, error_of=api_error)

        self.app = Starlette(
            routes=[
                Route("/tierstore/metrics", endpoint("metrics", self._metrics), methods=["GET"]),
                Route("/health", endpoint("health", self._forward, public=True), methods=["GET"]),
                Route("/{path:path}", endpoint("llama-server", self._forward), methods=_METHODS),
            ],
        )

    def start(self) -> None:
        """Start to watch llama-server."""
        self.cache.start()

    async def drain(self) -> None:
        """Answer 503 from now on, and wait for running requests and saves."""
        if not await self.admission.drain(self.settings.drain_s):
            _log.warning("requests were cut off: drain_s (%g) was not enough", self.settings.drain_s)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.cache.settle(), self.settings.drain_s)

    async def close(self) -> None:
        await self.cache.close()
        await self._upstream.close()

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.send(Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST}))

    async def _forward(self, exchange: Exchange) -> None:
        body = await exchange.any_body(self.settings.max_body_bytes)
        with self.admission.place():
            await while_connected(exchange, self._answer(exchange, body))

    async def _answer(self, exchange: Exchange, body: bytes) -> None:
        request, headers = exchange.request, _upwards(exchange.request)
        path = request.url.path.strip("/")
        asked = None
        if request.method == "POST":
            asked = LlamaRequest.parse(path, body)
            if moves_cells(path, request.query_params, body):
                self.cache.taint()
        if asked is None:
            if request.method == "POST" and "completion" in path:
                self.metrics.went(LlamaOutcome.UNSUITED)
            await self._passed(exchange, body, headers, None)
            return
        own = {"authorization": headers["authorization"]} if "authorization" in headers else {}
        async with self.cache.slot_for(asked, own) as use:
            sent = body if use is None else asked.sent_to(use.slot.number)
            await self._passed(exchange, sent, headers, use)

    async def _passed(
        self, exchange: Exchange, body: bytes, headers: dict[str, str], use: SlotUse | None
    ) -> None:
        url = exchange.request.url
        path = url.path + (f"?{url.query}" if url.query else "")
        async with self._upstream.ask(exchange.request.method, path, body or None, headers) as answer:
            if use is not None:
                use.answered = answer.status_code == 200
            await pass_through(exchange, answer)


def _upwards(request: Request) -> dict[str, str]:
    """Return the client's headers for llama-server."""
    named = {name.strip() for name in request.headers.get("connection", "").lower().split(",")}
    return {
        name: value
        for name, value in request.headers.items()
        if name not in _NOT_UPWARDS and name not in named
    }


def run(settings: LlamaSettings, *, err: TextIO | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises :class:`~tierstore.errors.UsageError` with a one-line message."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
    serve_proxy(
        lambda: LlamaProxy(settings), settings.address, name="tierstore llama", level=logging.INFO, err=err
    )
