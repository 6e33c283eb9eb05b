"""What tenants may have: quotas of the tiers, and pins.

Pins are pages that somebody wants kept. A client without a tenant owns the daemon: its pins last until they
are undone. A tenant's end an hour after the page was last pinned: tenants come and go, and what they leave
behind must not fill the tiers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from tierstore.core.clients import Refusal
from tierstore.core.state import StoreState
from tierstore.index import Page, Tier
from tierstore.tiers.slabs import slot_bytes
from tierstore.units import format_size

_EVICT_FRACTION = 1 / 32  # of the quota, at once: looking for the oldest means looking at all of the tenant's


class Quotas:
    """Needs the state's lock. Tenants without a quota may take what they get."""

    def __init__(self, state: StoreState, quotas: Mapping[str, int]) -> None:
        self._state = state
        self.quotas = quotas  # bytes by tenant; may be replaced
        self._identities: dict[str, set[bytes]] = {}  # by tenant
        self.evicted_pages = 0

    def register(self, tenant: str, identity: bytes) -> None:
        """Pages under this identity digest are the tenant's."""
        self._identities.setdefault(tenant, set()).add(identity)

    def forget(self, identity: bytes) -> None:
        """There are no pages under this identity digest."""
        self._state.residency.host_bytes.pop(identity, None)
        for identities in self._identities.values():
            identities.discard(identity)

    def identities(self, tenant: str) -> int:
        """How many are registered, or have pages in memory."""
        return len(self._identities.get(tenant, ()))

    def used_bytes(self, tenant: str) -> int:
        """In the host tier."""
        used = self._state.residency.host_bytes
        return sum(used[identity] for identity in self._identities.get(tenant, ()))

    def tenants(self) -> list[str]:
        return sorted(self._identities)

    def admit(self, tenant: str, page: Page) -> bool:
        """Whether a new page may have a slot. Makes room for it among the tenant's own pages."""
        quota = self.quotas.get(tenant)
        if quota is None:
            return True
        over = self.used_bytes(tenant) + slot_bytes(page.nbytes) - quota
        if over <= 0:
            return True
        page.pins += 1  # as in PendingFills.begin
        freed = self._evict(tenant, max(over, int(quota * _EVICT_FRACTION)))
        page.pins -= 1
        return freed >= over

    def _evict(self, tenant: str, nbytes: int) -> int:
        state = self._state
        state.leases.expire()
        identities = self._identities.get(tenant, set())
        freed = 0
        while freed < nbytes:
            leaving = [
                page
                for page in state.index.tree.walk()
                if page.identity in identities and page.may_leave(Tier.HOST)
            ]
            leaving.sort(key=lambda page: page.last_use)
            if not leaving:
                break
            for page in leaving:
                if freed >= nbytes:
                    break
                state.residency.drop(page, Tier.HOST)
                freed += slot_bytes(page.nbytes)
                self.evicted_pages += 1
                state.counters.evicted_pages[Tier.HOST.label] += 1
        return freed


TENANT_PIN_S = 3600.0
_QUOTA_SHARE = 1 / 2  # of a tenant's quota, that it may pin
_ARENA_SHARE = 1 / 8  # of the arena, that a tenant without a quota may pin
_TENANTS_SHARE = 1 / 2  # of the smallest tier, that all tenants may pin together
_MOST_MEMORY_BYTES = 64 << 20  # of all pinned pages, which are kept in mind


