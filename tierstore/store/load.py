"""Loads: leading pages are in HBM already, the others come from the backend.

The backend is asked where pages are in windows (of what is in host memory, thousands at once; of what is on
disk, a few MiB), and asked for the next ones while the last are being copied. Copies are tasks of the mover.

From memory that a pool's device reaches, all pages of a window are copied by it in one go, layer by layer,
and the load ends when that has begun. The engine has the pages by then, and its work is ordered behind the
copies, so what holds their source has to last until they have ended: where that is a lease with an end, it is
renewed when half of what is left of it has passed.

A load may be of some pages of a hit, ``first … stop``: an engine computes the others. What it measures, the
bytes of a tier and the seconds they took, it tells the planner.

When a page cannot be had the load is *cut* there: later pages would be useless without it. Bytes count only
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
from tierstore.index import Page, Tier
from tierstore.mover import Mover, Priority
from tierstore.planner import Planner
from tierstore.store.buffers import Buffers, PageTarget
from tierstore.store.hbm import HbmTier
from tierstore.store.hit import Hit
from tierstore.tiers.hbm import COMPLETED, PendingCopy
from tierstore.transfer import Transfer, TransferState
from tierstore.types import Loaded

_COPY_BYTES = 4 << 20  # one task of the mover
_WINDOWS = 4  # asked for at once
_WAIT_S = 5.0  # for a window, where there is no deadline
_LATE = 0.9  # of the time that it had: a window that has not come by then is taken for a slow one
LEAST_S = 5.0
"""What must be left of a lease for copies that go on by themselves: of what fits a device they take a few
seconds."""


@dataclass(frozen=True, slots=True)
class _HbmCopy:
    """A page to be copied out of HBM, under a lease of ours."""

    position: int
    page: Page


@dataclass(slots=True, eq=False)
class _Window:
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


WHOLE = Range()


class Load(ABC):
    """What all destinations have in common. The store's lock guards what changes."""

    def __init__(
        self,
        hbm: HbmTier,
        backend: Backend,
        mover: Mover,
        planner: Planner,
        hit: Hit,
        deadline_s: float | None,
        part: Range,
    ) -> None:
        self.hbm = hbm
        self.backend = backend
        self.mover = mover
        self.planner = planner
        self.hit = hit
        self.first = part.first
        self.pages = hit.num_pages if part.stop is None else part.stop
        self._keeps_hit = part.keeps_hit
        self.page_bytes = hit.page_bytes
        self._leased_from = hit.leased_from
        self.closed = False  # settled: nothing that arrives now will be handed out
        self._arrived = [position < self.first for position in range(self.pages)]  # the others: not wanted
        self._cut = self.pages
        self._copying = 0
        self._under_way = 1  # requests and tasks, and start() itself
        self._asked = 0  # windows that have been asked for and not located yet
        self._asked_of_disk = 0  # … of these
        self._windows = 0  # … and those that are being copied
        self._next = 0  # the first page not asked for yet
        self._wanted: list[bool] = []  # of the backend
        self._missing: list[tuple[int, int]] = []  # (first, count): asked for, and there was no room
        self._lease: Lease | None = None
        self._answers: set[Transfer[Located | None]] = set()  # that are waited for
        self.transfer: Transfer[Loaded] = Transfer(
            self._settle,
            pages=self.pages - self.first,
            nbytes=(self.pages - self.first) * self.page_bytes,
            deadline_s=deadline_s,
            clock=hbm.clock,
        )

    # -- what a destination decides ------------------------------------------------------------------

    @abstractmethod
    def _take_local(self) -> list[_HbmCopy]:
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
        good = _leading_equal(found, checksums)
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
    def _result(self, pages: int, tokens: int) -> Loaded:
        """The outcome, ``pages`` being the contiguous prefix that arrived. Under the lock."""

    # -- asking --------------------------------------------------------------------------------------

    def start(self) -> Transfer[Loaded]:
        with self.hbm.lock:
            local = self._take_local()
            here = sum(self._arrived[self.first :])
            held = {each.position for each in local}
            self._wanted = [not there and i not in held for i, there in enumerate(self._arrived)]
            self._next = self._next_wanted(0)
            self._under_way += bool(local) + (self._next < self.pages)
        self.transfer.advance(here, 0)
        if local:
            self.mover.submit(Priority.LOAD, lambda: self._copy_local(local))
        if self._next < self.pages:
            self.hit.with_lease(self._leased)
        self._step_done()
        return self.transfer

    def _next_wanted(self, start: int) -> int:
        """The first page from ``start`` on that is wanted of the backend."""
        return next((at for at in range(start, self.pages) if self._wanted[at]), self.pages)

    def _leased(self, lease: Lease | None) -> None:
        self._lease = lease
        chunk_tokens, before = self.hit.chunk_tokens, self._leased_from
        if lease is None or self._next < before:  # a loose page has left HBM, and nobody asked for it below
            self._cut_at(self._next)
        elif before * chunk_tokens + lease.tokens < self.hit.tokens:
            self._cut_at(max(before + lease.tokens // chunk_tokens, self._next))
        self._ask_for_more()
        self._step_done()

    def _ask_for_more(self, *, again: bool = False) -> None:
        """Ask for the next windows; ``again``: also for one that found no room, since now there may be some.
        One, because an answer may be there at once, and short again: more room comes with the next copy."""
        lease = self._lease
        while lease is not None and not self.transfer.stopped:
            with self.hbm.lock:
                if self._asked + self._windows >= _WINDOWS:
                    return
                alone = not (self._asked or self._windows)
                retried = again and bool(self._missing)
                if retried:
                    start, count = self._missing.pop(0)
                    again = False
                else:
                    start = self._next
                    count = 0
                    if start < self._cut and not (self._asked_of_disk and self._in_memory(lease, start)):
                        count = self.backend.window_pages(lease, start - self._leased_from)
                count = min(count, self._cut - start)
                if count <= 0:
                    return
                if start == self._next:
                    there = (at for at in range(start, start + count) if not self._wanted[at])
                    count = next(there, start + count) - start
                    self._next = self._next_wanted(start + count)
                self._asked += 1
                self._asked_of_disk += not self._in_memory(lease, start)
                self._under_way += 1
            self._ask(lease, start, count, alone=alone)
            if retried and alone:
                return  # nothing is to take the room that there is

    def _in_memory(self, lease: Lease, position: int) -> bool:
        """Whether a page was in host memory when it was looked up. Behind pages that are coming from disk it
        is not asked for yet: it would be held there, and they may need its room."""
        return lease.run_at(position - self._leased_from)[0] == Tier.HOST.label

    def _ask(self, lease: Lease, start: int, count: int, *, alone: bool) -> None:
        remaining = self.transfer.remaining_s
        wait_s = _WAIT_S if remaining is None else min(remaining, _WAIT_S)
        asked = self.hbm.clock()
        answer = self.backend.locate(lease, start - self._leased_from, count, wait_s=wait_s)
        self.transfer.watch(answer)
        self._answers.add(answer)
        tier = lease.run_at(start - self._leased_from)[0]

        def located() -> None:
            self._answers.discard(answer)
            found = answer.wait()
            self._measure_window(tier, asked, wait_s, found, count)
            self._located(found, start, count, asked, alone=alone)

        answer.on_end(located)

    def _measure_window(
        self, tier: str, asked: float, wait_s: float, located: Located | None, count: int
    ) -> None:
        """What the backend took to bring a window from disk. (What is in host memory is measured with its
        copies.) Of one that did not come in its time it is known that it takes no less."""
        came = len(located.addresses) if located is not None else 0
        now_s = self.hbm.clock()
        late = not came and now_s - asked >= _LATE * wait_s
        if late:
            self.planner.late(tier, count * self.page_bytes, now_s - asked, now_s=now_s)
        elif came and tier == Tier.DISK.label:
            self.planner.moved(tier, came * self.page_bytes, now_s - asked, now_s=now_s)

    def _measure_copies(self, window: _Window) -> None:
        """What it took to have a window from host memory, which may be another host's."""
        if window.measured_bytes:
            now_s = self.hbm.clock()
            host = Tier.HOST.label
            self.planner.moved(host, window.measured_bytes, now_s - window.began, now_s=now_s)

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
            if self._missing and not (there or self._windows or self._asked):
                again = not alone
                if alone:
                    self._cut = min(self._cut, self._missing[0][0])
                    self._missing.clear()
        if located is not None and there:
            self._copy_in_tasks(located, start, there, asked)
        elif located is not None:
            located.release()
        self._ask_for_more(again=again)
        self._step_done()

    # -- copying -------------------------------------------------------------------------------------

    def _copy_in_tasks(self, located: Located, start: int, count: int, asked: float) -> None:
        lease = self._lease
        in_memory = lease is not None and self._in_memory(lease, start)
        in_one_go = in_memory and not located.checksums and self._in_one_go(located.addresses[0])
        step = count if in_one_go else max(_COPY_BYTES // self.page_bytes, 1)
        starts = range(0, count, step)
        measured = count * self.page_bytes if in_memory else 0
        window = _Window(located, in_one_go, asked, measured, len(starts))
        with self.hbm.lock:
            self._windows += 1
            self._under_way += len(starts)
        for at in starts:
            task = partial(self._copy, window, start + at, at, min(at + step, count))
            self.mover.submit(Priority.LOAD, task)

    def _copy(self, window: _Window, first: int, start: int, stop: int) -> None:
        """Pages ``start … stop`` of a window, the first of which is page ``first`` of the hit."""
        located = window.located
        assert located is not None, "a window lasts until its last task has ended"
        with self.hbm.lock:
            targets = () if self.closed else self._targets(first, stop - start)
            self._copying += 1
        good = wanted = len(targets)
        addresses = located.addresses[start : start + good]
        under_way = None
        if located.checksums:
            good = self._fill_checked(targets, addresses, located.checksums[start : start + good])
        else:
            under_way = self._leave_alone(self._fill(targets, addresses), located, window.in_one_go)
        in_time = self.hbm.clock() < located.ends
        if in_time and good < wanted and self._lease is not None:
            self.backend.suspect(self._lease, first + good - self._leased_from)
        with self.hbm.lock:
            self._copying -= 1
            if not in_time:
                self.hbm.counters.expired_leases += 1
                good = 0
            self._land(first, targets, good=good)
            if good < stop - start:
                self._cut = min(self._cut, first + good)
            window.tasks -= 1
            over = window.tasks == 0
            self._windows -= over
            if over:
                window.located = None
            self.hbm.changed.notify_all()
        if under_way is not None:
            self.mover.submit(Priority.LOAD, partial(self._let_go, under_way, good, window))
        elif over:
            if good == stop - start:
                self._measure_copies(window)
            located.release()
        self.transfer.advance(good, good * self.page_bytes)
        if over:
            self._ask_for_more(again=True)
        self._step_done()

    def _leave_alone(self, filling: PendingCopy, located: Located, in_one_go: bool) -> _Copying | None:
        """Wait for copies, unless they can go on by themselves."""
        left_s = located.ends - self.hbm.clock()
        if filling.done or not in_one_go or left_s < LEAST_S:
            filling.wait()
            return None
        return _Copying(located, filling, self.hbm.clock)

    def _let_go(self, under_way: _Copying, pages: int, window: _Window) -> None:
        """Give back what holds the source of copies, when they have ended."""
        in_time = under_way.wait()
        self._measure_copies(window)
        if not in_time:
            with self.hbm.lock:
                self.hbm.counters.expired_leases += 1
            self._came_late(pages)

    def _copy_local(self, local: Sequence[_HbmCopy]) -> None:
        hbm = self.hbm
        with hbm.lock:
            wanted = [] if self.closed else local
            targets = [target for each in wanted for target in self._targets(each.position, 1)]
            places = [hbm.index.copy(each.page, Tier.HBM).place for each in wanted[: len(targets)]]
            self._copying += 1
        self._fill_from_hbm(targets, places)
        with hbm.lock:
            self._copying -= 1
            for each, target in zip(wanted, targets, strict=False):
                self._land(each.position, [target], good=1)
            for each in local:
                hbm.release_copy(each.page)
            hbm.changed.notify_all()
        self.transfer.advance(len(targets), len(targets) * self.page_bytes)
        self._step_done()

    def _cut_at(self, position: int) -> None:
        with self.hbm.lock:
            self._cut = min(self._cut, position)

    def _step_done(self) -> None:
        with self.hbm.lock:
            self._under_way -= 1
            last = self._under_way == 0
        if last:
            self.transfer.finish()

    # -- ending --------------------------------------------------------------------------------------

    def _settle(self, state: TransferState) -> Loaded:
        with self.hbm.lock:
            self.closed = True
            # Bytes may be on their way into memory that goes back to the caller now.
            self.hbm.changed.wait_for(lambda: not self._copying)
            pages = 0
            if state is not TransferState.CANCELLED:
                pages = next((i for i, here in enumerate(self._arrived) if not here), self.pages)
            tokens = min(pages * self.hit.chunk_tokens, self.hit.tokens)
            wanted = min(self.pages * self.hit.chunk_tokens, self.hit.tokens)
            self.hbm.counters.loads_cut_short += tokens < wanted
            self.hbm.counters.loaded_pages += max(pages - self.first, 0)
            loaded = self._result(pages, tokens)
        for answer in list(self._answers):
            answer.cancel()
        if state is TransferState.EXPIRED and tokens < wanted:
            lease = self._lease
            at = max(pages - self._leased_from, 0)
            tier = lease.run_at(at)[0] if lease is not None else Tier.HOST.label
            self.hbm.declined({f"{tier} late": wanted - tokens})
            self.backend.declined({f"{tier} late": wanted - tokens})
        if not self._keeps_hit:
            self.hit.release()
        return loaded


class BufferLoad(Load):
    """Into memory of the caller's."""

    def __init__(
        self,
        hbm: HbmTier,
        backend: Backend,
        mover: Mover,
        planner: Planner,
        hit: Hit,
        deadline_s: float | None,
        part: Range,
        buffers: Buffers,
    ) -> None:
        super().__init__(hbm, backend, mover, planner, hit, deadline_s, part)
        self._buffers = buffers  # keeps them alive: a caller may let go of what he has given

    def _take_local(self) -> list[_HbmCopy]:
        local = []
        for position, page in enumerate(self.hit.local):
            if page.copies[Tier.HBM] is None:
                break  # the lease has ended, and it has gone since
            self.hbm.index.lease(page, Tier.HBM)
            local.append(_HbmCopy(position, page))
        return local

    def _targets(self, first: int, count: int) -> Sequence[int]:
        return self._buffers.addresses[first : first + count]

    def _fill(self, targets: Sequence[int], addresses: Sequence[int]) -> PendingCopy:
        copying.copy_all(zip(targets, addresses, strict=True), self.page_bytes)
        return COMPLETED

    def _fill_checked(
        self, targets: Sequence[int], addresses: Sequence[int], checksums: Sequence[int]
    ) -> int:
        found = copying.copy_and_hash(zip(targets, addresses, strict=True), self.page_bytes)
        return _leading_equal(found, checksums)  # whatever else was copied has not been loaded

    def _fill_from_hbm(self, targets: Sequence[int], places: Sequence[int]) -> None:
        assert self.hbm.pool is not None, "pages in HBM are of a pool"
        self.hbm.pool.read_pages(zip(places, targets, strict=True))

    def _result(self, pages: int, tokens: int) -> Loaded:
        return Loaded(tokens, (), pages * self.page_bytes)


class TargetLoad(Load):
    """Pages ``first …`` of a hit, into whatever takes them."""

    def __init__(
        self,
        hbm: HbmTier,
        backend: Backend,
        mover: Mover,
        planner: Planner,
        hit: Hit,
        deadline_s: float | None,
        part: Range,
        target: PageTarget,
    ) -> None:
        super().__init__(hbm, backend, mover, planner, hit, deadline_s, part)
        self._target = target

    def _take_local(self) -> list[_HbmCopy]:
        assert self.hbm.pool is None, "pages of a pool are loaded into the pool"
        return []

    def _targets(self, first: int, count: int) -> Sequence[int]:
        return range(first, first + count)

    def _fill(self, targets: Sequence[int], addresses: Sequence[int]) -> PendingCopy:
        self._target.write(list(zip(targets, addresses, strict=True)))
        return COMPLETED

    def _fill_from_hbm(self, targets: Sequence[int], places: Sequence[int]) -> None:
        raise AssertionError("there is no pool")

    def _result(self, pages: int, tokens: int) -> Loaded:
        return Loaded(tokens, (), max(pages - self.first, 0) * self.page_bytes)


class HbmLoad(Load):
    """Into the engine's page pool. Whole pages become cached copies that the caller shares; a page the hit
    ends inside of is copied to a private page, because the caller is going to write behind the match."""

    def __init__(
        self,
        hbm: HbmTier,
        backend: Backend,
        mover: Mover,
        planner: Planner,
        hit: Hit,
        deadline_s: float | None,
        part: Range,
    ) -> None:
        super().__init__(hbm, backend, mover, planner, hit, deadline_s, part)
        assert hbm.pool is not None, "loads into HBM need a pool"
        self._pool = hbm.pool
        self._hbm_pages = [-1] * self.pages
        self._reserved: dict[int, int] = {}  # position -> page of the pool
        self._chain: list[Page] = []  # the whole pages
        self._kept: list[Page] = []  # … of which these are held, so that all stay in the tree
        self._moved = 0

    def _take_local(self) -> list[_HbmCopy]:
        hbm, request = self.hbm, self.hit.request
        root = page = hbm.root(request.identity)
        for position, key in enumerate(request.keys[: self.pages]):
            page = hbm.index.add(root if request.loose else page, key, request.chunk(position))
            self._chain.append(page)
            if position >= self.first:
                self._arrived[position] = self._share(position)
        self._kept = self._chain if request.loose else self._chain[-1:]
        for page in self._kept:
            hbm.index.hold(page)
        local = []
        tail = self.pages - 1
        if len(request.keys) < self.pages == len(self.hit.local):
            page = self.hit.local[tail]
            if page.copies[Tier.HBM] is not None:
                hbm.index.lease(page, Tier.HBM)
                local.append(_HbmCopy(tail, page))
        self._reserve()
        return local

    def _share(self, position: int) -> bool:
        """Take the HBM copy there is, if there is one."""
        page = self._chain[position]
        copy = page.copies[Tier.HBM]
        if copy is None or not copy.ready:
            return False
        self.hbm.index.lease(page, Tier.HBM)
        self._hbm_pages[position] = copy.place
        return True

    def _reserve(self) -> None:
        for position, here in enumerate(self._arrived):
            if not here:
                pages = self.hbm.allocate(1, near=list(self._reserved.values())[-1:])
                if pages is None:
                    self._cut = min(self._cut, position)
                    return
                self._reserved[position] = pages[0]

    def _targets(self, first: int, count: int) -> Sequence[int]:
        targets = []
        for position in range(first, first + count):
            if position not in self._reserved:
                break
            targets.append(self._reserved.pop(position))
        return targets

    def _land(self, first: int, targets: Sequence[int], *, good: int) -> None:
        self._pool.free(targets[good:])
        for position, hbm_page in enumerate(targets[:good], first):
            self._hbm_pages[position] = hbm_page
            self._arrived[position] = True
            self._moved += 1
            whole = position < len(self._chain)
            if whole and not self.hbm.publish(self._chain[position], hbm_page):
                self._pool.free([hbm_page])
                self._share(position)  # another load brought it meanwhile

    def _fill(self, targets: Sequence[int], addresses: Sequence[int]) -> PendingCopy:
        return self._pool.start_writing(list(zip(targets, addresses, strict=True)))

    def _in_one_go(self, address: int) -> bool:
        return self._pool.overlaps and self._pool.reaches(address)  # layer 0 of all pages is to come first

    def _came_late(self, pages: int) -> None:
        self._pool.invalidate(f"{pages} pages may be others': the lease ended while they were copied")

    def _fill_from_hbm(self, targets: Sequence[int], places: Sequence[int]) -> None:
        self._pool.copy_pages(zip(targets, places, strict=True))

    def _result(self, pages: int, tokens: int) -> Loaded:
        behind = [page for page in self._hbm_pages[pages:] if page >= 0]
        self.hbm.release([*behind, *self._reserved.values()])
        self._reserved.clear()
        for page in self._kept:
            self.hbm.index.unhold(page)
        return Loaded(tokens, tuple(self._hbm_pages[self.first : pages]), self._moved * self.page_bytes)


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


def _leading_equal(found: Sequence[int], expected: Sequence[int]) -> int:
    """How many of them are equal, or not known, before the first that are not."""
    pairs = enumerate(zip(found, expected, strict=True))
    return next((position for position, (one, other) in pairs if other and one != other), len(found))
