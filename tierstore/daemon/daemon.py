"""The daemon: owns the store, the server and the arena's listener; starts them, and ends them in order.

It ends like this: nobody is let in any more and the sockets are closed, so that clients know at once and
answer "miss"; then what was committed goes to disk, for a bounded time; then everything is given back. A
disk that does not answer by then is left to the kernel: what was durable stays so."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tierstore.daemon import keys, logs
from tierstore.daemon.arena import SocketLock
from tierstore.daemon.assembly import arena_fd, assemble
from tierstore.daemon.collecting import Collecting
from tierstore.daemon.endpoint import Url
from tierstore.daemon.events import EventPublisher
from tierstore.daemon.server import Server
from tierstore.daemon.service import Service
from tierstore.daemon.settings import Settings
from tierstore.daemon.stats import DaemonStats, version
from tierstore.errors import TierStoreError, UsageError
from tierstore.memory import shared_huge_pages
from tierstore.store.assembly import Assembly
from tierstore.units import format_size

if TYPE_CHECKING:
    from tierstore.daemon.metrics import MetricsServer

_log = logging.getLogger(__name__)

# glibc's names, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 64 << 20  # of what messages with pages have left free
_MAPPED_FROM_BYTES = 32 << 20  # the most that every glibc takes

_SWITCH_S = 0.0005  # with Python's 5 ms a lookup waits that long for each turn of whoever writes to disk


class Daemon:
    """One daemon on the running event loop: ``start()`` it, then ``stop()`` it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ready = False
        self.assembly: Assembly | None = None
        self.service: Service | None = None
        self.server: Server | None = None
        self._events: EventPublisher | None = None
        self._metrics: MetricsServer | None = None
        self._locks: list[SocketLock] = []
        self._started = time.monotonic()

    # -- starting ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen. Raises :class:`~tierstore.errors.TierStoreError`, and has given everything back then."""
        try:
            await self._start()
        except TierStoreError:
            await self.stop(drain_s=0)
            raise

    async def _start(self) -> None:
        settings = self.settings
        urls = [Url.parse(text) for text in settings.listen]
        pair = keys.read_pair(settings.server_key) if settings.server_key is not None else None
        tenants = keys.read_tenants(settings.tenants) if settings.tenants is not None else {}
        if pair is not None and settings.tenants is None:
            raise UsageError(
                "server_key without tenants lets nobody in: give --tenants, a directory with .key files"
            )
        for url in urls:
            if url.path is not None:
                self._locks.append(SocketLock(url.path))
        self.assembly = assemble(settings)
        if settings.events:
            self._events = EventPublisher(
                self.assembly.state,
                settings.events,
                replay_url=settings.events_replay,
                topic=settings.events_topic,
                encoding=settings.events_encoding,
            )
        loop = asyncio.get_running_loop()
        self.service = Service(
            self.assembly,
            settings,
            later=loop.call_soon,
            stats_json=lambda: msgspec.json.encode(self.stats()),
        )
        self.server = Server(self.service, keys=pair, tenants=tenants)
        for url in urls:
            if url.path is not None:
                path = Path(f"{url.path}.arena")
                self.server.listen_at_arena(path, arena_fd(self.assembly), settings.host_bytes)
            endpoint = self.server.listen(url)
            _log.info("listening at %s", endpoint.address)
        if settings.metrics_port:
            from tierstore.daemon.metrics import MetricsServer  # costs 0.1 s: a quarter of a cold start

            self._metrics = MetricsServer(self.stats)
            await self._metrics.start(settings.metrics_host, settings.metrics_port)
        self.ready = True

    # -- seeing --------------------------------------------------------------------------------------

    def stats(self) -> DaemonStats:
        """A snapshot. From any thread."""
        assert self.assembly is not None
        assert self.service is not None
        assert self.server is not None
        return DaemonStats(
            version=version(),
            uptime_s=time.monotonic() - self._started,
            pid=os.getpid(),
            ready=self.ready,
            store=self.assembly.stats(),
            service=self.service.stats(),
            server=self.server.stats(),
            events=self._events.stats() if self._events is not None else None,
        )

    # -- changing ------------------------------------------------------------------------------------

    def reload(self, newer: Settings) -> None:
        """Take over what can change while running; say what cannot."""
        self.settings, stuck = self.settings.reloaded(newer)
        logs.configure(self.settings.log_level, self.settings.log_format)
        if self.service is not None:
            self.service.quotas.quotas = self.settings.quotas
        _log.info("settings reloaded")
        if stuck:
            _log.warning("these settings need a restart: %s", ", ".join(stuck))

    # -- ending --------------------------------------------------------------------------------------

    async def stop(self, drain_s: float | None = None) -> bool:
        """Hang up, write what was committed to disk, give everything back. False when ``drain_s`` seconds (by
        default the setting) were not enough: then threads may still be at it, and the process should end."""
        self.ready = False
        drain_s = self.settings.drain_s if drain_s is None else drain_s
        if self._metrics is not None:
            await self._metrics.close()
        if self.server is not None:
            await self.server.close()
        drained = True
        if self.assembly is not None:
            drained = await self._drain(self.assembly, drain_s)
        if self._events is not None:
            self._events.close()
        for lock in self._locks:
            lock.release()
        self._locks.clear()
        return drained

    async def _drain(self, assembly: Assembly, drain_s: float) -> bool:
        pending = assembly.stats().pending_writes
        if pending:
            _log.info("writing %d pages to disk before the end", pending)
        closing = asyncio.get_running_loop().run_in_executor(None, assembly.close)
        _, late = await asyncio.wait({closing}, timeout=drain_s + 1)
        if late:
            _log.warning("not all pages were on disk after %.0f s: leaving without them", drain_s)
        else:
            closing.result()
        return not late


