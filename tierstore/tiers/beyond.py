"""A pool with more pages than fit into its memory: decides which pages have memory.

Every page of a :class:`BeyondPool` has a number, as in any pool, but only ``resident_pages`` pages have
memory at a time. The contents of all other pages are *beyond*, in a slower storage::

    page        0       1       2       3     4       5
    content     memory  beyond  memory  none  beyond  memory     none: allocated or free, not written yet

For a pool on a CPU, the storage beyond is a file (:mod:`tierstore.tiers.overflow`). For a pool on a GPU, the
storage beyond is host memory, and then a file (:mod:`tierstore.tiers.device_overflow`).

Pages with contents lose their memory only in :meth:`BeyondPool.prepare`, which the engine calls between two
steps. All other methods may run on other threads during a step. If such a method needs memory and none is
free, it writes the page to the storage beyond.
"""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore import copying
from tierstore.errors import TierStoreError, UsageError
from tierstore.memory import Memory
from tierstore.tiers.device import Event
from tierstore.tiers.hbm import COMPLETED, PagePool, PendingCopy
from tierstore.tiers.large_pages import PoolSize

Numbers: TypeAlias = npt.NDArray[np.int64]

NONE, MEMORY, BEYOND, LOST = range(4)  # where a page's content is
_IDLE_STEPS = 8  # a page that was not used for this many steps may lose its memory to a page in use


class LostPagesError(TierStoreError):
    """The overflow file did not return the written bytes of these pages."""

    def __init__(self, pages: Iterable[int], why: str) -> None:
        self.pages = frozenset(pages)
        super().__init__(f"{len(self.pages)} pages are lost: {why}")


class OverflowFailedError(TierStoreError):
    """No more pages can be written beyond a pool's memory."""


@dataclass(frozen=True, slots=True)
class OverflowStats:
    """A snapshot of the pages beyond a pool's memory. The counters start when the pool is opened."""

    file_bytes: int
    pages: int  # pages whose contents are only in the file
    read_bytes: int
    written_bytes: int
    lost_pages: int
    failed: bool  # whether no more pages can be written to the file
    host_pages: int = 0  # pages of a GPU's pool whose contents are in host memory


