"""The daemon: starts the store, the server and the arena's listener, and ends them in order.

To end, the daemon first closes its sockets, so that clients notice at once and their lookups miss. After
that, the daemon writes committed pages to disk, for a limited time, and releases all resources. If a disk
does not answer in time, the process ends without waiting. Pages that were already on disk are not lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tierstore.arguments import max_age_s
from tierstore.core.core import Core, open_tiers
from tierstore.daemon.arena import SocketLock
from tierstore.daemon.endpoint import Url
from tierstore.daemon.event_publisher import EventOptions, EventPublisher
from tierstore.daemon.server import Server
from tierstore.daemon.service import Service
from tierstore.daemon.settings import Settings
from tierstore.daemon.stats import DaemonStats, version
from tierstore.descriptors import raise_limit
from tierstore.errors import UsageError
from tierstore.machine import disk_bytes, memory_shortage
from tierstore.memory import shared_huge_pages
from tierstore.printable import printable
from tierstore.tiers.disk import DiskTier
from tierstore.tiers.disk.keyring import open_keyring
from tierstore.tiers.host import HostTier
from tierstore.units import format_size
from tierstore.wire import keys

if TYPE_CHECKING:
    from tierstore.cluster.supervisor import Cluster, SealedHost
    from tierstore.daemon.http import HttpServer
    from tierstore.dashboard.site import Site

_log = logging.getLogger(__name__)

# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 64 << 20  # of freed memory, glibc keeps this much for further messages with pages
_MAPPED_FROM_BYTES = 32 << 20  # the largest threshold that every glibc accepts

_ARENA = ".arena"  # suffix of the arena's socket
_ENDING = (signal.SIGTERM, signal.SIGINT)
_SWITCH_S = 0.0005  # with Python's 5 ms, a disk writer's thread could delay each lookup by 5 ms


def open_core(
    settings: Settings,
    *,
    defer: Callable[[Callable[[], None]], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Core:
    """Open the tiers that the settings describe, with an arena that clients can map. Raise
    :class:`~tierstore.errors.UsageError` or :class:`~tierstore.errors.StoreUnavailableError` if opening
    fails.
    """
    keyring = open_keyring(
        settings.disk_key, settings.disk_keyring, settings.disk, session_keys=settings.session_keys
    )
    open_disk = None
    if settings.disk is not None:
        open_disk = partial(
            DiskTier.open,
            settings.disk,
            capacity_bytes=settings.disk_bytes,
            page_bytes=settings.page_bytes,
            codec=settings.disk_codec,
            policy=settings.policy,
            keyring=keyring,
        )
    disk, host = open_tiers(open_disk, partial(HostTier, settings.host_bytes, shared=True))
    return Core(
        policy=settings.policy,
        host=host,
        disk=disk,
        lease_s=settings.lease_s,
        reserve_bytes=settings.reserve_bytes,
        quotas=settings.quotas,
        disk_write_budget=settings.disk_write_budget,
        max_age_s=max_age_s(settings.max_age_days),
        shared=True,
        defer=defer,
        clock=clock,
    )


def arena_fd(core: Core) -> int:
    """Return the descriptor of the arena's file, which clients map."""
    assert core.host is not None, "the daemon has a host tier"
    fd = core.host.shared_fd
    assert fd is not None, "the arena is not shared memory"
    return fd


def _event_options(settings: Settings) -> list[EventOptions]:
    """Return the options of all endpoints of KV events."""
    return [
        EventOptions(
            url,
            replay_url=settings.events_replay.get(model, ""),
            model=model,
            topic=settings.events_topic,
            encoding=settings.events_encoding,
            block_tokens=settings.events_block_tokens,
            tenants=settings.events_tenants,
            anywhere=settings.events_anywhere,
            connect=settings.events_connect,
        )
        for model, url in settings.events.items()
    ]


