"""A backend in a daemon. Each method of :class:`~tierstore.backend.Backend` is one or two messages.

On the same host, messages contain no pages: the daemon sends the offsets of the pages in its arena, which
this process has mapped. Between hosts, pages are frames behind a message. The methods are implemented in
:mod:`tierstore.client.lookups`, :mod:`tierstore.client.reading` and :mod:`tierstore.client.writing`.

**While the daemon is away** every method returns a miss at once. A failed request is not repeated, because
the engine soon sends the next lookup or save.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import msgspec

from tierstore.backend import ForgottenPages, LookupRequest, Registration
from tierstore.client.connection import Connection
from tierstore.client.handshake import Address
from tierstore.client.lookups import RemoteLookups
from tierstore.client.reading import RemoteReading
from tierstore.client.state import RemoteState, prompt_part
from tierstore.client.writing import RemoteWriting
from tierstore.curve import CurveStats
from tierstore.index import Tier
from tierstore.stats import StoreStats
from tierstore.tiers.pinned import Pin
from tierstore.transfer import Transfer
from tierstore.types import ForgetReceipt
from tierstore.wire import messages

_EVICT_S = 5.0
_FORGET_S = 30.0
_FLUSH_STEP_S = 5.0


class RemoteBackend:
    """A daemon's backend over one connection. Thread-safe.

    ``patience_s`` is the time limit, in seconds, of a method without a deadline of its own (a save has at
    least 5 seconds). ``verify``: compare pages in the arena with their checksums. Without ``loads`` every
    lookup misses, and without ``saves`` no page is saved. ``reach`` is
    :meth:`~tierstore.tiers.pinned.Reach.share` of the device to which pages of the arena are copied. The ends
    of leases are times of ``clock``."""

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
        log: logging.Logger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connection = Connection(address, [registration], patience_s=patience_s, reach=reach, log=log)
        self._state = state = RemoteState(
            self.connection, registration.model_name, verify, loads, saves, clock
        )
        lookups, writing = RemoteLookups(state), RemoteWriting(state)
        reading = RemoteReading(state, lookups)
        # Bound methods of the three objects above: forwarding methods would cost one more call each.
        self.register, self.rates, self.declined = state.register, state.rates, state.declined
        self.find, self.find_hit, self.expect = lookups.find, lookups.find_hit, lookups.expect
        self.holds, self.release, self.fetch_remote = reading.holds, state.release, reading.fetch_remote
        self.batch_pages, self.locate = reading.batch_pages, reading.locate
        self.prefetch, self.report_damage = reading.prefetch, reading.report_damage
        self.reserve, self.write = writing.reserve, writing.write
        self.commit, self.abort = writing.commit, writing.abort

    def __repr__(self) -> str:
        link = self.connection.link
        where = f"connection {link.number}" if link is not None else "away"
        return f"RemoteBackend({self.connection.address.url}, {where})"

    @property
    def lease_s(self) -> float:
        link = self.connection.link
        return link.lease_s if link is not None else 60.0

    @property
    def reserve_bytes(self) -> int:
        link = self.connection.link
        return link.reserve_bytes if link is not None and self._state.saves else 0

    @property
    def remote(self) -> bool:
        link = self.connection.link
        return link is not None and link.cluster and self._state.loads

    # -- keeping, dropping, seeing -------------------------------------------------------------------

    def pin(
        self, request: LookupRequest, *, undo: bool = False, max_tokens: int | None = None
    ) -> Transfer[int]:
        self._state.register(request.registration)
        link = self._state.link_for(request.identity)
        if link is None:
            return Transfer.completed(0)
        most = request.num_tokens if max_tokens is None else min(max_tokens, request.num_tokens)
        message = messages.Pin(0, prompt_part(link, request, None), undo, most)
        return self.connection.call(
            link, message, messages.Pinned, lambda answer, _: answer.tokens if answer else 0
        )

    def evict(self, tier: str, pages: int | None) -> int:
        message = messages.Evict(0, tier, -1 if pages is None else pages)
        answer = self.connection.ask(message, messages.Evicted, wait_s=_EVICT_S)
        return answer.pages if answer is not None else 0

    def finish(self, session: str) -> int | None:
        answer = self.connection.ask(messages.Finish(0, session), messages.Finished)
        return answer.pages if answer is not None else None

    def forget(
        self, *, tenant: str | None = None, model: str | None = None, session: str | None = None
    ) -> ForgetReceipt | None:
        message = messages.Forget(0, tenant, model, session)
        answer = self.connection.ask(message, messages.Forgotten, wait_s=_FORGET_S)
        return answer.receipt if answer is not None else None

    def follow_forgets(
        self, follower: Callable[[ForgottenPages], None], limit_age: Callable[[float], None]
    ) -> None:
        self.connection.follow_forgets(follower, limit_age)

    def flush(self, timeout: float | None) -> bool:
        ends = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _FLUSH_STEP_S if ends is None else min(ends - time.monotonic(), _FLUSH_STEP_S)
            left = max(left, 0.0)
            answer = self.connection.ask(messages.Flush(0, left), messages.Flushed, wait_s=left)
            if answer is None or answer.done or (ends is not None and time.monotonic() >= ends):
                return answer is not None and answer.done

    def stats(self) -> StoreStats:
        """Return the statistics of the daemon's tiers and the counters of this connection."""
        counters: dict[str, Any] = {"connection": asdict(self.connection.counters)}
        answer = self.connection.ask(messages.Stats(0), messages.StatsAnswer)
        below = msgspec.json.decode(answer.json, type=_DaemonStats).store if answer is not None else None
        if below is None:
            away = "the daemon is away" if answer is None else ""
            return StoreStats({}, 0, 0, 0, 0, 0, False, {}, away, 0, counters, CurveStats())
        tiers = {name: tier for name, tier in below.tiers.items() if name != Tier.HBM.label}
        return replace(below, tiers=tiers, key_collisions=0, open_hits=0, failed_tasks=0, counters=counters)

    def check(self) -> None:
        """Do nothing: the daemon checks its own page counts."""

    @property
    def connected(self) -> bool:
        return self.connection.link is not None

    def wait_connected(self, timeout: float | None) -> bool:
        return self.connection.wait_connected(timeout)

    def wait_ready(self, timeout: float) -> None:
        if self.connection.wait_connected(timeout):
            link = self.connection.link
            if link is not None and link.arena is not None:
                link.arena.wait_populated()

    def close(self) -> None:
        self.connection.close()


class _DaemonStats(msgspec.Struct):
    """The fields of a daemon's statistics that a store uses."""

    store: StoreStats | None = None  # None for a client of a tenant, which may not see other tenants' numbers
