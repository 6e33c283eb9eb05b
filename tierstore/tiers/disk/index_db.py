"""The index of a store directory, in LMDB. No other module uses LMDB.

The index has six named trees. Pages are keyed by their serials, big-endian, so that the pages of a prompt are
adjacent::

    meta      format, store identity, geometry, next serial, logical clock
    roots     serial → identity, as JSON                (one for each identity that ever had a page)
    pages     serial → record                           (never changes while the page exists)
    facts     serial → parent, place, size, use         (56 bytes a page; read at open)
    children  parent, four tokens, key, serial → b""    (used by lookups to find a page)
    payload   serial, piece → 4080 bytes                (pages whose place is INLINE)

A page's parent is a page or a root. Pages and roots take their serials from one counter. A payload is stored
in pieces that fill one LMDB page each. So the index never needs several adjacent free LMDB pages, and
payloads of different sizes cannot fragment it.

An LMDB write transaction belongs to the thread that began it. The caller of :meth:`IndexDB.apply` must ensure
that there is only one write transaction at a time. Readers are never blocked.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import lmdb
import numpy as np
import numpy.typing as npt

from tierstore.memory import ALIGNMENT
from tierstore.tiers.disk.index_file import DamagedIndexError
from tierstore.tiers.disk.records import (
    FACTS_BYTES,
    FORMAT_KEY,
    INLINE,
    KEY_NUMBER_BYTES,
    NEXT_SERIAL,
    PIECE_BYTES,
    SERIAL_BYTES,
    TICK,
    TREES,
    PageRecord,
    PageUse,
    Removal,
    beginnings,
    child_prefix,
    decode,
    decode_facts,
    described,
    encode,
    encode_facts,
    first_use,
    link_of,
    page_key,
    payload_key,
    stored_key_number,
    stored_names,
    stored_place,
    with_place,
    with_use,
)
from tierstore.tiers.disk.roots import identity_of

if TYPE_CHECKING:
    from tierstore.tiers.disk.sealing import Sealing

_Entry: TypeAlias = "tuple[bytes, bytes | memoryview]"  # key and value of an entry in a tree

REMOVED_AT_ONCE = 64  # removed pages per transaction if the map has no room for a larger transaction
_FORGOTTEN_AT_ONCE = 1024  # removed pages per transaction otherwise
FREE_PER_PAGE = 500  # page numbers in one page of LMDB's free list


@dataclass(frozen=True, slots=True)
class Change:
    """The changes of one transaction, made in this order: removals, roots, additions, uses."""

    added: Sequence[tuple[PageRecord, memoryview | None]] = ()
    removed: Sequence[Removal] = ()
    used: Mapping[int, PageUse] = field(default_factory=dict)  # including uses of added pages
    roots: Mapping[int, bytes] = field(default_factory=dict)
    next_serial: int = 1
    tick: int = 0
    left: dict[int, PageRecord] = field(default_factory=dict)
    """The removed records, by serial, without damaged records. The transaction fills this dictionary."""


class IndexTransaction:
    """One write transaction of LMDB, which the caller begins and ends. ``trees`` are the open trees in the
    order of :data:`~tierstore.tiers.disk.records.TREES`."""

    def __init__(self, txn: Any, trees: Sequence[Any]) -> None:
        self._txn = txn
        self._meta, self._roots, self._pages, self._facts, self._children, self._payload = trees

    def make(self, change: Change) -> None:
        """Write all of ``change``."""
        for removal in change.removed:
            # A damaged page that is saved again keeps its serial. Remove only the copy at the given place.
            stored = self._txn.get(page_key(removal.serial), db=self._pages)
            if stored is not None and stored_place(stored) == removal.place:
                record = decode(removal.serial, stored)
                if record is not None:
                    change.left[removal.serial] = record
                self.delete(removal.serial)
        for serial, identity in change.roots.items():
            self._txn.put(page_key(serial), identity, db=self._roots)
        self._add(change.added, change.used)
        added = {record.serial for record, _ in change.added}
        self._touch({serial: use for serial, use in change.used.items() if serial not in added})
        self._txn.put(NEXT_SERIAL, change.next_serial.to_bytes(8, "big"), db=self._meta)
        self._txn.put(TICK, change.tick.to_bytes(8, "big"), db=self._meta)

    def delete(self, serial: int) -> None:
        """Delete all entries of a page, even if its record is damaged."""
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
                assert payload is not None, f"page {record.serial} is inline, but has no payload"
                for piece, start in enumerate(range(0, record.nbytes, PIECE_BYTES)):
                    value = payload[start : min(start + PIECE_BYTES, record.nbytes)]
                    payloads.append((payload_key(record.serial, piece), value))
        self._append(self._pages, pages)
        self._append(self._facts, facts)
        self._append(self._payload, payloads)
        with self._txn.cursor(self._children) as cursor:
            cursor.putmulti(children)

    def _append(self, db: Any, entries: Sequence[_Entry]) -> None:
        """Put entries, which are sorted by key."""
        # Serials mostly ascend. Appending fills LMDB's leaves; other insertions split them into halves.
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
    """Yield the removals in small groups."""
    step: list[Removal] = []
    freed = 0
    for removal in removed:
        step.append(removal)
        freed += -(-removal.nbytes // PIECE_BYTES) if removal.place == INLINE else 0
        if len(step) == REMOVED_AT_ONCE or freed >= FREE_PER_PAGE:
            yield step
            step, freed = [], 0
    yield step


def _is_root(key: bytes, value: bytes) -> bool:
    return _is_serial(key) and identity_of(value) is not None


def _is_serial(key: bytes) -> bool:
    return len(key) == SERIAL_BYTES and int.from_bytes(key, "big") < MOST_COUNT


FORMAT = 2
ENCODED_FORMAT = 3  # pages may be encoded: earlier versions would return encoded payloads as pages
SEALED_FORMAT = 4  # pages are encrypted
_SIMILAR_TRIED = 16
MOST_COUNT = 1 << 62  # greater than any serial or count
_FIXED_PAGES = 8  # two meta pages, the directory of trees, the roots of the free list


@dataclass(frozen=True, slots=True)
class IndexUsage:
    """The size of the index after a transaction."""

    used_bytes: int  # trees and payloads
    tree_bytes: int  # the trees, which later transactions rewrite in part


@dataclass(frozen=True, slots=True)
class Misfiled:
    """Keys of a tree that are damaged, or that a search does not find because another key is damaged.

    ``suspects`` are the keys that are out of order. If only one of two keys can be right and it is unknown
    which, both are suspects. ``astray`` are the keys that a search does not find."""

    suspects: Set[bytes]
    astray: Set[bytes]

    def __bool__(self) -> bool:
        return bool(self.suspects or self.astray)


class IndexDB:
    """An open index. All methods raise :class:`OSError` if LMDB or the disk fails."""

    def __init__(self, path: Path, *, map_bytes: int, read_only: bool = False) -> None:
        """Open or create the index. The index's file never grows beyond ``map_bytes``, or beyond its size at
        open if that is greater.

        With ``read_only``, no file changes, not even LMDB's lock file; the caller must have locked the
        directory. ``map_bytes=0`` uses the size with which the index was last opened. LMDB does not check its
        file: see index_file.py.

        Raise :class:`DamagedIndexError` if the index cannot be read.
        """
        self.path = path
        try:
            self._env = lmdb.open(
                os.fsencode(path),  # lmdb's own encoding fails for paths that are not text in the locale
                subdir=False,
                map_size=map_bytes,
                max_dbs=len(TREES),
                mode=0o600,
                readahead=True,
                readonly=read_only,
                lock=not read_only,
                create=not read_only,
            )
            trees = [self._env.open_db(name, create=not read_only) for name in TREES]
        except lmdb.Error as error:
            raise DamagedIndexError(path, str(error)) from error
        self._meta, self._roots, self._pages, self._facts, self._children, self._payload = self._trees = trees
        self.map_bytes = map_bytes or int(self._env.info()["map_size"])
        self.sealing: Sealing | None = None
        """Decrypts the records that :meth:`find` and :meth:`find_similar` return, if the directory is
        encrypted. All other methods accept and return records in the stored (encrypted) form."""

    def close(self) -> None:
        self._env.close()

    def __enter__(self) -> IndexDB:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- metadata ------------------------------------------------------------------------------------

    def get_meta(self, name: bytes) -> bytes | None:
        with _os_errors(), self._env.begin(db=self._meta) as txn:
            value: bytes | None = txn.get(name)
            return value

    def put_meta(self, values: Mapping[bytes, bytes], *, format: int = FORMAT) -> None:
        """Store metadata and the format number, in one transaction."""
        with _os_errors(), self._env.begin(write=True, db=self._meta) as txn:
            txn.put(FORMAT_KEY, str(format).encode())
            for name, value in values.items():
                txn.put(name, value)

    def get_extra(self, name: bytes) -> bytes:
        """Return the bytes stored by :meth:`put_extra`; empty if none were stored."""
        with _os_errors(), self._env.begin(db=self._meta) as txn, txn.cursor() as cursor:
            pieces = []
            found = cursor.set_range(name)
            while found and cursor.key().startswith(name):
                pieces.append(cursor.value())
                found = cursor.next()
            return b"".join(pieces)

    def put_extra(self, name: bytes, data: bytes) -> None:
        """Replace the bytes stored under ``name``, durably. The opening does not need them. Raise
        :class:`OSError`, with ENOSPC if the map is full; then the earlier bytes stay."""
        with _os_errors(), self._env.begin(write=True, db=self._meta) as txn:
            with txn.cursor() as cursor:
                found = cursor.set_range(name)
                while found and cursor.key().startswith(name):
                    found = cursor.delete()
            for piece, start in enumerate(range(0, len(data), PIECE_BYTES)):
                txn.put(name + piece.to_bytes(4, "big"), data[start : start + PIECE_BYTES])

    @property
    def next_serial(self) -> int:
        """The lowest serial that no durable page or root ever had."""
        return self._number(NEXT_SERIAL, default=1)

    @property
    def last_serial(self) -> int:
        """The highest serial of any intact page or root; 0 if there is none."""
        last = 0
        with _os_errors(), self._env.begin() as txn:
            for db, is_whole in ((self._pages, described), (self._roots, _is_root)):
                with txn.cursor(db) as cursor:
                    more = cursor.last()
                    while more and not is_whole(*cursor.item()):
                        more = cursor.prev()
                    last = max(last, int.from_bytes(cursor.key(), "big") if more else 0)
        return last

    @property
    def tick(self) -> int:
        """The store's logical clock at the last commit."""
        return self._number(TICK, default=0)

    def _number(self, name: bytes, *, default: int) -> int:
        value = self.get_meta(name)
        return int.from_bytes(value, "big") if value else default

    @property
    def usage(self) -> IndexUsage:
        """The current size of the index."""
        with _os_errors(), self._env.begin() as txn:
            stats = [txn.stat(db) for db in self._trees]
        tree = sum(stat["branch_pages"] + stat["leaf_pages"] for stat in stats)
        used = tree + sum(stat["overflow_pages"] for stat in stats) + _FIXED_PAGES
        free = max(self._env.info()["last_pgno"] + 1 - used, 0) // FREE_PER_PAGE
        return IndexUsage((used + free) * ALIGNMENT, (tree + free) * ALIGNMENT)

    # -- pages ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        with _os_errors(), self._env.begin() as txn:
            return int(txn.stat(self._pages)["entries"])

    def scan(self) -> Iterator[tuple[int, PageRecord | None]]:
        """Yield (serial, record) of every page in order of serials. The record is None if it is damaged."""
        with ExitStack() as stack:
            stack.enter_context(_os_errors())
            txn = stack.enter_context(self._env.begin(db=self._pages))
            for key, data in stack.enter_context(txn.cursor()):
                serial = int.from_bytes(key, "big")
                yield serial, decode(serial, data)

    def records(self, serials: Iterable[int]) -> Iterator[PageRecord | None]:
        """Yield the record of each serial; None if it is missing or damaged."""
        with ExitStack() as stack:
            stack.enter_context(_os_errors())
            txn = stack.enter_context(self._env.begin(db=self._pages))
            for serial in serials:
                data = txn.get(page_key(serial))
                yield decode(serial, data) if data is not None else None

    def records_from(self, serial: int, count: int) -> list[tuple[int, PageRecord | None]]:
        """Return up to ``count`` pages as (serial, record) from ``serial`` on, in order. The record is None
        if it is damaged."""
        with _os_errors(), self._env.begin(db=self._pages) as txn, txn.cursor() as cursor:
            if not cursor.set_range(page_key(serial)):
                return []
            found = [(int.from_bytes(key, "big"), data) for key, data in itertools.islice(cursor, count)]
        return [(number, decode(number, data)) for number, data in found]

    def facts(self) -> npt.NDArray[np.void]:
        """Return the facts of every page in order of serials (``FACTS_DTYPE``). Parent, place and size are
        taken from the page's record, which has a checksum. A page with a damaged record gets its own serial
        as its parent. Takes one pass over both trees: 3 s for a million pages."""
        rows, records = bytearray(), bytearray()
        with _os_errors(), self._env.begin() as txn:
            with txn.cursor(self._facts) as cursor:
                for key, value in cursor:
                    if len(key) == SERIAL_BYTES and len(value) == FACTS_BYTES:
                        rows += key
                        rows += value
            with txn.cursor(self._pages) as cursor:
                for key, value in cursor:
                    records += described(key, value) or b""
        return _confirmed(by_serial(decode_facts(rows)), by_serial(decode_facts(records)), self.tick)

    def key_numbers(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the serials of all pages, and the numbers of their encryption keys. The directory must be
        encrypted. Takes one pass over the records."""
        serials, numbers = bytearray(), bytearray()
        with _os_errors(), self._env.begin(db=self._pages) as txn, txn.cursor() as cursor:
            for key, value in cursor:
                number = stored_key_number(value)
                if _is_serial(key) and len(number) == KEY_NUMBER_BYTES:
                    serials += key
                    numbers += number
        return np.frombuffer(serials, ">i8").astype(np.int64), np.frombuffer(numbers, "<i8").astype(np.int64)

    def roots(self) -> dict[int, bytes]:
        """Return the roots as serial → encoded identity: one for every identity that ever had a page here."""
        with _os_errors(), self._env.begin(db=self._roots) as txn, txn.cursor() as cursor:
            return {int.from_bytes(key, "big"): value for key, value in cursor if _is_serial(key)}

    def entries(self, tree: bytes) -> Iterator[tuple[bytes, memoryview]]:
        """Yield every (key, value) of a tree, unchecked. A value is valid until the next one is yielded."""
        with ExitStack() as stack:
            stack.enter_context(_os_errors())
            txn = stack.enter_context(self._env.begin(db=self._trees[TREES.index(tree)], buffers=True))
            cursor = stack.enter_context(txn.cursor())
            for key, value in cursor:
                yield bytes(key), value

    def links(self, start: bytes, count: int) -> tuple[list[bytes], bytes | None]:
        """Return up to ``count`` keys of the tree ``children`` from ``start`` on, and ``start`` for the next
        call (None at the end). A call also finds entries that were added after the previous call."""
        with _os_errors(), self._env.begin(db=self._children) as txn, txn.cursor() as cursor:
            if not cursor.set_range(start):
                return [], None
            found = list(itertools.islice(cursor.iternext(keys=True, values=False), count))
        return found, found[-1] + b"\0" if len(found) == count else None

    def misfiled(self, tree: bytes) -> Misfiled:
        """Return the damaged keys of a tree. Takes one pass over the tree, and a search for each key."""
        db = self._trees[TREES.index(tree)]
        keys: list[bytes] = []
        astray: set[bytes] = set()
        with _os_errors(), self._env.begin(db=db) as txn, txn.cursor() as cursor, txn.cursor() as finder:
            for key in cursor.iternext(keys=True, values=False):
                keys.append(key)
                if not finder.set_key(key):
                    astray.add(key)
        return Misfiled(_out_of_order(keys), astray)

    def refile(self, tree: bytes, misfiled: Misfiled, is_whole: Callable[[bytes, bytes], bool]) -> None:
        """Put a tree in order, durably. Delete suspects, except those for which ``is_whole`` returns True for
        key and value. Insert entries again that a search does not find. Reads every entry of the tree."""
        db = self._trees[TREES.index(tree)]
        wrong = misfiled.suspects
        again: list[_Entry] = []
        with _os_errors(), self._env.begin(write=True, db=db) as txn:
            with txn.cursor() as cursor:
                more = cursor.first()
                while more:
                    key, value = cursor.item()
                    whole = key not in wrong or is_whole(key, value)
                    if whole and key not in wrong and key not in misfiled.astray:
                        more = cursor.next()
                        continue
                    if whole:
                        again.append((key, value))
                    more = cursor.delete()
            for name, data in again:
                txn.put(name, data, db=db)

    def find(self, parent: int, identity: bytes, chunks: Iterable[tuple[bytes, bytes]]) -> list[PageRecord]:
        """Follow (key, tokens) pairs down from ``parent``. Return the records of the pages with exactly these
        tokens under this identity, up to the first pair without a page."""
        found: list[PageRecord] = []
        with (
            _os_errors(),
            self._env.begin(db=self._pages) as txn,
            txn.cursor(self._children) as cursor,
        ):
            for key, tokens in chunks:
                prefix = self._link(parent, identity, tokens, key)
                if prefix is None:
                    break
                more = cursor.set_range(prefix)
                record = None
                while record is None and more and cursor.key().startswith(prefix):
                    record = self._child(txn, cursor.key(), parent, identity)
                    if record is not None and record.tokens != tokens:
                        record = None  # a collision of keys: another page with other tokens
                    more = cursor.next()
                if record is None:
                    break
                found.append(record)
                parent = record.serial
        return found

    def find_similar(self, parent: int, identity: bytes, tokens: bytes) -> list[PageRecord]:
        """Return some children of ``parent`` that begin with the same four tokens as ``tokens``, or that
        have fewer than four tokens, all equal to the first of ``tokens``."""
        found: list[PageRecord] = []
        links = [self._link(parent, identity, beginning) for beginning in beginnings(tokens)]
        with (
            _os_errors(),
            self._env.begin(db=self._pages) as txn,
            txn.cursor(self._children) as cursor,
        ):
            for prefix in filter(None, links):
                more = cursor.set_range(prefix)
                while more and len(found) < _SIMILAR_TRIED and cursor.key().startswith(prefix):
                    record = self._child(txn, cursor.key(), parent, identity)
                    if record is not None:
                        found.append(record)
                    more = cursor.next()
        return found

    def _child(self, txn: Any, link: bytes, parent: int, identity: bytes) -> PageRecord | None:
        serial = link[-8:]
        data = txn.get(serial)
        record = decode(int.from_bytes(serial, "big"), data) if data is not None else None
        if record is None or record.parent != parent or record.identity != identity:
            return None
        return record if self.sealing is None else self.sealing.opened(record)

    def _link(self, parent: int, identity: bytes, tokens: bytes, key: bytes = b"") -> bytes | None:
        """Return the prefix of the keys in the tree ``children`` that lead to pages right below ``parent``
        with these tokens and this key; None if no such page can exist."""
        if self.sealing is None:
            return child_prefix(parent, tokens) + key
        beginning = self.sealing.beginning(identity, parent, tokens)
        name = self.sealing.key_name(identity, key) if key else b""
        return child_prefix(parent, beginning) + name if beginning and name is not None else None

    def read_payload(self, record: PageRecord, view: memoryview) -> bool:
        """Copy an inline payload into ``view``. Return False if it is missing or incomplete."""
        with _os_errors(), self._env.begin(buffers=True) as txn, txn.cursor(self._payload) as cursor:
            more = cursor.set_key(payload_key(record.serial, 0))
            for piece, start in enumerate(range(0, record.nbytes, PIECE_BYTES)):
                target = view[start : min(start + PIECE_BYTES, record.nbytes)]
                if not more or bytes(cursor.key()) != payload_key(record.serial, piece):
                    return False
                if len(cursor.value()) != len(target):
                    return False
                target[:] = cursor.value()
                more = cursor.next()
        return True

    def pages(self, serials: Iterable[int]) -> list[tuple[PageRecord, memoryview | None]]:
        """Return each page's record, and its payload if it is inline. Damaged pages are left out."""
        found: list[tuple[PageRecord, memoryview | None]] = []
        for record in list(self.records(serials)):
            payload = None
            if record is not None and record.place == INLINE:
                payload = memoryview(bytearray(record.nbytes))
                if not self.read_payload(record, payload):
                    continue
            if record is not None:
                found.append((record, payload))
        return found

    def apply(self, change: Change) -> None:
        """Make all of ``change`` durable. Raise :class:`OSError` if the disk fails, with ENOSPC if the map is
        full; then no page was added, but some removals may have been made."""
        with _os_errors():
            try:
                self._apply(change)
            except lmdb.MapFullError:
                self._make_room(change)
                self._apply(change)

    def forget(self, serials: Sequence[int]) -> None:
        """Delete pages durably, even if their records are damaged."""
        with _os_errors():
            for start in range(0, len(serials), _FORGOTTEN_AT_ONCE):
                some = serials[start : start + _FORGOTTEN_AT_ONCE]
                try:
                    self._delete(some)
                except lmdb.MapFullError:
                    for at in range(0, len(some), REMOVED_AT_ONCE):
                        self._commit_twice()
                        self._delete(some[at : at + REMOVED_AT_ONCE])

    def _delete(self, serials: Sequence[int]) -> None:
        with self._env.begin(write=True) as txn:
            for serial in serials:
                IndexTransaction(txn, self._trees).delete(serial)

    def forget_roots(self, serials: Sequence[int]) -> None:
        """Delete these roots durably. No lookup reaches the pages below them any more. The next opening
        deletes the pages that are still there."""
        with _os_errors(), self._env.begin(write=True, db=self._roots) as txn:
            for serial in serials:
                txn.delete(page_key(serial))

    def settle_free_pages(self) -> None:
        """Make the LMDB pages that were freed so far reusable: after this, no state to which LMDB may return
        after a crash refers to them."""
        with _os_errors():
            self._commit_twice()

    def relocate(self, moved: Sequence[tuple[PageRecord, int]]) -> None:
        """Replace the records of pages that have new places in the extents, durably. Each new record comes
        with the page's old place. Raise :class:`OSError` if the disk fails; then nothing has changed."""
        with _os_errors(), self._env.begin(write=True) as txn:
            for record, before in moved:
                key = page_key(record.serial)
                stored, facts = txn.get(key, db=self._pages), txn.get(key, db=self._facts)
                assert stored is not None, f"page {record.serial} has no record"
                assert facts is not None, f"page {record.serial} has no facts"
                assert stored_place(stored) == before, f"page {record.serial} is not at {before}"
                txn.put(key, encode(record), db=self._pages)
                txn.put(key, with_place(facts, record.place), db=self._facts)

    def mend(self, edits: Sequence[tuple[bytes, bytes, bytes | None]]) -> None:
        """Put each (tree, key, value), or delete the key if the value is None. The changes are durable."""
        with _os_errors():
            for start in range(0, len(edits), REMOVED_AT_ONCE):
                with self._env.begin(write=True) as txn:
                    for tree, key, value in edits[start : start + REMOVED_AT_ONCE]:
                        db = self._trees[TREES.index(tree)]
                        if value is None:
                            txn.delete(key, db=db)
                        else:
                            txn.put(key, value, db=db)

    def _apply(self, change: Change) -> None:
        with self._env.begin(write=True) as txn:
            IndexTransaction(txn, self._trees).make(change)

    def _make_room(self, change: Change) -> None:
        # LMDB reuses the pages that a transaction has freed only in the second transaction after it, because
        # the previous state must stay readable until then. So make the removals in small steps, and then run
        # two more transactions.
        for removed in small_steps(change.removed):
            try:
                self._apply(replace(change, added=(), removed=removed, used={}, roots={}))
            except lmdb.MapFullError:  # the pages that were just freed cannot be used yet
                for removal in removed:
                    self._commit_twice()
                    self._apply(replace(change, added=(), removed=[removal], used={}, roots={}))
        self._commit_twice()

    def _commit_twice(self) -> None:
        for _ in range(2):
            with self._env.begin(write=True, db=self._meta) as txn:
                txn.put(b"turn", (txn.id() % 256).to_bytes(1, "big"))


def _out_of_order(keys: Sequence[bytes]) -> set[bytes]:
    """Return the keys that are not in every longest ascending subsequence of ``keys``."""
    if all(itertools.starmap(operator.lt, itertools.pairwise(keys))):
        return set()
    number = {key: at for at, key in enumerate(sorted(set(keys)))}
    ranks = [number[key] for key in keys]
    before = _ascending(ranks)
    behind = _ascending([-rank for rank in reversed(ranks)])[::-1]
    longest = max(before)
    chosen = [one + other - 1 == longest for one, other in zip(before, behind, strict=True)]
    rivals = Counter(itertools.compress(before, chosen))
    return {
        key
        for key, length, is_chosen in zip(keys, before, chosen, strict=True)
        if not is_chosen or rivals[length] > 1
    }


def _ascending(ranks: Sequence[int]) -> list[int]:
    """Return for each rank the length of the longest ascending subsequence that ends with it."""
    ends: list[int] = []
    lengths: list[int] = []
    for rank in ranks:
        at = bisect.bisect_left(ends, rank)
        ends[at : at + 1] = [rank]
        lengths.append(at + 1)
    return lengths


def by_serial(facts: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Return the facts in order of serials, each serial once. Damaged keys may be out of order."""
    serials = facts["serial"]
    if bool((serials[1:] > serials[:-1]).all()):
        return facts
    return facts[np.unique(serials, return_index=True)[1]]


def _confirmed(facts: npt.NDArray[np.void], records: npt.NDArray[np.void], tick: int) -> npt.NDArray[np.void]:
    """Return ``facts`` with parent, place and size taken from ``records``. Impossible uses, such as a tick
    after the clock's value ``tick``, are set to 0."""
    facts = facts.copy()
    known = np.isin(facts["serial"], records["serial"])
    said = records[np.isin(records["serial"], facts["serial"])]
    for name in ("parent", "place", "nbytes"):
        facts[name][known] = said[name]
    facts["parent"][~known] = facts["serial"][~known]
    usable = (facts["tick"] <= tick) & (facts["hits"] < MOST_COUNT) & np.isfinite(facts["used_s"])
    for name in ("tick", "used_s", "hits"):
        facts[name][~usable] = 0
    return facts


class _os_errors:
    """Turns LMDB's errors into :class:`OSError`, the error that callers expect from a failing disk."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, lmdb.MapFullError):
            raise OSError(errno.ENOSPC, "the index is full") from error
        if isinstance(error, lmdb.DiskError):
            raise OSError(errno.ENOSPC, "no space left on the device for the index") from error
        if isinstance(error, lmdb.Error):
            raise OSError(errno.EIO, f"the index failed: {error}") from error
