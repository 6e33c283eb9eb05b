"""A table in memory with a few numbers about every durable page, and the order of eviction.

A store may have millions of pages on disk, most of them from earlier runs. The pages' records stay in the
index on disk and are read when a lookup needs them (``IndexDB.find``). The numbers for eviction are in this
table: one row per page, 84 bytes in columns (92 if sessions have keys). A million pages take 84 MB and are
read in a second at open. A policy sorts all pages in one numpy operation.

If a damaged page is removed while pages below it stay, its row becomes a *tombstone*. The tombstone keeps
these pages connected to the page's parent. The tombstone is removed when the page is saved again under its
old serial, or when the last page below it is removed.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tierstore.policy import EXPIRED, NO_HINT, PageFacts, PageHint, Policy, Reuse
from tierstore.tiers.disk.records import PageRecord, PageUse, Removal, first_use, key_number
from tierstore.tiers.slabs import slot_bytes

# -- parents and children, for a whole directory at once ---------------------------------------------


def parent_rows(
    facts: npt.NDArray[np.void] | Mapping[str, npt.NDArray[np.int64]],
) -> npt.NDArray[np.int64]:
    """Return the row of each page's parent; -1 if the parent has no row. A parent with a higher serial than
    its child is damage and counts as missing, so that no page is its own ancestor."""
    serials = facts["serial"].astype(np.int64)
    parents = facts["parent"].astype(np.int64)
    if not len(serials):
        return parents
    rows = np.searchsorted(serials, parents).astype(np.int64)
    rows[rows == len(serials)] = 0
    rows[(serials[rows] != parents) | (parents >= serials)] = -1
    return rows


def depths(parents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the number of each row's ancestors, by pointer doubling. The number of passes is log₂ of the
    largest depth."""
    depth = (parents >= 0).astype(np.int64)
    jump = parents.copy()
    while (jumping := np.flatnonzero(jump >= 0)).size:
        depth[jumping] += depth[jump[jumping]]
        jump[jumping] = jump[jump[jumping]]
    return depth


