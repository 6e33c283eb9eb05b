"""The limits of tenants: quotas of the tiers, and pins.

A pin keeps the pages of one prompt for one tenant. A client without a tenant owns the daemon, and its pins
last until they are undone. A tenant's pin ends an hour after the prompt was last pinned. So the pins of
tenants that no longer use the daemon do not fill the tiers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from tierstore.core.clients import Refusal
from tierstore.core.state import StoreState
from tierstore.index import Page, Tier
from tierstore.keys import Identity, outer_tenant
from tierstore.tiers.slabs import slot_bytes
from tierstore.units import format_size

# Share of the quota that is evicted at once, because finding the oldest page visits all pages of the tenant.
_EVICT_FRACTION = 1 / 32


class Quotas:
    """The quotas of all tenants. Tenants without a quota are not limited. Needs the state's lock."""

    def __init__(self, state: StoreState, quotas: Mapping[str, int]) -> None:
        self._state = state
        self.quotas = quotas  # bytes by tenant; the daemon replaces it when its settings change
        self._identities: dict[str, set[bytes]] = {}  # digests by tenant
        self._tenants: dict[bytes, str] = {}  # tenants by digest
        self.evicted_pages = 0

    def register(self, client: str, identity: Identity) -> None:
        """Assign the pages of this identity to the outer tenant of a nested tenant, because agents fetch
        pages for other tenants. If the identity's tenant is not nested, assign them to the tenant
        ``client``."""
        tenant = self._tenants[identity.digest] = outer_tenant(identity.tenant) or client
        self._identities.setdefault(tenant, set()).add(identity.digest)

    def forget(self, identity: bytes) -> None:
        """Forget an identity digest that has no pages."""
        self._state.residency.host_bytes.pop(identity, None)
        self._tenants.pop(identity, None)
        for identities in self._identities.values():
            identities.discard(identity)

    def identities(self, tenant: str) -> int:
        """Return the number of the tenant's identities that are registered or have pages in memory."""
        return len(self._identities.get(tenant, ()))

    def used_bytes(self, tenant: str) -> int:
        """Return the tenant's bytes in the host tier."""
        used = self._state.residency.host_bytes
        return sum(used[identity] for identity in self._identities.get(tenant, ()))

    def tenants(self) -> list[str]:
        return sorted(self._identities)

    def limited(self, page: Page) -> bool:
        """Return whether the tenant of a page has a quota."""
        return self._tenants.get(page.identity) in self.quotas

    def admit(self, page: Page) -> bool:
        """Return whether a new page may have a slot. Evict other pages of its tenant if necessary."""
        if not self.limited(page):
            return True
        tenant = self._tenants[page.identity]
        quota = self.quotas[tenant]
        over = self.used_bytes(tenant) + slot_bytes(page.nbytes) - quota
        if over <= 0:
            return True
        page.holds += 1  # as in PendingFills.begin
        freed = self._evict(tenant, max(over, int(quota * _EVICT_FRACTION)))
        page.holds -= 1
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
_QUOTA_SHARE = 1 / 2  # share of its quota that a tenant may pin
_ARENA_SHARE = 1 / 8  # share of the arena that a tenant without a quota may pin
_TENANTS_SHARE = 1 / 2  # share of the smallest tier that all tenants may pin together
_MOST_MEMORY_BYTES = 64 << 20  # memory for all pins and for pinned pages, which cannot be unloaded
_PIN_COST = 512  # bytes of memory


class PinHolder:
    """One prompt that a tenant has pinned ``times`` times, each time with the same pages.

    The pin keeps the pages ``last`` and all pages before them. A chained prompt has one last page. Of named
    pages, each is in ``last``. ``ends`` is a time of the state's clock; None if the pin does not expire.
    """

    __slots__ = ("ends", "last", "name", "tenant", "times")

    def __init__(self, tenant: str, name: bytes, last: Sequence[Page]) -> None:
        self.tenant, self.name, self.last = tenant, name, last
        self.times = 0
        self.ends: float | None = None

    @property
    def memory_cost(self) -> int:
        return _PIN_COST + 8 * len(self.last)

    def pages(self) -> Iterator[Page]:
        """Yield the pages that the pin keeps, children before parents. Pinned pages stay in the tree until
        the pin ends."""
        for last in self.last:
            page = last
            while page.parent is not None:
                yield page
                page = page.parent


