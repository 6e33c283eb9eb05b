"""Loads of a hit's pages into an engine's pools or a caller's memory.

A :class:`Load` is one transfer over the parts of a hit, one part for each layer group. A :class:`PartLoad`
loads one part. A part's leading pages may be in HBM already; the backend provides the remaining pages. At the
deadline, the pages that have arrived decide the length of the hit, by the rule that lookups use
(:mod:`tierstore.groups`). So a late group shortens the hit, and all groups have pages for the same length.
Pages that the shorter hit does not need are released.

A load asks the backend for the addresses of pages in batches: up to thousands of pages in host memory, or
several MiB of pages on disk. While a batch is copied, the load requests the next ones. Copies are tasks of
the mover.

If the pool's device can read the host memory, the device copies all pages of a batch together, layer by
layer. The load ends when these copies have begun: the engine may use the pages then, because the device runs
the engine's work after the copies. So the lease on the source has to last until the copies have ended. A
lease that expires is renewed when half of its remaining time has passed.

A load may cover only the chunks ``first`` to ``stop - 1`` of a hit, while an engine computes the other
chunks. A load reports its measurements, the bytes and seconds of each tier, to the planner.

If a page is missing, the load of the part is *cut* before that page, because later pages are useless without
it. Copied bytes count only if the lease on their source was still valid after the copy, because otherwise the
source may have been reused during the copy.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tierstore import copying
from tierstore.backend import Backend, Lease, Located
from tierstore.groups import Group, longest_of_pages
from tierstore.index import Page, Tier
from tierstore.mover import Mover, Priority
from tierstore.planner import Planner
from tierstore.store.hbm import HbmTier
from tierstore.store.hit import Hit, HitPart
from tierstore.tiers.hbm import PendingCopy
from tierstore.transfer import Transfer, TransferState
from tierstore.types import GroupPages, Loaded

_COPY_BYTES = 4 << 20  # size of one task of the mover
_BATCHES = 4  # most batches that are requested or copied at the same time
_WAIT_S = 5.0  # longest wait for a batch if the load has no deadline
_LATE = 0.9  # a batch without pages after this share of its time limit is measured as slow
LEAST_S = 5.0
"""Remaining seconds that a lease needs if copies continue in the background. Copying all pages that fit a
device takes several seconds."""


@dataclass(frozen=True, slots=True)
class HbmCopy:
    """A page to copy out of HBM, which the load has leased."""

    position: int
    page: Page


@dataclass(slots=True, eq=False)
class _LoadBatch:
    """Pages whose addresses are known, until the last of them has been copied."""

    located: Located | None  # set to None after the copies, so that the memory is not kept alive
    in_one_go: bool  # whether the device copies the whole batch
    began: float
    measured_bytes: int  # 0 if the copies do not measure a tier
    tasks: int = field(default=0)


@dataclass(frozen=True, slots=True)
class Lower:
    """The objects below a store that its loads use."""

    hbm: HbmTier
    backend: Backend
    mover: Mover
    planner: Planner
    groups: Sequence[Group]
    named: Sequence[Group]
    """The groups with named pages."""


class Load:
    """A load of the chunks ``first`` to ``stop - 1`` of a hit. The load that reaches the hit's end also loads
    the named pages that the hit needs. The store's lock guards the mutable state."""

    def __init__(
        self,
        lower: Lower,
        hit: Hit,
        deadline_s: float | None,
        into: Callable[[Load, HitPart, range], PartLoad],
        *,
        first: int = 0,
        stop: int | None = None,
        keeps_hit: bool = False,
    ) -> None:
        """``stop`` is None for the hit's end. ``into`` returns the load of one part, for the given positions.
        With ``keeps_hit``, the load does not release the hit, because other loads of it follow."""
        self.lower = lower
        self.hbm = lower.hbm
        self.hit = hit
        self.first = first
        self.stop = hit.num_pages if stop is None else stop
        self._keeps_hit = keeps_hit
        self._ends = self.stop == hit.num_pages
        self._under_way = 1  # number of running requests, tasks, and calls of start()
        self.parts: list[PartLoad] = []
        for part in hit.parts:
            positions = part.fetched(self.first, self.stop, last=self._ends)
            if positions is not None:
                self.parts.append(into(self, part, positions))
        self.transfer: Transfer[Loaded] = Transfer(
            self._settle,
            pages=sum(part.pages - part.first for part in self.parts),
            nbytes=sum((part.pages - part.first) * part.page_bytes for part in self.parts),
            deadline_s=deadline_s,
            clock=self.hbm.clock,
        )

    def start(self) -> Transfer[Loaded]:
        parts = self.parts
        with self.hbm.lock:  # begin all parts first: the load may end as soon as one part requests pages
            for part in parts:
                part.begin()
        for part in parts:
            part.go_on()
        self.step_done()
        return self.transfer

    def begun(self, steps: int) -> None:
        """Add requests or tasks that start now. Needs the lock."""
        self._under_way += steps

    def step_done(self) -> None:
        """Subtract one request or task that has ended, and finish the load after the last one. Takes the
        lock."""
        with self.hbm.lock:
            self._under_way -= 1
            last = self._under_way == 0
        if last:
            self.transfer.finish()

    # -- ending --------------------------------------------------------------------------------------

    def _settle(self, state: TransferState) -> Loaded:
        wanted = min(self.stop * self.hit.chunk_tokens, self.hit.tokens)
        with self.hbm.lock:
            for part in self.parts:
                part.closed = True
            # Running copies may still write to memory that the caller may reuse from now on.
            self.hbm.changed.wait_for(lambda: not any(part.copying for part in self.parts))
            length = 0 if state is TransferState.CANCELLED else self._length(wanted)
            self.hbm.counters.loads_cut_short += length < wanted
            loaded = self._loaded(length)
        for part in self.parts:
            part.forget_answers()
        if state is TransferState.EXPIRED and length < wanted:
            late = {f"{self._late_tier()} late": wanted - length}
            self.hbm.declined(late)
            self.lower.backend.declined(late)
        if not self._keeps_hit:
            self.hit.release()
        self.parts = []  # break a reference cycle, so that no garbage collection is needed
        return loaded

    def _length(self, wanted: int) -> int:
        """Return the longest hit that all groups support with the pages that have arrived. The chunks before
        ``first`` count as present: they are loaded or computed by others."""
        chunk_tokens = self.hit.chunk_tokens
        front = min(self.first * chunk_tokens, self.hit.tokens)
        if len(self.parts) == 1 and self.parts[0].part.leading:
            return min(self.parts[0].leading() * chunk_tokens, wanted)
        named = self.lower.named if self._ends else ()
        held = {group.number: (group.rule, frozenset[int]()) for group in named}
        for part in self.parts:
            held[part.part.group] = part.part.rule, frozenset(part.arrived_ends())
        return max(longest_of_pages(list(held.values()), wanted, chunk_tokens), front) if held else front

    def _loaded(self, length: int) -> Loaded:
        """Return the result for a hit of ``length`` tokens, and release all other pages. Needs the lock."""
        groups = [GroupPages(self.first)] * len(self.lower.groups)
        moved = 0
        for part in self.parts:
            first, kept = part.part.kept(length, self.first)
            self.hbm.counters.loaded_pages += len(kept)
            groups[part.part.group] = GroupPages(first, part.result(kept))
            moved += part.moved_bytes(kept)
        return Loaded(length, groups[0].pages, moved, tuple(groups))

    def _late_tier(self) -> str:
        for part in self.parts:
            if part.leading() < part.pages:
                return part.tier_at(part.leading())
        return Tier.HOST.label


