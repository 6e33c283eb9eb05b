"""An engine that answers what a test tells it to: for what no real one does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.engine.server.live import WAIT_S


@dataclass
class Received:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        return dict(json.loads(self.body))


Script = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Scripted:
    """Answers ``/health`` with 200 and everything else with ``script``; a connection for each request."""

    script: Script
    received: list[Received] = field(default_factory=list)
    hang_ups: int = 0  # of the other side, before an answer's end

    def __post_init__(self) -> None:
        self._begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._begun.wait(WAIT_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(WAIT_S)

    async def _main(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._begun.set()
        await self._ended.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.rstrip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path == "/health":
            writer.write(whole(b"{}"))
        else:
            request = Received(method, path, headers, body)
            self.received.append(request)
            answering = asyncio.ensure_future(self.script(request, writer))
            listening = asyncio.ensure_future(reader.read(1))
            await asyncio.wait((answering, listening), return_when=asyncio.FIRST_COMPLETED)
            self.hang_ups += not answering.done()
            for task in (answering, listening):
                task.cancel()
            await asyncio.gather(answering, listening, return_exceptions=True)
        writer.close()


def whole(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """An answer in one piece."""
    lines = (f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *headers)
    return "\r\n".join((*lines, "connection: close", "", "")).encode() + body


def saying(answer: bytes) -> Script:
    """Answers every request so."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return script
