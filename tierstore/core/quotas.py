"""Byte quotas: how much of the host tier a tenant may take. A page counts with the slot that it takes, which
is 4 KiB at least.

A tenant that is full makes room among its own pages, the oldest first; the others do not notice it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierstore.core.state import StoreState
from tierstore.index import Page, Tier
from tierstore.tiers.slabs import slot_bytes

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
        self._state.holdings.host_bytes.pop(identity, None)
        for identities in self._identities.values():
            identities.discard(identity)

    def identities(self, tenant: str) -> int:
        """How many are registered, or have pages in memory."""
        return len(self._identities.get(tenant, ()))

    def used_bytes(self, tenant: str) -> int:
        """In the host tier."""
        used = self._state.holdings.host_bytes
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
        page.pins += 1  # as in Fills.begin
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
                state.holdings.drop(page, Tier.HOST)
                freed += slot_bytes(page.nbytes)
                self.evicted_pages += 1
                state.counters.evicted_pages[Tier.HOST.label] += 1
        return freed
