"""A client of any server that speaks OpenAI's completions, and measures what it is sent.

Times are taken where a client sees them: from before the request is sent until a piece of text has been
read. Servers send a piece for each token; one that is late may put several tokens into a piece, which then
counts as one gap.
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

import httpx

from tierstore.errors import TierStoreError, UsageError

_PROBE_S = 10.0
_SLOW_BUFFER_BYTES = 4096  # of a slow reader's socket
_SHOWN = 160


@dataclass(frozen=True, slots=True)
class ScenarioRequest:
    """One request: token ids, so that no tokenizer comes between targets."""

    tokens: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. ``gaps_s`` are the times between pieces of text, ``cached_tokens`` those of the prompt
    that the server says it did not compute (0 where it says nothing). With an ``error`` it is not whole."""

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
        """The mean time between tokens; 0 for an answer of one token."""
        return (self.last_at - self.first_at) / max(self.generated_tokens - 1, 1)


class NonsenseError(TierStoreError):
    """What answers does not speak OpenAI's protocol, or refuses."""


@dataclass(slots=True, eq=False)
class _Growing:
    """A request under way."""

    ask: ScenarioRequest
    sent_at: float = field(default_factory=time.perf_counter)
    pieces: list[tuple[float, str]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    def hear(self, chunk: dict[str, Any]) -> None:
        """Raises :class:`NonsenseError` for what is no chunk of a completion."""
        now = time.perf_counter()
        if "error" in chunk:
            raise NonsenseError(f"the server ended the answer: {_line(chunk['error'])}")
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            raise NonsenseError(f"this is no chunk of a completion: {_line(chunk)}")
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
    """The server at ``url``. Made by :func:`connected`; for one event loop."""

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
        """Send a request and read the answer as it comes; a reader with a ``pause_s`` sleeps that long after
        each piece, and has a small buffer. What goes wrong is said in the reply."""
        growing = _Growing(ask)
        self._under_way.add(growing)
        try:
            await asyncio.wait_for(self._read(growing, pause_s), self._request_s)
        except asyncio.TimeoutError:
            return growing.reply(f"no whole answer within {self._request_s:g} s")
        except (httpx.HTTPError, NonsenseError) as error:
            return growing.reply(_line(error) or type(error).__name__)
        finally:
            self._under_way.discard(growing)
        return growing.reply()

    async def warm_up(self, ask: ScenarioRequest) -> None:
        """Ask once, and learn whether the server takes ``ignore_eos``. Raises :class:`NonsenseError` when it
        does not answer as a server of completions does."""
        reply = await self.ask(ask)
        if reply.error is not None and self._extra:
            self._extra = {}
            reply = await self.ask(ask)
        if reply.error is not None:
            raise NonsenseError(f"{self.url} does not complete a prompt: {reply.error}")

    def answering_tokens(self) -> int:
        """Tokens whose KV the requests need that have their first token and not yet their last."""
        return sum(len(each.ask.tokens) + len(each.pieces) for each in self._under_way if each.pieces)

    async def metrics(self) -> str:
        """What it says of itself in Prometheus's format; empty where it does not."""
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
    """The server at ``url``, asked for its model. Raises :class:`UsageError` for what is no address, and
    :class:`TierStoreError` when nothing answers there, or something else than an OpenAI server."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is no address of a server: write http://HOST:PORT")
    url = url.rstrip("/").removesuffix("/v1")
    many = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    small = [(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)]
    slow_sockets = httpx.AsyncHTTPTransport(limits=many, socket_options=small)
    async with (
        httpx.AsyncClient(limits=many, timeout=request_s) as quick,
        httpx.AsyncClient(transport=slow_sockets, timeout=request_s) as slow,
    ):
        try:
            answer = await quick.get(f"{url}/v1/models", timeout=_PROBE_S)
        except httpx.HTTPError as error:
            raise TierStoreError(
                f"nothing answers at {url}: {_line(error) or type(error).__name__}"
            ) from error
        if answer.status_code != httpx.codes.OK:
            raise NonsenseError(f"{url}/v1/models answers with status {answer.status_code}")
        models = _object(answer.text).get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise NonsenseError(f"{url}/v1/models lists no model")
        yield OpenAiEndpoint(url, str(models[0].get("id")), request_s, quick, slow)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise NonsenseError(f"this is no JSON: {_line(text)}") from error
    if not isinstance(value, dict):
        raise NonsenseError(f"this is no JSON object: {_line(text)}")
    return value


def _line(what: object) -> str:
    text = " ".join(str(what).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