class BeyondPool(PagePool):
    """A pool in which at most ``resident_pages`` pages have memory. ``spec`` has one layer group.

    A subclass implements how pages get memory and where their contents are stored beyond it:
    :meth:`_give_memory`, :meth:`_take_memory`, :meth:`_write_here`, :meth:`_write_beyond`, :meth:`_bring` and
    :meth:`_read`. These methods are called with the lock held.
    """

    own_memory = True
    resident_pages: int

    def _track(self, num_pages: int, *, at_once: int) -> None:
        """Begin with pages that have no contents. At most ``at_once`` pages move together."""
        self._at_once = at_once
        # Guarded by the lock.
        self._lock = threading.RLock()
        self._content = np.full(num_pages, NONE, np.uint8)
        self._backed = np.zeros(num_pages, bool)  # whether a page has memory
        self._kept = np.zeros(num_pages, bool)  # whether a page in memory also has a valid copy beyond it
        self._used_at = np.zeros(num_pages, np.int64)  # number of the last step that used a page
        self._step = 0
        self._lost = 0

    @property
    @abstractmethod
    def failed(self) -> str | None:
        """The reason why no more pages can be written beyond the memory; None if they can."""

    @property
    @abstractmethod
    def stats(self) -> OverflowStats: ...

    def resize(self, nbytes: int) -> PoolSize:
        raise UsageError("a pool with an overflow file cannot be resized")

    def is_resident(self, page: int) -> bool:
        return bool(self._content[page] == MEMORY)

    def is_beyond(self, pages: Numbers) -> npt.NDArray[np.bool_]:
        """Return which of these pages have their contents only beyond the memory."""
        there: npt.NDArray[np.bool_] = self._content[pages] == BEYOND
        return there

    def free(self, pages: Sequence[int]) -> None:
        with self._lock:
            self._forget(np.asarray(pages, np.int64))
            super().free(pages)

    def _forget(self, pages: Numbers) -> None:
        """Drop the contents of these pages. The pages keep their memory until another page needs memory."""
        self._content[pages] = NONE
        self._kept[pages] = False

    # -- what a subclass does ----------------------------------------------------------------------------

    @abstractmethod
    def _give_memory(self, pages: Numbers) -> None:
        """Give memory to pages that have none. The caller ensures that there is enough memory."""

    @abstractmethod
    def _take_memory(self, pages: Numbers) -> None:
        """Take the memory from these pages (in ascending order)."""

    @abstractmethod
    def _write_here(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy from host memory into pages that have memory: (page, address) pairs."""

    @abstractmethod
    def _write_beyond(self, pages: Numbers, sources: Numbers | None = None) -> None:
        """Write pages (in ascending order) beyond the memory, from the host addresses ``sources`` (None: from
        the pages' memory). Raise :class:`OverflowFailedError` if the pages cannot be written."""

    @abstractmethod
    def _bring(self, pages: Numbers) -> None:
        """Copy pages from beyond into their memory, and record that their contents are in memory. Raise
        :class:`LostPagesError` if the written bytes cannot be read."""

    @abstractmethod
    def _read(self, copies: Sequence[tuple[int, int]], after: Event | None) -> set[int]:
        """Copy pages to host addresses: (page, address) pairs. Return the lost pages."""

    # -- between two steps -------------------------------------------------------------------------------

    def prepare(self, written: Sequence[int] | Numbers, used: Sequence[int] | Numbers) -> None:
        """Give memory to the pages that the next step writes, and then to the pages that it reads (``used``),
        as far as there is room.

        Raise :class:`LostPagesError` if the step needs lost pages, and :class:`OverflowFailedError` if the
        pages that have to lose their memory cannot be written beyond it.
        """
        wanted = np.unique(np.asarray(written, np.int64))
        needed = np.union1d(wanted, np.asarray(used, np.int64))
        with self._lock:
            self._step += 1
            self._used_at[needed] = self._step
            if (self._content[needed] == LOST).any():
                # Report all lost pages of the pool at once; otherwise the next attempt could find another
                # lost page.
                lost = np.flatnonzero(self._content == LOST)
                raise LostPagesError(lost.tolist(), "the overflow file has failed")
            if len(wanted) > self.resident_pages:
                raise OverflowFailedError(
                    f"a step writes {len(wanted)} pages, but only {self.resident_pages} may be in memory"
                )
            self._admit(wanted, keep=wanted)
            self._content[wanted] = MEMORY
            self._kept[wanted] = (
                False  # the step changes these pages, so copies of them beyond become invalid
            )
            outside = needed[self._content[needed] == BEYOND]
            if len(outside):
                self._promote(outside)

    def _admit(self, pages: Numbers, *, keep: Numbers) -> None:
        """Bring ``pages`` into memory. Other pages lose their memory if necessary, except those in
        ``keep``."""
        keep = np.union1d(pages, keep)
        for some in batches(pages[~self._backed[pages]], self._at_once):
            self._make_room(len(some), keep=keep)
            self._backed[some] = True
            self._give_memory(some)
            self._bring(some[self._content[some] == BEYOND])
        self._bring(pages[self._content[pages] == BEYOND])

    def _promote(self, pages: Numbers) -> None:
        """Bring pages in use into memory, as far as this takes no memory from other pages in use."""
        room = self.resident_pages - int(self._backed.sum())
        spare = self._backed & ((self._content == NONE) | (self._used_at < self._step - _IDLE_STEPS))
        chosen = pages[: room + int(spare.sum())]
        with contextlib.suppress(OverflowFailedError):  # then the pages stay in the storage beyond
            self._admit(chosen, keep=np.flatnonzero(self._backed & ~spare))

    def _make_room(self, count: int, *, keep: Numbers) -> None:
        """Take memory from pages other than ``keep`` until there is memory for ``count`` pages: first from
        pages without contents, and then from the least recently used pages."""
        excess = count - (self.resident_pages - int(self._backed.sum()))
        if excess <= 0:
            return
        may_leave = self._backed.copy()
        may_leave[keep] = False
        candidates = np.flatnonzero(may_leave)
        order = np.where(self._content[candidates] == MEMORY, self._used_at[candidates], -1)
        leaving = np.sort(candidates[np.argsort(order, kind="stable")[:excess]])
        if len(leaving) < excess:
            raise OverflowFailedError("the pages of one step do not fit the memory")
        full = leaving[self._content[leaving] == MEMORY]
        try:
            self._write_beyond(full[~self._kept[full]])
            self._content[full] = BEYOND
        except OverflowFailedError:
            if (self._used_at[full] == self._step).any():
                raise
            self.lose(
                full.tolist()
            )  # the current step does not need these pages; they are computed again later
        self._backed[leaving] = False
        self._take_memory(leaving)

    def lose(self, pages: Iterable[int]) -> None:
        """Record that the contents of these pages are lost. The pages count as lost until they are freed."""
        with self._lock:
            lost = np.fromiter(pages, np.int64)
            self._lost += int((self._content[lost] != LOST).sum())
            self._content[lost] = LOST

    # -- on any thread -----------------------------------------------------------------------------------

    def read_pages(self, copies: Iterable[tuple[int, int]], *, after: Event | None = None) -> None:
        """Copy pages to host memory. Raise :class:`LostPagesError` if one of the pages is lost."""
        with self._lock:
            lost = self._read(list(copies), after)
        if lost:
            raise LostPagesError(lost, "the overflow file did not return what was written")

    def read_and_hash(
        self, copies: Sequence[tuple[int, int]], *, after: Event | None = None
    ) -> Sequence[int | None]:
        with self._lock:
            lost = self._read(copies, after)
        sums = copying.hash_all([address for _, address in copies], self.spec.page_bytes)
        return [None if page in lost else each for (page, _), each in zip(copies, sums, strict=True)]

    def write_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy from host memory into pages. Pages for which there is no memory are written to the storage
        beyond the memory. A page that cannot be written to that storage is lost."""
        with self._lock:
            pairs = list(copies)
            targets = np.array([page for page, _ in pairs], np.int64)
            new = targets[~self._backed[targets]]
            room = self.resident_pages - int(self._backed.sum())
            spare = np.setdiff1d(np.flatnonzero(self._backed & (self._content == NONE)), targets)
            spare = spare[: max(len(new) - room, 0)]
            self._backed[spare] = False
            self._take_memory(spare)
            new = new[: room + len(spare)]
            self._backed[new] = True
            self._give_memory(new)
            here = [pair for pair in pairs if self._backed[pair[0]]]
            there = [pair for pair in pairs if not self._backed[pair[0]]]
            self._write_here(here)
            held = np.array([page for page, _ in here], np.int64)
            self._content[held] = MEMORY
            self._kept[held] = False
            if there:
                pages, sources = np.array(sorted(there), np.int64).T
                try:
                    self._write_beyond(pages, sources)
                    self._content[pages] = BEYOND
                except OverflowFailedError:
                    self.lose(pages.tolist())

    def copy_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy within the pool, through host memory. The copy of a lost page counts as lost, too."""
        memory = Memory(self.spec.page_bytes, shared=False, huge_pages=False)
        with self._lock:
            for to, of in copies:
                if self._read([(of, memory.address)], None):
                    self.lose([to])
                else:
                    self.write_pages([(to, memory.address)])

    def start_writing(self, copies: Sequence[tuple[int, int]]) -> PendingCopy:
        self.write_pages(copies)
        return COMPLETED


def batches(pages: Numbers, most: int) -> Iterator[Numbers]:
    """Yield slices of ``pages`` with at most ``most`` pages each."""
    for first in range(0, len(pages), most):
        yield pages[first : first + most]
