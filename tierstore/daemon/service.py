"""The verbs of the daemon, without sockets: a message in, an answer or a coroutine that ends in one out.

Each session has a :class:`~tierstore.core.backend.LocalBackend` of its own, which decides; here its verbs are
read from messages, and nothing that a message says is believed. Everything runs on the event loop's thread
and nothing blocks it: what is in memory is answered at once, what has to be waited for is a coroutine over a
transfer or a thread.
"""

from __future__ import annotations

import array
import asyncio
import logging
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from tierstore.backend import (
    GroupLease,
    HitLease,
    Lease,
    Located,
    NamedGroup,
    Registration,
    Reservation,
    SaveHints,
)
from tierstore.core.backend import LocalBackend
from tierstore.core.clients import Client, LocalLease, Refusal
from tierstore.core.core import Core
from tierstore.core.hits import HitView
from tierstore.core.prompts import ChainView, NamedView, PromptView
from tierstore.daemon.settings import Settings
from tierstore.daemon.stats import (
    ClientStats,
    Histogram,
    LayersStats,
    ServiceStats,
    Slowest,
    TenantStats,
    version,
)
from tierstore.errors import SpecError, StoreClosedError, UsageError
from tierstore.groups import GroupRule, Past, search
from tierstore.index import LABELS, Tier
from tierstore.keys import KEY_BYTES, LEAST_NAMED_TOKENS, NAME_BYTES, TOKEN_BYTES, Identity, PageKey
from tierstore.planner import CLUSTER, Way
from tierstore.spec import check_page, layers_label
from tierstore.stats import DECLINED
from tierstore.transfer import Transfer, TransferState
from tierstore.types import Hint, Reuse
from tierstore.wire import messages as p

if TYPE_CHECKING:  # costs nothing where there is no cluster
    from tierstore.cluster.supervisor import Cluster

_log = logging.getLogger(__name__)

_WAIT_THREADS = 4  # for what waits long: flushes, surveys, evictions
_MOST_MODELS = 16  # that stats name by their layers
_MOST_PAGE_BYTES = 1 << 30
_MOST_CHUNK_TOKENS = 1 << 16
_WINDOW_BYTES = 2 * p.MAX_FETCH_BYTES  # of pages on their way to one client over TCP
_LATENCY_OF: dict[type, str] = {
    p.Lookup: "lookup", p.FindHit: "lookup", p.Load: "load", p.Fetch: "load", p.Prefetch: "load",
    p.Reserve: "save", p.Write: "save", p.Commit: "save",
}  # fmt: skip

assert sys.byteorder == "little", "positions and offsets are sent as they are in memory"

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PageFrames:
    """An answer that is followed by pages. ``sent`` is to be called once their memory is not needed any
    more, on the event loop."""

    answer: p.Fetched
    frames: Sequence[memoryview]
    sent: Callable[[], None]


Reply: TypeAlias = "p.Answer | PageFrames | None"
Ways: TypeAlias = dict[str, tuple[float, float, float]]


@dataclass(slots=True, eq=False)
class Session:
    """One client, by its messages. ``sending_bytes`` of pages are on their way to it, handed to ZMQ and not
    yet sent; ``sent`` waits for that."""

    backend: LocalBackend
    sending_bytes: int = 0
    sent: list[asyncio.Future[None]] = field(default_factory=list)
    # Reservations whose pages other hosts are to have: the prompt, and how many of its chunks.
    sharing: dict[int, tuple[PromptView, int]] = field(default_factory=dict)
    expected: dict[int, Transfer[None]] = field(default_factory=dict)  # what lookups wait for, by their ids

    @property
    def client(self) -> Client:
        return self.backend.client

    @property
    def number(self) -> int:
        return self.client.number

    @property
    def local(self) -> bool:
        return self.client.local

    @property
    def tenant(self) -> str:
        return self.client.tenant

    def lease(self, number: int) -> LocalLease | None:
        """The lease of this number; None when it has ended."""
        lease = self.client.leases.get(number)
        return lease if lease is not None and self.backend.holds(lease) else None

    def note_sent(self, nbytes: int) -> None:
        """These bytes are not on their way any more: there is room for others."""
        self.sending_bytes -= nbytes
        for waits in self.sent:
            if not waits.done():
                waits.set_result(None)
        self.sent.clear()


