"""The service of a daemon: handles requests and returns their answers. It knows no sockets.

Each client connection has its own :class:`~tierstore.core.backend.LocalBackend`. A handler is a function of a
connection and a message. Handlers in :mod:`tierstore.daemon.lookups` find pages, handlers in
:mod:`tierstore.daemon.transfers` move pages, and all other handlers are in
:mod:`tierstore.daemon.administration`.

All handlers run on the event loop's thread, and none blocks it. Requests for pages in memory are answered at
once. For other requests, the handler returns a coroutine that waits for a transfer or a thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tierstore.backend import ForgottenPages
from tierstore.core.backend import LocalBackend
from tierstore.core.clients import Client, Refusal
from tierstore.core.core import Core
from tierstore.daemon import administration, lookups, transfers
from tierstore.daemon.client_connections import ClientConnection, PageFrames, Reply, ServiceState
from tierstore.daemon.settings import Settings
from tierstore.daemon.stats import Histogram, ServiceStats, Slowest, version
from tierstore.errors import StoreClosedError, UsageError
from tierstore.wire import messages as p

_log = logging.getLogger(__name__)

_VERBS: dict[type[p.Request], Callable[[ClientConnection, Any], Reply | Awaitable[Reply]]] = {
    p.Find: lookups.lookup,
    p.FindHit: lookups.find_hit,
    p.Unexpect: lookups.unexpect,
    p.FetchRemote: lookups.fetch_remote,
    p.Prefetch: transfers.prefetch,
    p.Locate: transfers.load,
    p.Fetch: transfers.fetch,
    p.ReportDamage: transfers.report_damage,
    p.Release: lambda connection, m: connection.release(m.leases),
    p.Reserve: transfers.reserve,
    p.Commit: transfers.commit,
    p.Abort: transfers.abort,
    p.Ping: lambda _, m: p.Pong(m.id),
    p.Register: administration.register,
    p.Identities: administration.identities,
    p.Pin: administration.pin,
    p.Unpin: administration.unpin,
    p.Finish: lambda connection, m: p.Finished(m.id, connection.backend.finish(m.session)),
    p.Evict: administration.evict,
    p.Forget: administration.forget,
    p.Flush: administration.flush,
    p.MissedRequests: administration.missed_requests,
    p.Stats: administration.stats,
}
_LATENCY_OF: dict[type, str] = {
    p.Find: "lookup", p.FindHit: "lookup", p.Locate: "load", p.Fetch: "load", p.Prefetch: "load",
    p.Reserve: "save", p.Write: "save", p.Commit: "save",
}  # fmt: skip


class Service:
    """Dispatches requests to their handlers and counts them. ``stats_json`` returns the JSON that answers a
    :class:`p.Stats`."""

    def __init__(self, core: Core, settings: Settings, *, stats_json: Callable[[], bytes]) -> None:
        self.state = ServiceState(core, stats_json)
        self._core = core
        self._settings = settings
        self._clients_ended = 0
        self._requests: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._failed_requests = 0
        self._latency = {name: Histogram() for name in ("lookup", "load", "save")}
        self._slowest = Slowest()

    # -- client connections -----------------------------------------------------------------------------

    def begin(self, name: str, *, local: bool, tenant: str = "") -> ClientConnection:
        client = Client(name[:200], local, tenant)
        connection = ClientConnection(self.state, LocalBackend(self._core, client=client))
        self.state.connections[connection.number] = connection
        return connection

    def welcome(self, connection: ClientConnection, number: int) -> p.Welcome:
        return p.Welcome(
            number,
            connection.number,
            f"tierstore {version()}",
            self._settings.lease_s,
            self._settings.reserve_bytes,
            connection.cluster is not None,
            self._core.forgetting.told,
            self._settings.max_age_days * 86400.0,
            self._core.forgetting.log_name,
        )

    def end(self, connection: ClientConnection) -> None:
        """End a client's connection, its leases and its reservations. Idempotent."""
        if self.state.connections.pop(connection.number, None) is not None:
            self._clients_ended += 1
            connection.backend.end()

    def close(self) -> None:
        """End all connections and threads. Requests that are waiting for a disk get no answer."""
        for connection in list(self.state.connections.values()):
            self.end(connection)
        self.state.threads.shutdown(wait=False, cancel_futures=True)

    def follow_forgets(self, follower: Callable[[ForgottenPages], None]) -> None:
        """See :meth:`tierstore.backend.Backend.follow_forgets`."""
        self._core.forgetting.followers.append(follower)

    # -- requests ------------------------------------------------------------------------------------

    def handle(
        self, connection: ClientConnection, m: p.Request, frames: Sequence[memoryview] = ()
    ) -> Reply | Awaitable[Reply]:
        """Return the answer to a request, or a coroutine that returns it; None for messages without an
        answer. An error becomes an answer and is never raised."""
        started = time.perf_counter()
        try:
            self._requests[type(m).__name__] += 1
            self._expire_pins()
            answer = _dispatch(connection, m, frames)
        except Exception as error:  # noqa: BLE001  # an error of one request must not stop the daemon
            return self._refusal(m, error)
        if answer is None or isinstance(answer, p.Message | PageFrames):
            self._took(m, started)
            return answer
        return self._finish_later(m, answer, started)

    def _expire_pins(self) -> None:
        if self._core.pins.any_ending:
            with self._core.state.lock:
                self._core.pins.expire()

    async def _finish_later(self, m: p.Request, answer: Awaitable[Reply], started: float) -> Reply:
        try:
            result = await answer
        except Exception as error:  # noqa: BLE001  # as above
            return self._refusal(m, error)
        self._took(m, started)
        return result

    def _took(self, m: p.Request, started: float) -> None:
        name = _LATENCY_OF.get(type(m))
        if name is not None and not (isinstance(m, p.Find) and m.expect):  # it waits for promised pages
            now = time.perf_counter()
            self._latency[name].add(now - started)
            self._slowest.add(type(m).__name__, now - started, now)

    def refuse(self, number: int, kind: str, message: str) -> p.Refused:
        """Return the answer to a request that cannot be handled, and count it."""
        self._refused[kind] += 1
        return p.Refused(number, kind, message)

    def _refusal(self, m: p.Request, error: Exception) -> p.Refused | None:
        kind, message = "internal", f"{type(error).__name__}: {error}"
        if isinstance(error, Refusal):
            kind, message = error.kind, str(error)
        elif isinstance(error, UsageError):
            kind, message = "usage", str(error)
        elif isinstance(error, StoreClosedError):
            kind, message = "busy", "the daemon is shutting down"
        else:
            self._failed_requests += 1
            _log.error("request %s failed", type(m).__name__, exc_info=error)
        refused = self.refuse(0 if isinstance(m, p.OneWay) else m.id, kind, message)
        return None if isinstance(m, p.OneWay) else refused

    # -- counting ------------------------------------------------------------------------------------

    def lookups(self) -> int:
        """Return the number of lookups so far."""
        return self._requests[p.Find.__name__] + self._requests[p.FindHit.__name__]

    def stats(self) -> ServiceStats:
        """Return a snapshot. Callable from any thread."""
        core = self._core
        connections = list(self.state.connections.values())
        with core.state.lock:
            core.pins.expire()
            names = sorted({*core.quotas.tenants(), *core.pins.tenants()})
            tenants = {name: administration.tenant_stats(core, name) for name in names}
            layers = administration.layers_stats(core)
        return ServiceStats(
            connections=len(connections),
            leases=sum(len(connection.client.leases) for connection in connections),
            reservations=sum(len(connection.client.reservations) for connection in connections),
            reserved_bytes=sum(connection.client.reserved_bytes for connection in connections),
            sending_bytes=sum(connection.sending_bytes for connection in connections),
            clients_ended=self._clients_ended,
            requests=dict(self._requests),
            refused=dict(self._refused),
            failed_requests=self._failed_requests,
            promised_lookups=self.state.promised_lookups,
            broken_promises=self.state.broken_promises,
            quota_evicted_pages=core.quotas.evicted_pages,
            latency={name: histogram.stats() for name, histogram in self._latency.items()},
            slowest_s=self._slowest.stats(time.perf_counter()),
            tenants=tenants,
            clients=tuple(connection.stats() for connection in connections),
            layers=layers,
        )


def _dispatch(
    connection: ClientConnection, m: p.Request, frames: Sequence[memoryview]
) -> Reply | Awaitable[Reply]:
    if isinstance(m, p.Write):
        return transfers.write(connection, m, frames)
    if frames:
        raise Refusal("usage", f"a {type(m).__name__} has no frames behind it")
    if isinstance(m, p.Hello | p.Bye):
        raise Refusal("usage", "the server begins and ends connections")
    return _VERBS[type(m)](connection, m)
