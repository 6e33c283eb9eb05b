"""The index of a store directory: LMDB, and the only module that knows it.

Four named trees, all keyed by the page's serial, big-endian, so that pages of one prompt lie side by side::

    meta     format, store identity, geometry, next serial
    pages    serial → record                  (never changes while the page exists)
    uses     serial → last use, hits          (small and apart: updating them rewrites few tree pages)
    payload  serial, piece → 4080 bytes       (pages whose place is INLINE)

A payload lies in pieces that fill one LMDB page each. So the space never needs a run of free pages, and
churn of mixed sizes cannot fragment it.

A write transaction belongs to the thread that began it; :meth:`Catalog.apply` begins and ends one (its caller
sees to it that there is one at a time). Readers are never blocked.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import lmdb

from tierstore.errors import StoreUnavailableError
from tierstore.memory import ALIGNMENT
from tierstore.tiers.disk.records import (
    INLINE,
    PageRecord,
    decode,
    decode_use,
    encode,
    encode_use,
    stored_place,
)

FORMAT = 1
TREES = (b"meta", b"pages", b"uses", b"payload")
FORMAT_KEY = b"format"
PIECE_BYTES = 4096 - 16  # what one LMDB overflow page holds

_NEXT_SERIAL = b"next_serial"
_FIXED_PAGES = 8  # two meta pages, the directory of trees, the roots of the free list
_FREE_PER_PAGE = 500  # page numbers that one page of the free list holds
_REMOVED_AT_ONCE = 64  # when space is so short that a large transaction does not fit


@dataclass(frozen=True, slots=True)
class Change:
    """What one transaction does, in this order: removals, additions, use times."""

    added: Sequence[tuple[PageRecord, memoryview | None]] = ()
    removed: Sequence[PageRecord] = ()
    used: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    next_serial: int = 1


@dataclass(frozen=True, slots=True)
class IndexUsage:
    """What a transaction left behind."""

    used_bytes: int  # everything alive
    tree_bytes: int  # of that, what later transactions rewrite; the rest is payload


class Catalog:
    """An open index. Raises :class:`OSError` for whatever goes wrong while it is in use."""

    def __init__(self, path: Path, *, map_bytes: int) -> None:
        """Open or make the index; its file will never be larger than ``map_bytes`` unless it already is.

        Raises :class:`StoreUnavailableError` when there is one that cannot be read.
        """
        try:
            self._env = lmdb.open(
                str(path), subdir=False, map_size=map_bytes, max_dbs=len(TREES), mode=0o600, readahead=True
            )
            self._meta, self._pages, self._uses, self._payload = (self._env.open_db(name) for name in TREES)
        except lmdb.Error as error:
            raise unreadable(path, str(error)) from error
        self.map_bytes = map_bytes

    def close(self) -> None:
        self._env.close()

    def __enter__(self) -> Catalog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the store's own facts -----------------------------------------------------------------------

    def get_meta(self, name: bytes) -> bytes | None:
        with _os_errors(), self._env.begin(db=self._meta) as txn:
            value: bytes | None = txn.get(name)
            return value

    def put_meta(self, values: Mapping[bytes, bytes]) -> None:
        """Store facts, and with them the mark of this format, in one transaction."""
        with _os_errors(), self._env.begin(write=True, db=self._meta) as txn:
            txn.put(FORMAT_KEY, str(FORMAT).encode())
            for name, value in values.items():
                txn.put(name, value)

    @property
    def next_serial(self) -> int:
        """The lowest serial that was never used by anything durable."""
        value = self.get_meta(_NEXT_SERIAL)
        return int.from_bytes(value, "big") if value else 1

    @property
    def usage(self) -> IndexUsage:
        """How much of the map is taken now."""
        with _os_errors(), self._env.begin() as txn:
            stats = [txn.stat(db) for db in (self._meta, self._pages, self._uses, self._payload)]
        tree = sum(stat["branch_pages"] + stat["leaf_pages"] for stat in stats)
        used = tree + sum(stat["overflow_pages"] for stat in stats) + _FIXED_PAGES
        free = max(self._env.info()["last_pgno"] + 1 - used, 0) // _FREE_PER_PAGE
        return IndexUsage((used + free) * ALIGNMENT, (tree + free) * ALIGNMENT)

    # -- pages ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        with _os_errors(), self._env.begin() as txn:
            return int(txn.stat(self._pages)["entries"])

    def scan(self) -> Iterator[tuple[int, PageRecord | None]]:
        """Every (serial, record) in order of serials; None for a record that is damaged."""
        with ExitStack() as stack:
            stack.enter_context(_os_errors())
            txn = stack.enter_context(self._env.begin())
            uses = stack.enter_context(txn.cursor(self._uses))
            pages = stack.enter_context(txn.cursor(self._pages))
            more = uses.first()
            identities: dict[bytes, bytes] = {}  # few, and on many records: kept once
            for key, data in pages:
                serial = int.from_bytes(key, "big")
                record = decode(serial, data)
                while more and uses.key() < key:
                    more = uses.next()
                if record is not None:
                    record.identity = identities.setdefault(record.identity, record.identity)
                    if more and uses.key() == key:
                        record.used_s, record.hits = decode_use(uses.value())
                yield serial, record

    def read_payload(self, record: PageRecord, view: memoryview) -> bool:
        """Copy an inline payload into ``view``. False when it is not there, or not in full."""
        with _os_errors(), self._env.begin(buffers=True) as txn, txn.cursor(self._payload) as cursor:
            more = cursor.set_key(_payload_key(record.serial, 0))
            for piece, start in enumerate(range(0, record.nbytes, PIECE_BYTES)):
                target = view[start : min(start + PIECE_BYTES, record.nbytes)]
                if not more or bytes(cursor.key()) != _payload_key(record.serial, piece):
                    return False
                if len(cursor.value()) != len(target):
                    return False
                target[:] = cursor.value()
                more = cursor.next()
        return True

    def apply(self, change: Change) -> None:
        """Do all of ``change``, durably, or nothing of its additions.

        Raises :class:`OSError`; ENOSPC when the map is full. Removals may then have been done already.
        """
        with _os_errors():
            try:
                self._apply(change)
            except lmdb.MapFullError:
                self._make_room(change)
                self._apply(change)

    def forget(self, serials: Sequence[int]) -> None:
        """Delete pages whatever their records say, durably."""
        with _os_errors():
            for start in range(0, len(serials), _REMOVED_AT_ONCE):
                with self._env.begin(write=True) as txn:
                    for serial in serials[start : start + _REMOVED_AT_ONCE]:
                        self._delete(txn, serial)

    def _make_room(self, change: Change) -> None:
        # LMDB reuses what a transaction freed only in the second one after it (the one before must stay
        # readable until then). So remove in small steps, and let two transactions pass.
        for removed in _small_steps(change.removed):
            self._apply(Change(removed=removed, next_serial=change.next_serial))
        for _ in range(2):
            with self._env.begin(write=True, db=self._meta) as txn:
                txn.put(b"turn", (txn.id() % 256).to_bytes(1, "big"))

    def _apply(self, change: Change) -> None:
        with self._env.begin(write=True) as txn:
            for record in change.removed:
                self._remove(txn, record)
            self._add(txn, change.added)
            self._touch(txn, change.used)
            txn.put(_NEXT_SERIAL, change.next_serial.to_bytes(8, "big"), db=self._meta)

    def _remove(self, txn: Any, record: PageRecord) -> None:
        # A page that was evicted and saved again keeps its serial: only the copy that was meant may go.
        stored = txn.get(_key(record.serial), db=self._pages)
        if stored is not None and stored_place(stored) == record.place:
            self._delete(txn, record.serial)

    def _delete(self, txn: Any, serial: int) -> None:
        txn.delete(_key(serial), db=self._pages)
        txn.delete(_key(serial), db=self._uses)
        with txn.cursor(self._payload) as cursor:
            found = cursor.set_range(_payload_key(serial, 0))
            while found and cursor.key().startswith(_key(serial)):
                found = cursor.delete()

    def _add(self, txn: Any, added: Sequence[tuple[PageRecord, memoryview | None]]) -> None:
        last = {db: self._last_key(txn, db) for db in (self._pages, self._uses, self._payload)}

        def put(db: Any, key: bytes, value: bytes | memoryview) -> None:
            # Serials mostly come in order: appending fills tree pages instead of splitting them in halves.
            txn.put(key, value, db=db, append=key > last[db])
            last[db] = max(last[db], key)

        for record, payload in sorted(added, key=lambda pair: pair[0].serial):
            put(self._pages, _key(record.serial), encode(record))
            put(self._uses, _key(record.serial), encode_use(record.used_s, record.hits))
            if record.place == INLINE:
                assert payload is not None, f"page {record.serial} is inline, but its payload was not given"
                for piece, start in enumerate(range(0, record.nbytes, PIECE_BYTES)):
                    value = payload[start : min(start + PIECE_BYTES, record.nbytes)]
                    put(self._payload, _payload_key(record.serial, piece), value)

    def _touch(self, txn: Any, used: Mapping[int, tuple[float, int]]) -> None:
        for serial in sorted(used):
            key = _key(serial)
            if txn.get(key, db=self._uses) is not None:
                txn.put(key, encode_use(*used[serial]), db=self._uses)

    @staticmethod
    def _last_key(txn: Any, db: Any) -> bytes:
        with txn.cursor(db) as cursor:
            return cursor.key() if cursor.last() else b""


def _small_steps(removed: Sequence[PageRecord]) -> Iterator[list[PageRecord]]:
    step: list[PageRecord] = []
    freed = 0
    for record in removed:
        step.append(record)
        freed += -(-record.nbytes // PIECE_BYTES) if record.place == INLINE else 0
        if len(step) == _REMOVED_AT_ONCE or freed >= _FREE_PER_PAGE:
            yield step
            step, freed = [], 0
    yield step


def _key(serial: int) -> bytes:
    return serial.to_bytes(8, "big")


def _payload_key(serial: int, piece: int) -> bytes:
    return serial.to_bytes(8, "big") + piece.to_bytes(4, "big")


def unreadable(path: Path, why: str) -> StoreUnavailableError:
    """What to tell a person about an index that is there and is none."""
    return StoreUnavailableError(
        f"{path} cannot be read ({why}): it is damaged or not an index of tierstore; "
        "remove the directory to start afresh, or give another one"
    )


class _os_errors:
    """Turns LMDB's errors into :class:`OSError`, which is what a disk that fails looks like from above."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, lmdb.MapFullError):
            raise OSError(errno.ENOSPC, "the index is full") from error
        if isinstance(error, lmdb.Error):
            raise OSError(errno.EIO, f"the index failed: {error}") from error