class Service:
    """What the daemon does for its clients. ``stats_json`` makes the answer to :class:`p.Stats`."""

    def __init__(self, core: Core, settings: Settings, *, stats_json: Callable[[], bytes]) -> None:
        self._core = core
        self._state = core.state
        self._settings = settings
        self._stats_json = stats_json
        self._wait_threads = ThreadPoolExecutor(_WAIT_THREADS, thread_name_prefix="tierstore-wait")
        self.sessions: dict[int, Session] = {}
        self._sessions_ended = 0
        self._requests: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._failed_requests = 0
        self._promised_lookups = 0
        self._broken_promises = 0
        self._latency = {name: Histogram() for name in ("lookup", "load", "save")}
        self._slowest = Slowest()
        self.cluster: Cluster | None = None  # pages of other hosts, where there are any

    # -- sessions ------------------------------------------------------------------------------------

    def begin(self, name: str, *, local: bool, tenant: str = "") -> Session:
        session = Session(LocalBackend(self._core, client=Client(name[:200], local, tenant)))
        self.sessions[session.number] = session
        return session

    def welcome(self, session: Session, number: int) -> p.Welcome:
        return p.Welcome(
            number,
            session.number,
            f"tierstore {version()}",
            self._settings.lease_s,
            self._settings.reserve_bytes,
            self.cluster is not None and not self._is_agent(session),
        )

    def end(self, session: Session) -> None:
        """The client is dead, or has gone: take back what it held. Idempotent."""
        if self.sessions.pop(session.number, None) is not None:
            self._sessions_ended += 1
            session.backend.end()

    def _is_agent(self, session: Session) -> bool:
        """Whether it is the cluster's own: what it does makes no work for it."""
        pids = self.cluster.pids if self.cluster is not None else ()
        return session.local and any(session.client.name.endswith(f", pid {pid}") for pid in pids)

    def lookups(self) -> int:
        """How many have come: while none come, no engine begins anything."""
        return self._requests[p.Lookup.__name__] + self._requests[p.FindHit.__name__]

    # -- requests ------------------------------------------------------------------------------------

    def handle(
        self, session: Session, m: p.Request, frames: Sequence[memoryview] = ()
    ) -> Reply | Awaitable[Reply]:
        """What to answer: None for messages that have no answer. Never raises, nor does the coroutine."""
        started = time.perf_counter()
        try:
            self._requests[type(m).__name__] += 1
            self._expire_pins()
            answer = self._dispatch(session, m, frames)
        except Exception as error:  # noqa: BLE001  # counted and answered; one request must not stop the rest
            return self._refusal(m, error)
        if answer is None or isinstance(answer, p.Message | PageFrames):
            self._took(m, started)
            return answer
        return self._finish_later(m, answer, started)

    def _expire_pins(self) -> None:
        if self._core.pins.any_ending:
            with self._state.lock:
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
        if name is not None and not (isinstance(m, p.Lookup) and m.expect):  # that one waits on purpose
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
        elif isinstance(error, UsageError):
            kind, message = "usage", str(error)
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
                return self._lookup(session, m)
            case p.FindHit():
                return self._find_hit(session, m)
            case p.Release():
                self._release(session, m.leases)
                return None
            case p.Suspect():
                lease = session.lease(m.lease)
                if lease is not None and m.page in range(lease.pages):
                    session.backend.suspect(lease, m.page)
                return None
            case p.Unexpect():
                expected = session.expected.get(m.lookup)
                if expected is not None:
                    expected.cancel()
                return None
            case p.Bring():
                return self._bring(session, m)
            case p.Load():
                return self._load(session, m)
            case p.Reserve():
                return self._reserve(session, m)
            case p.Commit():
                return self._commit(session, m)
            case p.Prefetch():
                return self._prefetch(session, m)
            case p.Fetch():
                return self._fetch(session, m)
            case p.Write():
                return self._write(session, m, frames)
            case p.Abort():
                reservation = session.client.reservations.get(m.reservation)
                if reservation is not None:
                    session.backend.abort(reservation)
                session.sharing.pop(m.reservation, None)
                return None
            case p.Ping():
                return p.Pong(m.id)
            case p.Register():
                return self._register(session, m)
            case p.Pin():
                return self._pin(session, m)
            case p.Unpin():
                return self._unpin(session, m)
            case p.Identities():
                return self._identities(session, m)
            case p.Finish():
                return p.Finished(m.id, session.backend.finish(m.session))
            case p.Evict():
                return self._evict(session, m)
            case p.Flush():
                return self._flush(session, m)
            case p.Stats():
                return self._tenant_view(session, m) if session.tenant else self._stats(m)
            case p.Hello() | p.Bye():
                raise Refusal("usage", "the server begins and ends sessions")

    async def _aside(self, work: Callable[[], R]) -> R:
        """Something that may wait for long, on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._wait_threads, work)

    # -- reading -------------------------------------------------------------------------------------

    def _begin_lookup(self, session: Session, m: p.Lookup | p.FindHit) -> float:
        """Take in what comes with every lookup; how long it may wait."""
        self._release(session, m.released)
        declined = {why: count for why, count in m.declined.items() if why in DECLINED and count > 0}
        if declined:
            session.backend.declined(declined)
        return _checked_wait(m.wait_s)

    def _find_hit(self, session: Session, m: p.FindHit) -> Reply | Awaitable[Reply]:
        wait_s = self._begin_lookup(session, m)
        view = _hit_view(session, m)
        found = session.backend.find_hit(view, patience_s=wait_s)
        ways = _told(session.backend.ways())
        if self.cluster is None or self._is_agent(session):
            return _then(found, partial(_hit_found, m.id, ways))
        return self._find_hit_elsewhere(self.cluster, session, view, found, m, ways)

    async def _find_hit_elsewhere(
        self,
        cluster: Cluster,
        session: Session,
        view: HitView,
        found: Transfer[HitLease | None],
        m: p.FindHit,
        ways: Ways,
    ) -> Reply:
        """The hit, and by how much it would be longer with what other hosts have."""
        answer = _hit_found(m.id, ways, await found)
        chunk_tokens, lookups = view.chunk_tokens, session.backend.lookups
        reach = view.num_tokens
        held = [lookups.held(chain, view.num_tokens) // chunk_tokens for chain in view.chains]
        for chain, here, chunks in zip(view.chains, view.here, held, strict=True):
            cluster.used(chain, chunks)
            more = 0
            if chunks < min(chain.whole_chunks, view.num_tokens // chunk_tokens):
                more = await cluster.look(chain, chunks)
            reach = min(reach, max(here, (chunks + more) * chunk_tokens))
        reach -= reach % chunk_tokens
        if reach <= answer.tokens:
            return answer
        remote: dict[int, set[int]] = {}
        looking = search({at: group.rule for at, group in enumerate(view.named)}, reach, chunk_tokens)
        try:
            wanted = next(looking)
            while True:
                there = {}
                for at, ends in wanted.items():
                    group = view.named[at]
                    asked = [end for end in ends if end not in group.here]
                    pages = view.pages(group, asked)
                    lacking = await lookups.missing(pages, patience_s=m.wait_s)
                    far = await cluster.look_for(pages.part(lacking), reach - answer.tokens)
                    remote[at] = {asked[lacking[place]] for place in far}
                    nowhere = {asked[place] for place in lacking} - remote[at]
                    there[at] = [end for end in ends if end not in nowhere]
                wanted = looking.send(there)
        except StopIteration as end:
            length = int(end.value)
        if length <= answer.tokens:
            return answer
        answer.remote_tokens = length - answer.tokens
        for group_found, chunks in zip(answer.chains, held, strict=True):
            ends = range((chunks + 1) * chunk_tokens, length + 1, chunk_tokens)
            group_found.remote_ends = array.array("I", ends).tobytes()
        for at, group in enumerate(view.named):
            needed = remote.get(at, set()).intersection(group.rule.ends(length, chunk_tokens))
            answer.named[at].remote_ends = array.array("I", sorted(needed)).tobytes()
        if (way := cluster.way()) is not None:
            answer.ways = {**answer.ways, CLUSTER: (way.bytes_per_s, way.latency_s, way.backlog_s)}
        return answer

    def _lookup(self, session: Session, m: p.Lookup) -> Reply | Awaitable[Reply]:
        wait_s = self._begin_lookup(session, m)
        view = _view(session, m.prompt)
        if m.max_tokens < 0:
            raise Refusal("usage", f"max_tokens is {m.max_tokens}")
        if m.expect and m.expect_s:
            expected = self._expect(session, view, m)
            if not expected.done:
                self._promised_lookups += 1
                return self._find_later(session, view, m, wait_s, expected)
        return self._find(session, view, m, wait_s)

    def _expect(self, session: Session, view: PromptView, m: p.Lookup) -> Transfer[None]:
        if m.expect < 0 or not 0 <= m.expect_s <= p.MOST_EXPECT_S:
            raise Refusal(
                "usage",
                f"{m.expect} tokens expected within {m.expect_s} s: expect_s lies between 0 and "
                f"{p.MOST_EXPECT_S:.0f}",
            )
        return session.backend.expect(view, tokens=m.expect, wait_s=m.expect_s)

    async def _find_later(
        self, session: Session, view: PromptView, m: p.Lookup, wait_s: float, expected: Transfer[None]
    ) -> Reply:
        """Find a prompt's pages when those that were promised have come, or are late."""
        stop = _nothing
        if self.cluster is not None and not self._is_agent(session):
            lookups = session.backend.lookups
            wanted, first = view, lookups.held(view, m.expect) // view.chunk_tokens
            if isinstance(view, NamedView):
                wanted, first = view.part(lookups.missing(view).wait()), 0
            stop = self.cluster.expect(wanted, first, m.expect // view.chunk_tokens - first, m.expect_s)
        session.expected[m.id] = expected
        try:
            await expected
        finally:
            session.expected.pop(m.id, None)
            stop()
        self._broken_promises += expected.state is TransferState.EXPIRED
        found = self._find(session, view, m, wait_s)
        return found if found is None or isinstance(found, p.Message | PageFrames) else await found

    def _find(
        self, session: Session, view: PromptView, m: p.Lookup, wait_s: float
    ) -> Reply | Awaitable[Reply]:
        if m.expect and not m.max_tokens:  # whoever only waits is not counted as one that has found nothing
            return p.Found(m.id, 0, 0, 0, [], 0, 0)
        found = session.backend.find(view, patience_s=wait_s, max_tokens=m.max_tokens)
        ways = dict(session.backend.ways())
        alone = self.cluster is None or self._is_agent(session) or (view.named and m.gain <= 0)
        if self.cluster is None or alone:
            return _then(found, partial(_found, m.id, ways))
        return self._look_further(self.cluster, view, found, m, ways)

    async def _look_further(
        self,
        cluster: Cluster,
        view: PromptView,
        found: Transfer[Lease | None],
        m: p.Lookup,
        ways: dict[str, Way],
    ) -> Reply:
        """And whether other hosts have more of it."""
        answer = _found(m.id, ways, await found)
        chunks = answer.tokens // view.chunk_tokens
        if isinstance(view, NamedView):
            here = set(array.array("I", answer.positions))
            lacking = [at for at in range(view.whole_chunks) if at not in here]
            there = await cluster.look_for(view.part(lacking), m.gain)
            answer.remote_positions = array.array("I", [lacking[at] for at in there]).tobytes()
        else:
            cluster.used(view, chunks)
            if chunks < min(view.whole_chunks, m.max_tokens // view.chunk_tokens):
                answer.remote = await cluster.look(view, chunks)
        if (answer.remote or answer.remote_positions) and (way := cluster.way()) is not None:
            answer.ways = {**answer.ways, CLUSTER: (way.bytes_per_s, way.latency_s, way.backlog_s)}
        return answer

    async def _bring(self, session: Session, m: p.Bring) -> Reply:
        wait_s = _checked_wait(m.wait_s)
        view = _view(session, m.prompt)
        if m.first < 0 or m.count < 0:
            raise Refusal("usage", f"there are no chunks {m.first} … {m.first} + {m.count}")
        if self.cluster is None:
            return p.Brought(m.id, 0)
        return p.Brought(m.id, await self.cluster.bring(view, m.first, m.count, wait_s))

    def _release(self, session: Session, leases: Sequence[int]) -> None:
        """Those that are not the session's are passed over."""
        for number in leases:
            lease = session.client.leases.get(number)
            if lease is not None:
                session.backend.release(lease)

    def _prefetch(self, session: Session, m: p.Prefetch) -> Reply | Awaitable[Reply]:
        wait_s = _checked_wait(m.wait_s)
        lease = session.lease(m.lease)
        if m.first < 0:
            raise Refusal("usage", f"there is no page {m.first}")
        if lease is None:
            return p.Prefetched(m.id, 0)
        brought = session.backend.prefetch(lease, first=m.first, wait_s=wait_s)
        return _then(brought, lambda pages: p.Prefetched(m.id, pages))

    def _load(self, session: Session, m: p.Load) -> Reply | Awaitable[Reply]:
        wait_s = _checked_wait(m.wait_s)
        lease, count = _asked_for(session, m)
        if lease is None:
            return p.Located(m.id, b"")
        start = self._core.arena_address

        def answer(there: Located | None) -> p.Located:
            if there is None:
                return p.Located(m.id, b"")
            checksums = array.array("Q", there.checksums).tobytes()
            return p.Located(m.id, _offsets(there.addresses, start), checksums)

        return _then(session.backend.locate(lease, m.first, count, wait_s=wait_s), answer)

    async def _fetch(self, session: Session, m: p.Fetch) -> Reply:
        wait_s = _checked_wait(m.wait_s)
        lease, count = _asked_for(session, m)
        if lease is None:
            return p.Fetched(m.id, 0, b"")
        page_bytes = lease.page_bytes
        if count > 1 and count * page_bytes > p.MAX_FETCH_BYTES:
            raise Refusal("usage", f"{count} pages of {page_bytes} bytes are more than {p.MAX_FETCH_BYTES}")
        ends = time.monotonic() + wait_s
        nbytes = count * page_bytes
        if not await self._room_to_send(session, nbytes, wait_s):
            return p.Fetched(m.id, 0, b"")
        session.sending_bytes += nbytes
        pages = 0
        try:
            left = max(ends - time.monotonic(), 0.0)
            sending = await session.backend.reading.send(lease, m.first, count, wait_s=left)
            pages = len(sending.frames)
        finally:
            session.note_sent(nbytes - pages * page_bytes)
        answer = p.Fetched(m.id, pages, array.array("Q", sending.checksums).tobytes())

        def sent() -> None:
            session.note_sent(pages * page_bytes)
            sending.release()

        if not pages:
            sending.release()
            return answer
        return PageFrames(answer, sending.frames, sent)

    async def _room_to_send(self, session: Session, nbytes: int, wait_s: float) -> bool:
        """Wait until the client has read enough of what is on its way to it. One that does not read costs no
        more than the window."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + wait_s
        while session.sending_bytes and session.sending_bytes + nbytes > _WINDOW_BYTES:
            sent = loop.create_future()
            with _waiting(session):
                session.sent.append(sent)
                await asyncio.wait({sent}, timeout=max(ends - loop.time(), 0))
            if not sent.done():
                session.sent.remove(sent)
                return False
        return not session.client.ended

    # -- writing -------------------------------------------------------------------------------------

    def _reserve(self, session: Session, m: p.Reserve) -> Reply | Awaitable[Reply]:
        view = _view(session, m.prompt)
        if m.first < 0 or m.count < 0 or m.first + m.count > view.num_chunks:
            raise Refusal(
                "usage",
                f"chunks {m.first} … {m.first} + {m.count} do not lie within a prompt of {view.num_chunks}",
            )
        hint = None
        if m.hint is not None:
            reuse = cast("Reuse | None", m.hint.reuse)
            hint = Hint(m.hint.ttl_s, reuse, m.hint.priority, m.hint.elsewhere)
        hints = SaveHints(hint, m.session or None)
        reserved = session.backend.reserve(view, m.first, m.count, hints=hints)

        def answer(reservation: Reservation | None) -> p.Reserved:
            told = _reserved(m.id, self._core.arena_address, reservation)
            elsewhere = hint is not None and hint.elsewhere
            cluster = None if self._is_agent(session) else self.cluster
            if cluster is None or not cluster.publishes(view, elsewhere=elsewhere):
                return told
            shared, chunks = view, min(m.first + m.count, view.whole_chunks)
            if isinstance(view, NamedView):  # a save of no pages is about all that it names
                shared = view.part(range(m.first, chunks)) if m.count else view
                chunks = shared.whole_chunks
            if told.reservation:
                session.sharing[told.reservation] = shared, chunks
            elif elsewhere:  # it is here already, as far as it is
                lookups = session.backend.lookups
                if isinstance(shared, NamedView):
                    lacking = set(lookups.missing(shared).wait())
                    shared = shared.part([at for at in range(chunks) if at not in lacking])
                    chunks = shared.whole_chunks
                else:
                    chunks = lookups.held(view, chunks * view.chunk_tokens) // view.chunk_tokens
                cluster.committed(shared, chunks)
            return told

        return _then(reserved, answer)

    def _write(self, session: Session, m: p.Write, frames: Sequence[memoryview]) -> Reply | Awaitable[Reply]:
        reservation = session.client.reservation(m.reservation)
        pages = reservation.pages[m.first : m.first + len(frames)] if m.first >= 0 else []
        nbytes = sum(frame.nbytes for frame in frames)
        if not frames or len(pages) != len(frames):
            raise Refusal("usage", f"{len(frames)} frames are not pages {m.first} … of this reservation")
        if any(frame.nbytes != reservation.page_bytes for frame in frames):
            raise Refusal("usage", f"a page of this reservation has {reservation.page_bytes} bytes")
        if len(frames) > 1 and nbytes > p.MAX_FETCH_BYTES:
            raise Refusal("usage", f"{nbytes} bytes are more than the {p.MAX_FETCH_BYTES} of one Write")
        return _then(session.backend.write(reservation, m.first, frames), lambda _: p.Written(m.id))

    def _commit(self, session: Session, m: p.Commit) -> Reply | Awaitable[Reply]:
        reservation = session.client.reservation(m.reservation)
        if len(m.done) % 4 or len(m.checksums) != 2 * len(m.done):
            raise Refusal("usage", f"{len(m.done)} bytes of positions, {len(m.checksums)} of checksums")
        done = dict(zip(array.array("I", m.done), array.array("Q", m.checksums), strict=True))
        unknown = done.keys() - set(reservation.positions)
        if unknown or len(done) != len(m.done) // 4:
            raise Refusal("usage", "positions that were not reserved, or twice")
        if reservation.copying:
            raise Refusal("usage", "pages of this reservation are still being written")
        sharing = session.sharing.pop(m.reservation, None)

        def answer(pages: int) -> p.Committed:
            if sharing is not None and self.cluster is not None:
                self.cluster.committed(*sharing)
            return p.Committed(m.id, pages)

        return _then(session.backend.commit(reservation, done), answer)

    # -- identities ----------------------------------------------------------------------------------

    def _register(self, session: Session, m: p.Register) -> p.Registered:
        named = len(m.model_name) + sum(len(name) + len(value) for name, value in m.identity.items())
        if named > p.MAX_IDENTITY_BYTES:
            raise Refusal("usage", f"an identity has {p.MAX_IDENTITY_BYTES} bytes at most")
        if not 1 <= m.page_bytes <= _MOST_PAGE_BYTES or not 1 <= m.chunk_tokens <= _MOST_CHUNK_TOKENS:
            raise Refusal("usage", f"pages of {m.page_bytes} bytes for {m.chunk_tokens} tokens")
        try:
            check_page(m.page_bytes, m.chunk_tokens)
        except SpecError as error:
            raise Refusal("usage", str(error)) from error
        try:
            identity = Identity(**m.identity)
        except TypeError as error:
            raise Refusal("usage", f"not an identity: {error}") from error
        if session.tenant:
            # A client may tell its own tenants apart, but never leave the one it was given.
            identity = replace(identity, tenant=_nested(session.tenant, identity.tenant))
        elif identity.tenant.startswith("["):
            raise Refusal("usage", "a tenant that begins with '[' is one that only the daemon may give")
        registration = Registration(identity, m.page_bytes, m.chunk_tokens, m.model_name)
        return p.Registered(m.id, session.backend.register(registration))

    async def _identities(self, session: Session, m: p.Identities) -> p.IdentitiesAnswer:
        known = dict(self._core.registered)
        disk = self._core.disk

        def listed() -> p.IdentitiesAnswer:
            if disk is not None:
                known.update((identity.digest, identity) for identity in disk.identities())
            answer = p.IdentitiesAnswer(m.id, [])
            nbytes = 0
            for digest in sorted(digest for digest in known if digest > m.after):
                identity = _seen_by(session, known[digest])
                if identity is None:
                    continue
                if nbytes > p.MAX_LIST_BYTES:
                    break
                fields = asdict(identity)
                nbytes += sum(len(name) + len(value.encode()) + 6 for name, value in fields.items())
                answer.identities.append(fields)
                answer.more = digest
            else:
                answer.more = b""
            return answer

        with _waiting(session):
            return await self._aside(listed)

    # -- keeping, dropping, seeing -------------------------------------------------------------------

    def _pin(self, session: Session, m: p.Pin) -> Reply | Awaitable[Reply]:
        view = _view(session, m.prompt)

        def pinned(tokens: int | Refusal) -> p.Pinned:
            if isinstance(tokens, Refusal):
                raise tokens
            return p.Pinned(m.id, tokens)

        most = None if m.max_tokens < 0 else m.max_tokens
        return _then(session.backend.lookups.pin(view, undo=m.undo, max_tokens=most), pinned)

    def _unpin(self, session: Session, m: p.Unpin) -> p.Unpinned:
        if session.tenant:
            raise Refusal("denied", "a tenant unpins its prompts one by one")
        with self._state.lock:
            return p.Unpinned(m.id, self._core.pins.lift(m.tenant))

    async def _evict(self, session: Session, m: p.Evict) -> p.Evicted:
        if session.tenant:
            raise Refusal("denied", "not all pages are this tenant's: it cannot say which of them leave")
        if m.tier not in LABELS:
            raise Refusal("usage", f"unknown tier {m.tier!r}")
        if m.tier == Tier.HBM.label:
            return p.Evicted(m.id, 0)
        wanted = None if m.pages < 0 else m.pages
        return p.Evicted(m.id, await self._aside(partial(session.backend.evict, m.tier, wanted)))

    async def _flush(self, session: Session, m: p.Flush) -> p.Flushed:
        wait_s = _checked_wait(m.wait_s)
        with _waiting(session):
            return p.Flushed(m.id, await self._aside(partial(session.backend.flush, wait_s)))

    def _tenant_view(self, session: Session, m: p.Stats) -> p.StatsAnswer:
        """What a client with a tenant may know: what is its own."""
        with self._state.lock:
            tenants = {session.tenant: self._tenant_stats(session.tenant)}
        clients = [_client_stats(each) for each in self.sessions.values() if each.tenant == session.tenant]
        view = {"version": version(), "service": {"tenants": tenants, "clients": clients}}
        return p.StatsAnswer(m.id, msgspec.json.encode(view))

    async def _stats(self, m: p.Stats) -> p.StatsAnswer:
        return p.StatsAnswer(m.id, await self._aside(self._stats_json))

    def stats(self) -> ServiceStats:
        """A snapshot. From any thread."""
        sessions = list(self.sessions.values())
        quotas = self._core.quotas
        with self._state.lock:
            self._core.pins.expire()
            names = sorted({*quotas.tenants(), *self._core.pins.tenants()})
            tenants = {name: self._tenant_stats(name) for name in names}
            layers = self._layers_stats()
        return ServiceStats(
            sessions=len(sessions),
            leases=sum(len(session.client.leases) for session in sessions),
            reservations=sum(len(session.client.reservations) for session in sessions),
            reserved_bytes=sum(session.client.reserved_bytes for session in sessions),
            sending_bytes=sum(session.sending_bytes for session in sessions),
            sessions_ended=self._sessions_ended,
            requests=dict(self._requests),
            refused=dict(self._refused),
            failed_requests=self._failed_requests,
            promised_lookups=self._promised_lookups,
            broken_promises=self._broken_promises,
            quota_evicted_pages=quotas.evicted_pages,
            latency={name: histogram.stats() for name, histogram in self._latency.items()},
            slowest_s=self._slowest.stats(time.perf_counter()),
            tenants=tenants,
            clients=tuple(_client_stats(session) for session in sessions),
            layers=layers,
        )

    def _layers_stats(self) -> tuple[LayersStats, ...]:
        """The models that have most in memory, with all kinds of layers of each."""
        models: dict[str, Counter[str]] = {}
        for digest, nbytes in self._state.residency.host_bytes.items():
            identity = self._state.identities.get(digest)
            if nbytes and identity is not None:
                models.setdefault(identity.model, Counter())[layers_label(identity.layout)] += nbytes
        largest = sorted(models.items(), key=lambda each: -each[1].total())[:_MOST_MODELS]
        return tuple(
            LayersStats(model, layers, nbytes)
            for model, kinds in largest
            for layers, nbytes in kinds.most_common()
        )

    def _tenant_stats(self, tenant: str) -> TenantStats:
        core = self._core
        return TenantStats(
            lookup_tokens=core.lookup_tokens[tenant],
            hit_tokens={label: core.hit_tokens[tenant, label] for label in LABELS[1:]},
            host_bytes=core.quotas.used_bytes(tenant),
            quota_bytes=core.quotas.quotas.get(tenant),
            pinned_pages=core.pins.pages(tenant),
            pinned_bytes=core.pins.pinned_bytes[tenant],
        )

    def close(self) -> None:
        """End all sessions and the threads. What still waits for a disk is answered to nobody."""
        for session in list(self.sessions.values()):
            self.end(session)
        self._wait_threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _waiting(session: Session) -> Iterator[None]:
    """A request of this session waits. Raises :class:`Refusal` when too many do."""
    session.client.require_patience()
    session.client.waiting += 1
    try:
        yield
    finally:
        session.client.waiting -= 1


def _then(transfer: Transfer[R], answer: Callable[[R], p.Answer]) -> p.Answer | Awaitable[Reply]:
    """The answer that a transfer's result leads to: at once where it is there."""
    if transfer.done:
        return answer(transfer.wait())

    async def later() -> Reply:
        return answer(await transfer)

    return later()


def _nothing() -> None:
    """There is nothing to end."""


def _view(session: Session, part: p.PromptPart, like: PromptView | None = None) -> PromptView:
    """A prompt as a message says it. Its keys are those of ``like`` where there is one. Raises
    :class:`Refusal` when that does not fit together."""
    client = session.client
    registration = client.registration(part.identity)
    width = registration.chunk_tokens * TOKEN_BYTES
    whole = len(part.tokens) // width
    if len(part.tokens) % TOKEN_BYTES or len(part.keys) != whole * KEY_BYTES:
        raise Refusal(
            "usage",
            f"{len(part.tokens)} bytes of tokens in chunks of {registration.chunk_tokens} need {whole} keys "
            f"of {KEY_BYTES} bytes, not {len(part.keys)} bytes",
        )
    if not 0 <= part.known <= p.MAX_CHUNKS or part.known + whole > p.MAX_CHUNKS:
        raise Refusal("usage", f"a prompt has {p.MAX_CHUNKS} chunks at most")
    unpacked = struct.unpack(f"{KEY_BYTES}s" * whole, part.keys) if like is None else like.keys
    keys = cast(Sequence[PageKey], unpacked)
    if part.named and not (registration.identity.whole_pages and len(part.tokens) == whole * width):
        raise Refusal("usage", "named pages are whole, and of a layout whose pages are found whole")
    if part.named:
        return NamedView(registration, keys, part.tokens, depth=part.known)
    if not part.path:
        return ChainView(registration, keys, part.tokens)
    path = client.path(part.path)
    if part.known > len(path.pages):
        raise Refusal("path", f"path {part.path} has {len(path.pages)} chunks, not {part.known}")
    if path.pages and path.pages[0].identity != registration.identity.digest:
        raise Refusal("path", f"path {part.path} is one of another identity")
    return ChainView(registration, keys, part.tokens, path=path, path_number=part.path, known=part.known)


def _hit_view(session: Session, m: p.FindHit) -> HitView:
    """A hit as a message asks for it. Raises :class:`Refusal` when that does not fit together."""
    client = session.client
    if len(m.chains) != len(m.here) or not 0 < len(m.chains) + len(m.named) <= p.MAX_GROUPS:
        raise Refusal(
            "usage", f"{len(m.chains)} chains, {len(m.here)} of them here, {len(m.named)} named groups"
        )
    chains: list[ChainView] = []
    for part in m.chains:
        like = chains[0] if chains and not part.keys else None
        part.keys = part.keys or m.chains[0].keys
        part.tokens = part.tokens or m.chains[0].tokens
        if isinstance(view := _view(session, part, like), ChainView):
            chains.append(view)
    named = [
        NamedGroup(client.registration(part.identity), _rule(part), array.array("I", part.here))
        for part in m.named
        if len(part.here) % 4 == 0
    ]
    registrations = [*(chain.registration for chain in chains), *(group.registration for group in named)]
    sizes = {each.chunk_tokens for each in registrations}
    whole = [group.registration.identity.whole_pages for group in named]
    if len(sizes) != 1 or len(named) != len(m.named) or not all(whole) or len(chains) < len(m.chains):
        raise Refusal("usage", "these layer groups are not those of one model")
    [chunk_tokens] = sizes
    names = [m.names[at : at + NAME_BYTES] for at in range(0, len(m.names), NAME_BYTES)]
    chunks, rest = divmod(m.num_tokens, chunk_tokens)
    named_fit = not named or (
        chunk_tokens >= LEAST_NAMED_TOKENS
        and len(m.names) % NAME_BYTES == 0
        and chunks <= len(names) <= p.MAX_CHUNKS
        and (bool(chains) or len(m.tail) >= rest * TOKEN_BYTES)
    )
    if m.num_tokens < 0 or any(chain.num_tokens < m.num_tokens for chain in chains) or not named_fit:
        raise Refusal("usage", f"{m.num_tokens} tokens are not all in the prompt, or have no names")
    return HitView(chunk_tokens, m.num_tokens, chains, m.here, named, names, m.root, m.tail)


def _rule(part: p.NamedPart) -> GroupRule:
    """Raises :class:`Refusal` for what is no rule of named pages."""
    try:
        rule = GroupRule(Past(part.past), part.past_tokens)
    except (ValueError, UsageError) as error:
        raise Refusal("usage", str(error)) from error
    if rule.past is Past.ALL:
        raise Refusal("usage", "a layer group that needs every token is a chain")
    return rule


def _hit_found(number: int, ways: Ways, hit: HitLease | None) -> p.HitFound:
    if hit is None:
        raise StoreClosedError("the store is closed")
    return p.HitFound(
        number,
        hit.tokens,
        hit.branch,
        [_group_found(group) for group in hit.chains],
        [_group_found(group) for group in hit.named],
        ways=ways,
    )


def _group_found(group: GroupLease) -> p.GroupFound:
    lease = group.lease
    path, known = (lease.handle.number, lease.handle.chunks) if lease.handle is not None else (0, 0)
    return p.GroupFound(lease.number, lease.tokens, list(lease.runs), path, known)


def _told(ways: Mapping[str, Way]) -> Ways:
    return {tier: (way.bytes_per_s, way.latency_s, way.backlog_s) for tier, way in ways.items()}


def _found(number: int, ways: Mapping[str, Way], lease: Lease | None) -> p.Found:
    if lease is None:
        raise StoreClosedError("the store is closed")
    if not isinstance(lease, LocalLease) or not lease.number:
        return p.Found(number, 0, 0, 0, [], 0, 0)
    path, known = (lease.handle.number, lease.handle.chunks) if lease.handle is not None else (0, 0)
    positions = array.array("I", lease.positions).tobytes()
    runs = list(lease.runs)
    return p.Found(
        number, lease.tokens, lease.tail_tokens, lease.number, runs, path, known, positions, _told(ways)
    )


def _reserved(number: int, start: int, reservation: Reservation | None) -> p.Reserved:
    if reservation is None:
        raise StoreClosedError("the store is closed")
    handle = reservation.handle
    path, known = (handle.number, handle.chunks) if handle is not None else (0, 0)
    positions = array.array("I", reservation.positions).tobytes()
    offsets = _offsets(reservation.addresses or (), start)
    return p.Reserved(number, reservation.number, positions, offsets, reservation.stored_tokens, path, known)


def _offsets(addresses: Sequence[int], start: int) -> bytes:
    """Where in the arena that begins at ``start``."""
    offsets: npt.NDArray[np.uint64] = np.array(addresses, np.uint64) - np.uint64(start)
    return offsets.tobytes()


def _asked_for(session: Session, m: p.Load | p.Fetch) -> tuple[LocalLease | None, int]:
    """The lease, None when it has ended, and how many of the pages asked for there are."""
    if m.first < 0 or m.count < 0:
        raise Refusal("usage", f"pages {m.first} … {m.first} + {m.count}")
    lease = session.lease(m.lease)
    return lease, max(min(m.count, lease.pages - m.first), 0) if lease is not None else 0


def _checked_wait(wait_s: float) -> float:
    """Raises :class:`Refusal`."""
    if not 0 <= wait_s <= p.MOST_WAIT_S:
        raise Refusal("usage", f"wait_s is {wait_s}: it must lie between 0 and {p.MOST_WAIT_S:.0f}")
    return wait_s


def _nested(outer: str, inner: str) -> str:
    """The tenant of a tenant."""
    nested: bytes = msgspec.json.encode([outer, inner])
    return nested.decode()


def _seen_by(session: Session, identity: Identity) -> Identity | None:
    """An identity as a client would register it; None where it cannot."""
    nested = identity.tenant.startswith("[")
    if not session.tenant:
        return None if nested else identity
    if not nested:
        return None
    outer, inner = msgspec.json.decode(identity.tenant, type=tuple[str, str])
    return replace(identity, tenant=inner) if outer == session.tenant else None


def _client_stats(session: Session) -> ClientStats:
    client = session.client
    return ClientStats(
        client.number,
        client.name,
        client.tenant,
        client.local,
        len(client.leases),
        client.reserved_bytes,
        session.sending_bytes,
    )
