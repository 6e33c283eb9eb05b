"""Loads: leading pages are in HBM already, the others come from the backend.

A :class:`Load` is one transfer over the parts of a hit, one for each layer group; a :class:`PartLoad` brings
one part. At the deadline, what has come in time decides how long the hit is, by the rule that decides it at a
lookup (:mod:`tierstore.groups`): a group that is late shortens the hit, and pages of different lengths are
never mixed. Pages that the shorter hit does not need are given back.

The backend is asked where pages are in batches (of what is in host memory, thousands at once; of what is on
disk, a few MiB), and asked for the next ones while the last are being copied. Copies are tasks of the mover.

From memory that a pool's device reaches, all pages of a batch are copied by it in one go, layer by layer, and
the load ends when that has begun. The engine has the pages by then, and its work is ordered behind the
copies, so what holds their source has to last until they have ended: where that is a lease with an end, it is
renewed when half of what is left of it has passed.

A load may be of some chunks of a hit, ``first … stop``: an engine computes the others. What it measures, the
bytes of a tier and the seconds they took, it tells the planner.

When a page cannot be had the part is *cut* there: later pages would be useless without it. Bytes count only
if what held them had not ended when they were copied: after that, the place may have been somebody else's.
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

_COPY_BYTES = 4 << 20  # one task of the mover
_BATCHES = 4  # asked for at once
_WAIT_S = 5.0  # for a batch, where there is no deadline
_LATE = 0.9  # of the time that it had: a batch that has not come by then is taken for a slow one
LEAST_S = 5.0
"""What must be left of a lease for copies that go on by themselves: of what fits a device they take a few
seconds."""


@dataclass(frozen=True, slots=True)
class HbmCopy:
    """A page to be copied out of HBM, under a lease of ours."""

    position: int
    page: Page


@dataclass(slots=True, eq=False)
class _LoadBatch:
    """Pages that have been located, until the last of them has been copied."""

    located: Located | None  # None once all is copied: tasks outlive their work, and would keep its memory
    in_one_go: bool
    began: float
    measured_bytes: int  # 0 where the time to copy says nothing
    tasks: int = field(default=0)


@dataclass(frozen=True, slots=True)
class Range:
    """Pages ``first … stop`` of a hit (None: to its end). ``keeps_hit``: the hit is not released with the
    load, because others are to come."""

    first: int = 0
    stop: int | None = None
    keeps_hit: bool = False


@dataclass(frozen=True, slots=True)
class Lower:
    """What a load works with."""

    hbm: HbmTier
    backend: Backend
    mover: Mover
    planner: Planner
    groups: Sequence[Group]
    named: Sequence[Group]
    """Those of the groups whose pages are named."""


class Load:
    """Chunks ``first … stop`` of a hit. Of groups whose pages are named, what the hit needs comes with the
    load that ends the hit. The store's lock guards what changes."""

    def __init__(
        self,
        lower: Lower,
        hit: Hit,
        deadline_s: float | None,
        chunks: Range,
        into: Callable[[Load, HitPart, range], PartLoad],
    ) -> None:
        """``into`` makes the load of one part, of these positions."""
        self.lower = lower
        self.hbm = lower.hbm
        self.hit = hit
        self.first = chunks.first
        # A hit of pages that the caller has named, or of one group's, is as long as it has pages.
        self.stop = hit.num_pages if chunks.stop is None else chunks.stop
        self._keeps_hit = chunks.keeps_hit
        self._ends = self.stop == hit.num_pages
        self._under_way = 1  # requests and tasks, and start() itself
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
        with self.hbm.lock:  # of all parts at once: the load may end as soon as one of them asks for pages
            for part in parts:
                part.begin()
        for part in parts:
            part.go_on()
        self.step_done()
        return self.transfer

    def begun(self, steps: int) -> None:
        """So many requests or tasks more are under way. Under the lock."""
        self._under_way += steps

    def step_done(self) -> None:
        """One has ended. Takes the lock."""
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
            # Bytes may be on their way into memory that goes back to the caller now.
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
        self.parts = []  # they refer to this: so neither waits for the collector
        return loaded

    def _length(self, wanted: int) -> int:
        """The longest hit that all groups can serve with what has come. What is before the first chunk is
        loaded, or computed, by others."""
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
        """The outcome for a hit of ``length``: what else has come is given back. Under the lock."""
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
    """Pages ``first … pages`` of a hit's part, to wherever a subclass takes them."""

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
        self.closed = False  # settled: nothing that arrives now will be handed out
        self._arrived = [position < self.first for position in range(self.pages)]  # the others: not wanted
        self._cut = self.pages
        self.copying = 0
        self._asked = 0  # batches that have been asked for and not located yet
        self._asked_of_disk = 0  # … of these
        self._batches = 0  # … and those that are being copied
        self._next = 0  # the first page not asked for yet
        self._wanted: list[bool] = []  # of the backend
        self._missing: list[tuple[int, int]] = []  # (first, count): asked for, and there was no room
        self._local: list[HbmCopy] = []
        self._here = 0  # pages that need no copy
        self._lease: Lease | None = None
        self._answers: set[Transfer[Located | None]] = set()  # that are waited for

    # -- what a destination decides ------------------------------------------------------------------

    @abstractmethod
    def _take_local(self) -> list[HbmCopy]:
        """Take note of the pages that need no copy, and lease those to be copied within this process. Under
        the lock, as are the two below."""

    @abstractmethod
    def _targets(self, first: int, count: int) -> Sequence[int]:
        """Where the leading pages among ``first … first + count`` go."""

    def _land(self, first: int, targets: Sequence[int], *, good: int) -> None:
        """The first ``good`` of these have arrived, the others have not."""
        self._arrived[first : first + good] = [True] * good

    @abstractmethod
    def _fill(self, targets: Sequence[int], addresses: Sequence[int]) -> PendingCopy:
        """Copy pages from host memory. While that goes on the targets may be handed out."""

    def _fill_checked(
        self, targets: Sequence[int], addresses: Sequence[int], checksums: Sequence[int]
    ) -> int:
        """Copy pages, and return how many leading ones are what was saved."""
        found = copying.hash_all(addresses, self.page_bytes)
        good = leading_equal(found, checksums)
        self._fill(targets[:good], addresses[:good]).wait()
        return good

    def _in_one_go(self, address: int) -> bool:
        """Whether pages from ``address`` on are best copied together."""
        return False

    def _came_late(self, pages: int) -> None:
        """Pages that were handed out were copied from what may have been somebody else's by then."""
        raise AssertionError("copies to host memory have ended when pages are handed out")

    @abstractmethod
    def _fill_from_hbm(self, targets: Sequence[int], places: Sequence[int]) -> None:
        """Copy pages of the pool."""

    @abstractmethod
    def result(self, kept: Sequence[int]) -> tuple[int, ...]:
        """Hand the pages at these positions out, if they are the pool's, and give the others back. Under the
        lock."""

    def moved_bytes(self, kept: Sequence[int]) -> int:
        """What was copied for these."""
        return len(kept) * self.page_bytes

    # -- what has come (under the lock) ------------------------------------------------------------------

    def leading(self) -> int:
        """How many pages are there before the first that is not."""
        return next((at for at, here in enumerate(self._arrived) if not here), self.pages)

    def arrived_ends(self) -> list[int]:
        """Where in the prompt those that are there end."""
        return [end for end, here in zip(self.part.ends, self._arrived, strict=False) if here]

    def tier_at(self, position: int) -> str:
        """Where a page was that has not come."""
        lease = self._lease
        return lease.run_at(max(position - self._leased_from, 0))[0] if lease else Tier.HOST.label

    def forget_answers(self) -> None:
        """The load has ended: what is still asked for is not wanted. Without the lock."""
        for answer in list(self._answers):
            answer.cancel()

    # -- asking --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take note of what is in HBM. Under the lock."""
        self._local = local = self._take_local()
        held = {each.position for each in local}
        self._wanted = [not there and i not in held for i, there in enumerate(self._arrived)]
        self._next = self._next_wanted(0)
        self.load.begun(bool(local) + (self._next < self.pages))
        self._here = sum(self._arrived[self.first :])

    def go_on(self) -> None:
        """Ask for the rest, and have copied what is to be copied."""
        self.load.transfer.advance(self._here, 0)
        local, self._local = self._local, []
        if local:
            self.mover.submit(Priority.LOAD, lambda: self._copy_local(local))
        if self._next < self.pages:
            self.part.with_lease(self._leased)

    def _next_wanted(self, start: int) -> int:
        """The first page from ``start`` on that is wanted of the backend."""
        return next((at for at in range(start, self.pages) if self._wanted[at]), self.pages)

    def _leased(self, lease: Lease | None) -> None:
        self._lease = lease
        chunk_tokens, before = self.part.chunk_tokens, self._leased_from
        if lease is None or self._next < before:  # a named page has left HBM, and nobody asked for it below
            self._cut_at(self._next)
        elif before * chunk_tokens + lease.tokens < self.part.tokens:
            self._cut_at(max(before + lease.tokens // chunk_tokens, self._next))
        self._ask_for_more()
        self.load.step_done()

    def _ask_for_more(self, *, again: bool = False) -> None:
        """Ask for the next batches; ``again``: also for one that found no room, since now there may be some.
        One, because an answer may be there at once, and short again: more room comes with the next copy."""
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
                return  # nothing is to take the room that there is

    def _in_memory(self, lease: Lease, position: int) -> bool:
        """Whether a page was in host memory when it was looked up. Behind pages that are coming from disk it
        is not asked for yet: it would be held there, and they may need its room."""
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
        """What the backend took to bring a batch from disk. (What is in host memory is measured with its
        copies.) Of one that did not come in its time it is known that it takes no less."""
        came = len(located.addresses) if located is not None else 0
        now_s = self.hbm.clock()
        late = not came and now_s - asked >= _LATE * wait_s
        if late:
            self.planner.late(tier, count * self.page_bytes, now_s - asked, now_s=now_s)
        elif came and tier == Tier.DISK.label:
            self.planner.moved(tier, came * self.page_bytes, now_s - asked, now_s=now_s)

    def _measure_copies(self, batch: _LoadBatch) -> None:
        """What it took to have a batch from host memory, which may be another host's."""
        if batch.measured_bytes:
            now_s = self.hbm.clock()
            host = Tier.HOST.label
            self.planner.moved(host, batch.measured_bytes, now_s - batch.began, now_s=now_s)

    def _located(self, located: Located | None, start: int, count: int, asked: float, *, alone: bool) -> None:
        """``alone``: nothing else of this load was on its way when it was asked for, and might have taken the
        room."""
        again = False
        there = min(len(located.addresses), count) if located is not None else 0
        with self.hbm.lock:
            self._asked -= 1
            if self._lease is not None:
                self._asked_of_disk -= not self._in_memory(self._lease, start)
            if there < count:
                # The rest may find room once these, or others, have been copied.
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
        """Pages ``start … stop`` of a batch, the first of which is page ``first`` of the hit."""
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
        """Wait for copies, unless they can go on by themselves."""
        left_s = located.ends - self.hbm.clock()
        if filling.done or not in_one_go or left_s < LEAST_S:
            filling.wait()
            return None
        return _Copying(located, filling, self.hbm.clock)

    def _release_source(self, under_way: _Copying, pages: int, batch: _LoadBatch) -> None:
        """Give back what holds the source of copies, when they have ended."""
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
    """Copies that go on after their load has ended. What holds their source is renewed until they have. It
    can only end before them if the device stands still and the daemon does not answer, both for seconds; then
    the pool is not to be trusted any more, and says so to whoever goes on computing."""

    def __init__(self, located: Located, filling: PendingCopy, clock: Callable[[], float]) -> None:
        self._located: Located | None = located
        self._filling = filling
        self._clock = clock
        self._ends = located.ends
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._renew_later(located.ends)

    def wait(self) -> bool:
        """Block until the copies have ended. False when what held their source had ended before."""
        self._filling.wait()
        in_time = self._clock() < self._ends
        with self._lock:
            located, self._located = self._located, None  # now: this and its timer are a circle
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
    """How many of them are equal, or not known, before the first that are not."""
    pairs = enumerate(zip(found, expected, strict=True))
    return next((position for position, (one, other) in pairs if other and one != other), len(found))
