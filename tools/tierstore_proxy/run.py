"""``tierstore-proxy``: listen, serve, and shut down in order."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Sequence
from typing import TextIO

from tierstore.descriptors import raise_limit
from tierstore_engine.server.http import listening_at, serve_app
from tierstore_proxy.app import Proxy
from tierstore_proxy.settings import ProxySettings

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run(settings: ProxySettings, *, err: TextIO | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises :class:`~tierstore.errors.UsageError` with a one-line message."""
    err = err or sys.stderr
    logging.basicConfig(level=logging.WARNING, format=_LOG_FORMAT, stream=err)
    raise_limit()
    with listening_at(*settings.address) as listening:
        asyncio.run(_serve(settings, listening, err))


async def _serve(settings: ProxySettings, listening: Sequence[socket.socket], err: TextIO) -> None:
    proxy = Proxy(settings)
    proxy.start()
    try:
        await serve_app(
            proxy.app,
            listening,
            drain=proxy.drain,
            announce="tierstore-proxy at",
            err=err,
            descriptors=2,  # the client's connection, and one to the engine
        )
    finally:
        await proxy.close()
