"""A client of servers that speak OpenAI's completions. It measures the stream of an answer.

Times are those of a client: from before the request is sent until a piece of text has been read. Servers send
one piece per token. A late server may put several tokens into a piece, which then counts as one gap.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from tierstore.errors import TierStoreError, UsageError

_PROBE_S = 10.0
_SLOW_BUFFER_BYTES = 4096  # receive buffer of a slow reader's socket
_SHOWN = 160


@dataclass(frozen=True, slots=True)
class ScenarioRequest:
    """One request. Its prompt is token ids, so that all targets get the same tokens."""

    tokens: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. ``gaps_s`` are the times between pieces of text. ``cached_tokens`` are the prompt tokens
    that the server reports as cached (0 if it reports none). If there is an ``error``, the answer is not
    complete."""

    ask: ScenarioRequest
    sent_at: float
    first_at: float
    last_at: float
    gaps_s: tuple[float, ...]
    text: str
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.sent_at

    @property
    def itl_s(self) -> float:
        """Mean time between tokens; 0 for an answer of one token."""
        return (self.last_at - self.first_at) / max(self.generated_tokens - 1, 1)


class NonsenseError(TierStoreError):
    """The server does not speak OpenAI's protocol, or refuses the request."""


@dataclass(slots=True, eq=False)
class _Growing:
    """The answer to a request while it arrives."""

    ask: ScenarioRequest
    sent_at: float = field(default_factory=time.perf_counter)
    pieces: list[tuple[float, str]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    def hear(self, chunk: dict[str, Any]) -> None:
        """Add a chunk of the stream. Raises :class:`NonsenseError` for anything else."""
        now = time.perf_counter()
        if "error" in chunk:
            raise NonsenseError(f"the server ended the answer: {_line(chunk['error'])}")
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            raise NonsenseError(f"not a chunk of a completion: {_line(chunk)}")
        text = "".join(str(choice.get("text") or "") for choice in choices)
        if text:
            self.pieces.append((now, text))
        self.usage = chunk.get("usage") or self.usage

    def reply(self, error: str | None = None) -> Reply:
        if error is None and not self.pieces:
            error = "the answer has no text"
        times = [at for at, _ in self.pieces] or [time.perf_counter()]
        details = self.usage.get("prompt_tokens_details") or {}
        by_tier = details.get("cached_tokens_by_tier") or {}
        return Reply(
            self.ask,
            self.sent_at,
            times[0],
            times[-1],
            tuple(later - earlier for earlier, later in itertools.pairwise(times)),
            "".join(text for _, text in self.pieces),
            int(self.usage.get("prompt_tokens") or len(self.ask.tokens)),
            int(self.usage.get("completion_tokens") or len(self.pieces)),
            int(details.get("cached_tokens") or 0),
            {str(tier): int(tokens) for tier, tokens in by_tier.items()},
            error,
        )


class OpenAiEndpoint:
    """The server at ``url``, made by :func:`connected`. For one event loop."""

    def __init__(
        self, url: str, model: str, request_s: float, quick: httpx.AsyncClient, slow: httpx.AsyncClient
    ) -> None:
        self.url = url
        self.model = model
        self._request_s = request_s
        self._quick = quick
        self._slow = slow
        self._extra: dict[str, Any] = {"ignore_eos": True}
        self._under_way: set[_Growing] = set()

    async def ask(self, ask: ScenarioRequest, *, pause_s: float = 0.0) -> Reply:
        """Send a request and read the answer as it arrives. A reader with a ``pause_s`` sleeps that long
        after each piece, and has a small buffer. Errors are returned in the reply and not raised."""
        growing = _Growing(ask)
        self._under_way.add(growing)
        try:
            await asyncio.wait_for(self._read(growing, pause_s), self._request_s)
        except asyncio.TimeoutError:
            return growing.reply(f"no complete answer within {self._request_s:g} s")
        except (httpx.HTTPError, NonsenseError) as error:
            return growing.reply(_line(error) or type(error).__name__)
        finally:
            self._under_way.discard(growing)
        return growing.reply()

    async def warm_up(self, ask: ScenarioRequest) -> None:
        """Send one request, and find out whether the server accepts ``ignore_eos``. Raises
        :class:`NonsenseError` if it does not complete the prompt."""
        reply = await self.ask(ask)
        if reply.error is not None and self._extra:
            self._extra = {}
            reply = await self.ask(ask)
        if reply.error is not None:
            raise NonsenseError(f"{self.url} does not complete a prompt: {reply.error}")

    def answering_tokens(self) -> int:
        """Return the KV tokens needed by requests that have their first token and not yet their last."""
        return sum(len(each.ask.tokens) + len(each.pieces) for each in self._under_way if each.pieces)

    async def metrics(self) -> str:
        """Return the server's Prometheus metrics; empty if it has none."""
        try:
            answer = await self._quick.get(f"{self.url}/metrics", timeout=_PROBE_S)
        except httpx.HTTPError:
            return ""
        return answer.text if answer.status_code == httpx.codes.OK else ""

    async def _read(self, growing: _Growing, pause_s: float) -> None:
        body = {
            "model": self.model,
            "prompt": list(growing.ask.tokens),
            "max_tokens": growing.ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        http = self._slow if pause_s else self._quick
        async with http.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                said = (await answer.aread()).decode(errors="replace")
                raise NonsenseError(f"status {answer.status_code}: {_line(said)}")
            ended = False
            async for line in answer.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    ended = True
                    continue
                growing.hear(_object(data))
                if pause_s:
                    await asyncio.sleep(pause_s)
            if not ended:
                raise NonsenseError("the stream ended without [DONE]")


@asynccontextmanager
async def connected(url: str, *, request_s: float) -> AsyncIterator[OpenAiEndpoint]:
    """Connect to the server at ``url`` and ask for its model. Raises :class:`UsageError` for another kind of
    address, and :class:`TierStoreError` if no OpenAI server answers there. Proxies of the environment
    (``http_proxy``) are not used for loopback."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"the address of a server is http://HOST:PORT, got {url!r}")
    url = url.rstrip("/").removesuffix("/v1")
    many = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    small = [(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)]
    slow_sockets = httpx.AsyncHTTPTransport(limits=many, socket_options=small)
    proxied = not is_loopback(url)
    async with (
        httpx.AsyncClient(limits=many, timeout=request_s, trust_env=proxied) as quick,
        httpx.AsyncClient(transport=slow_sockets, timeout=request_s, trust_env=proxied) as slow,
    ):
        try:
            answer = await quick.get(f"{url}/v1/models", timeout=_PROBE_S)
        except httpx.HTTPError as error:
            raise TierStoreError(
                f"nothing answers at {url}: {_line(error) or type(error).__name__}"
            ) from error
        if answer.status_code != httpx.codes.OK:
            raise NonsenseError(f"{url}/v1/models answers status {answer.status_code}")
        models = _object(answer.text).get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise NonsenseError(f"{url}/v1/models lists no model")
        yield OpenAiEndpoint(url, str(models[0].get("id")), request_s, quick, slow)


def is_loopback(url: str) -> bool:
    """Return whether ``url`` names this machine's loopback.

    >>> is_loopback("http://127.0.0.1:8000"), is_loopback("http://[::1]/"), is_loopback("http://host")
    (True, True, False)
    """
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise NonsenseError(f"not JSON: {_line(text)}") from error
    if not isinstance(value, dict):
        raise NonsenseError(f"not a JSON object: {_line(text)}")
    return value


def _line(what: object) -> str:
    text = " ".join(str(what).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