class Pins:
    """Needs the state's lock."""

    def __init__(self, state: StoreState, quotas: Quotas) -> None:
        self._state = state
        self._quotas = quotas
        self._pinned: dict[str, dict[Page, None]] = {}  # by tenant
        self._ends: dict[Page, float] = {}  # of tenants' pages, on the state's clock: the earliest first
        self._memory_bytes = 0
        self.pinned_bytes: Counter[str] = Counter()  # slots of pinned pages, by tenant

    def pin(self, tenant: str, pages: Sequence[Page]) -> None:
        """Keep ``pages`` once more. Raises :class:`Refusal`, and has changed nothing then."""
        self._require_room(tenant, [page for page in pages if not page.pins])
        for page in pages:
            if not page.pins:
                self._pinned.setdefault(tenant, {})[page] = None
                self.pinned_bytes[tenant] += slot_bytes(page.nbytes)
                self._memory_bytes += page.memory_cost
            self._state.index.pin(page)
            if tenant:
                self._ends.pop(page, None)
                self._ends[page] = self._state.clock() + TENANT_PIN_S

    def unpin(self, tenant: str, pages: Sequence[Page]) -> int:
        """Undo one pin of each of these pages that has any. Returns how many had."""
        pinned = [page for page in reversed(pages) if page.pins]
        for page in pinned:
            self._unpin(tenant, page)
        return len(pinned)

    def lift(self, tenant: str | None) -> int:
        """Undo all pins of a tenant (None: of everybody). Returns how many pages were pinned."""
        lifted = 0
        for name in list(self._pinned) if tenant is None else [tenant]:
            for page in list(self._pinned.get(name, ())):
                self._lift(name, page)
                lifted += 1
        return lifted

    def expire(self) -> None:
        """Undo the pins whose time is over."""
        now = self._state.clock()
        while self._ends:
            page, ends = next(iter(self._ends.items()))
            if ends > now:
                return
            tenant = next(name for name, pages in self._pinned.items() if page in pages)
            self._lift(tenant, page)

    @property
    def any_ending(self) -> bool:
        """Whether there are pins that end."""
        return bool(self._ends)

    def tenants(self) -> list[str]:
        """Who has pinned something."""
        return list(self._pinned)

    def pages(self, tenant: str) -> int:
        """How many of a tenant's pages are pinned."""
        return len(self._pinned.get(tenant, ()))

    def may_pin_bytes(self, tenant: str) -> int | None:
        """How much of the tiers a tenant may pin; None where it is not limited."""
        if not tenant:
            return None
        quota = self._quotas.quotas.get(tenant)
        assert self._state.host is not None
        return int(self._state.host.capacity_bytes * _ARENA_SHARE if quota is None else quota * _QUOTA_SHARE)

    def _require_room(self, tenant: str, new: Sequence[Page]) -> None:
        wanted = sum(slot_bytes(page.nbytes) for page in new)
        most = self.may_pin_bytes(tenant)
        if most is not None:
            if self.pinned_bytes[tenant] + wanted > most:
                raise Refusal(
                    "busy",
                    f"{tenant} may pin {format_size(most)} and has pinned "
                    f"{format_size(self.pinned_bytes[tenant])}: unpin some prompts, or pin a shorter one",
                )
            theirs = sum(nbytes for name, nbytes in self.pinned_bytes.items() if name)
            if theirs + wanted > self._smallest_tier() * _TENANTS_SHARE:
                raise Refusal("busy", "tenants have pinned as much as they may together: try again later")
        if self._memory_bytes + sum(page.memory_cost for page in new) > _MOST_MEMORY_BYTES:
            raise Refusal("busy", "more pages are pinned than can be kept in mind: unpin some prompts")

    def _smallest_tier(self) -> int:
        state = self._state
        assert state.host is not None
        disk = state.disk.stats().capacity_bytes if state.disk is not None else math.inf
        return int(min(state.host.capacity_bytes, disk))

    def _lift(self, tenant: str, page: Page) -> None:
        for _ in range(page.pins):
            self._unpin(tenant, page)

    def _unpin(self, tenant: str, page: Page) -> None:
        if page.pins == 1:
            self._ends.pop(page, None)
            del self._pinned[tenant][page]
            if not self._pinned[tenant]:
                del self._pinned[tenant]
            self.pinned_bytes[tenant] -= slot_bytes(page.nbytes)
            self._memory_bytes -= page.memory_cost
        self._state.index.unpin(page)