async def run(settings: Settings, reload: Callable[[], Settings]) -> bool:
    """Serve until SIGTERM or SIGINT; SIGHUP takes over what ``reload()`` returns. False when the end was not
    an orderly one."""
    logs.configure(settings.log_level, settings.log_format)
    daemon = Daemon(settings)
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    await daemon.start()

    async def reread() -> None:
        try:
            daemon.reload(await loop.run_in_executor(None, reload))
        except UsageError as error:
            _log.error("the settings stay as they are: %s", error)

    rereading: set[asyncio.Task[None]] = set()  # asyncio itself keeps no hold on a task

    def on_sighup() -> None:
        task = loop.create_task(reread())
        rereading.add(task)
        task.add_done_callback(rereading.discard)

    loop.add_signal_handler(signal.SIGHUP, on_sighup)
    disk = (
        f", {format_size(settings.disk_bytes)} of disk at {settings.disk}"
        if settings.disk is not None
        else ""
    )
    _log.info("tierstore %s serves %s of host memory%s", version(), format_size(settings.host_bytes), disk)
    if not shared_huge_pages():
        _log.info("the arena has no huge pages, which slows the disk and copies: see `tierstore doctor`")
    assert daemon.service is not None
    collecting = asyncio.ensure_future(Collecting(daemon.service.lookups).run())
    await ending.wait()
    collecting.cancel()
    _log.info("ending")
    orderly = await daemon.stop()
    _log.info("ended")
    return orderly


def serve(settings: Settings, reload: Callable[[], Settings]) -> None:
    """:func:`run` as the whole of a process."""
    sys.setswitchinterval(_SWITCH_S)
    _keep_message_memory()
    if not asyncio.run(run(settings, reload)):
        os._exit(1)  # threads that wait for a disk would keep the process


def _keep_message_memory() -> None:
    """ZMQ takes memory for each page that comes, and gives it back. Left to itself glibc maps it anew nearly
    every time, and a third of what receiving a page costs is the kernel zeroing it."""
    with contextlib.suppress(AttributeError):  # another libc, without mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
