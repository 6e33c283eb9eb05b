"""The proxy's HTTP server: from a client's request to a decode engine's answer.

::

    body ─ place ─ token ids? ─ who holds it? ─ prefill, if worthwhile ─ decode ─ bytes as they arrive
    413/408/400 429/503                          late, failed: skipped   503

A task listens for the client's disconnect. If the client disconnects, or the request's time limit is over,
the proxy closes its connection to the engine. Engines then cancel the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO
from urllib.parse import quote

import httpx
import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tierstore_engine.server.admission import Admission
from tierstore_engine.server.errors import ApiError
from tierstore_engine.server.http import (
    JSON,
    Exchange,
    Handler,
    MeteredRoute,
    has_key,
    not_routed,
)
from tierstore_proxy.choice import rank_decode, rank_prefill, worth_handing_over
from tierstore_proxy.metrics import Outcome, ProxyMetrics
from tierstore_proxy.passing import api_error, pass_through, while_connected
from tierstore_proxy.prompts import Api, Asked, RoutedPrompt, token_ids
from tierstore_proxy.residency import DaemonLookups, KnownResidency, PromptLookups, Selector, read_bounded
from tierstore_proxy.serving import serve_proxy
from tierstore_proxy.settings import ProxySettings
from tierstore_proxy.upstream import Upstream, UpstreamError, watch, within

_REQUEST_ID = "x-request-id"
# Client headers that an engine may need. All others stay between the client and the proxy.
_UPWARDS = ("accept", "authorization", "traceparent", "tracestate", "x-session-id")
_MOST_PREFILL_BYTES = 4 << 20  # the size limit of a prefill's answer, which has one token and its parameters
_MOST_TOKENIZED_BYTES = 64 << 20
_NOT_TOKENIZED_S = 60.0  # the time after which the proxy tries an engine without /tokenize again

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Prefilled:
    """The result of a prefill. ``params`` are the ``kv_transfer_params`` for the decode engine, or None if no
    prefill engine computed the prompt."""

    way: Outcome
    params: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Question:
    """A request for an engine. ``tokens`` is the number of its prompt's tokens."""

    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]
    tokens: int = 0


