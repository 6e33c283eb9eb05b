"""Serve a proxy until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from starlette.applications import Starlette

from tierstore.descriptors import raise_limit
from tierstore_engine.server.http import listening_at, serve_app

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class ServedProxy(Protocol):
    """A proxy on one event loop, from :meth:`start` to :meth:`close`."""

    app: Starlette

    def start(self) -> None:
        """Start the work beside requests."""

    async def drain(self) -> None:
        """Answer 503 from now on, and wait for running requests."""

    async def close(self) -> None:
        """Close connections."""


def serve_proxy(
    make: Callable[[], ServedProxy], address: tuple[str, int], *, name: str, level: int, err: TextIO | None
) -> None:
    """Serve until SIGTERM or SIGINT, and log to ``err`` (None: stderr) from ``level`` on. Raises
    :class:`~tierstore.errors.UsageError` with a one-line message for an address that cannot be used."""
    err = err or sys.stderr
    logging.basicConfig(level=level, format=_LOG_FORMAT, stream=err)
    raise_limit()
    with listening_at(*address) as listening:
        asyncio.run(_serve(make, listening, name, err))


async def _serve(
    make: Callable[[], ServedProxy], listening: Sequence[socket.socket], name: str, err: TextIO
) -> None:
    proxy = make()
    proxy.start()
    try:
        await serve_app(
            proxy.app,
            listening,
            drain=proxy.drain,
            announce=f"{name} at",
            err=err,
            descriptors=2,  # descriptors for each request: the client's connection and the one to the engine
        )
    finally:
        await proxy.close()
