"""The verbs that neither read nor write pages: register, pin, evict, flush."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from concurrent.futures import Executor
from dataclasses import asdict, replace

import msgspec

from tierstore.daemon import protocol as p
from tierstore.daemon.lookups import LABELS, Lookups
from tierstore.daemon.prompts import AskedPrompt
from tierstore.daemon.quotas import Quotas
from tierstore.daemon.registration import Registration
from tierstore.daemon.session import Refusal, Session, checked_wait, waiting
from tierstore.errors import UsageError
from tierstore.index import Match, Tier
from tierstore.keys import Identity
from tierstore.store.assembly import Assembly
from tierstore.store.telling import finish

_EVICTED_AT_ONCE = 256  # pages; then other requests get their turn
_PIN_LOOK_S = 10.0
_MOST_PAGE_BYTES = 1 << 30
_MOST_CHUNK_TOKENS = 1 << 16


class Upkeep:
    """Belongs to the event loop's thread."""

    def __init__(self, assembly: Assembly, lookups: Lookups, quotas: Quotas, *, threads: Executor) -> None:
        """``threads`` wait for disks, possibly for long."""
        self._assembly = assembly
        self._state = assembly.state
        self._lookups = lookups
        self._quotas = quotas
        self._threads = threads
        self._registered: dict[bytes, Identity] = {}  # by digest

    def register(self, session: Session, m: p.Register) -> p.Registered:
        if sum(len(name) + len(value) for name, value in m.identity.items()) > p.MAX_IDENTITY_BYTES:
            raise Refusal("usage", f"an identity has {p.MAX_IDENTITY_BYTES} bytes at most")
        if not 1 <= m.page_bytes <= _MOST_PAGE_BYTES or not 1 <= m.chunk_tokens <= _MOST_CHUNK_TOKENS:
            raise Refusal("usage", f"pages of {m.page_bytes} bytes for {m.chunk_tokens} tokens")
        try:
            identity = Identity(**m.identity)
        except TypeError as error:
            raise Refusal("usage", f"not an identity: {error}") from error
        if session.tenant:
            # A client may tell its own tenants apart, but never leave the one it was given.
            identity = replace(identity, tenant=_nested(session.tenant, identity.tenant))
        elif identity.tenant.startswith("["):
            raise Refusal("usage", "a tenant that begins with '[' is one that only the daemon may give")
        with self._state.lock:
            root = self._state.index.tree.root(identity.digest, m.page_bytes)
            if root.nbytes != m.page_bytes:
                raise Refusal("usage", f"pages of this identity have {root.nbytes} bytes, not {m.page_bytes}")
            self._quotas.register(session.tenant, identity.digest)
            if self._state.holdings.feed is not None:
                self._state.holdings.feed.register(identity, m.chunk_tokens)
        self._registered[identity.digest] = identity
        registration = Registration(identity, m.page_bytes, m.chunk_tokens)
        return p.Registered(m.id, session.register(registration))

    async def identities(self, session: Session, m: p.Identities) -> p.IdentitiesAnswer:
        known = dict(self._registered)
        disk = self._assembly.disk
        if disk is not None:
            on_disk = await asyncio.get_running_loop().run_in_executor(self._threads, disk.identities)
            known |= {identity.digest: identity for identity in on_disk}
        seen = [identity for each in known.values() if (identity := _seen_by(session, each)) is not None]
        return p.IdentitiesAnswer(m.id, [asdict(identity) for identity in seen])

    def pin(self, session: Session, m: p.Pin) -> p.Pinned | Awaitable[p.Pinned]:
        prompt = AskedPrompt(session, m.prompt)
        limit = prompt.num_tokens // prompt.chunk_tokens * prompt.chunk_tokens
        with self._state.lock:
            found = self._lookups.find(session, prompt, limit)
            if not found.look_on_disk:
                return self._set_pins(m, found.match, prompt.chunk_tokens)

        async def after_disk() -> p.Pinned:
            lease = await self._lookups.look_on_disk(session, prompt, limit, _PIN_LOOK_S)
            with self._state.lock:
                try:
                    found = self._lookups.find(session, prompt, limit)
                    return self._set_pins(m, found.match, prompt.chunk_tokens)
                finally:
                    self._state.leases.release(lease)

        return after_disk()

    def _set_pins(self, m: p.Pin, match: Match, chunk_tokens: int) -> p.Pinned:
        index = self._state.index
        whole = list(match.pages[: match.tokens // chunk_tokens])  # the last one may match in part only
        if m.undo:
            whole = [page for page in whole if page.pins]
        for page in whole:
            if m.undo:
                index.unpin(page)
            else:
                index.pin(page)
        return p.Pinned(m.id, len(whole) * chunk_tokens)

    async def evict(self, session: Session, m: p.Evict) -> p.Evicted:
        if session.tenant:
            raise Refusal("denied", "not all pages are this tenant's: it cannot say which of them leave")
        if m.tier not in LABELS:
            raise Refusal("usage", f"unknown tier {m.tier!r}")
        tier = Tier(LABELS.index(m.tier))
        wanted = sys.maxsize if m.pages < 0 else m.pages
        if tier is Tier.DISK and self._assembly.disk is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._assembly.disk.wait_surveyed)
        evicted = 0
        while evicted < wanted:
            share = min(wanted - evicted, _EVICTED_AT_ONCE)
            with self._state.lock:
                self._state.require_open()
                left = self._state.room.evict(tier, share)
            evicted += left
            if left < share:
                break
            await asyncio.sleep(0)
        return p.Evicted(m.id, evicted)

    def finish(self, session: Session, m: p.Finish) -> p.Finished:
        with self._state.lock:
            try:
                return p.Finished(m.id, finish(self._state, session.tenant, m.session))
            except UsageError as error:
                raise Refusal("usage", str(error)) from error

    async def flush(self, session: Session, m: p.Flush) -> p.Flushed:
        wait_s = checked_wait(m.wait_s)
        with waiting(session):
            done = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._assembly.flush, wait_s
            )
        return p.Flushed(m.id, done)


def _nested(outer: str, inner: str) -> str:
    """The tenant of a tenant."""
    return msgspec.json.encode([outer, inner]).decode()


def _seen_by(session: Session, identity: Identity) -> Identity | None:
    """An identity as a client would register it; None where it cannot."""
    nested = identity.tenant.startswith("[")
    if not session.tenant:
        return None if nested else identity
    if not nested:
        return None
    outer, inner = msgspec.json.decode(identity.tenant, type=tuple[str, str])
    return replace(identity, tenant=inner) if outer == session.tenant else None
