"""The verbs of the daemon, without sockets: a message in, an answer or a coroutine that ends in one out.

Everything here runs on the event loop's thread. Nothing blocks it: what is in memory is decided at once under
the state's lock, what waits for a disk is a coroutine (see ``lookups.py``, ``loads.py`` and ``writing.py``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import msgspec

from tierstore.daemon import protocol as p
from tierstore.daemon.loads import Loads, PageFrames
from tierstore.daemon.lookups import LABELS, Lookups
from tierstore.daemon.quotas import Quotas
from tierstore.daemon.session import Refusal, Session
from tierstore.daemon.settings import Settings
from tierstore.daemon.stats import ClientStats, Histogram, ServiceStats, Slowest, TenantStats, version
from tierstore.daemon.upkeep import Upkeep
from tierstore.daemon.writing import Writing
from tierstore.errors import StoreClosedError
from tierstore.store.assembly import Assembly

_log = logging.getLogger(__name__)

Reply: TypeAlias = "p.Answer | PageFrames | None"

_DISK_THREADS = 4
_COPY_THREADS = 2  # of pages that come by TCP
_WAIT_THREADS = 4  # for what waits long: flushes, surveys
_LATENCY_OF: dict[type, str] = {
    p.Lookup: "lookup", p.Load: "load", p.Fetch: "load", p.Prefetch: "load",
    p.Reserve: "save", p.Write: "save", p.Commit: "save",
}  # fmt: skip


class Service:
    """What the daemon does for its clients. ``stats_json`` makes the answer to :class:`p.Stats`."""

    def __init__(
        self,
        assembly: Assembly,
        settings: Settings,
        *,
        later: Callable[[Callable[[], None]], object],
        stats_json: Callable[[], bytes],
    ) -> None:
        self._state = assembly.state
        self._settings = settings
        self._stats_json = stats_json
        self._disk_threads = ThreadPoolExecutor(_DISK_THREADS, thread_name_prefix="tierstore-lookup")
        self._copy_threads = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="tierstore-copy")
        self._wait_threads = ThreadPoolExecutor(_WAIT_THREADS, thread_name_prefix="tierstore-wait")
        state = assembly.state
        self.quotas = Quotas(state, settings.quotas)
        self._lookups = Lookups(
            state, assembly.curve.notes, lease_s=settings.lease_s, threads=self._disk_threads, later=later
        )
        self._loads = Loads(state, assembly.loader)
        self._writing = Writing(
            state,
            self._lookups,
            assembly.curve.notes,
            assembly.write_behind,
            self.quotas,
            reserve_bytes=settings.reserve_bytes,
            threads=self._copy_threads,
        )
        self._upkeep = Upkeep(assembly, self._lookups, self.quotas, threads=self._wait_threads)
        self.sessions: dict[int, Session] = {}
        self._sessions_ended = 0
        self._requests: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._failed_requests = 0
        self._latency = {name: Histogram() for name in ("lookup", "load", "save")}
        self._slowest = Slowest()

    # -- sessions ------------------------------------------------------------------------------------

    def begin(self, client: str, *, local: bool, tenant: str = "") -> Session:
        session = Session(client[:200], local, tenant)
        self.sessions[session.number] = session
        return session

    def welcome(self, session: Session, number: int) -> p.Welcome:
        return p.Welcome(
            number,
            session.number,
            f"tierstore {version()}",
            self._settings.lease_s,
            self._settings.reserve_bytes,
        )

    def end(self, session: Session) -> None:
        """The client is dead, or has gone: take back what it held. Idempotent."""
        if session.ended:
            return
        session.ended = True
        self._sessions_ended += 1
        self.sessions.pop(session.number, None)
        self._writing.end_all(session)
        with self._state.lock:
            for held in session.leases.values():
                self._state.leases.release(held.lease)
        session.leases.clear()
        session.paths.clear()

    def lookups(self) -> int:
        """How many have come: while none come, no engine begins anything."""
        return self._requests[p.Lookup.__name__]

    # -- requests ------------------------------------------------------------------------------------

    def handle(
        self, session: Session, m: p.Request, frames: Sequence[memoryview] = ()
    ) -> Reply | Awaitable[Reply]:
        """What to answer: None for messages that have no answer. Never raises, nor does the coroutine."""
        started = time.perf_counter()
        try:
            self._requests[type(m).__name__] += 1
            answer = self._dispatch(session, m, frames)
        except Exception as error:  # noqa: BLE001  # counted and answered; one request must not stop the rest
            return self._refusal(m, error)
        if answer is None or isinstance(answer, p.Message | PageFrames):
            self._took(m, started)
            return answer
        return self._finish(m, answer, started)

    async def _finish(self, m: p.Request, answer: Awaitable[Reply], started: float) -> Reply:
        try:
            result = await answer
        except Exception as error:  # noqa: BLE001  # as above
            return self._refusal(m, error)
        self._took(m, started)
        return result

    def _took(self, m: p.Request, started: float) -> None:
        name = _LATENCY_OF.get(type(m))
        if name is not None:
            now = time.perf_counter()
            self._latency[name].add(now - started)
            self._slowest.add(type(m).__name__, now - started, now)

    def refuse(self, number: int, kind: str, message: str) -> p.Refused:
        """An answer to a request that cannot be handled; counted."""
        self._refused[kind] += 1
        return p.Refused(number, kind, message)

    def _refusal(self, m: p.Request, error: Exception) -> p.Refused | None:
        kind, message = "internal", f"{type(error).__name__}: {error}"
        if isinstance(error, Refusal):
            kind, message = error.kind, str(error)
        elif isinstance(error, StoreClosedError):
            kind, message = "busy", "the daemon is shutting down"
        else:
            self._failed_requests += 1
            _log.error("a %s failed", type(m).__name__, exc_info=error)
        refused = self.refuse(0 if isinstance(m, p.OneWay) else m.id, kind, message)
        return None if isinstance(m, p.OneWay) else refused

    def _dispatch(
        self, session: Session, m: p.Request, frames: Sequence[memoryview]
    ) -> Reply | Awaitable[Reply]:
        if frames and not isinstance(m, p.Write):
            raise Refusal("usage", f"a {type(m).__name__} has no frames behind it")
        match m:
            case p.Lookup():
                return self._lookups.lookup(session, m)
            case p.Release():
                self._lookups.release(session, m.leases)
                return None
            case p.Load():
                return self._loads.load(session, m)
            case p.Reserve():
                return self._writing.reserve(session, m)
            case p.Commit():
                return self._writing.commit(session, m)
            case p.Prefetch():
                return self._loads.prefetch(session, m)
            case p.Fetch():
                return self._loads.fetch(session, m)
            case p.Write():
                return self._writing.write(session, m, frames)
            case p.Abort():
                self._writing.abort(session, m)
                return None
            case p.Ping():
                return p.Pong(m.id)
            case p.Register():
                return self._upkeep.register(session, m)
            case p.Pin():
                return self._upkeep.pin(session, m)
            case p.Identities():
                return self._upkeep.identities(session, m)
            case p.Finish():
                return self._upkeep.finish(session, m)
            case p.Evict():
                return self._upkeep.evict(session, m)
            case p.Flush():
                return self._upkeep.flush(session, m)
            case p.Stats():
                return self._tenant_view(session, m) if session.tenant else self._stats(m)
            case p.Hello() | p.Bye():
                raise Refusal("usage", "the server begins and ends sessions")

    def _tenant_view(self, session: Session, m: p.Stats) -> p.StatsAnswer:
        """What a client with a tenant may know: what is its own."""
        with self._state.lock:
            tenants = {session.tenant: self._tenant_stats(session.tenant)}
        clients = [_client_stats(each) for each in self.sessions.values() if each.tenant == session.tenant]
        view = {"version": version(), "service": {"tenants": tenants, "clients": clients}}
        return p.StatsAnswer(m.id, msgspec.json.encode(view))

    async def _stats(self, m: p.Stats) -> p.StatsAnswer:
        json = await asyncio.get_running_loop().run_in_executor(self._wait_threads, self._stats_json)
        return p.StatsAnswer(m.id, json)

    # -- seeing and ending ---------------------------------------------------------------------------

    def stats(self) -> ServiceStats:
        """A snapshot. From any thread."""
        sessions = list(self.sessions.values())
        with self._state.lock:
            tenants = {name: self._tenant_stats(name) for name in self.quotas.tenants()}
        return ServiceStats(
            sessions=len(sessions),
            leases=sum(len(session.leases) for session in sessions),
            reservations=sum(len(session.reservations) for session in sessions),
            reserved_bytes=sum(session.reserved_bytes for session in sessions),
            sending_bytes=sum(session.sending_bytes for session in sessions),
            sessions_ended=self._sessions_ended,
            requests=dict(self._requests),
            refused=dict(self._refused),
            failed_requests=self._failed_requests,
            quota_evicted_pages=self.quotas.evicted_pages,
            latency={name: histogram.stats() for name, histogram in self._latency.items()},
            slowest_s=self._slowest.stats(time.perf_counter()),
            tenants=tenants,
            clients=tuple(_client_stats(session) for session in sessions),
        )

    def _tenant_stats(self, tenant: str) -> TenantStats:
        return TenantStats(
            lookup_tokens=self._lookups.lookup_tokens[tenant],
            hit_tokens={label: self._lookups.hit_tokens[tenant, label] for label in LABELS[1:]},
            host_bytes=self.quotas.used_bytes(tenant),
            quota_bytes=self.quotas.quotas.get(tenant),
        )

    def close(self) -> None:
        """End all sessions and the threads. What still waits for a disk is answered to nobody."""
        for session in list(self.sessions.values()):
            self.end(session)
        for threads in (self._disk_threads, self._copy_threads, self._wait_threads):
            threads.shutdown(wait=False, cancel_futures=True)


def _client_stats(session: Session) -> ClientStats:
    return ClientStats(
        session.number,
        session.client,
        session.tenant,
        session.local,
        len(session.leases),
        session.reserved_bytes,
        session.sending_bytes,
    )
