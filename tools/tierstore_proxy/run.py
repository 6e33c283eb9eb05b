"""``tierstore-proxy``: listens, serves, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from typing import TextIO

from tierstore_engine.server.http import listen_at, serve_app
from tierstore_proxy.app import Proxy
from tierstore_proxy.settings import ProxySettings

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run(settings: ProxySettings, *, err: TextIO | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises :class:`~tierstore.errors.UsageError` with one line to show."""
    err = err or sys.stderr
    logging.basicConfig(level=logging.WARNING, format=_LOG_FORMAT, stream=err)
    with contextlib.closing(listen_at(*settings.address)) as listener:
        asyncio.run(_serve(settings, listener, err))


async def _serve(settings: ProxySettings, listener: socket.socket, err: TextIO) -> None:
    proxy = Proxy(settings)
    proxy.start()
    try:
        await serve_app(proxy.app, listener, drain=proxy.drain, announce="tierstore-proxy at", err=err)
    finally:
        await proxy.close()