def _cluster(settings: Settings, urls: Sequence[Url]) -> Cluster:
    """Return the shared store's agents. Raise :class:`UsageError` for settings that cannot work."""
    from tierstore.cluster.supervisor import Cluster, ClusterOptions

    local = next((url.text for url in urls if url.path is not None), None)
    if local is None:
        raise UsageError("cluster needs an ipc:// address in listen, which its agents use")
    options = ClusterOptions(
        settings.cluster,
        protocol=settings.cluster_protocol,
        devices=settings.cluster_devices,
        host=settings.cluster_host,
        secret=settings.cluster_secret,
        publish=settings.cluster_publish,
        min_tokens=settings.cluster_min_tokens,
        look_s=settings.cluster_look_s,
        staging_bytes=settings.cluster_staging,
        bytes_per_s=settings.cluster_bytes_per_s,
        most_bytes=settings.cluster_bytes,
        lifetime_s=settings.cluster_days * 86400,
        sealed=bool(settings.disk_key),
        keys_url=settings.cluster_keys,
    )
    return Cluster(options, local)


def _sealed_host(core: Core) -> SealedHost | None:
    """Return the keys of this host for encrypted pages in a shared store; None if its pages are not
    encrypted."""
    from tierstore.cluster.supervisor import SealedHost

    if core.disk is None or core.disk.keyring is None:
        return None
    forgets = core.disk.forgets
    return SealedHost(
        core.disk.keyring.sharing_key, core.forgetting.forget, forgets.shared_keys, forgets.keep_shared_keys
    )


def _site(settings: Settings) -> Site:
    """Return the dashboard's access rules. Raise :class:`UsageError` for an unusable token."""
    from tierstore.dashboard.site import Site, read_token

    return Site(
        settings.metrics_host,
        read_token(settings.dashboard_token),
        title="tierstore daemon",
        how="tierstore serve --dashboard-token FILE",
    )


