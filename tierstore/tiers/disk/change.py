"""What one transaction of the index does, and how that is written."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeAlias

from tierstore.tiers.disk.records import (
    INLINE,
    PageRecord,
    PageUse,
    Removal,
    encode,
    encode_facts,
    first_use,
    stored_names,
    stored_place,
    with_use,
)
from tierstore.tiers.disk.trees import (
    NEXT_SERIAL,
    PIECE_BYTES,
    TICK,
    child_prefix,
    link_of,
    page_key,
    payload_key,
)

_Entry: TypeAlias = "tuple[bytes, bytes | memoryview]"  # of a tree: key, value

REMOVED_AT_ONCE = 64  # pages, when space is so short that a large transaction does not fit
FREE_PER_PAGE = 500  # page numbers that one page of LMDB's free list holds


@dataclass(frozen=True, slots=True)
class Change:
    """What one transaction does, in this order: removals, roots, additions, uses."""

    added: Sequence[tuple[PageRecord, memoryview | None]] = ()
    removed: Sequence[Removal] = ()
    used: Mapping[int, PageUse] = field(default_factory=dict)  # of added pages too
    roots: Mapping[int, bytes] = field(default_factory=dict)
    next_serial: int = 1
    tick: int = 0


class Writing:
    """One write transaction of LMDB's, which its owner begins and ends. ``trees`` are the open trees in the
    order of :data:`~tierstore.tiers.disk.trees.TREES`."""

    def __init__(self, txn: Any, trees: Sequence[Any]) -> None:
        self._txn = txn
        self._meta, self._roots, self._pages, self._facts, self._children, self._payload = trees

    def make(self, change: Change) -> None:
        """All of it."""
        for removal in change.removed:
            # A page that was damaged and saved again keeps its serial: only the copy that was meant goes.
            stored = self._txn.get(page_key(removal.serial), db=self._pages)
            if stored is not None and stored_place(stored) == removal.place:
                self.delete(removal.serial)
        for serial, identity in change.roots.items():
            self._txn.put(page_key(serial), identity, db=self._roots)
        self._add(change.added, change.used)
        added = {record.serial for record, _ in change.added}
        self._touch({serial: use for serial, use in change.used.items() if serial not in added})
        self._txn.put(NEXT_SERIAL, change.next_serial.to_bytes(8, "big"), db=self._meta)
        self._txn.put(TICK, change.tick.to_bytes(8, "big"), db=self._meta)

    def delete(self, serial: int) -> None:
        """Everything of a page, whatever its record says."""
        key = page_key(serial)
        stored = self._txn.get(key, db=self._pages)
        names = stored_names(stored) if stored is not None else None
        if names is not None:
            parent, name, tokens = names
            self._txn.delete(child_prefix(parent, tokens) + name + key, db=self._children)
        self._txn.delete(key, db=self._pages)
        self._txn.delete(key, db=self._facts)
        with self._txn.cursor(self._payload) as cursor:
            found = cursor.set_range(payload_key(serial, 0))
            while found and cursor.key().startswith(key):
                found = cursor.delete()

    def _add(
        self,
        added: Sequence[tuple[PageRecord, memoryview | None]],
        used: Mapping[int, PageUse],
    ) -> None:
        pages: list[_Entry] = []
        facts: list[_Entry] = []
        children: list[_Entry] = []
        payloads: list[_Entry] = []
        for record, payload in sorted(added, key=lambda pair: pair[0].serial):
            key = page_key(record.serial)
            pages.append((key, encode(record)))
            facts.append((key, encode_facts(record, first_use(record, used))))
            children.append((link_of(record), b""))
            if record.place == INLINE:
                assert payload is not None, f"page {record.serial} is inline, but its payload was not given"
                for piece, start in enumerate(range(0, record.nbytes, PIECE_BYTES)):
                    value = payload[start : min(start + PIECE_BYTES, record.nbytes)]
                    payloads.append((payload_key(record.serial, piece), value))
        self._append(self._pages, pages)
        self._append(self._facts, facts)
        self._append(self._payload, payloads)
        with self._txn.cursor(self._children) as cursor:
            cursor.putmulti(children)

    def _append(self, db: Any, entries: Sequence[_Entry]) -> None:
        """Put what is sorted by its keys, one after the other without a word of Python in between."""
        # Serials mostly come in order: appending fills tree pages instead of splitting them in halves.
        with self._txn.cursor(db) as cursor:
            last = cursor.key() if cursor.last() else b""
            new = bisect.bisect_right(entries, last, key=itemgetter(0))
            cursor.putmulti(entries[:new])
            cursor.putmulti(entries[new:], append=True)

    def _touch(self, used: Mapping[int, PageUse]) -> None:
        for serial in sorted(used):
            key = page_key(serial)
            facts = self._txn.get(key, db=self._facts)
            if facts is not None:
                self._txn.put(key, with_use(facts, used[serial]), db=self._facts)


def small_steps(removed: Sequence[Removal]) -> Iterator[list[Removal]]:
    """The same removals, few at a time."""
    step: list[Removal] = []
    freed = 0
    for removal in removed:
        step.append(removal)
        freed += -(-removal.nbytes // PIECE_BYTES) if removal.place == INLINE else 0
        if len(step) == REMOVED_AT_ONCE or freed >= FREE_PER_PAGE:
            yield step
            step, freed = [], 0
    yield step