class Pins:
    """The pins of all tenants. Needs the state's lock.

    A pin belongs to one tenant and one prompt. Unpinning a prompt undoes only this tenant's pins of exactly
    this prompt, not pins of other prompts with the same pages.
    """

    def __init__(self, state: StoreState, quotas: Quotas) -> None:
        self._state = state
        self._quotas = quotas
        # by tenant and by the prompt's name, newest last
        self._pins: dict[str, dict[bytes, list[PinHolder]]] = {}
        self._pages: dict[str, Counter[Page]] = {}  # by tenant: how many of its pins keep a page
        self._ending: dict[PinHolder, None] = {}  # pins that expire, in the order in which they expire
        self._memory_bytes = 0
        self.pinned_bytes: Counter[str] = Counter()  # bytes of the slots of pinned pages, by tenant

    def pin(self, tenant: str, name: bytes, last: Sequence[Page]) -> int:
        """Keep ``last`` and the pages before them, for the prompt called ``name``. Return the number of these
        pages. Raise :class:`Refusal` at a limit, and change nothing then."""
        if not last:
            return 0
        pin = PinHolder(tenant, name, last)
        pages = list(pin.pages())
        older = self._pins.get(tenant, {}).get(name, ())
        known = older[-1] if older and older[-1].last == last else None
        self._require_room(tenant, pages, 0 if known is not None else pin.memory_cost)
        if known is not None:
            pin = known
            self._ending.pop(pin, None)
        else:
            self._pins.setdefault(tenant, {}).setdefault(name, []).append(pin)
            self._memory_bytes += pin.memory_cost
        pin.times += 1
        if tenant:
            pin.ends = self._state.clock() + TENANT_PIN_S
            self._ending[pin] = None
        counted = self._pages.setdefault(tenant, Counter())
        for page in pages:
            if not page.pins:
                self._memory_bytes += page.memory_cost
            if not counted[page]:
                self.pinned_bytes[tenant] += slot_bytes(page.nbytes)
            counted[page] += 1
            self._state.index.pin(page)
        return len(pages)

    def unpin(self, tenant: str, name: bytes) -> int:
        """Undo the tenant's newest pin of the prompt called ``name``. Return the number of pages that the pin
        kept; 0 if there is no such pin."""
        pins = self._pins.get(tenant, {}).get(name)
        return self._undo(pins[-1]) if pins else 0

    def lift(self, tenant: str | None) -> int:
        """Undo all pins of a tenant (None: of all tenants). Return the number of pages that were pinned."""
        lifted = 0
        for owner in list(self._pins) if tenant is None else [tenant]:
            lifted += self.pages(owner)
            for pins in list(self._pins.get(owner, {}).values()):
                for pin in list(pins):
                    self._undo(pin, pin.times)
        return lifted

    def forget(self, forgotten: Callable[[Page], bool]) -> None:
        """Undo all pins that keep a forgotten page."""
        every = [pin for by_name in self._pins.values() for pins in by_name.values() for pin in pins]
        for pin in every:
            if any(map(forgotten, pin.pages())):
                self._undo(pin, pin.times)

    def expire(self) -> None:
        now = self._state.clock()
        while self._ending:
            pin = next(iter(self._ending))
            if pin.ends is None or pin.ends > now:
                return
            self._undo(pin, pin.times)

    @property
    def any_ending(self) -> bool:
        return bool(self._ending)

    def tenants(self) -> list[str]:
        return list(self._pins)

    def pages(self, tenant: str) -> int:
        """Return the number of a tenant's pinned pages."""
        return len(self._pages.get(tenant, ()))

    def may_pin_bytes(self, tenant: str) -> int | None:
        """Return how many bytes a tenant may pin; None without a limit."""
        if not tenant:
            return None
        quota = self._quotas.quotas.get(tenant)
        assert self._state.host is not None
        return int(self._state.host.capacity_bytes * _ARENA_SHARE if quota is None else quota * _QUOTA_SHARE)

    def _require_room(self, tenant: str, pages: Sequence[Page], memory: int) -> None:
        counted = self._pages.get(tenant, Counter())
        wanted = sum(slot_bytes(page.nbytes) for page in pages if page not in counted)
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
                raise Refusal("busy", "tenants together have pinned all that they may: try again later")
        memory += sum(page.memory_cost for page in pages if not page.pins)
        if self._memory_bytes + memory > _MOST_MEMORY_BYTES:
            raise Refusal("busy", "pins use all the memory that they may use: unpin some prompts")

    def _smallest_tier(self) -> int:
        state = self._state
        assert state.host is not None
        disk = state.disk.stats().capacity_bytes if state.disk is not None else math.inf
        return int(min(state.host.capacity_bytes, disk))

    def _undo(self, pin: PinHolder, times: int = 1) -> int:
        """Undo a pin ``times`` times. Return the number of pages that the pin kept."""
        pages = list(pin.pages())  # listed before unpinning, because unpinned pages may leave the tree
        pin.times -= times
        if not pin.times:
            self._forget(pin)
        counted = self._pages[pin.tenant]
        for page in pages:
            counted[page] -= times
            if not counted[page]:
                del counted[page]
                self.pinned_bytes[pin.tenant] -= slot_bytes(page.nbytes)
            if page.pins == times:
                self._memory_bytes -= page.memory_cost
            self._state.index.unpin(page, times)
        if not counted:
            del self._pages[pin.tenant]
        return len(pages)

    def _forget(self, pin: PinHolder) -> None:
        self._ending.pop(pin, None)
        self._memory_bytes -= pin.memory_cost
        by_name = self._pins[pin.tenant]
        by_name[pin.name].remove(pin)
        if not by_name[pin.name]:
            del by_name[pin.name]
        if not by_name:
            del self._pins[pin.tenant]
