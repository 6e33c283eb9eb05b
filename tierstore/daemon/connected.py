"""A store whose pages below HBM are a daemon's: the same verbs, the same results.

What is in HBM is known here: a :class:`~tierstore.store.state.StoreState` with nothing but the engine's pool
decides about it as in an embedded store. What is below is asked for. While the daemon is away there is only
HBM: lookups find what is there, and nothing is stored below it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tierstore.daemon import protocol
from tierstore.daemon.budget import Budget
from tierstore.daemon.client_stats import client_stats
from tierstore.daemon.connected_hit import ConnectedHit
from tierstore.daemon.connected_save import SaveJob
from tierstore.daemon.connection import Connection
from tierstore.daemon.destinations import BufferLoad, HbmLoad, TargetLoad
from tierstore.daemon.finding import Finder, look_up
from tierstore.daemon.greeting import Address, CurveKeys
from tierstore.daemon.local import LocalPages
from tierstore.daemon.registration import Registration
from tierstore.daemon.remembered import Question, Remembered
from tierstore.daemon.remote import Remote
from tierstore.daemon.sources import BufferSource, HbmSource, Source
from tierstore.daemon.told import hint_part
from tierstore.errors import StoreClosedError, UsageError
from tierstore.hints import Hint
from tierstore.index import Page, Tier
from tierstore.keys import Identity, Prompt, TokenIds, encode_tokens
from tierstore.mover import Mover
from tierstore.policy import DEFAULT_POLICY, POLICIES
from tierstore.spec import KVSpec
from tierstore.store.base import Hit, Store, check_chunks, checked_prompt, checked_tier
from tierstore.store.endpoints import Buffers, PageTarget
from tierstore.store.load import Loaded
from tierstore.store.state import StoreState
from tierstore.store.stats import StoreStats
from tierstore.store.telling import Told, finish
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.pinned import Pin
from tierstore.transfer import Transfer

M = TypeVar("M", bound=protocol.Message)

_CLOSE_S = 5.0  # for saves that are under way
_FLUSH_STEP_S = 5.0


class ConnectedStore(Store):
    """Made by :meth:`Store.connect`. Thread-safe; for one process: a forked child that uses it gets a
    :class:`StoreClosedError`, and connects for itself."""

    def __init__(
        self,
        address: Address,
        spec: KVSpec,
        identity: Identity,
        *,
        pool: PagePool | None,
        lookup_s: float,
        mover_threads: int,
        reach: Callable[[Pin], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.identity = identity
        self.pool = pool
        self.lookup_s = lookup_s
        self._layout = spec.describe()
        policies = [POLICIES[DEFAULT_POLICY]() for _ in Tier]
        self._state = StoreState(policies, host=None, pool=pool, disk=None, clock=clock)
        self._local = LocalPages(self._state, spec.page_bytes)
        self._mover = Mover(mover_threads)
        self._remembered = Remembered(spec.chunk_tokens)
        registration = Registration(identity, spec.page_bytes, spec.chunk_tokens)
        if pool is not None:
            reach = pool.reach
        self.connection = Connection(address, [registration], patience_s=lookup_s, reach=reach)
        self._remote = Remote(self.connection, self._remembered, spec.page_bytes, clock)
        self._finder = Finder(self._local, self._remote)
        self._budget = Budget()

    @classmethod
    def connect(
        cls,
        url: str,
        spec: KVSpec,
        *,
        identity: Identity | None = None,
        pool: PagePool | None = None,
        lookup_s: float = 0.5,
        mover_threads: int = 2,
        keys: str | Path | None = None,
        server_key: str | Path | None = None,
        reach: Callable[[Pin], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> ConnectedStore:
        """See :meth:`Store.connect`. ``reach`` is for those who have no pool but copy between pages and the
        memory of a device all the same: :meth:`~tierstore.tiers.pinned.Reach.share` of that device's.
        ``clock`` is what the ends of leases are compared with."""
        if pool is not None and pool.spec != spec:
            raise UsageError("the page pool was made for another KV spec than the store's")
        if lookup_s <= 0 or mover_threads < 1:
            raise UsageError("lookup_s must be above 0, mover_threads at least 1")
        return cls(
            Address.parse(url, CurveKeys.read(keys, server_key)),
            spec,
            identity or Identity.of(spec, model="default"),
            pool=pool,
            lookup_s=lookup_s,
            mover_threads=mover_threads,
            reach=reach,
            clock=clock,
        )

    def __repr__(self) -> str:
        session = self.connection.session
        where = f"session {session.number}" if session is not None else "away"
        return f"ConnectedStore({self.connection.address.url}, {where})"

    def introduce(self, identity: Identity) -> None:
        """Have the daemon know an identity before its first prompt is saved or looked up, which waits for
        that (``lookup_s`` at most) otherwise. Costs nothing once it does."""
        prompt = Prompt(identity, chunk_tokens=self.spec.chunk_tokens)
        self._remote.introduce(self._remembered.question(prompt))

    # -- finding and loading -------------------------------------------------------------------------

    def prompt(self, tokens: TokenIds) -> Prompt:
        return self._remembered.prompt(self.identity, encode_tokens(tokens))

    def lookup(self, prompt: Prompt | TokenIds, *, max_tokens: int | None = None) -> Hit:
        return self._finder.lookup(self._question(prompt, max_tokens))

    async def lookup_async(self, prompt: Prompt | TokenIds, *, max_tokens: int | None = None) -> Hit:
        """:meth:`lookup` for an event loop, which goes on meanwhile. (Loads and saves are awaitable.)"""
        return await self._finder.lookup_async(self._question(prompt, max_tokens))

    def load(
        self,
        hit: Hit,
        into: Sequence[bytearray | memoryview] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Transfer[Loaded]:
        self._require_open()
        if not isinstance(hit, ConnectedHit):
            raise UsageError("the hit is of another store")
        if into is None:
            if self.pool is None:
                raise UsageError("this store has no page pool: say which buffers to load into")
            return HbmLoad(self._state, self._remote, self._mover, hit, deadline_s).start()
        if len(into) != hit.num_pages:
            raise UsageError(f"the hit has {hit.num_pages} pages, there are {len(into)} buffers to load into")
        buffers = Buffers(into, self.spec.page_bytes, writable=True)
        return BufferLoad(self._state, self._remote, self._mover, hit, deadline_s, buffers).start()

    def load_to(
        self, hit: Hit, target: PageTarget, *, first: int = 0, deadline_s: float | None = None
    ) -> Transfer[Loaded]:
        """Load pages ``first …`` of a hit into a target of the caller's (for a store without a pool). When
        the transfer has ended nothing is written to the target any more; the tokens of the result count from
        the prompt's start."""
        self._require_open()
        if not isinstance(hit, ConnectedHit):
            raise UsageError("the hit is of another store")
        if self.pool is not None or not 0 <= first <= hit.num_pages:
            raise UsageError(f"a hit of {hit.num_pages} pages cannot be loaded into a target from {first} on")
        return TargetLoad(self._state, self._remote, self._mover, hit, deadline_s, target, first).start()

    def _question(self, prompt: Prompt | TokenIds, max_tokens: int | None) -> Question:
        self._require_open()
        if isinstance(prompt, Prompt):
            question = self._remembered.question(checked_prompt(self, self._layout, prompt))
        else:
            question = self._remembered.question_of(self.identity, encode_tokens(prompt))
        return question if max_tokens is None else question.cut(max(max_tokens, 0))

    # -- saving --------------------------------------------------------------------------------------

    def save(
        self,
        prompt: Prompt | TokenIds,
        pages: Sequence[bytes | bytearray | memoryview],
        *,
        first: int = 0,
        hint: Hint | None = None,
        session: str | None = None,
    ) -> Transfer[int]:
        source = BufferSource(Buffers(pages, self.spec.page_bytes, writable=False))
        question = self._checked(prompt, first, len(pages))
        return self._save(question, source, {}, first, len(pages), Told(hint, session))

    def save_from(
        self,
        prompt: Prompt,
        source: Source,
        count: int,
        *,
        first: int = 0,
        hint: Hint | None = None,
        session: str | None = None,
    ) -> Transfer[int]:
        """:meth:`save` of ``count`` pages that are not buffers of ``page_bytes``. After ``cancel()`` the
        source is not read any more; what it had given by then is stored."""
        return self._save(self._checked(prompt, first, count), source, {}, first, count, Told(hint, session))

    def save_hbm(
        self,
        prompt: Prompt,
        hbm_pages: Sequence[int],
        *,
        first: int = 0,
        hint: Hint | None = None,
        session: str | None = None,
    ) -> Transfer[int]:
        assert self.pool is not None, "save_hbm needs a pool"
        question = self._checked(prompt, first, len(hbm_pages))
        source = HbmSource(self.pool, hbm_pages)
        tail_key = prompt.tail_key() if question.num_chunks > len(question.keys) else None
        told = Told(hint, session)
        held = self._local.publish(question, tail_key, source, first, told) if hbm_pages else {}
        return self._save(question, source, held, first, len(held), told)

    def _checked(self, prompt: Prompt | TokenIds, first: int, count: int) -> Question:
        question = self._question(prompt, None)
        check_chunks(first, count, question.num_chunks)
        return question

    def _save(
        self, question: Question, source: Source, held: dict[int, Page], first: int, count: int, told: Told
    ) -> Transfer[int]:
        self._remote.introduce(question)
        if told and not count:
            self._tell(question, first, told)
        job = SaveJob(
            self._budget, self._remote, self._mover, self._state, question, source, held, first, count, told
        )
        return job.start()

    def _tell(self, question: Question, first: int, told: Told) -> None:
        """What was told with no pages; nobody waits for it."""
        session = self._remote.session_for(question)
        if session is not None:
            part = question.cut(first * question.chunk_tokens).part(session, refer_to=0)
            message = protocol.Reserve(0, part, first, 0, hint_part(told), told.session or "")
            self.connection.call(session, message, protocol.Reserved)

    def finish(self, session: str) -> int:
        self._require_open()
        with self._state.lock:
            in_hbm = finish(self._state, "", session)
        answer = self._ask(protocol.Finish(0, session), protocol.Finished)
        return answer.pages if answer is not None else in_hbm

    def flush(self, timeout: float | None = None) -> bool:
        self._require_open()
        ends = None if timeout is None else time.monotonic() + timeout
        state = self._state
        with state.lock:
            if not state.changed.wait_for(lambda: not state.pending_saves, timeout):
                return False
        while True:
            left = _FLUSH_STEP_S if ends is None else min(ends - time.monotonic(), _FLUSH_STEP_S)
            answer = self._ask(protocol.Flush(0, max(left, 0.0)), protocol.Flushed, wait_s=left)
            if answer is None or answer.done or (ends is not None and time.monotonic() >= ends):
                return answer is not None and answer.done

    # -- room in HBM ---------------------------------------------------------------------------------

    def allocate_hbm(self, count: int) -> list[int] | None:
        with self._state.lock:
            return self._state.room.hbm_pages(count)

    def release_hbm(self, hbm_pages: Sequence[int]) -> None:
        with self._state.lock:
            self._state.hbm.release(hbm_pages)

    def available_hbm(self) -> int:
        with self._state.lock:
            return self._state.available_hbm()

    # -- keeping and dropping ------------------------------------------------------------------------

    def evict(self, tier: str, pages: int | None = None) -> int:
        self._require_open()
        if checked_tier(tier) is Tier.HBM:
            with self._state.lock:
                room = self.pool.num_pages if self.pool is not None else 0
                return self._state.room.evict(Tier.HBM, room if pages is None else pages)
        answer = self._ask(
            protocol.Evict(0, tier, -1 if pages is None else pages), protocol.Evicted, wait_s=5.0
        )
        return answer.pages if answer is not None else 0

    def pin(self, prompt: Prompt | TokenIds) -> int:
        return self._pin(prompt, undo=False)

    def unpin(self, prompt: Prompt | TokenIds) -> int:
        return self._pin(prompt, undo=True)

    def _pin(self, prompt: Prompt | TokenIds, *, undo: bool) -> int:
        question = self._question(prompt, None)
        self._remote.introduce(question)
        session = self._remote.session_for(question)
        if session is None:
            return 0
        message = protocol.Pin(0, question.part(session, refer_to=0), undo)
        answer = self.connection.call(session, message, protocol.Pinned).wait()
        return answer.tokens if answer is not None else 0

    # -- seeing and ending ---------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """What is counted here, with the tiers of the daemon beside HBM. ``counters`` are this client's."""
        answer = self._ask(protocol.Stats(0), protocol.StatsAnswer)
        return client_stats(self._state, self._mover, self.connection, answer)

    def check(self) -> None:
        """Assert that what is known of HBM agrees with the pool. For tests and idle moments."""
        with self._state.lock:
            self._state.check()

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait for the daemon; False when ``timeout`` seconds pass first. Nobody has to: until it is there,
        everything is a miss."""
        return self.connection.wait_connected(timeout)

    def wait_ready(self) -> None:
        if self.connection.wait_connected(self.lookup_s):
            session = self.connection.session
            if session is not None and session.arena is not None:
                session.arena.wait_populated()

    @property
    def closed(self) -> bool:
        return self._state.closed

    def close(self) -> None:
        if self.connection.forked:
            return  # nothing here is this process's
        with self._state.lock:
            if self._state.closed:
                return
            self._state.closed = True
            self._state.changed.wait_for(lambda: not self._state.pending_saves, _CLOSE_S)
        self._mover.drain()  # copies go on after their load, and need the daemon's leases
        self.connection.close()
        self._mover.close()

    def _ask(self, message: Any, expected: type[M], *, wait_s: float = 0.0) -> M | None:
        session = self.connection.session
        if session is None:
            return None
        return self.connection.call(session, message, expected, wait_s=wait_s).wait()

    def _require_open(self) -> None:
        if self.connection.forked:
            raise StoreClosedError("this store was connected by another process: connect one here after fork")
        if self._state.closed:
            raise StoreClosedError("the store is closed")


def lookup_all(
    wanted: Iterable[tuple[ConnectedStore, Prompt | TokenIds]], *, max_tokens: int | None = None
) -> Sequence[Hit]:
    """:meth:`Store.lookup` of many prompts, in one store or in several: all are asked before any answer is
    waited for, and ``lookup_s`` (the longest of the stores') is the limit for all together. The hits are in
    the order of ``wanted``. Raises what :meth:`Store.lookup` raises; nothing is leased then."""
    return look_up((store._finder, store._question(prompt, max_tokens)) for store, prompt in wanted)