class Proxy:
    """The API over the engines of ``settings``. Use it on one event loop, from :meth:`start` to
    :meth:`close`."""

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.admission = Admission(settings)
        self._prefill = [Upstream(url, "prefill") for url in settings.prefill]
        self._decode = [Upstream(url, "decode") for url in settings.decode]
        self.metrics = ProxyMetrics([*self._prefill, *self._decode])
        self._residency = KnownResidency(
            len(self._decode),
            [
                DaemonLookups(PromptLookups(url, settings.identity, *settings.key_files))
                for url in settings.daemon
            ],
            Selector(settings.selector, settings.decode) if settings.selector else None,
            look_s=settings.look_s,
        )
        self._turn = 0
        self._tokenize_at = 0.0
        self._watching: asyncio.Task[None] | None = None

        # A foreign web page has no key, and a proxy with a key may have its own host name.
        host = settings.address[0] if settings.api_key is None else None

        def endpoint(name: str, handler: Handler, *, public: bool = False) -> MeteredRoute:
            key = None if public else settings.api_key
            return MeteredRoute(name, handler, self.metrics, api_key=key, host=host, error_of=api_error)

        self.app = Starlette(
            routes=[
                Route(Api.COMPLETIONS.value, endpoint("completions", self._completions), methods=["POST"]),
                Route(Api.CHAT.value, endpoint("chat", self._chat), methods=["POST"]),
                Route("/v1/models", endpoint("models", self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", endpoint("models", self._models), methods=["GET"]),
                Route("/health", endpoint("health", self._health, public=True), methods=["GET"]),
                Route("/metrics", endpoint("metrics", self._metrics), methods=["GET"]),
            ],
            exception_handlers={HTTPException: not_routed},
        )

    def start(self) -> None:
        """Start to watch the engines."""
        self._watching = asyncio.create_task(watch([*self._prefill, *self._decode]))

    async def drain(self) -> None:
        """Answer 503 from now on, and wait for running requests."""
        if not await self.admission.drain(self.settings.drain_s):
            _log.warning("requests were cut off: drain_s (%g) was not enough", self.settings.drain_s)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await self._residency.close()
        for engine in (*self._prefill, *self._decode):
            await engine.close()

    # -- small endpoints -----------------------------------------------------------------------------

    async def _health(self, exchange: Exchange) -> None:
        engines = [*self._prefill, *self._decode]
        if self.admission.draining:
            status = "draining"
        elif all(engine.problem for engine in self._decode):
            status = "down"
        else:
            status = "degraded" if any(engine.problem for engine in engines) else "ok"
        code = 200 if status in ("ok", "degraded") else 503
        if self.settings.api_key is not None and not has_key(exchange.request, self.settings.api_key):
            # only clients with the key may see the engines' addresses
            await exchange.reply(code, {"status": status})
            return
        document = {
            "status": status,
            "engines": [
                {
                    "url": engine.url,
                    "role": engine.role,
                    "up": not engine.problem,
                    "problem": engine.problem,
                    "requests": engine.requests,
                    "queued_tokens": engine.tokens,
                }
                for engine in engines
            ],
            "lookups": self._residency.problems,
        }
        await exchange.reply(code, document)

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.send(Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST}))

    async def _models(self, exchange: Exchange) -> None:
        with self.admission.place():
            headers = _upwards(exchange.request)
            name = str(exchange.request.path_params.get("name", ""))
            if any(part in (".", "..") for part in name.split("/")):
                # the proxy passes no other path to an engine either
                raise ApiError(404, "there is no such model")
            path = "/v1/models" + (f"/{quote(name)}" if name else "")
            ranked = rank_decode([engine.load for engine in self._decode], [0] * len(self._decode), 0)
            await self._bound(
                exchange, self._first_that_answers(exchange, ranked, _Question("GET", path, None, headers))
            )

    # -- completions ---------------------------------------------------------------------------------

    async def _completions(self, exchange: Exchange) -> None:
        await self._generate(exchange, Api.COMPLETIONS)

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, Api.CHAT)

    async def _generate(self, exchange: Exchange, api: Api) -> None:
        # a slow sender takes no place among the running requests
        body = await exchange.body(self.settings.max_body_bytes)
        with self.admission.place() as place:
            asked = Asked.parse(api, body)
            place.take(asked.prompt.length if asked.prompt is not None else 0)
            await self._bound(exchange, self._answer(exchange, asked))
            self.metrics.request_s.observe(exchange.seconds)

    async def _bound(self, exchange: Exchange, work: Awaitable[object]) -> None:
        """Await ``work`` while the client is connected, at most for the time limit of a request."""
        await while_connected(exchange, work, limit_s=self.settings.request_s)

    async def _answer(self, exchange: Exchange, asked: Asked) -> None:
        headers = _upwards(exchange.request)
        prompt = await self._with_tokens(asked, headers)
        tokens, held = 0, [0] * len(self._decode)
        if prompt is not None:
            tokens, held = prompt.length, await self._residency.held(prompt, asked.model)
        self._turn += 1
        ranked = rank_decode([engine.load for engine in self._decode], held, tokens, self._turn)
        self.metrics.prompt_tokens.inc(tokens)
        self.metrics.held_tokens.inc(held[ranked[0]])
        # the request is counted before its decode starts, so that the choice for other requests includes it
        with self._decode[ranked[0]].under_way(tokens):
            prefilled = await self._prefilled(asked, prompt, held[ranked[0]], headers)
        self.metrics.went(prefilled.way)
        question = _Question("POST", asked.api.value, asked.decode_body(prefilled.params), headers, tokens)
        at = await self._first_that_answers(exchange, ranked, question)
        if prompt is not None and (exchange.status or 500) < 400:
            self._residency.note(prompt, at)

    async def _with_tokens(self, asked: Asked, headers: Mapping[str, str]) -> RoutedPrompt | None:
        """Return the prompt, with token ids if a daemon or selector needs them and an engine can tokenize
        it."""
        prompt = asked.prompt
        wanted = self._residency.wants_tokens and time.monotonic() >= self._tokenize_at
        if prompt is None or prompt.tokens is not None or not wanted:
            return prompt
        [at, *_] = rank_decode([engine.load for engine in self._decode], [0] * len(self._decode), 0)
        try:
            tokens = await within(self.settings.look_s, self._tokenized(self._decode[at], asked, headers))
        except (asyncio.TimeoutError, UpstreamError, ValueError, msgspec.MsgspecError):
            tokens = None
        if tokens is None:
            self.metrics.untokenized.inc()
            return prompt
        return replace(prompt, tokens=token_ids(tokens))

    async def _tokenized(self, engine: Upstream, asked: Asked, headers: Mapping[str, str]) -> object:
        async with engine.ask("POST", "/tokenize", asked.tokenize_body, headers) as answer:
            if answer.status_code in (404, 405):
                self._tokenize_at = time.monotonic() + _NOT_TOKENIZED_S
            if answer.status_code != 200:
                return None
            document = msgspec.json.decode(await read_bounded(answer, _MOST_TOKENIZED_BYTES))
        return document.get("tokens") if isinstance(document, dict) else None

    # -- prefill -------------------------------------------------------------------------------------

    async def _prefilled(
        self, asked: Asked, prompt: RoutedPrompt | None, held: int, headers: Mapping[str, str]
    ) -> _Prefilled:
        """Have a prompt computed by a prefill engine if that is worthwhile. After any failure the decode
        engine continues without it."""
        if not self._prefill or prompt is None:
            return _Prefilled(Outcome.UNSUITED if prompt is None else Outcome.NO_PREFILL)
        if not worth_handing_over(prompt.length, held, self.settings.min_prefill_tokens):
            return _Prefilled(Outcome.HELD)
        begun = time.monotonic()
        try:
            found = await within(
                self.settings.prefill_s,
                self._ask_prefill(asked.prefill_body, asked.api.value, prompt.length, headers),
            )
        except asyncio.TimeoutError:
            return _Prefilled(Outcome.LATE)
        except (UpstreamError, ValueError, msgspec.MsgspecError) as error:
            _log.warning("the decode engine computes a prompt itself: %s", error)
            return _Prefilled(Outcome.FAILED)
        if found.way is Outcome.HANDED_OVER:
            self.metrics.prefill_s.observe(time.monotonic() - begun)
        return found

    async def _ask_prefill(
        self, body: bytes, path: str, tokens: int, headers: Mapping[str, str]
    ) -> _Prefilled:
        """Ask the prefill engine with the shortest queue, and the next one if it is busy, fails or is
        unreachable."""
        way = Outcome.NO_PREFILL
        for at in rank_prefill([engine.load for engine in self._prefill], self._turn):
            engine = self._prefill[at]
            try:
                with engine.under_way(tokens):
                    async with engine.ask("POST", path, body, headers) as answer:
                        if _passes(answer.status_code):
                            way = Outcome.REFUSED
                            continue
                        if answer.status_code != 200:
                            # the decode engine computes the prompt instead, or reports the reason
                            return _Prefilled(Outcome.REFUSED)
                        document = msgspec.json.decode(await read_bounded(answer, _MOST_PREFILL_BYTES))
            except UpstreamError as error:
                if error.sent:
                    raise
                continue
            params = document.get("kv_transfer_params") if isinstance(document, dict) else None
            return _Prefilled(Outcome.HANDED_OVER, params if isinstance(params, dict) else None)
        return _Prefilled(way)

    # -- decode --------------------------------------------------------------------------------------

    async def _first_that_answers(
        self, exchange: Exchange, ranked: Sequence[int], question: _Question
    ) -> int:
        """Pass through the answer of the first engine that gives one, and return its index.

        If an engine is busy (429), fails (5xx) or is unreachable, the next one is asked. If an engine breaks
        off before it has begun to answer, only one other is asked, because the request may be the cause. If
        all engines that answered gave the same status, the client gets the last of these answers. Raises
        :class:`ApiError`: 429 if all that answered were busy, otherwise 503.
        """
        problems: list[str] = []
        refused: set[int] = set()
        broken = 0
        for at in ranked:
            engine = self._decode[at]
            if problems:
                self.metrics.retried.inc()
            try:
                with engine.under_way(question.tokens):
                    async with engine.ask(
                        question.method, question.path, question.body, question.headers
                    ) as answer:
                        status = answer.status_code
                        if _passes(status):
                            refused.add(status)
                        if not _passes(status) or (at == ranked[-1] and refused == {status}):
                            await self._pass_through(exchange, answer, question.headers[_REQUEST_ID])
                            return at
                        problems.append(f"{engine.url} answers {status}")
            except UpstreamError as error:
                if exchange.status:
                    self.metrics.cut_off.inc()
                    raise
                problems.append(str(error))
                broken += error.sent
                if broken > 1:
                    break
        status = 429 if refused == {429} else 503
        raise ApiError(status, f"no decode engine answers: {'; '.join(problems)}", retry_after_s=1)

    async def _pass_through(self, exchange: Exchange, answer: httpx.Response, request_id: str) -> None:
        """Pass an answer through. Raises :class:`UpstreamError` if it ends too early, or does not end."""
        await pass_through(
            exchange,
            answer,
            headers=[(_REQUEST_ID.encode(), request_id.encode())],
            most_bytes=self.settings.max_answer_bytes,
            begun=lambda: self.metrics.first_byte_s.observe(exchange.seconds),
        )


def _passes(status: int) -> bool:
    """Return whether another engine may be tried after an answer with this status, because the engine is busy
    or has failed."""
    return status == 429 or status >= 500


def _upwards(request: Request) -> dict[str, str]:
    """Return the headers for an engine. A request keeps its id at all engines."""
    headers = {name: request.headers[name] for name in _UPWARDS if name in request.headers}
    given = request.headers.get(_REQUEST_ID, "")
    return {
        **headers,
        _REQUEST_ID: given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else uuid.uuid4().hex,
        "content-type": JSON,
        "accept-encoding": "identity",
        "user-agent": "tierstore-proxy",
    }


def run(settings: ProxySettings, *, err: TextIO | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises :class:`~tierstore.errors.UsageError` with a one-line message."""
    serve_proxy(
        lambda: Proxy(settings), settings.address, name="tierstore-proxy", level=logging.WARNING, err=err
    )