class PartLoad(ABC):
    """A load of the pages ``first`` to ``pages - 1`` of a hit's part. Subclasses decide where the pages
    go."""

    def __init__(self, load: Load, part: HitPart, positions: range) -> None:
        self.load = load
        self.hbm = load.hbm
        self.backend = load.lower.backend
        self.mover = load.lower.mover
        self.planner = load.lower.planner
        self.part = part
        self.first = positions.start
        self.pages = max(positions.stop, positions.start)
        self.page_bytes = part.page_bytes
        self._leased_from = part.leased_from
        self.closed = False  # if true, pages that arrive are not handed out any more
        self._arrived = [position < self.first for position in range(self.pages)]  # or unwanted
        self._cut = self.pages
        self.copying = 0
        self._asked = 0  # batches that are requested but not located yet
        self._asked_of_disk = 0  # number of requested batches that are on disk
        self._batches = 0  # batches that are being copied
        self._next = 0  # the first page that is not requested yet
        self._wanted: list[bool] = []  # whether the backend has to provide the page, by position
        self._missing: list[tuple[int, int]] = []  # (first, count) of pages that found no room when requested
        self._local: list[HbmCopy] = []
        self._here = 0  # number of pages that need no copy
        self._lease: Lease | None = None
        self._answers: set[Transfer[Located | None]] = set()  # running requests

    # -- implemented for each destination --------------------------------------------------------------

    @abstractmethod
    def _take_local(self) -> list[HbmCopy]:
        """Record the pages that need no copy. Lease and return the pages to copy out of HBM. Needs the
        lock."""

    @abstractmethod
    def _targets(self, first: int, count: int) -> Sequence[int]:
        """Return the targets of the ``count`` pages from ``first`` on; fewer if later pages have no target.
        Needs the lock."""

    def _land(self, first: int, targets: Sequence[int], *, good: int) -> None:
        """Record that the first ``good`` of these pages have arrived and the others have not. Needs the
        lock."""
        self._arrived[first : first + good] = [True] * good

    @abstractmethod
    def _fill(self, targets: Sequence[int], addresses: Sequence[int]) -> PendingCopy:
        """Start to copy pages from host memory. The targets may be handed out before the copies end."""

    def _fill_checked(
        self, targets: Sequence[int], addresses: Sequence[int], checksums: Sequence[int]
    ) -> int:
        """Copy pages. Return the number of pages before the first with an unexpected checksum."""
        found = copying.hash_all(addresses, self.page_bytes)
        good = leading_equal(found, checksums)
        self._fill(targets[:good], addresses[:good]).wait()
        return good

    def _in_one_go(self, address: int) -> bool:
        """Return whether the device should copy a batch that begins at ``address`` as a whole."""
        return False

    def _came_late(self, pages: int) -> None:
        """Handle pages that were handed out although their source may have been reused during the copy."""
        raise AssertionError("copies to host memory have ended when pages are handed out")

    @abstractmethod
    def _fill_from_hbm(self, targets: Sequence[int], places: Sequence[int]) -> None:
        """Copy pages out of the pool."""

    @abstractmethod
    def result(self, kept: Sequence[int]) -> tuple[int, ...]:
        """Hand out the pages of the pool at these positions, and release all others. Return the numbers of
        the pool's pages; empty for other destinations. Needs the lock."""

    def moved_bytes(self, kept: Sequence[int]) -> int:
        return len(kept) * self.page_bytes

    # -- arrived pages (need the lock) -------------------------------------------------------------------

    def leading(self) -> int:
        """Return the number of pages before the first missing one."""
        return next((at for at, here in enumerate(self._arrived) if not here), self.pages)

    def arrived_ends(self) -> list[int]:
        """Return the position in the prompt at which each arrived page ends, in tokens."""
        return [end for end, here in zip(self.part.ends, self._arrived, strict=False) if here]

    def tier_at(self, position: int) -> str:
        """Return the tier in which the lookup found a page that has not arrived."""
        lease = self._lease
        return lease.run_at(max(position - self._leased_from, 0))[0] if lease else Tier.HOST.label

    def forget_answers(self) -> None:
        """Cancel running requests after the load has ended. Must be called without the lock."""
        for answer in list(self._answers):
            answer.cancel()

    # -- requesting --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Record the pages in HBM. Needs the lock."""
        self._local = local = self._take_local()
        held = {each.position for each in local}
        self._wanted = [not there and i not in held for i, there in enumerate(self._arrived)]
        self._next = self._next_wanted(0)
        self.load.begun(bool(local) + (self._next < self.pages))
        self._here = sum(self._arrived[self.first :])

    def go_on(self) -> None:
        """Request the pages from the backend, and start the copies out of HBM."""
        self.load.transfer.advance(self._here, 0)
        local, self._local = self._local, []
        if local:
            self.mover.submit(Priority.LOAD, lambda: self._copy_local(local))
        if self._next < self.pages:
            self.part.with_lease(self._leased)

    def _next_wanted(self, start: int) -> int:
        return next((at for at in range(start, self.pages) if self._wanted[at]), self.pages)

    def _leased(self, lease: Lease | None) -> None:
        self._lease = lease
        chunk_tokens, before = self.part.chunk_tokens, self._leased_from
        if lease is None or self._next < before:  # a named page has left HBM, and the lease does not cover it
            self._cut_at(self._next)
        elif before * chunk_tokens + lease.tokens < self.part.tokens:
            self._cut_at(max(before + lease.tokens // chunk_tokens, self._next))
        self._ask_for_more()
        self.load.step_done()

    def _ask_for_more(self, *, again: bool = False) -> None:
        """Request the next batches. With ``again``, also repeat a request that found no room, because there
        may be room now. Repeat only one request, because its answer may arrive immediately and be short
        again. The next copy that ends frees more room."""
        lease = self._lease
        while lease is not None and not self.load.transfer.stopped:
            with self.hbm.lock:
                if self._asked + self._batches >= _BATCHES:
                    return
                alone = not (self._asked or self._batches)
                retried = again and bool(self._missing)
                if retried:
                    start, count = self._missing.pop(0)
                    again = False
                else:
                    start = self._next
                    count = 0
                    if start < self._cut and not (self._asked_of_disk and self._in_memory(lease, start)):
                        count = self.backend.batch_pages(lease, start - self._leased_from)
                count = min(count, self._cut - start)
                if count <= 0:
                    return
                if start == self._next:
                    there = (at for at in range(start, start + count) if not self._wanted[at])
                    count = next(there, start + count) - start
                    self._next = self._next_wanted(start + count)
                self._asked += 1
                self._asked_of_disk += not self._in_memory(lease, start)
                self.load.begun(1)
            self._ask(lease, start, count, alone=alone)
            if retried and alone:
                return  # another request would take the room away

    def _in_memory(self, lease: Lease, position: int) -> bool:
        """Return whether a page was in host memory at the lookup. Such a page is not requested while pages
        before it come from disk: a hold on it would take room in host memory that those pages may need."""
        return lease.run_at(position - self._leased_from)[0] == Tier.HOST.label

    def _ask(self, lease: Lease, start: int, count: int, *, alone: bool) -> None:
        remaining = self.load.transfer.remaining_s
        wait_s = _WAIT_S if remaining is None else min(remaining, _WAIT_S)
        asked = self.hbm.clock()
        answer = self.backend.locate(lease, start - self._leased_from, count, wait_s=wait_s)
        self.load.transfer.watch(answer)
        self._answers.add(answer)
        tier = lease.run_at(start - self._leased_from)[0]

        def located() -> None:
            self._answers.discard(answer)
            found = answer.wait()
            self._measure_batch(tier, asked, wait_s, found, count)
            self._located(found, start, count, asked, alone=alone)

        answer.on_end(located)

    def _measure_batch(
        self, tier: str, asked: float, wait_s: float, located: Located | None, count: int
    ) -> None:
        """Report how long the backend took to load a batch from disk. (The copies measure pages in host
        memory.) A batch that missed its time limit took at least that time."""
        arrived = len(located.addresses) if located is not None else 0
        now_s = self.hbm.clock()
        late = not arrived and now_s - asked >= _LATE * wait_s
        if late:
            self.planner.late(tier, count * self.page_bytes, now_s - asked, now_s=now_s)
        elif arrived and tier == Tier.DISK.label:
            self.planner.moved(tier, arrived * self.page_bytes, now_s - asked, now_s=now_s)

    def _measure_copies(self, batch: _LoadBatch) -> None:
        """Report how long a batch from host memory took. The memory may be that of a daemon on another
        host."""
        if batch.measured_bytes:
            now_s = self.hbm.clock()
            host = Tier.HOST.label
            self.planner.moved(host, batch.measured_bytes, now_s - batch.began, now_s=now_s)

    def _located(self, located: Located | None, start: int, count: int, asked: float, *, alone: bool) -> None:
        """Handle the answer for a batch. ``alone`` says that this load had no other batch under way at the
        request, so that no other batch of this load had taken the room."""
        again = False
        there = min(len(located.addresses), count) if located is not None else 0
        with self.hbm.lock:
            self._asked -= 1
            if self._lease is not None:
                self._asked_of_disk -= not self._in_memory(self._lease, start)
            if there < count:
                # The remaining pages may find room after these or other pages have been copied.
                self._missing.append((start + there, count - there))
                self._missing.sort()
            if self._missing and not (there or self._batches or self._asked):
                again = not alone
                if alone:
                    self._cut = min(self._cut, self._missing[0][0])
                    self._missing.clear()
        if located is not None and there:
            self._copy_in_tasks(located, start, there, asked)
        elif located is not None:
            located.release()
        self._ask_for_more(again=again)
        self.load.step_done()

    # -- copying -------------------------------------------------------------------------------------

    def _copy_in_tasks(self, located: Located, start: int, count: int, asked: float) -> None:
        lease = self._lease
        in_memory = lease is not None and self._in_memory(lease, start)
        in_one_go = in_memory and not located.checksums and self._in_one_go(located.addresses[0])
        step = count if in_one_go else max(_COPY_BYTES // self.page_bytes, 1)
        starts = range(0, count, step)
        measured = count * self.page_bytes if in_memory else 0
        batch = _LoadBatch(located, in_one_go, asked, measured, len(starts))
        with self.hbm.lock:
            self._batches += 1
            self.load.begun(len(starts))
        for at in starts:
            task = partial(self._copy, batch, start + at, at, min(at + step, count))
            self.mover.submit(Priority.LOAD, task)

    def _copy(self, batch: _LoadBatch, first: int, start: int, stop: int) -> None:
        """Copy the pages ``start`` to ``stop - 1`` of a batch. Page ``start`` is the part's page
        ``first``."""
        located = batch.located
        assert located is not None, "a batch lasts until its last task has ended"
        with self.hbm.lock:
            targets = () if self.closed else self._targets(first, stop - start)
            self.copying += 1
        good = wanted = len(targets)
        addresses = located.addresses[start : start + good]
        under_way = None
        if located.checksums:
            good = self._fill_checked(targets, addresses, located.checksums[start : start + good])
        else:
            under_way = self._leave_alone(self._fill(targets, addresses), located, batch.in_one_go)
        in_time = self.hbm.clock() < located.ends
        if in_time and good < wanted and self._lease is not None:
            self.backend.report_damage(self._lease, first + good - self._leased_from)
        with self.hbm.lock:
            self.copying -= 1
            if not in_time:
                self.hbm.counters.expired_leases += 1
                good = 0
            self._land(first, targets, good=good)
            if good < stop - start:
                self._cut = min(self._cut, first + good)
            batch.tasks -= 1
            over = batch.tasks == 0
            self._batches -= over
            if over:
                batch.located = None
            self.hbm.changed.notify_all()
        if under_way is not None:
            self.mover.submit(Priority.LOAD, partial(self._release_source, under_way, good, batch))
        elif over:
            if good == stop - start:
                self._measure_copies(batch)
            located.release()
        self.load.transfer.advance(good, good * self.page_bytes)
        if over:
            self._ask_for_more(again=True)
        self.load.step_done()

    def _leave_alone(self, filling: PendingCopy, located: Located, in_one_go: bool) -> _Copying | None:
        """Wait for copies, or return them if they can continue in the background."""
        left_s = located.ends - self.hbm.clock()
        if filling.done or not in_one_go or left_s < LEAST_S:
            filling.wait()
            return None
        return _Copying(located, filling, self.hbm.clock)

    def _release_source(self, under_way: _Copying, pages: int, batch: _LoadBatch) -> None:
        in_time = under_way.wait()
        self._measure_copies(batch)
        if not in_time:
            with self.hbm.lock:
                self.hbm.counters.expired_leases += 1
            self._came_late(pages)

    def _copy_local(self, local: Sequence[HbmCopy]) -> None:
        hbm = self.hbm
        with hbm.lock:
            wanted = [] if self.closed else local
            targets = [target for each in wanted for target in self._targets(each.position, 1)]
            places = [hbm.index.copy(each.page, Tier.HBM).place for each in wanted[: len(targets)]]
            self.copying += 1
        self._fill_from_hbm(targets, places)
        with hbm.lock:
            self.copying -= 1
            for each, target in zip(wanted, targets, strict=False):
                self._land(each.position, [target], good=1)
            for each in local:
                hbm.release_copy(each.page)
            hbm.changed.notify_all()
        self.load.transfer.advance(len(targets), len(targets) * self.page_bytes)
        self.load.step_done()

    def _cut_at(self, position: int) -> None:
        with self.hbm.lock:
            self._cut = min(self._cut, position)


class _Copying:
    """Copies that continue after their load has ended. The lease on their source is renewed until they end.
    The lease can only expire before that if the device and the daemon hang for seconds. In that case, the
    pool's content is invalid, and the pool reports this to the engine."""

    def __init__(self, located: Located, filling: PendingCopy, clock: Callable[[], float]) -> None:
        self._located: Located | None = located
        self._filling = filling
        self._clock = clock
        self._ends = located.ends
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._renew_later(located.ends)

    def wait(self) -> bool:
        """Wait until the copies have ended. Return False if the lease on their source has expired before."""
        self._filling.wait()
        in_time = self._clock() < self._ends
        with self._lock:
            # Break the reference cycle of this object and its timer.
            located, self._located = self._located, None
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if located is not None:
            located.release()
        return in_time

    def _renew_later(self, ends: float) -> None:
        left_s = ends - self._clock()
        with self._lock:
            self._ends = ends
            located = self._located
            if located is None or located.renew is None or left_s <= 0 or math.isinf(left_s):
                return
            self._timer = threading.Timer(left_s / 2, located.renew, [self._renew_later])
            self._timer.daemon = True
            self._timer.start()


def leading_equal(found: Sequence[int], expected: Sequence[int]) -> int:
    """Return the number of leading checksums that are as expected, or for which none is expected."""
    pairs = enumerate(zip(found, expected, strict=True))
    return next((position for position, (one, other) in pairs if other and one != other), len(found))