def reachable(parents: npt.NDArray[np.int64], good: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which rows are good and have only good ancestors."""
    good = good.copy()
    jump = parents.copy()
    while (jumping := np.flatnonzero(jump >= 0)).size:
        good[jumping] &= good[jump[jumping]]
        jump[jumping] = jump[jump[jumping]]
    return good


# -- the order of eviction ---------------------------------------------------------------------------


_SAMPLE = 1 << 15  # pages; enough to estimate a share of all bytes with an error of 1 %
_INLINE_CLASS = 0
_NEAR_SHARE = 1 / 32  # share of all bytes: the worst pages up to this share count as equally bad
_NEAR_STEPS = 8  # the score of this share is computed again after 1/8 of the share's bytes were removed


class LeavingEntry(NamedTuple):
    """A page at the time of sorting. If the page was used since then, its tick is another now."""

    score: float
    serial: int
    tick: int
    latest: int = 0  # tick of the most recently used page


class Facts(NamedTuple):
    """The facts by which pages are ordered: one array for each fact. All but the first two are those of
    :class:`~tierstore.policy.PageFacts`, in the same order."""

    serial: npt.NDArray[np.integer[Any]]
    place: npt.NDArray[np.integer[Any]]
    nbytes: npt.NDArray[np.integer[Any]]
    depth: npt.NDArray[np.integer[Any]]
    tick: npt.NDArray[np.integer[Any]]
    hits: npt.NDArray[np.integer[Any]]
    reuse: npt.NDArray[np.integer[Any]]
    priority: npt.NDArray[np.integer[Any]]
    worth: npt.NDArray[np.integer[Any]]

    def scores(self, policy: Policy) -> npt.NDArray[np.float64]:
        facts = PageFacts(*self[2:])
        return np.broadcast_to(np.asarray(policy.score(facts), np.float64), self.serial.shape)

    def take(self, rows: npt.NDArray[np.intp]) -> Facts:
        return Facts(*(column[rows] for column in self))


class LeavingOrder:
    """Pages in the order of eviction. A page must not be evicted before the pages below it, and the last
    pages of a prompt were usually written last. So most of the worst pages have to wait for pages with a
    better score."""

    def __init__(self, entries: Iterable[LeavingEntry]) -> None:
        self._entries = deque(entries)
        self._held_up: dict[int, LeavingEntry] = {}  # entries that have to wait, by serial

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def first(self) -> LeavingEntry:
        return self._entries[0]

    def take(self) -> None:
        """Remove the first entry."""
        self._entries.popleft()

    def hold_up(self, entry: LeavingEntry) -> None:
        """Set an entry aside because there are pages below it."""
        self._held_up[entry.serial] = entry

    def drop(self, serial: int) -> None:
        """Record that there are no pages below this one any more. If its entry was set aside, the entry
        becomes the first one."""
        entry = self._held_up.pop(serial, None)
        if entry is not None:
            self._entries.appendleft(entry)


def size_class(place: int, nbytes: int) -> int:
    """Return the size class of a page: the slot size, or one common class for all inline pages. A page can
    use the freed room of another page of its class."""
    return _INLINE_CLASS if place < 0 else slot_bytes(nbytes)


def size_classes(facts: Facts) -> npt.NDArray[np.integer[Any]]:
    """Return the :func:`size_class` of each page."""
    unit = slot_bytes(1)
    return np.where(facts.place < 0, _INLINE_CLASS, np.maximum(-(-facts.nbytes // unit), 1) * unit)


def worst_first(facts: Facts, policy: Policy, count: int) -> list[LeavingEntry]:
    """Return at least ``count`` of the pages (or all), worst first by ``policy``. Of pages with equal scores,
    the deepest comes first."""
    scores = facts.scores(policy)
    latest = int(facts.tick.max(initial=0))
    if count < len(scores):
        chosen = np.flatnonzero(scores <= np.partition(scores, count)[count])
        facts, scores = facts.take(chosen), scores[chosen]
    order = np.lexsort((-facts.depth, scores))
    columns = (scores[order].tolist(), facts.serial[order].tolist(), facts.tick[order].tolist())
    return [LeavingEntry(*entry, latest) for entry in zip(*columns, strict=True)]


def worst_share(facts: Facts, policy: Policy, share: float) -> float:
    """Return the score such that all pages with this score or a worse one have together ``share`` of all
    bytes. For many pages, this is an estimate from a sample."""
    step = -(-len(facts.serial) // _SAMPLE) or 1
    some = facts.take(np.arange(0, len(facts.serial), step))
    scores = some.scores(policy)
    if not len(scores):
        return -np.inf
    order = np.argsort(scores, kind="stable")
    within = np.cumsum(some.nbytes[order])
    return float(scores[order][np.searchsorted(within, share * within[-1])])


class NearWorst:
    """The score up to which pages count as bad as the worst page, cached until enough pages were removed."""

    def __init__(self) -> None:
        self._score = -np.inf
        self._bytes = 0  # the score is computed again after this many bytes were removed

    def removed(self, nbytes: int) -> None:
        self._bytes -= nbytes

    def score(self, policy: Policy, facts: Callable[[], Facts]) -> float:
        if self._bytes <= 0:
            all_facts = facts()
            self._score = worst_share(all_facts, policy, _NEAR_SHARE)
            self._bytes = int(all_facts.nbytes.sum() * _NEAR_SHARE / _NEAR_STEPS)
        return self._score


_LEAST_ROWS = 1024
_ORDERED_FRACTION = 64  # sort the worst 1/64 of the pages at once: a pass over a million pages takes 50 ms
_LEAST_ORDERED = 1024  # sort at least this many pages: that takes no longer than the pass
_END = LeavingEntry(np.inf, -1, 0)
_NO_WORTHS: Mapping[int, int] = {}
_EXPIRY_S = 1.0  # least time between two searches for expired hints
_COLUMNS = {
    "serial": np.int64,
    "parent": np.int64,
    "place": np.int64,
    "nbytes": np.int64,
    "tick": np.int64,
    "used_s": np.float64,
    "hits": np.int64,
    "children": np.int32,
    "depth": np.int32,
    "reuse": np.int8,
    "priority": np.int8,
    "expires_s": np.float64,
    "alive": np.bool_,
    "session": np.int64,
    "worth": np.int8,
}
_KEYED_COLUMNS = {**_COLUMNS, "key": np.int64}  # key_number of the page's encryption key; 0 for a tombstone


class PageTable:
    """A row for each durable page, in order of serials. Thread-safe; does no I/O."""

    def __init__(
        self,
        facts: npt.NDArray[np.void] | None = None,
        worths: Mapping[int, int] = _NO_WORTHS,
        *,
        keyed: bool = False,
    ) -> None:
        """Copy ``facts`` (``FACTS_DTYPE``, in order of serials). The parent of each page must be in ``facts``
        or be a root. ``worths`` has the worth of each root that has one (``Serials.worths``), and may grow
        later. With ``keyed``, rows also have the numbers of encryption keys; then all records are sealed, and
        sessions may have keys."""
        self._worths = worths
        self._lock = threading.Lock()
        self._rows = 0 if facts is None else len(facts)
        self._alive = self._rows
        # Remaining entries of the last sorting, by size class; None: of all pages.
        self._orders: dict[int | None, LeavingOrder] = {}
        self._near = NearWorst()
        self._expires_s = np.inf  # no hint expires before this time
        size = max(self._rows * 9 // 8, _LEAST_ROWS)
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(size, dtype) for name, dtype in (_KEYED_COLUMNS if keyed else _COLUMNS).items()
        }
        self._columns["expires_s"][:] = np.inf
        if facts is not None:
            for name in facts.dtype.names or ():
                self._columns[name][: self._rows] = facts[name]
            self._columns["alive"][: self._rows] = True
            parents = parent_rows(facts)
            held = parents[parents >= 0]
            self._columns["children"][: self._rows] = np.bincount(held, minlength=self._rows)
            self._columns["depth"][: self._rows] = depths(parents)
            self._columns["worth"][: self._rows] = self._worths_below(facts["parent"].astype(np.int64))

    def __len__(self) -> int:
        """Return the number of pages in the table."""
        return self._alive

    def __contains__(self, serial: int) -> bool:
        with self._lock:
            return self._alive_row(serial) is not None

    def children(self, serial: int) -> int:
        """Return the number of pages on disk right below this page, which may be a tombstone."""
        with self._lock:
            row = self._row(serial)
            return 0 if row is None else int(self._columns["children"][row])

    def use(self, serial: int) -> PageUse:
        """Return the recorded use of a page."""
        with self._lock:
            row = self._row(serial)
            if row is None:
                return PageUse(0, 0.0, 0)
            tick, used_s, hits = (self._columns[name][row] for name in ("tick", "used_s", "hits"))
            return PageUse(int(tick), float(used_s), int(hits))

    def places(self) -> dict[int, tuple[int, int]]:
        """Return serial → (place, bytes) of every page."""
        with self._lock:
            rows = np.flatnonzero(self._columns["alive"][: self._rows])
            serials, places, sizes = (
                self._columns[name][rows].tolist() for name in ("serial", "place", "nbytes")
            )
            return dict(zip(serials, zip(places, sizes, strict=True), strict=True))

    def payload_bytes(self) -> int:
        """Return the sum of the payload bytes of all pages. Takes one pass over the pages."""
        with self._lock:
            return int(self._columns["nbytes"][: self._rows][self._columns["alive"][: self._rows]].sum())

    def commonest_class(self) -> int | None:
        """Return the size class with the most pages; None if there are no pages. Takes one pass over the
        pages."""
        with self._lock:
            classes, pages = np.unique(size_classes(self._facts()), return_counts=True)
        return int(classes[np.argmax(pages)]) if len(classes) else None

    def place(self, serial: int) -> int | None:
        """Return the place of a page; None if it is not in the table."""
        with self._lock:
            row = self._alive_row(serial)
            return None if row is None else int(self._columns["place"][row])

    def within(self, places: range) -> list[tuple[int, int, int]]:
        """Return (serial, place, bytes) of every page whose place is in ``places``. Takes one pass over all
        pages."""
        with self._lock:
            place = self._columns["place"][: self._rows]
            inside = (place >= places.start) & (place < places.stop) & self._columns["alive"][: self._rows]
            rows = np.flatnonzero(inside)
            columns = (self._columns[name][rows].tolist() for name in ("serial", "place", "nbytes"))
            return list(zip(*columns, strict=True))

    # -- changes -------------------------------------------------------------------------------------

    def add(self, records: Iterable[PageRecord], used: Mapping[int, PageUse]) -> None:
        """Add pages that are now durable, with their stored records. Each serial must be greater than all
        serials in the table, or be that of a tombstone."""
        records = sorted(records, key=lambda record: record.serial)
        with self._lock:
            if not records:
                return
            rows = self._rows_for([record.serial for record in records])
            columns = self._columns
            again = columns["alive"][rows]
            assert not again.any(), f"page {columns['serial'][rows][again][0]} is added twice"
            columns["parent"][rows] = parents = [record.parent for record in records]
            columns["place"][rows] = [record.place for record in records]
            columns["nbytes"][rows] = [record.room for record in records]
            self._set_uses(rows, [first_use(record, used) for record in records])
            columns["alive"][rows] = True
            columns["session"][rows] = 0
            columns["worth"][rows] = self._worths_below(np.array(parents, np.int64))
            if "key" in columns:
                columns["key"][rows] = [key_number(record.tokens) for record in records]
            self._alive += len(records)
            above = self._find(np.array(parents, np.int64))
            np.add.at(columns["children"], above[above >= 0], 1)
            depth = columns["depth"]
            for row, parent in zip(rows.tolist(), above.tolist(), strict=True):  # parents come first
                depth[row] = depth[parent] + 1 if parent >= 0 else 0

    def remove(self, serial: int) -> Removal:
        """Remove a page that is about to be removed from disk. The page's row stays as a tombstone while
        pages below the page are on disk."""
        with self._lock:
            row = self._row(serial)
            assert row is not None, f"page {serial} is not in the page table"
            columns = self._columns
            assert columns["alive"][row], f"page {serial} is removed twice"
            columns["alive"][row] = False
            if "key" in columns:
                columns["key"][row] = 0
            self._alive -= 1
            parent = int(columns["parent"][row])
            above = self._row(parent)
            if above is not None:
                columns["children"][above] -= 1
            removal = Removal(
                serial,
                parent,
                int(columns["place"][row]),
                int(columns["nbytes"][row]),
                done=bool(columns["reuse"][row] == Reuse.DONE),
                expired=bool(columns["expires_s"][row] == EXPIRED),
            )
            self._near.removed(removal.nbytes)
            return removal

    def move(self, serial: int, place: int) -> bool:
        """Set the place of a page. Return False if it is no longer in the table."""
        with self._lock:
            row = self._alive_row(serial)
            if row is not None:
                self._columns["place"][row] = place
            return row is not None

    def touch(self, used: Mapping[int, PageUse]) -> None:
        """Record uses. Pages that are not in the table are ignored."""
        if not used:
            return
        with self._lock:
            rows = self._find(np.fromiter(used, np.int64, len(used)))
            known = rows >= 0
            self._set_uses(rows[known], list(itertools.compress(used.values(), known)))

    def hint(self, serial: int, hint: PageHint) -> bool:
        """Set the hint about the next use of a page. Return False if the page is not in the table."""
        with self._lock:
            row = self._alive_row(serial)
            if row is not None:
                for name, value in zip(PageHint._fields, hint, strict=True):
                    self._columns[name][row] = value
                if hint.expires_s > EXPIRED:
                    self._expires_s = min(self._expires_s, hint.expires_s)
            return row is not None

    def keep_session(self, serial: int, session: int) -> None:
        """Record the number of a page's session, while the page is not in the store's index in memory."""
        with self._lock:
            row = self._alive_row(serial)
            if row is not None:
                self._columns["session"][row] = session

    def session(self, serial: int) -> int:
        """Return the session recorded by :meth:`keep_session`; 0 if there is none."""
        with self._lock:
            row = self._alive_row(serial)
            return 0 if row is None else int(self._columns["session"][row])

    def of_session(self, session: int) -> list[int]:
        """Return the serials of the pages with this recorded session, ascending."""
        with self._lock:
            serial, alive, own = (
                self._columns[name][: self._rows] for name in ("serial", "alive", "session")
            )
            serials: list[int] = serial[alive & (own == session)].tolist()
            return serials

    # -- keys ----------------------------------------------------------------------------------------

    def set_keys(self, serials: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> None:
        """Record the numbers of pages' encryption keys. Ignore pages that are not in the table."""
        with self._lock:
            rows = self._find(serials)
            self._columns["key"][rows[rows >= 0]] = keys[rows >= 0]

    def used_keys(self) -> npt.NDArray[np.int64]:
        """Return the numbers of all encryption keys that pages have. Takes one pass over the pages."""
        with self._lock:
            keys = self._columns["key"][: self._rows].copy()
        return np.unique(keys)

    def of_keys(self, keys: Sequence[int]) -> list[int]:
        """Return the serials of the pages with these encryption keys, and of all pages below them, ascending.
        Takes one pass over the pages."""
        with self._lock:
            serial, parent, key, alive = (
                self._columns[name][: self._rows].copy() for name in ("serial", "parent", "key", "alive")
            )
        kept = reachable(parent_rows({"serial": serial, "parent": parent}), ~np.isin(key, keys))
        serials: list[int] = serial[alive & ~kept].tolist()
        return serials

    def expire_hints(self, now_s: float) -> None:
        """Mark pages whose time to live is over as finished. Searches all pages if any may have expired."""
        with self._lock:
            if self._expires_s > now_s:
                return
            expires_s = self._columns["expires_s"][: self._rows]
            over = expires_s <= now_s
            self._columns["reuse"][: self._rows][over] = Reuse.DONE
            expires_s[over] = EXPIRED
            earliest = expires_s.min(initial=np.inf, where=~over)
            self._expires_s = max(float(earliest), now_s + _EXPIRY_S)

    def _worths_below(self, parents: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
        """Return the worth of pages with these parents. Only pages right below a root have a worth, because
        layer groups with a worth have named pages."""
        known = dict(self._worths)  # a copy, because another thread may add to the original
        if not known:
            return np.zeros(len(parents), np.int8)
        roots, worths = np.array(sorted(known.items())).T
        at = np.minimum(np.searchsorted(roots, parents), len(roots) - 1)
        return np.where(roots[at] == parents, worths[at], 0).astype(np.int8)

    def _set_uses(self, rows: npt.NDArray[np.int64], uses: Sequence[PageUse]) -> None:
        """Set the last use of each row, and clear the hint about the next use."""
        columns = self._columns
        columns["tick"][rows] = [use.tick for use in uses]
        columns["used_s"][rows] = [use.used_s for use in uses]
        columns["hits"][rows] = [use.hits for use in uses]
        for name, nothing in zip(PageHint._fields, NO_HINT, strict=True):
            columns[name][rows] = nothing

    def _rows_for(self, serials: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the rows for these pages, whose serials ascend: rows of tombstones, and new rows at the end
        of the table."""
        latest = int(self._columns["serial"][self._rows - 1]) if self._rows else 0
        new = len(serials) - bisect.bisect_right(serials, latest)
        if self._rows + new > len(self._columns["serial"]):
            self._make_room(new)
        end = self._rows + new
        self._columns["serial"][self._rows : end] = serials[len(serials) - new :]
        self._columns["children"][self._rows : end] = 0
        self._columns["alive"][self._rows : end] = False
        self._rows = end
        rows = self._find(np.array(serials, np.int64))
        assert (rows >= 0).all(), f"serial {serials[int(rows.argmin())]} is old"
        return rows

    def _make_room(self, new: int) -> None:
        columns = self._columns
        kept = np.flatnonzero(columns["alive"][: self._rows] | (columns["children"][: self._rows] > 0))
        size = max((len(kept) + new) * 3 // 2, _LEAST_ROWS)
        for name, column in columns.items():
            columns[name] = np.zeros(size, column.dtype)
            columns[name][: len(kept)] = column[kept]
        self._rows = len(kept)

    def _find(self, serials: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row of each serial; -1 if there is none."""
        known = self._columns["serial"][: self._rows]
        rows = np.searchsorted(known, serials)
        rows[rows == self._rows] = 0
        rows[known[rows] != serials if self._rows else slice(None)] = -1
        return rows

    def _row(self, serial: int) -> int | None:
        serials = self._columns["serial"]
        # the method takes half the time of np.searchsorted
        row = int(serials[: self._rows].searchsorted(serial))
        return row if row < self._rows and serials[row] == serial else None

    def _alive_row(self, serial: int) -> int | None:
        row = self._row(serial)
        return row if row is not None and self._columns["alive"][row] else None

    # -- order ---------------------------------------------------------------------------------------

    def next_to_leave(
        self,
        policy: Policy,
        count: int,
        *,
        nbytes: float = np.inf,
        size_class: int | None = None,
        until: float = np.inf,
    ) -> list[int]:
        """Return the serials of the next pages to evict: up to ``count`` (of one size class), but no more
        than it takes to free ``nbytes``. The worst pages by ``policy`` come first, and among pages with equal
        scores the deepest pages. A page with pages below it comes right after the last of these pages. Pages
        used since the last sorting are skipped. An empty list means that no sorted page, or none up to the
        score ``until``, is left; without a sorted page, the next call sorts again.

        The caller must check whether each page may be evicted: a page that still has :meth:`children` may
        not.
        """
        with self._lock:
            order = self._order(policy, count, size_class)
            chosen: list[int] = []
            left = Counter[int]()  # row → number of its children that were chosen
            while len(chosen) < count and nbytes > 0 and (order.first is _END or order.first.score <= until):
                entry = order.first
                if entry is _END:
                    if not chosen:
                        order.take()
                    break
                order.take()
                row = self._alive_row(entry.serial)
                if row is None or self._columns["tick"][row] != entry.tick:
                    continue
                if self._columns["children"][row] > left[row]:
                    order.hold_up(entry)
                    continue
                facts = self._page_facts(row)
                policy.leaves(facts, entry.score, entry.latest)
                chosen.append(entry.serial)
                nbytes -= cast(int, facts.nbytes)
                parent = int(self._columns["parent"][row])
                above = self._row(parent)
                if above is not None:
                    left[above] += 1
                    if self._columns["children"][above] == left[above]:
                        order.drop(parent)
            return chosen

    def _page_facts(self, row: int) -> PageFacts:
        return PageFacts(*(self._columns[name][row].item() for name in Facts._fields[2:]))

    def near_worst(self, policy: Policy) -> float:
        """Return the score up to which pages count as bad as the worst page."""
        with self._lock:
            return self._near.score(policy, self._facts)

    def _order(self, policy: Policy, count: int, size_class: int | None) -> LeavingOrder:
        order = self._orders.get(size_class)
        if not order:
            facts = self._facts(size_class)
            least = max(count, len(facts.serial) // _ORDERED_FRACTION, _LEAST_ORDERED)
            order = self._orders[size_class] = LeavingOrder([*worst_first(facts, policy, least), _END])
        return order

    def _facts(self, size_class: int | None = None) -> Facts:
        rows = np.flatnonzero(self._columns["alive"][: self._rows])
        facts = Facts(*(self._columns[name][rows] for name in Facts._fields))
        return facts if size_class is None else facts.take(np.flatnonzero(size_classes(facts) == size_class))

    # -- checking ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that serials ascend, and that children and depths match the parents."""
        with self._lock:
            columns = {name: column[: self._rows] for name, column in self._columns.items()}
            assert (np.diff(columns["serial"]) > 0).all(), "serials do not ascend"
            assert columns["alive"].sum() == self._alive, f"{self._alive} pages are counted"
            rows = np.searchsorted(columns["serial"], columns["parent"])
            rows[rows == self._rows] = 0
            known = columns["serial"][rows] == columns["parent"] if self._rows else columns["alive"]
            held = rows[known & columns["alive"]]
            children = np.bincount(held, minlength=self._rows)
            assert (children == columns["children"]).all(), "children are miscounted"