class Daemon:
    """A daemon on the running event loop. Call ``start()``, then ``stop()``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ready = False
        self.opened = False  # whether the tiers are open, so that the daemon must end in order
        self.core: Core | None = None
        self.service: Service | None = None
        self.server: Server | None = None
        self._events: list[EventPublisher] = []
        self._cluster: Cluster | None = None
        self._http: HttpServer | None = None
        self._locks: dict[Url, SocketLock] = {}
        self._started = time.monotonic()

    # -- starting ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the tiers and listen. If this raises :class:`~tierstore.errors.TierStoreError`, all resources
        have been released."""
        try:
            await self._start()
        except BaseException:
            await self.stop(drain_s=0)
            raise

    async def _start(self) -> None:
        settings = self.settings
        urls = [Url.parse(text) for text in settings.listen]
        pair = keys.read_pair(settings.server_key) if settings.server_key is not None else None
        tenants = await keys.read_tenants(settings.tenants) if settings.tenants is not None else {}
        if pair is not None and settings.tenants is None:
            raise UsageError(
                "server_key without tenants admits no client: give --tenants, a directory with .key files"
            )
        cluster = _cluster(settings, urls) if settings.cluster else None
        site = _site(settings) if settings.metrics_port else None
        for url in urls:
            if url.path is not None:
                self._locks[url] = SocketLock(url.path, beside=(_ARENA,))
        loop = asyncio.get_running_loop()
        self.core = open_core(settings, defer=loop.call_soon)
        for options in _event_options(settings):
            self._events.append(EventPublisher(self.core.state, self.core.disk, options))
        self.service = Service(
            self.core,
            settings,
            stats_json=lambda: msgspec.json.encode(self.stats()),
        )
        self.server = Server(self.service, keys=pair, tenants=tenants)
        self.opened = True
        for url in urls:
            lock = self._locks.get(url)
            listening = None
            if lock is not None:
                arena = Path(f"{lock.path}{_ARENA}")
                self.server.listen_at_arena(arena, lock.bind(arena), arena_fd(self.core), settings.host_bytes)
                listening = lock.bind(lock.path)
            endpoint = self.server.listen(url, listening)
            _log.info("listening at %s", endpoint.address)
        if cluster is not None:
            self._cluster = self.service.state.cluster = cluster
            cluster.start(_sealed_host(self.core))
        if site is not None:
            await self._serve_http(self.core, site)
        self.ready = True

    async def _serve_http(self, core: Core, site: Site) -> None:
        from tierstore.daemon.dashboard import DaemonDashboard
        from tierstore.daemon.http import HttpServer  # the import takes 0.1 s, a quarter of a cold start

        self._http = HttpServer(self.stats, DaemonDashboard(self.stats, core.busiest).look, site)
        await self._http.start(self.settings.metrics_host, self.settings.metrics_port)

    # -- seeing --------------------------------------------------------------------------------------

    def stats(self) -> DaemonStats:
        """Return a snapshot. Callable from any thread."""
        assert self.core is not None
        assert self.service is not None
        assert self.server is not None
        return DaemonStats(
            version=version(),
            uptime_s=time.monotonic() - self._started,
            pid=os.getpid(),
            ready=self.ready,
            store=self.core.stats(),
            service=self.service.stats(),
            server=self.server.stats(),
            events=tuple(each.stats() for each in self._events),
            cluster=self._cluster.stats() if self._cluster is not None else None,
        )

    # -- changing ------------------------------------------------------------------------------------

    async def reload(self, newer: Settings) -> None:
        """Apply the tenants' keys and the settings that can change at run time. Log changed settings that
        need a restart. If keys cannot be read, raise :class:`~tierstore.errors.UsageError` and change
        nothing."""
        if self.settings.tenants is not None and self.server is not None:
            self.server.let_in(await keys.read_tenants(self.settings.tenants))
        self.settings, stuck = self.settings.reloaded(newer)
        configure_logs(self.settings.log_level, self.settings.log_format)
        if self.core is not None:
            self.core.quotas.quotas = self.settings.quotas
        _log.info("settings reloaded")
        if stuck:
            _log.warning("these settings need a restart: %s", ", ".join(stuck))

    # -- ending --------------------------------------------------------------------------------------

    async def stop(self, drain_s: float | None = None) -> bool:
        """Close all connections, write committed pages to disk, and release all resources. Return False if
        writing took longer than ``drain_s`` seconds (default: the setting). After False, threads may still be
        running, and the process should end."""
        self.ready = False
        drain_s = self.settings.drain_s if drain_s is None else drain_s
        if self._http is not None:
            await self._http.close()
        if self._cluster is not None:
            await self._cluster.stop()
        if self.server is not None:
            await self.server.close()
        for publisher in self._events:
            await publisher.stop()
        drained = True
        if self.core is not None:
            drained = await self._drain(self.core, drain_s)
        await asyncio.sleep(0)  # lets the event loop close connections
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()
        return drained

    async def _drain(self, core: Core, drain_s: float) -> bool:
        pending = core.stats().pending_writes
        if pending:
            _log.info("writing %d pages to disk before the end", pending)
        try:
            closing = asyncio.get_running_loop().run_in_executor(None, core.close)
        except RuntimeError:  # no thread can be started
            core.close()
            return True
        _, late = await asyncio.wait({closing}, timeout=drain_s + 1)
        if late:
            _log.warning("not all pages were on disk after %.0f s: ending without them", drain_s)
        else:
            closing.result()
        return not late


