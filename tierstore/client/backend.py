"""What is below HBM, in a daemon: each verb of :class:`~tierstore.backend.Backend` is a message or two.

Bytes are in no message on the same host: the daemon says at which offsets of its arena they are, and this
process has mapped that. To and from another host they are frames behind a message.

**Reading under a lease.** A lease ends ``lease_s`` after the daemon gave it; this side counts from when it
*asked*, so its own end is the earlier one. After copying, a store looks at its clock: before the end the
bytes are those that were promised, after it they are not used. Nothing has to be asked or shared for that.

**When the daemon is away** every verb ends at once, with a miss. Requests are not repeated: a lookup is asked
again by the engine soon enough, and a save that may or may not have been committed is found, or saved again,
by the next one.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from tierstore import memory
from tierstore.backend import (
    NO_HINTS,
    GroupLease,
    HitLease,
    HitRequest,
    Lease,
    Located,
    LookupRequest,
    NamedGroup,
    PrefixHandle,
    Registration,
    Reservation,
    SaveHints,
)
from tierstore.client.channel import numbers
from tierstore.client.connection import Connection
from tierstore.client.handshake import Address, Session
from tierstore.curve import CurveStats
from tierstore.index import Tier
from tierstore.planner import Way
from tierstore.stats import StoreStats
from tierstore.tiers.pinned import Pin
from tierstore.transfer import Transfer, TransferState
from tierstore.wire import messages
from tierstore.wire.messages import Message

A = TypeVar("A", bound=Message)
R = TypeVar("R")

_WAIT_SHARE = 0.8  # of a lookup's time, that the daemon may take
_WINDOW_PAGES = 4096  # of those in the daemon's arena
_DISK_BYTES = 16 << 20
_FETCH_BYTES = messages.MAX_FETCH_BYTES // 2  # the daemon bounds what is on its way to one client
_WAIT_S = 10.0  # how long the daemon is asked to try, where there is no deadline
_SAVE_S = 5.0  # for a daemon on a busy machine: nobody waits for a save
_EVICT_S = 5.0
_FLUSH_STEP_S = 5.0


@dataclass(slots=True, eq=False)
class RemoteLease(Lease):
    """Given back when it has been released and nothing is being copied under it. ``request`` is what was
    found of the prompt. Guarded by the backend's lock, except what never changes."""

    session: Session | None = None
    request: LookupRequest | None = None
    copies: int = field(default=0)
    released: bool = False