async def run(settings: Settings, reload: Callable[[], Awaitable[Settings]]) -> bool:
    """Serve until SIGTERM or SIGINT. SIGHUP applies the settings that ``reload()`` returns. Return False if
    writing to disk did not end in time."""
    configure_logs(settings.log_level, settings.log_format)
    daemon = Daemon(settings)
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()

    def end(*_: object) -> None:
        if not daemon.opened:  # opening a large directory takes long, and stopping it loses nothing
            os._exit(0)
        loop.call_soon_threadsafe(ending.set)

    # Not loop.add_signal_handler: a closing loop removes such handlers, and a second signal would then kill
    # the process before it has ended in order.
    for number in _ENDING:
        signal.signal(number, end)
    await daemon.start()

    async def reread() -> None:
        try:
            await daemon.reload(await reload())
        except UsageError as error:
            _log.error("reload failed, the settings are unchanged: %s", error)

    rereading: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference to its tasks

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
    if lacking := _lacking(settings):
        _log.warning("this machine has less than the settings say: %s", lacking)
    if not shared_huge_pages():
        _log.info("the arena has no huge pages, which slows the disk and copies: see `tierstore doctor`")
    assert daemon.service is not None
    collecting = asyncio.ensure_future(Collecting(daemon.service.lookups).run())
    await ending.wait()
    collecting.cancel()
    _log.info("ending")
    orderly = await daemon.stop()
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    _log.info("ended")
    return orderly


def _lacking(settings: Settings) -> str:
    """Return a text about the capacities that exceed this machine's memory or disk; empty if none does."""
    lacking = [short] if (short := memory_shortage(settings.host_bytes)) else []
    if settings.disk is not None and settings.disk_bytes > (room := disk_bytes(settings.disk)):
        lacking.append(
            f"disk_bytes {format_size(settings.disk_bytes)}, room at {settings.disk} {format_size(room)}"
        )
    return "; ".join(lacking)


def serve(settings: Settings, reload: Callable[[], Awaitable[Settings]]) -> None:
    """Run the daemon as this process. Do not return before it has ended."""
    raise_limit()
    sys.setswitchinterval(_SWITCH_S)
    _keep_message_memory()
    if not asyncio.run(run(settings, reload)):
        os._exit(1)  # sys.exit would wait for threads that wait for a disk


def _keep_message_memory() -> None:
    """Make glibc reuse the memory that ZMQ allocates for received pages. By default glibc maps new memory for
    nearly every page, and the kernel's zeroing of it takes a third of the time of receiving a page."""
    with contextlib.suppress(AttributeError):  # a libc without mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


_YOUNG = 2000  # new objects between two collections of the youngest generation, which take a millisecond
_YOUNGER = 5  # collections of the youngest generation for each one of the middle generation (some ms)
_NEVER = 1 << 30
_LOOK_S = 5.0  # if no lookup arrives for this long, no client is assumed to wait
_EVERY_S = 600.0
_LATEST_S = 6 * 3600.0


class Collecting:
    """Runs Python's full garbage collections while no client waits: every 10 minutes if no lookup has arrived
    since the last call of ``look()``, and every 6 hours otherwise. ``requests`` returns the number of lookups
    so far."""

    def __init__(
        self,
        requests: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        collect: Callable[[], object] = gc.collect,
    ) -> None:
        self._requests = requests
        self._clock = clock
        self._collect = collect
        self._seen = -1
        self._last_s = clock()

    async def run(self) -> None:
        """Disable Python's automatic full collections, and call ``look()`` every 5 s instead. Never
        returns."""
        gc.set_threshold(_YOUNG, _YOUNGER, _NEVER)
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Run a full collection if one is due."""
        requests = self._requests()
        quiet, self._seen = requests == self._seen, requests
        passed_s = self._clock() - self._last_s
        if passed_s >= (_EVERY_S if quiet else _LATEST_S):
            self._collect()
            self._last_s = self._clock()


class JsonLines(logging.Formatter):
    """Formats a log record as one line of JSON with ``time``, ``level``, ``logger`` and ``message``, and with
    a traceback in ``error`` after an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage()),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class PlainLines(logging.Formatter):
    """Formats a log record as ``time level message``; after an exception an indented traceback follows."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    {printable(line)}" for line in lines)


def configure_logs(level: str, format: str) -> None:
    """Log the messages of ``tierstore`` to stderr. A further call changes level and format."""
    logger = logging.getLogger("tierstore")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if format == "json" else PlainLines())
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