class RemoteBackend:
    """A daemon's, over one connection. Thread-safe. ``patience_s`` is the longest that a verb without a
    deadline of its own waits for an answer (those that save wait some seconds); ``verify``: pages of the
    arena are compared with their checksums. Without ``loads`` or ``saves`` it finds, or keeps, nothing.
    ``reach`` is :meth:`~tierstore.tiers.pinned.Reach.share` of the
    device that pages of the arena are copied to; ``clock`` is compared with the ends of leases."""

    def __init__(
        self,
        address: Address,
        registration: Registration,
        *,
        patience_s: float,
        reach: Callable[[Pin], None] | None = None,
        verify: bool = False,
        loads: bool = True,
        saves: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model_name = registration.model_name
        self._verify = verify
        self._loads, self._saves = loads, saves
        self.connection = Connection(address, [registration], patience_s=patience_s, reach=reach)
        self._patience_s = patience_s
        self._clock = clock
        self._lock = threading.Lock()
        # Guarded by the lock: both below.
        self._ways: dict[str, Way] = {}  # as the daemon told them last
        self._declined: Counter[str] = Counter()  # to be told with the next lookup

    def __repr__(self) -> str:
        session = self.connection.session
        where = f"session {session.number}" if session is not None else "away"
        return f"RemoteBackend({self.connection.address.url}, {where})"

    @property
    def lease_s(self) -> float:
        session = self.connection.session
        return session.lease_s if session is not None else 60.0

    @property
    def reserve_bytes(self) -> int:
        session = self.connection.session
        return session.reserve_bytes if session is not None and self._saves else 0

    # -- identities and prompts ----------------------------------------------------------------------

    def introduce(self, registration: Registration) -> None:
        registering = self._registering(registration)
        if registering is not None:
            registering.wait()

    def _registering(self, registration: Registration) -> Transfer[None] | None:
        """What has to end before a prompt of this identity can be spoken of; None in nearly all cases."""
        session = self.connection.session
        if session is None or registration.identity.digest in session.identities:
            return None
        named = replace(registration, model_name=registration.model_name or self._model_name)
        return self.connection.register(session, named)

    def _session_for(self, request: LookupRequest, *, saving: bool = False) -> Session | None:
        """The session, if there is one that knows the prompt's identity. Saves go on in one where a lookup
        was answered too late: they have more time."""
        session = self.connection.any_session if saving else self.connection.session
        if session is None or request.identity.digest not in session.identities:
            return None
        return session

    # -- finding -------------------------------------------------------------------------------------

    def find(
        self, request: LookupRequest, *, patience_s: float, caller_receives: bool = False
    ) -> Transfer[Lease | None]:
        if not self._loads:
            return Transfer.completed(None)
        return self._once_known(
            [request.registration],
            patience_s,
            lambda left_s, receives: self._find(request, left_s, caller_receives and receives),
            self.release,
        )

    def find_hit(self, request: HitRequest, *, patience_s: float) -> Transfer[HitLease | None]:
        if not self._loads:
            return Transfer.completed(None)
        return self._once_known(
            request.registrations,
            patience_s,
            lambda left_s, receives: self._find_hit(request, left_s, receives),
            self._release_hit,
        )

    def _once_known(
        self,
        registrations: Sequence[Registration],
        patience_s: float,
        ask: Callable[[float, bool], Transfer[R | None]],
        give_back: Callable[[R], None],
    ) -> Transfer[R | None]:
        """``ask`` when the daemon knows these identities, which it does in nearly all cases. ``ask`` is told
        how many seconds are left, and whether the calling thread receives the answer. What nobody waits for
        any more is given back."""
        registering = [each for known in registrations if (each := self._registering(known)) is not None]
        if not registering:
            return ask(patience_s, True)
        ends = time.monotonic() + patience_s
        found: Transfer[R | None] | None = None

        def settle(state: TransferState) -> R | None:
            if found is None:
                return None
            if state is TransferState.DONE or not found.cancel():
                lease = found.wait()
                if state is TransferState.DONE:
                    return lease
                if lease is not None:
                    give_back(lease)
            return None

        both: Transfer[R | None] = Transfer(settle, pages=0, nbytes=0, deadline_s=patience_s)
        waited_for = iter(registering)

        def go_on() -> None:
            nonlocal found
            following = next(waited_for, None)
            if following is not None:
                following.on_end(go_on)
                return
            left = ends - time.monotonic()
            if left <= 0 or both.stopped:
                both.finish()
                return
            found = ask(left, False)
            found.on_end(both.finish)

        go_on()
        return both

    def _release_hit(self, hit: HitLease) -> None:
        for group in hit.groups:
            self.release(group.lease)

    def _find_hit(
        self, request: HitRequest, patience_s: float, caller_receives: bool
    ) -> Transfer[HitLease | None]:
        session = self.connection.session
        known = session.identities if session is not None else {}
        if session is None or any(each.identity.digest not in known for each in request.registrations):
            return Transfer.completed(None)
        at = self._clock()
        declined = self._take_declined()

        def message() -> messages.FindHit:
            return messages.FindHit(
                0,
                _chain_parts(session, request.chains),
                list(request.here),
                [_named_part(session, group) for group in request.named],
                b"".join(request.names),
                request.root,
                request.tail,
                request.num_tokens,
                min(patience_s * _WAIT_SHARE, messages.MOST_WAIT_S),
                declined=declined,
            )

        def whole() -> messages.FindHit:
            for chain in request.chains:
                chain.forget_handle()
            return message()

        def leased(found: messages.HitFound | None, _: object) -> HitLease | None:
            return self._leased_hit(session, request, found, at) if found is not None else None

        return self.connection.call(
            session,
            message(),
            messages.HitFound,
            leased,
            patience_s=patience_s,
            otherwise=whole,
            caller_receives=caller_receives,
        )

    def _leased_hit(
        self, session: Session, request: HitRequest, found: messages.HitFound, at: float
    ) -> HitLease:
        """The answer as leases. An answer that does not fit the question is a miss, and is given back."""
        self._note_ways(found.ways)
        ends = at + session.lease_s
        chains = [
            self._group_lease(session, chain.cut(group.tokens), group, range(0), ends)
            for chain, group in zip(request.chains, found.chains, strict=False)
        ]
        named = []
        for kind, group in zip(request.named, found.named, strict=False):
            needed = kind.rule.ends(found.tokens, request.chunk_tokens)
            lacking = [end for end in needed if end not in kind.here]
            named.append(self._group_lease(session, request.pages(kind, lacking), group, lacking, ends))
        hit = HitLease(found.tokens, found.branch, chains, named, max(found.remote_tokens, 0))
        sound = (
            len(chains) == len(request.chains)
            and len(named) == len(request.named)
            and 0 <= found.tokens <= min(found.branch, request.num_tokens)
            and all(
                max(here, group.lease.tokens) >= found.tokens
                for here, group in zip(request.here, chains, strict=True)
            )
            and all(group.lease.pages == len(group.ends) for group in named)
        )
        if not sound:
            self._release_hit(hit)
            empty = GroupLease(Lease(0, 0, 0, (), 0.0))
            return HitLease(0, 0, [empty] * len(request.chains), [empty] * len(request.named))
        return hit

    def _group_lease(
        self,
        session: Session,
        request: LookupRequest,
        found: messages.GroupFound,
        page_ends: Sequence[int],
        ends: float,
    ) -> GroupLease:
        """The lease on what the daemon has found of one group, which is ``request``."""
        remote_ends = numbers(found.remote_ends, "<u4").tolist()
        handle = PrefixHandle(session, found.path, found.known) if found.path and found.known > 0 else None
        pages = -(-found.tokens // request.chunk_tokens) if found.tokens > 0 else 0
        fits = pages == request.num_chunks == sum(count for _, count in found.tiers)
        if not found.lease or not pages or not fits:
            if found.lease:
                self.connection.release(session, found.lease)
            return GroupLease(Lease(0, 0, 0, (), 0.0, handle), page_ends, remote_ends)
        lease = RemoteLease(
            found.lease,
            found.tokens,
            pages,
            found.tiers,
            ends,
            handle,
            range(pages) if request.named else (),
            page_bytes=request.page_bytes,
            session=session,
            request=request,
        )
        return GroupLease(lease, page_ends, remote_ends)

    def _take_declined(self) -> dict[str, int]:
        with self._lock:
            declined, self._declined = dict(self._declined), Counter()
        return declined

    def _note_ways(self, figures: Mapping[str, tuple[float, float, float]]) -> None:
        ways = {
            tier: Way(*each)
            for tier, each in figures.items()
            if each[0] > 0 and all(0 <= figure < math.inf for figure in each)
        }
        with self._lock:
            self._ways = ways

    def _find(
        self, request: LookupRequest, patience_s: float, caller_receives: bool
    ) -> Transfer[Lease | None]:
        session = self._session_for(request)
        if session is None or patience_s <= 0:
            return Transfer.completed(None)
        wait_s = min(
            patience_s * _WAIT_SHARE, messages.MOST_WAIT_S
        )  # the daemon's waiting is within our patience, not on top of it
        at = self._clock()

        declined = self._take_declined()

        def message() -> messages.Lookup:
            handle = request.handle_of(session)
            prompt = _part(session, request, handle)
            return messages.Lookup(
                0, prompt, request.num_tokens, wait_s, declined=declined, gain=request.gain
            )

        def whole() -> messages.Lookup:
            request.forget_handle()
            return message()  # what refused the first did not count what was declined, either

        def leased(found: messages.Found | None, _: object) -> Lease | None:
            return self._leased(session, request, found, at)

        return self.connection.call(
            session,
            message(),
            messages.Found,
            leased,
            patience_s=patience_s,
            otherwise=whole,
            caller_receives=caller_receives,
        )

    def expect(self, request: LookupRequest, *, wait_s: float) -> Transfer[None]:
        wait_s = min(wait_s, messages.MOST_EXPECT_S)
        if wait_s <= 0 or not self._loads or self.connection.session is None:
            return Transfer.completed(None)
        # Its own end: a request that ends unanswered is a sign that the daemon is not well.
        stop: list[Callable[[], None]] = []

        def settle(state: TransferState) -> None:
            if state is TransferState.CANCELLED:  # the daemon, and its pool, need not look for it any more
                for each in stop:
                    each()

        transfer: Transfer[None] = Transfer(settle, pages=0, nbytes=0, deadline_s=wait_s)

        def ask() -> None:
            asked = self._expect(request, transfer.remaining_s or 0.0, stop)
            transfer.watch(asked)
            asked.on_end(transfer.finish)
            if transfer.state is TransferState.CANCELLED:  # in the meantime
                settle(transfer.state)

        registering = self._registering(request.registration)
        if registering is None:
            ask()
        else:
            transfer.watch(registering)
            registering.on_end(ask)
        return transfer

    def _expect(
        self, request: LookupRequest, wait_s: float, stop: list[Callable[[], None]]
    ) -> Transfer[None]:
        session = self._session_for(request)
        if session is None or wait_s <= 0:
            return Transfer.completed(None)

        def message() -> messages.Lookup:
            prompt = _part(session, request, request.handle_of(session))
            return messages.Lookup(0, prompt, 0, 0.0, expect=request.num_tokens, expect_s=wait_s)

        def whole() -> messages.Lookup:
            request.forget_handle()
            return message()

        call = self.connection.call(
            session, message(), messages.Found, lambda *_: None, wait_s=wait_s, otherwise=whole
        )
        stop.append(lambda: None if call.done else self.connection.unexpect(session, call.number))
        return call

    def _leased(
        self, session: Session, request: LookupRequest, found: messages.Found | None, at: float
    ) -> Lease | None:
        if found is None:
            return None
        self._note_ways(found.ways)
        pages = -(-found.tokens // request.chunk_tokens)
        sound = 0 <= found.tokens <= request.num_tokens and sum(count for _, count in found.tiers) == pages
        positions = numbers(found.positions, "<u4").tolist()
        if request.named:
            in_order = sorted(set(positions)) == positions and positions[-1:] < [request.num_chunks]
            sound = sound and len(positions) == pages and in_order
        handle = PrefixHandle(session, found.path, found.known) if found.path and found.known > 0 else None
        held = found.tokens // request.chunk_tokens if sound else 0
        remote = min(max(found.remote, 0), len(request.keys) - held) * request.chunk_tokens
        others: list[int] = []
        if request.named:
            remote = 0
            there = set(numbers(found.remote_positions, "<u4").tolist()).difference(positions)
            others = [at for at in range(request.num_chunks) if at in there]
        if not found.lease or not found.tokens or not sound:
            if found.lease:
                self.connection.release(session, found.lease)
            return Lease(0, 0, 0, (), 0.0, handle, remote_tokens=remote, remote_positions=others)
        return RemoteLease(
            found.lease,
            found.tokens,
            pages,
            found.tiers,
            at + session.lease_s,
            handle,
            positions if request.named else (),
            remote,
            others,
            request.page_bytes,
            session,
            request,
        )

    def holds(self, lease: Lease) -> bool:
        session = _session_of(lease)
        return session is not None and session.current and self._clock() < lease.ends

    def release(self, lease: Lease) -> None:
        with self._lock:
            if not isinstance(lease, RemoteLease) or lease.released:
                return
            lease.released = True
            unused = not lease.copies
        if unused:
            self._give_back(lease)

    def _give_back(self, lease: RemoteLease) -> None:
        if lease.session is not None:
            self.connection.release(lease.session, lease.number)

    def _renew(self, lease: RemoteLease, then: Callable[[float], None]) -> None:
        """Exchange a lease for one that ends later, if the daemon gives one; ``then`` is told the end."""
        request = lease.request
        assert request is not None, "a lease is on what was found of a prompt"
        found = self._find(request.found(lease), self._patience_s, caller_receives=False)

        def adopt() -> None:
            newer = found.wait()
            if isinstance(newer, RemoteLease):
                with self._lock:
                    if newer.tokens >= lease.tokens and lease.copies:
                        lease.number, newer.number = newer.number, lease.number
                        lease.session, newer.session = newer.session, lease.session
                        lease.ends = newer.ends
                self._give_back(newer)
            then(lease.ends)

        found.on_end(adopt)

    # -- other hosts ---------------------------------------------------------------------------------

    @property
    def remote(self) -> bool:
        session = self.connection.session
        return session is not None and session.cluster and self._loads

    def bring(self, request: LookupRequest, first: int, count: int, *, wait_s: float) -> Transfer[int]:
        session = self._session_for(request)
        if session is None or not session.cluster:
            return Transfer.completed(0)
        wait_s = min(wait_s, messages.MOST_WAIT_S)

        def message() -> messages.Bring:
            return messages.Bring(
                0, _part(session, request, request.handle_of(session)), first, count, wait_s
            )

        def whole() -> messages.Bring:
            request.forget_handle()
            return message()

        def brought(answer: messages.Brought | None, _: object) -> int:
            return answer.chunks if answer is not None else 0

        return self.connection.call(
            session, message(), messages.Brought, brought, wait_s=wait_s, otherwise=whole
        )

    # -- bringing ------------------------------------------------------------------------------------

    def window_pages(self, lease: Lease, first: int) -> int:
        session = _session_of(lease)
        if session is not None and session.arena is None:
            return max(_FETCH_BYTES // lease.page_bytes, 1)
        tier, run = lease.run_at(first)
        if tier == Tier.DISK.label:
            return min(run, max(_DISK_BYTES // lease.page_bytes, 1))
        return min(run, _WINDOW_PAGES)

    def locate(
        self, lease: Lease, first: int, count: int, *, wait_s: float | None
    ) -> Transfer[Located | None]:
        assert isinstance(lease, RemoteLease), "the lease is of another backend"
        wait_s = _WAIT_S if wait_s is None else min(wait_s, messages.MOST_WAIT_S)
        session = lease.session
        if session is None:
            return Transfer.completed(None)
        if session.arena is None:

            def fetched(answer: messages.Fetched | None, frames: Sequence[memoryview]) -> Located | None:
                return self._fetched(lease, answer, frames, count)

            fetch = messages.Fetch(0, lease.number, first, count, wait_s)
            return self.connection.call(session, fetch, messages.Fetched, fetched, wait_s=wait_s)

        def located(answer: messages.Located | None, _: object) -> Located | None:
            return self._located(lease, session, answer, count)

        load = messages.Load(0, lease.number, first, count, wait_s)
        return self.connection.call(session, load, messages.Located, located, wait_s=wait_s)

    def _located(
        self, lease: RemoteLease, session: Session, answer: messages.Located | None, count: int
    ) -> Located | None:
        mapped = session.arena.memory if session.arena is not None else None
        if answer is None or mapped is None:
            return None
        offsets = numbers(answer.offsets, "<u8")[:count]
        # A wrong offset must not become a wrong address.
        good = int(np.argmin(np.append(offsets <= mapped.nbytes - lease.page_bytes, False)))
        if not good:
            return None
        with self._lock:
            lease.copies += 1
        addresses = [mapped.address + offset for offset in offsets[:good].tolist()]

        def renew(then: Callable[[float], None]) -> None:
            self._renew(lease, then)

        def copied() -> None:
            with self._lock:
                lease.copies -= 1
                unused = lease.released and not lease.copies
            if unused:
                self._give_back(lease)

        checksums = numbers(answer.checksums, "<u8")[:good].tolist() if self._verify else ()
        return Located(
            addresses,
            lease.ends,
            checksums if len(checksums) == good else (),
            release=copied,
            renew=renew,
            memory=mapped,
        )

    def _fetched(
        self, lease: Lease, answer: messages.Fetched | None, frames: Sequence[memoryview], count: int
    ) -> Located | None:
        pages = [frame for frame in frames[:count] if frame.nbytes == lease.page_bytes]
        checksums = numbers(answer.checksums if answer is not None else b"", "<u8").tolist()
        good = min(len(pages), [*checksums, 0].index(0))
        if not good:
            return None
        addresses = [memory.address_of(frame, writable=False) for frame in pages[:good]]
        return Located(addresses, checksums=checksums[:good], memory=pages)

    def suspect(self, lease: Lease, position: int) -> None:
        session = _session_of(lease)
        if session is not None and session.arena is not None:  # else they were torn on the way
            self.connection.suspect(session, lease.number, position)

    def prefetch(self, lease: Lease, *, first: int = 0, wait_s: float | None) -> Transfer[int]:
        session = _session_of(lease)
        if session is None:
            return Transfer.completed(0)
        wait_s = _WAIT_S if wait_s is None else min(wait_s, messages.MOST_WAIT_S)
        message = messages.Prefetch(0, lease.number, wait_s, first)
        return self.connection.call(session, message, messages.Prefetched, _pages, wait_s=wait_s)

    # -- planning ------------------------------------------------------------------------------------

    def ways(self) -> Mapping[str, Way]:
        with self._lock:
            return self._ways

    def declined(self, tokens: Mapping[str, int]) -> None:
        with self._lock:
            self._declined.update(tokens)

    # -- writing -------------------------------------------------------------------------------------

    def reserve(
        self,
        request: LookupRequest,
        first: int,
        count: int,
        *,
        hints: SaveHints = NO_HINTS,
        handle: PrefixHandle | None = None,
    ) -> Transfer[Reservation | None]:
        session = self._session_for(request, saving=True)
        if session is None:
            return Transfer.completed(None)
        hint = hints.hint
        part = None
        if hint is not None:
            ttl_s = (
                None if hint.ttl_s is None else float(hint.ttl_s)
            )  # a message has no room for an int of any size
            part = messages.HintPart(ttl_s, hint.reuse, hint.priority, hint.elsewhere)

        def message(handle: PrefixHandle | None) -> messages.Reserve:
            # What is to be saved is spelled out, even where it begins like something the daemon knows.
            if handle is None or handle.owner is not session:
                handle = request.handle_of(session, first)
            elif handle.chunks > first:
                handle = replace(handle, chunks=first)
            prompt = _part(session, request, handle)
            return messages.Reserve(0, prompt, first, count, part, hints.session or "")

        def whole() -> messages.Reserve:
            request.forget_handle()
            return message(None)

        def reserved(answer: messages.Reserved | None, _: object) -> Reservation | None:
            return self._reserved(session, answer, count, request.page_bytes)

        return self._save_call(session, message(handle), messages.Reserved, reserved, otherwise=whole)

    def _save_call(
        self,
        session: Session,
        message: Message,
        expected: type[A],
        then: Callable[[A | None, Sequence[memoryview]], R],
        *,
        frames: Sequence[memoryview] = (),
        otherwise: Callable[[], Message] | None = None,
    ) -> Transfer[R]:
        """A request of a save, which is nobody's latency."""
        return self.connection.call(
            session,
            message,
            expected,
            then,
            patience_s=max(_SAVE_S, self._patience_s),
            frames=frames,
            otherwise=otherwise,
            though_silent=True,
        )

    def _reserved(
        self, session: Session, answer: messages.Reserved | None, count: int, page_bytes: int
    ) -> Reservation | None:
        if answer is None:
            return None
        positions = numbers(answer.positions, "<u4").tolist()
        offsets = numbers(answer.offsets, "<u8").tolist()
        mapped = session.arena.memory if session.arena is not None else None
        sound = (
            len(set(positions)) == len(positions) == len(offsets)
            and bool(positions) == bool(answer.reservation)
            and all(position < count for position in positions)
        )
        if session.arena is not None:
            limit = mapped.nbytes - page_bytes if mapped is not None else -1
            sound = sound and all(offset <= limit for offset in offsets)
        if not sound:  # writing there could harm somebody
            if answer.reservation:
                self.connection.abort(session, answer.reservation)
            return None
        handle = (
            PrefixHandle(session, answer.path, answer.known) if answer.path and answer.known > 0 else None
        )
        addresses = [mapped.address + offset for offset in offsets] if mapped is not None else None

        def usable() -> bool:
            return session.current if session.arena is None else session.arena.memory is not None

        return Reservation(
            answer.reservation,
            positions,
            addresses,
            answer.stored_tokens,
            handle,
            session,
            mapped,
            usable,
        )

    def write(self, reservation: Reservation, first: int, frames: Sequence[memoryview]) -> Transfer[bool]:
        session = reservation.owner
        assert isinstance(session, Session), "the reservation is of another backend"

        def written(answer: messages.Written | None, _: object) -> bool:
            return answer is not None

        message = messages.Write(0, reservation.number, first)
        return self._save_call(session, message, messages.Written, written, frames=frames)

    def commit(self, reservation: Reservation, checksums: dict[int, int]) -> Transfer[int]:
        session = reservation.owner
        assert isinstance(session, Session), "the reservation is of another backend"
        done = np.array(list(checksums), "<u4").tobytes()
        hashes = np.array(list(checksums.values()), "<u8").tobytes()
        message = messages.Commit(0, reservation.number, done, hashes)
        return self._save_call(session, message, messages.Committed, _pages)

    def abort(self, reservation: Reservation) -> None:
        if reservation.number and isinstance(reservation.owner, Session):
            self.connection.abort(reservation.owner, reservation.number)

    # -- keeping, dropping, seeing -------------------------------------------------------------------

    def pin(
        self, request: LookupRequest, *, undo: bool = False, max_tokens: int | None = None
    ) -> Transfer[int]:
        self.introduce(request.registration)
        session = self._session_for(request)
        if session is None:
            return Transfer.completed(0)

        def tokens(answer: messages.Pinned | None, _: object) -> int:
            return answer.tokens if answer is not None else 0

        most = request.num_tokens if max_tokens is None else min(max_tokens, request.num_tokens)
        message = messages.Pin(0, _part(session, request, None), undo, most)
        return self.connection.call(session, message, messages.Pinned, tokens)

    def evict(self, tier: str, pages: int | None) -> int:
        message = messages.Evict(0, tier, -1 if pages is None else pages)
        answer = self.connection.ask(message, messages.Evicted, wait_s=_EVICT_S)
        return answer.pages if answer is not None else 0

    def finish(self, session: str) -> int | None:
        answer = self.connection.ask(messages.Finish(0, session), messages.Finished)
        return answer.pages if answer is not None else None

    def flush(self, timeout: float | None) -> bool:
        ends = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _FLUSH_STEP_S if ends is None else min(ends - time.monotonic(), _FLUSH_STEP_S)
            left = max(left, 0.0)
            answer = self.connection.ask(messages.Flush(0, left), messages.Flushed, wait_s=left)
            if answer is None or answer.done or (ends is not None and time.monotonic() >= ends):
                return answer is not None and answer.done

    def stats(self) -> StoreStats:
        """The daemon's tiers; the counters are this connection's."""
        counters: dict[str, Any] = {"connection": asdict(self.connection.counters)}
        answer = self.connection.ask(messages.Stats(0), messages.StatsAnswer)
        below = msgspec.json.decode(answer.json, type=_DaemonStats).store if answer is not None else None
        if below is None:
            away = "the daemon is away" if answer is None else ""
            return StoreStats({}, 0, 0, 0, 0, 0, False, {}, away, 0, counters, CurveStats())
        tiers = {name: tier for name, tier in below.tiers.items() if name != Tier.HBM.label}
        return replace(below, tiers=tiers, key_collisions=0, open_hits=0, failed_tasks=0, counters=counters)

    def check(self) -> None:
        """What the daemon counts, it checks itself."""

    @property
    def connected(self) -> bool:
        return self.connection.session is not None

    def wait_connected(self, timeout: float | None) -> bool:
        return self.connection.wait_connected(timeout)

    def wait_ready(self, timeout: float) -> None:
        if self.connection.wait_connected(timeout):
            session = self.connection.session
            if session is not None and session.arena is not None:
                session.arena.wait_populated()

    def close(self) -> None:
        self.connection.close()


class _DaemonStats(msgspec.Struct):
    """As much of what a daemon says of itself as is of interest here."""

    store: StoreStats | None = None  # not told to a client with a tenant


def _pages(answer: messages.Prefetched | messages.Committed | None, _: object) -> int:
    return answer.pages if answer is not None else 0


def _session_of(lease: Lease) -> Session | None:
    return lease.session if isinstance(lease, RemoteLease) else None


def _named_part(session: Session, group: NamedGroup) -> messages.NamedPart:
    here = np.array(group.here, "<u4").tobytes()
    number = session.identities[group.registration.identity.digest]
    return messages.NamedPart(number, group.rule.past.value, group.rule.tokens, here)


def _chain_parts(session: Session, chains: Sequence[LookupRequest]) -> list[messages.PromptPart]:
    """The chains of one prompt as a message describes them. They go on behind equally many chunks, so that
    a chain with the first one's keys and tokens need not say them again."""
    handles = [chain.handle_of(session) for chain in chains]
    common = min((0 if handle is None else handle.chunks for handle in handles), default=0)
    parts: list[messages.PromptPart] = []
    for chain in chains:
        handle, first = chain.handle_of(session, common), chains[0]
        if parts and chain.data is first.data and (chain.nbytes, chain.keys) == (first.nbytes, first.keys):
            identity, path = session.identities[chain.identity.digest], handle.number if handle else 0
            parts.append(messages.PromptPart(identity, b"", b"", path, common))
        else:
            parts.append(_part(session, chain, handle))
    return parts


def _part(session: Session, request: LookupRequest, handle: PrefixHandle | None) -> messages.PromptPart:
    """A prompt as a message describes it: by reference to what the session remembers, the rest in full."""
    identity = session.identities[request.identity.digest]
    if handle is None or not handle.chunks:
        keys = b"".join(request.keys)
        tokens = request.tokens_from(0)
        return messages.PromptPart(identity, keys, tokens, known=request.depth, named=request.named)
    keys = b"".join(request.keys[handle.chunks :])
    return messages.PromptPart(
        identity, keys, request.tokens_from(handle.chunks), handle.number, handle.chunks
    )
